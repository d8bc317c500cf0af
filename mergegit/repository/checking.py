"""`fsck`: is everything that the refs need there, and is it what its id says?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mergegit.encoding import decode, hash_object
from mergegit.errors import Damaged
from mergegit.objects import BlockId, Commit, CommitId, Manifest, Tensor, TensorId
from mergegit.pipeline import ordered_map
from mergegit.repository.naming import short
from mergegit.storage.catalog import (
    Catalog,
    DamagedCatalog,
    PackFile,
    Place,
    StoredForm,
    place_of,
)
from mergegit.storage.location import Location, confirm
from mergegit.storage.pack import Header, Kind, scan
from mergegit.storage.refs import SPACES, Space
from mergegit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Problem:
    """Something damaged or missing: what it is, and the commits (as refs and ids) that need it."""

    what: str
    commits: tuple[str, ...] = ()


@dataclass(slots=True)
class CheckReport:
    """What a check found. ``notes`` are harmless; ``problems`` are not."""

    packs: int = 0
    blocks: int = 0
    objects: int = 0
    commits: int = 0
    checked_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.problems


def check(store: Store, *, threads: int, progress: Callable[[int, int], None]) -> CheckReport:
    """Check the catalog, every pack's structure, every object, every block's bytes, and every ref
    with its log."""
    report = CheckReport()
    what = store.catalog.damage()
    if what is not None:
        report.problems.append(Problem(f"the catalog is damaged: {what}; {_ANEW}"))
        return report
    try:
        _check_all(store, report, threads, progress)
    except DamagedCatalog as error:
        report.problems.append(Problem(f"{error.message}; {_ANEW}"))
    return report


def _check_all(
    store: Store, report: CheckReport, threads: int, progress: Callable[[int, int], None]
) -> None:
    if not store.catalog.is_sealed:
        report.notes.append(
            "the catalog was made by an older mergegit, without checksums; "
            "`mergegit fsck --rebuild-catalog` adds them"
        )
    damage, gone = _check_packs(store, report)
    damage += _check_objects(store, report, gone)
    damage += _check_blocks(store, report, gone, threads, progress)
    _check_logs(store, report)
    needs = _Needs(store, report)
    needs.walk_refs()
    for found in damage:
        tensors = sorted(set().union(*map(needs.tensors_of, found.keys)))
        what = found.what
        if tensors:
            what += f" (in {', '.join(tensors[:3])}{' ...' if len(tensors) > 3 else ''})"
        needed_by = set().union(*map(needs.commits_of, found.keys))
        report.problems.append(Problem(what, tuple(sorted(needed_by))))
    for what, commits in needs.missing():
        report.problems.append(Problem(what, commits))


_ANEW: Final = "make it anew from the packs with `mergegit fsck --rebuild-catalog`"


@dataclass(frozen=True, slots=True)
class _Damage:
    """Something damaged, and the ids of the blocks and objects that it concerns."""

    what: str
    keys: Collection[bytes]


_Gone = Mapping[int, Collection[bytes]]
"""Packs that are missing, by number, and the blocks and objects that can't be read without."""


def _check_packs(store: Store, report: CheckReport) -> tuple[list[_Damage], _Gone]:
    """Check the structure of every pack."""
    known = {pack.name: number for number, pack in store.catalog.packs().items()}
    on_disk = {path.stem for path in store.location.packs.glob("*.pack")}
    for name in sorted(on_disk - known.keys()):
        report.notes.append(
            f"pack {name} is not in use: an interrupted command left it; `mergegit gc` collects it"
        )
    damage: list[_Damage] = []
    bad: dict[int, str] = {}
    for name, number in sorted(known.items()):
        if name not in on_disk:
            bad[number] = f"pack {name} is missing from {store.location.packs}"
            continue
        report.packs += 1
        try:
            records = list(scan(store.location.packs / f"{name}.pack"))
        except Damaged as error:
            bad[number] = error.message
        else:
            damage += _check_entries(store, name, number, records)
    keys: dict[int, set[bytes]] = {number: set() for number in bad}
    if bad:
        for block, forms in store.catalog.blocks():
            for number in {place.pack for form in forms for place in form.places} & bad.keys():
                keys[number].add(block)
        for block, forms in store.catalog.blocks():
            for number in bad:
                if keys[number].issuperset(form.base for form in forms):
                    keys[number].add(block)
        for object_id, place in store.catalog.objects():
            if place.pack in bad:
                keys[place.pack].add(object_id)
    damage += [_Damage(what, keys[number]) for number, what in bad.items()]
    return damage, {number: keys[number] for name, number in known.items() if name not in on_disk}


def _check_entries(
    store: Store, name: str, number: int, records: Sequence[tuple[Header, int]]
) -> list[_Damage]:
    """Check that the catalog says of a pack what the pack says of itself.

    Records that the catalog does not know, or has in another pack, nobody reads: they are checked
    here, for a catalog that is made anew may take them.
    """
    damage = []
    wrong: set[bytes] = set()
    own = {place_of(header, number, offset) for header, offset in records}
    for header, offset, place in _entries_of(store, records):
        if place is not None and place.pack == number and place not in own:
            wrong.add(header.key)
        elif place != place_of(header, number, offset):
            try:
                store.reader.read_stored(place_of(header, number, offset))
            except Damaged as error:
                damage.append(_Damage(error.message, ()))
    if wrong:
        what = f"the catalog is wrong about {len(wrong)} records of pack {name}; {_ANEW}"
        damage.append(_Damage(what, wrong))
    return damage


def _entries_of(
    store: Store, records: Sequence[tuple[Header, int]]
) -> Iterator[tuple[Header, int, Place | None]]:
    """Records of a pack, with the place that the catalog has for each."""
    blocks = {header.key for header, _ in records if header.kind is Kind.SEGMENT}
    forms = store.catalog.forms_of(blocks, complete=False)
    for header, offset in records:
        place: Place | None = None
        if header.kind is Kind.OBJECT:
            place = store.catalog.object(header.key)
        elif header.kind is Kind.STATISTICS:
            place = store.catalog.statistics(header.key, header.base)
        else:
            for form in forms.get(header.key, ()):
                same = (form.encoding, form.base, form.dtype, len(form.places))
                if same == (header.encoding, header.base, header.dtype, header.layers):
                    place = form.places[header.layer]
        yield header, offset, place


def _check_logs(store: Store, report: CheckReport) -> None:
    """Check that the log of every ref can be read, and ends where the ref stands."""
    for space in SPACES:
        for name in sorted({*store.refs.logged(space), *store.refs.names(space)}):
            try:
                log = store.refs.log(space, name)
                stands = store.refs.read(space, name)
            except Damaged as error:
                report.problems.append(Problem(f"{error.message}; {error.hint}", (name,)))
                continue
            ends = log[0].new if log else None
            if ends != stands and store.refs.read(space, name) == stands:
                report.notes.append(
                    f"{name} stands at {short(stands) if stands else 'nothing'}, its log ends at "
                    f"{short(ends) if ends else 'nothing'}: an interrupted command left it so, or "
                    "the ref's file was changed or lost"
                )


def _check_objects(store: Store, report: CheckReport, gone: _Gone) -> list[_Damage]:
    damaged = {}
    for object_id, place in list(store.catalog.objects()):
        if place.pack in gone:
            continue
        report.objects += 1
        try:
            data = store.reader.read_decompressed(place)
            report.checked_bytes += place.length
            if hash_object(data) != object_id:
                damaged[object_id] = (
                    f"object {short(object_id)} in pack {store.reader.pack_name(place)} is damaged"
                )
            else:
                decode(data)
        except Damaged as error:
            damaged[object_id] = f"object {short(object_id)}: {error.message}"
    found = [_Damage(what, [object_id]) for object_id, what in damaged.items()]
    for tensor, base in list(store.catalog.all_statistics()):
        at = store.catalog.statistics(TensorId(tensor), base)
        if at is None or at.pack in gone:
            continue
        try:
            store.read_statistics(TensorId(tensor), base)
        except Damaged as error:
            what = f"statistics of tensor {short(tensor)}: {error.message}"
            found.append(_Damage(what, [tensor]))
    return found


def _check_blocks(
    store: Store,
    report: CheckReport,
    gone: _Gone,
    threads: int,
    progress: Callable[[int, int], None],
) -> list[_Damage]:
    blocks = [
        (block, form)
        for block, forms in store.catalog.blocks()
        for form in forms
        if form.is_complete
        and not any(place.pack in gone for place in form.places)
        and not any(form.base in keys for keys in gone.values())
    ]
    total = sum(form.nbytes for _, form in blocks)
    done = 0
    damaged: dict[bytes, str] = {}

    def verify(item: tuple[bytes, StoredForm]) -> tuple[bytes, int, str | None]:
        block, form = item
        try:
            store.read_form(BlockId(block), form)
        except Damaged as error:
            return block, form.nbytes, error.message
        return block, form.nbytes, None

    for block, length, what in ordered_map(verify, blocks, threads=threads):
        report.blocks += 1
        done += length
        report.checked_bytes += length
        progress(done, total)
        if what is not None:
            damaged[block] = what
    return [_Damage(what, [block]) for block, what in damaged.items()]


class _Needs:
    """Which commits and tensors need which objects and blocks, as far as the refs reach."""

    def __init__(self, store: Store, report: CheckReport) -> None:
        self._store = store
        self._report = report
        self._commits: dict[bytes, set[str]] = {}
        self._tensors: dict[bytes, set[str]] = {}
        self._missing: dict[bytes, str] = {}
        self._blocks_of: dict[TensorId, set[bytes]] = {}

    def commits_of(self, key: bytes) -> set[str]:
        return self._commits.get(key, set())

    def tensors_of(self, key: bytes) -> set[str]:
        return self._tensors.get(key, set())

    def missing(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for key, what in self._missing.items():
            yield what, tuple(sorted(self.commits_of(key)))

    def walk_refs(self) -> None:
        seen: set[CommitId] = set()
        for space in SPACES:
            for name, commit in self._refs(space):
                pending = [commit]
                while pending:
                    commit_id = pending.pop()
                    if commit_id in seen:
                        continue
                    seen.add(commit_id)
                    pending += self._walk_commit(commit_id, name)
        self._report.commits = len(seen)

    def _refs(self, space: Space) -> Iterator[tuple[str, CommitId]]:
        for name in self._store.refs.names(space):
            try:
                commit = self._store.refs.read(space, name)
            except Damaged as error:
                self._report.problems.append(Problem(error.message, (name,)))
                continue
            if commit is not None:
                yield name, commit

    def _walk_commit(self, commit_id: CommitId, ref: str) -> tuple[CommitId, ...]:
        label = f"{short(commit_id)} ({ref})"
        commit = self._load(commit_id, label, "commit")
        if not isinstance(commit, Commit):
            return ()
        if commit.plan is not None:
            self._load(commit.plan, label, "plan")
        manifest = self._load(commit.manifest, label, "manifest")
        if isinstance(manifest, Manifest):
            self._walk_manifest(manifest, label)
        return commit.parents

    def _walk_manifest(self, manifest: Manifest, label: str) -> None:
        names: dict[TensorId, str] = {}
        for path, tensor_id in manifest.files.items():
            names.setdefault(tensor_id, path)
        for shard in manifest.shards:
            names.setdefault(shard.header, f"{shard.path} (header)")
            for name in shard.names:
                names.setdefault(manifest.tensor_of(shard, name), name)
        for tensor_id, name in names.items():
            self._walk_tensor(tensor_id, name, label)

    def _walk_tensor(self, tensor_id: TensorId, name: str, label: str) -> None:
        self._tensors.setdefault(tensor_id, set()).add(name)
        if tensor_id not in self._blocks_of:
            tensor = self._load(tensor_id, label, f"tensor {name}")
            ids: set[bytes] = set(tensor.blocks()) if isinstance(tensor, Tensor) else set()
            self._blocks_of[tensor_id] = ids
            stored = self._store.catalog.forms_of(ids)
            for block in ids - stored.keys():
                self._missing[block] = f"block {short(block)} of tensor {name} is missing"
        self._commits.setdefault(tensor_id, set()).add(label)
        for block in self._blocks_of[tensor_id]:
            self._commits.setdefault(block, set()).add(label)
            self._tensors.setdefault(block, set()).add(name)

    def _load(self, object_id: bytes, label: str, word: str) -> object:
        self._commits.setdefault(object_id, set()).add(label)
        if not self._store.has_object(object_id):
            self._missing[object_id] = f"{word} {short(object_id)} is missing"
            return None
        try:
            return self._store.object(object_id)
        except Damaged:
            return None


def rebuild_catalog(location: Location) -> int:
    """Make the catalog anew from the packs alone; returns how many packs there were.

    The old catalog is replaced when the new one is complete. Packs that can't be scanned to the
    end give what they hold up to the damage.
    """
    discard_rebuilds(location)
    fresh, old = _rebuilds(location)
    paths = sorted(location.packs.glob("*.pack"))
    try:
        with closing(Catalog(fresh)) as catalog:
            for path in paths:
                catalog.enter({PackFile(path.stem, path.stat().st_size): _scan_while_sound(path)})
        if location.catalog.exists():
            os.rename(location.catalog, old)
        os.rename(fresh, location.catalog)
        confirm(location.root, f"{location.catalog} is made anew")
    finally:
        discard_rebuilds(location)
    return len(paths)


def discard_rebuilds(location: Location) -> None:
    """Remove the old catalog, and the new one of a rebuild that was not finished."""
    for path in _rebuilds(location):
        shutil.rmtree(path, ignore_errors=True)


def _rebuilds(location: Location) -> tuple[Path, Path]:
    """Where a new catalog is made, and where the old one goes."""
    return location.temporary / "catalog-new", location.temporary / "catalog-old"


def _scan_while_sound(path: Path) -> Iterator[tuple[Header, int]]:
    with suppress(Damaged):
        yield from scan(path)
