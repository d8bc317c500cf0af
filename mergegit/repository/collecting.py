"""`gc`: what nothing needs is collected, in two steps.

First everything is found that refs and their logs reach; that decides which packs hold nothing
needed, and which hold little. Then, in this order: what is needed of the latter is copied into new
packs, the logs forget what is too old, one transaction of the catalog puts new packs for old, the
old ones are moved to the trash, and the trash gives up what was in it long enough. A crash at any
point loses nothing; the next run goes on from there.

The caller holds the store's lease exclusively: nobody writes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from mergegit.checkpoint.adapter_settings import CONFIG_FILE as ADAPTER_CONFIG
from mergegit.errors import Damaged, MergegitError
from mergegit.objects import Commit, CommitId, Manifest, ManifestId, Plan, Tensor, TensorId
from mergegit.repository.checking import discard_rebuilds
from mergegit.repository.naming import short
from mergegit.repository.reports import CollectReport
from mergegit.repository.rewriting import copy_records, is_worth_rewriting, records_of
from mergegit.storage.catalog import Place, StoredForm
from mergegit.storage.pack import EMPTY_BYTES, HEADER, NO_ID, Encoding, Header, Kind
from mergegit.storage.refs import SPACES, Space
from mergegit.storage.store import Store
from mergegit.storage.trash import Trash
from mergegit.storage.workspace import sweep

Progress = Callable[[int, int], None]
_Id = TypeVar("_Id", CommitId, ManifestId, TensorId)
_Value = TypeVar("_Value", Commit, Manifest, Tensor)

_DAY: Final = 24 * 60 * 60
EXPIRE: Final = 30 * _DAY
"""Seconds for which the logs remember where refs stood, unless one says otherwise."""
GRACE: Final = 14 * _DAY
"""Seconds for which packs stay in the trash, unless one says otherwise."""


@dataclass(slots=True)
class Needed:
    """What refs and their logs reach: commits, ids of objects, and blocks."""

    commits: set[CommitId] = field(default_factory=set)
    objects: set[bytes] = field(default_factory=set)
    blocks: set[bytes] = field(default_factory=set)
    bases: set[bytes] = field(default_factory=set)
    """Blocks that needed deltas are relative to, whether or not a tensor has them."""
    computed: set[bytes] = field(default_factory=set)
    """Ids of tensors that adapters make, which are no objects but have statistics."""


@dataclass(frozen=True, slots=True)
class Collection:
    """What is to be collected, by pack number: packs of which nothing is needed, and packs of
    which little is. ``needed_bytes`` are those that are copied out of the latter."""

    needed: Needed
    dead: Sequence[int]
    sparse: Sequence[int]
    needed_bytes: int


def collect(
    store: Store,
    *,
    expire: float,
    grace: float,
    now: float,
    dry_run: bool,
    progress: Progress,
) -> CollectReport:
    """Collect what nothing needs. Durations are seconds. Raises ``Damaged``, and nothing is
    changed, where something is missing that refs or their logs reach."""
    limit = int(now - expire) if expire > 0 else None
    trash = Trash(store.location)
    store.forget()
    if not dry_run:
        _clear(store)
        trash.put_back(_needed_again(store, trash))
    forgotten = sum(store.refs.expired(space, name, limit) for space, name in _logs(store))
    collection = plan_collection(store, limit)
    before = _disk_bytes(_pack_paths(store))
    paths = _leaving_paths(store, collection)
    trashed_bytes = _disk_bytes(paths)
    written_bytes = collection.needed_bytes
    removing = trash.older_than(grace, now)
    removed_bytes = _disk_bytes(store.location.trash / f"{name}.pack" for name in removing)
    if grace <= 0:
        removing += [path.stem for path in paths]
        removed_bytes += trashed_bytes
    if not dry_run:
        written_bytes = _replace_packs(store, collection, limit, progress)
        store.forget()
        trash.put(_unknown(store), now)
        removing = trash.older_than(grace, now)
        removed_bytes = _disk_bytes(store.location.trash / f"{name}.pack" for name in removing)
        trash.remove(removing)
        store.catalog.forget_results()
    in_trash = _disk_bytes(store.location.trash.glob("*.pack"))
    if dry_run:
        in_trash += trashed_bytes - removed_bytes
        freed = removed_bytes - written_bytes
    else:
        freed = before - _disk_bytes(_pack_paths(store))
    return CollectReport(
        dry_run=dry_run,
        commits=len(collection.needed.commits),
        forgotten_moves=forgotten,
        trashed=len(paths),
        trashed_bytes=trashed_bytes,
        rewritten=len(collection.sparse),
        written_bytes=written_bytes,
        removed=len(removing),
        removed_bytes=removed_bytes,
        trash_bytes=in_trash,
        freed_bytes=freed,
        seconds=0.0,
    )


# -- what is needed --------------------------------------------------------------------------------


def plan_collection(store: Store, limit: int | None) -> Collection:
    """What can be collected once the logs have forgotten what is older than ``limit``."""
    needed = find_needed(store, _roots(store, limit))
    packs = store.catalog.packs()
    live: dict[int, int] = dict.fromkeys(packs, 0)
    for _, place in _needed_places(store, needed):
        live[place.pack] = live.get(place.pack, 0) + HEADER.size + place.length
    dead, sparse = [], []
    for number, file in sorted(packs.items()):
        if not live[number]:
            dead.append(number)
        elif is_worth_rewriting(file.length - EMPTY_BYTES - live[number], file.length):
            sparse.append(number)
    while orphaned := _orphaned(store, needed, {*dead, *sparse}):
        sparse = sorted({*sparse, *orphaned})
    return Collection(needed, dead, sparse, sum(live[number] for number in sparse))


def _orphaned(store: Store, needed: Needed, leaving: Set[int]) -> set[int]:
    """Packs that would stay, with deltas in them whose bases would not.

    Nothing needs these deltas, but the catalog would have them, and whoever wrote the same block
    would take it for stored.
    """
    gone = {
        block
        for block, forms in store.catalog.blocks()
        if block not in needed.blocks and block not in needed.bases
        if all(any(place.pack in leaving for place in form.places) for form in forms)
    }
    found: set[int] = set()
    for _, forms in store.catalog.blocks() if gone else ():
        for form in forms:
            packs = {place.pack for place in form.places}
            if form.base in gone and not packs & leaving:
                found |= packs
    return found


def _logs(store: Store) -> Iterator[tuple[Space, str]]:
    for space in SPACES:
        for name in store.refs.logged(space):
            yield space, name


def _roots(store: Store, limit: int | None) -> Iterator[CommitId]:
    """Where every ref stands, and where it stood as far as its log remembers."""
    for space in SPACES:
        yield from store.refs.all(space).values()
    for space, name in _logs(store):
        for entry in store.refs.unexpired(space, name, limit):
            yield from filter(None, (entry.old, entry.new))


def find_needed(store: Store, roots: Iterable[CommitId]) -> Needed:
    """Everything that commits reach. Raises ``Damaged`` where some of it is missing."""

    def load(read: Callable[[_Id], _Value], word: str, object_id: _Id) -> _Value:
        if not store.has_object(object_id):
            raise _missing(word, object_id)
        return read(object_id)

    needed = Needed()
    manifests: set[ManifestId] = set()
    tensors: set[TensorId] = set()
    pending = list(roots)
    while pending:
        commit_id = pending.pop()
        if commit_id in needed.commits:
            continue
        needed.commits.add(commit_id)
        commit = load(store.commit, "commit", commit_id)
        pending += commit.parents
        manifests.add(commit.manifest)
        needed.objects |= {commit_id, commit.manifest}
        if commit.plan is not None:
            if not store.has_object(commit.plan):
                raise _missing("plan", commit.plan)
            needed.objects.add(commit.plan)
    for manifest_id in manifests:
        tensors.update(load(store.manifest, "manifest", manifest_id).tensor_ids())
    needed.objects |= tensors
    for tensor_id in tensors:
        needed.blocks.update(load(store.tensor, "tensor", tensor_id).blocks())
    needed.objects |= _usable_plans(store, needed)
    for commit_id in needed.commits:
        needed.computed |= _computed_by(store, commit_id)
    _find_bases(store, needed)
    return needed


def _computed_by(store: Store, commit_id: CommitId) -> set[bytes]:
    """The tensors that a commit makes, if it holds an adapter."""
    if ADAPTER_CONFIG not in store.manifest(store.commit(commit_id).manifest).files:
        return set()
    # The kernels take their time to load, and most repositories hold no adapters.
    from mergegit.repository.adapters import adapted_model

    try:
        adapted = adapted_model(store, commit_id.hex(), commit_id)
    except MergegitError:
        return set()  # of an adapter that can't be read, no statistics are needed
    return set() if adapted is None else set(adapted.made)


def _usable_plans(store: Store, needed: Needed) -> set[bytes]:
    """Plans that no commit names, and that can be carried out: all their commits are needed."""
    found = set()
    for object_id in [i for i, _ in store.catalog.objects() if i not in needed.objects]:
        with suppress(Damaged):
            plan = store.object(object_id)
            if isinstance(plan, Plan) and needed.commits.issuperset(
                (plan.base, *(expert.commit for expert in plan.experts))
            ):
                found.add(object_id)
    return found


def _find_bases(store: Store, needed: Needed) -> None:
    """The base blocks of the deltas that are kept."""
    stored = 0
    for block, forms in store.catalog.blocks():
        if block in needed.blocks:
            kept = _chosen(block, forms, needed)
            stored += bool(kept)
            needed.bases.update(form.base for form in kept if form.encoding is Encoding.DELTA)
    if stored < len(needed.blocks):
        known = store.catalog.forms_of(needed.blocks)
        raise _missing("block", min(needed.blocks - known.keys()))
    pending = needed.bases
    while pending:
        found = store.catalog.forms_of(pending)
        if lost := pending - found.keys():
            raise _missing("block", min(lost))
        below = {f.base for b, forms in found.items() if not _raw(forms) for f in forms}
        pending = below - needed.bases
        needed.bases |= pending


def _missing(word: str, object_id: bytes) -> Damaged:
    return Damaged(
        f"nothing is collected: {word} {short(object_id)} is missing",
        hint="run `mergegit fsck`; if only the logs of refs name it, `mergegit gc --expire 0` "
        "makes them forget it",
    )


def _raw(forms: Iterable[StoredForm]) -> list[StoredForm]:
    return [form for form in forms if form.encoding is Encoding.RAW and form.is_complete]


def _chosen(block: bytes, forms: Iterable[StoredForm], needed: Needed) -> list[StoredForm]:
    """The forms of a block that are kept, of those in which it is stored.

    Of a block that a tensor has: deltas whose base a tensor has, too, for they cost least;
    without any, its plain bytes; without those, one delta. Of a block that deltas are relative to:
    its plain bytes besides, and without those everything.
    """
    whole = [form for form in forms if form.is_complete]
    raw = _raw(whole)
    kept: list[StoredForm] = []
    if block in needed.blocks:
        kept = [form for form in whole if form.base in needed.blocks] or raw or whole[:1]
    if block in needed.bases:
        wanted = raw or whole
        kept += [form for form in wanted if form not in kept]
    return kept


def _needed_places(store: Store, needed: Needed) -> Iterator[tuple[Header, Place]]:
    """Every needed record of the catalog: what it is, as far as the catalog tells, and where."""
    for block, forms in store.catalog.blocks():
        if block in needed.blocks or block in needed.bases:
            for form in _chosen(block, forms, needed):
                yield from _segments(block, form)
    for object_id, place in store.catalog.objects():
        if object_id in needed.objects:
            yield Header(Kind.OBJECT, object_id, place.length, place.size), place
    for tensor, base, place in store.catalog.statistics_places():
        if _needs_statistics(needed, tensor, base):
            yield Header(Kind.STATISTICS, tensor, place.length, place.size, base), place


def _needs_statistics(needed: Needed, tensor: bytes, base: bytes) -> bool:
    has_tensor = tensor in needed.objects or tensor in needed.computed
    return has_tensor and (base == NO_ID or base in needed.objects)


def _segments(block: bytes, form: StoredForm) -> Iterator[tuple[Header, Place]]:
    for place in form.places:
        header = Header(
            Kind.SEGMENT, block, place.length, place.size, form.base, encoding=form.encoding
        )
        yield header, place


# -- carrying it out -------------------------------------------------------------------------------


def _replace_packs(
    store: Store, collection: Collection, limit: int | None, progress: Progress
) -> int:
    """Copy what is needed out of sparse packs, let the logs forget, and put new packs for old in
    the catalog. Returns the bytes on disk of the new packs."""
    known = {file.name for file in store.catalog.packs().values()}
    kept_places = _places_in(store, collection.sparse, collection.needed)
    done = 0
    with store.transaction() as transaction:
        for number in collection.sparse:
            places = kept_places[number]

            def is_needed(_header: Header, offset: int, places: set[int] = places) -> bool:
                return offset in places

            records = records_of(store, number)
            for length in copy_records(store, transaction, number, records, is_needed):
                done += HEADER.size + length
                progress(done, collection.needed_bytes)
        for space, name in _logs(store):
            store.refs.expire(space, name, limit)
        leaving = [*collection.dead, *collection.sparse]
        if leaving:
            transaction.publish(drop=_entries_of(store, leaving), remove=False)
    new = [file.name for file in store.catalog.packs().values() if file.name not in known]
    return _disk_bytes(_pack_path(store, name) for name in new)


def _places_in(store: Store, numbers: Sequence[int], needed: Needed) -> dict[int, set[int]]:
    """The offsets of the needed payloads in some packs."""
    found: dict[int, set[int]] = {number: set() for number in numbers}
    if numbers:
        for _, place in _needed_places(store, needed):
            if place.pack in found:
                found[place.pack].add(place.offset)
    return found


def _entries_of(store: Store, numbers: Sequence[int]) -> dict[int, list[Header]]:
    """All that the catalog has in some packs, needed or not.

    From the catalog and not from the packs: they may be missing or damaged, and nothing may stay
    in the catalog that is not stored.
    """
    found: dict[int, list[Header]] = {number: [] for number in numbers}
    for block, forms in store.catalog.blocks():
        for number in {place.pack for form in forms for place in form.places} & found.keys():
            found[number].append(Header(Kind.SEGMENT, block, 0, 0))
    for object_id, place in store.catalog.objects():
        if place.pack in found:
            found[place.pack].append(Header(Kind.OBJECT, object_id, 0, 0))
    for tensor, base, place in store.catalog.statistics_places():
        if place.pack in found:
            found[place.pack].append(Header(Kind.STATISTICS, tensor, 0, 0, base))
    return found


# -- files -----------------------------------------------------------------------------------------


def _clear(store: Store) -> None:
    """Remove what interrupted commands left beside the packs."""
    sweep(store.location)
    discard_rebuilds(store.location)
    store.refs.clear()


def _unknown(store: Store) -> list[str]:
    """Packs on disk that the catalog does not know: replaced, or left by interrupted commands."""
    known = {file.name for file in store.catalog.packs().values()}
    return sorted({path.stem for path in store.location.packs.glob("*.pack")} - known)


def _needed_again(store: Store, trash: Trash) -> list[str]:
    """Packs in the trash that the catalog knows, as an old copy of it may, and that are nowhere
    else."""
    known = {file.name for file in store.catalog.packs().values()}
    return [n for n in trash.names() if n in known and not _pack_path(store, n).exists()]


def _leaving_paths(store: Store, collection: Collection) -> list[Path]:
    """The files that a collection moves to the trash."""
    packs = store.catalog.packs()
    names = {packs[number].name for number in (*collection.dead, *collection.sparse)}
    paths = [_pack_path(store, name) for name in sorted({*names, *_unknown(store)})]
    return [path for path in paths if path.exists()]


def _pack_path(store: Store, name: str) -> Path:
    return store.location.packs / f"{name}.pack"


def _pack_paths(store: Store) -> list[Path]:
    directories = (store.location.packs, store.location.trash)
    return [path for directory in directories for path in directory.glob("*.pack")]


def _disk_bytes(paths: Iterable[Path]) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in paths)
