"""`blame`: what every tensor of a commit is made of, through chains of merges.

All of it is in the commit graph: a merge's commit has its recipe and its plan, and the statistics
of its experts are in the store. No weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from mergegit.merge.settings import Scalar
from mergegit.objects import CommitId, Tensor, TensorId
from mergegit.repository.known import Knowledge
from mergegit.repository.lineage import is_adapter, name_of
from mergegit.repository.merge_record import BlocksRead, Gather, MergedTensor, MergeRecord
from mergegit.repository.naming import ResolvedRef
from mergegit.repository.seen import Seen, see
from mergegit.repository.spots import Spot, is_asked_for, require_some, spots
from mergegit.storage.store import Store

_MOST_WAYS: Final = 16
"""Ways that are told of one contribution: through merges of merges there may be any number."""

Parameters = Mapping[str, Scalar]
Origin = Literal["merged", "copied", "base", "own"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way by which a contribution came.

    ``merges`` are those that it went through before, the last first; none where it was merged
    directly. ``weight`` is the product of the weights along it. ``reads`` say how far each merge
    read of what came this way, that of the commit itself first; ``parameters`` are the
    contribution's own in the merge that it went into first. ``caveats`` say why the weight does
    not tell all.
    """

    merges: tuple[str, ...] = ()
    weight: float = 1.0
    parameters: Parameters = field(default_factory=dict)
    reads: tuple[BlocksRead, ...] = ()
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a commit that is no merge gave to a tensor.

    ``tensor`` is what the commit calls it; ``ref`` is a name of the commit. ``weight`` is what its
    delta is multiplied by, the sum over all ways; ``ways`` are the heaviest of them. ``energy`` is
    that of its delta times the weight squared, as far as it was read, and ``share`` its part of the
    sum over all contributions; None where there are no statistics.
    """

    ref: str
    commit: CommitId
    tensor: str
    weight: float
    ways: tuple[Way, ...]
    energy: float | None = None
    share: float | None = None

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why the weight does not tell all: nothing where it is exact."""
        return tuple(dict.fromkeys(caveat for way in self.ways for caveat in way.caveats))


@dataclass(frozen=True, slots=True)
class TensorBlame:
    """What one tensor is made of.

    ``origin`` is ``merged``; ``copied`` from a model as it is; ``base`` where it is the base's; or
    ``own`` where the commit is no merge, and brought it. ``note`` says why, where that is no matter
    of course. ``base_tensor`` is what the base calls the tensor that deltas were taken from, and
    ``at_base`` are the blocks, of so many, that are the base's own.
    """

    name: str
    spot: Spot
    origin: Origin
    contributions: tuple[Contribution, ...]
    blocks: int
    at_base: tuple[int, ...] = ()
    base_tensor: str | None = None
    parameters: Parameters | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class BlameReport:
    """What a commit is made of. ``method`` and ``experts`` are None and empty of one that is no
    merge; ``base`` is None of one without. ``base_is_merge`` tells whether the base can be blamed
    in turn."""

    ref: ResolvedRef
    method: str | None
    base: ResolvedRef | None
    base_is_merge: bool
    experts: tuple[ResolvedRef, ...]
    tensors: tuple[TensorBlame, ...]


@dataclass(frozen=True, slots=True)
class _Delta:
    """A change that a commit made: its tensor beside the one that it was changed from."""

    commit: CommitId
    name: str
    tensor: TensorId
    base: TensorId


@dataclass(frozen=True, slots=True)
class _Part:
    """What there is of a delta in something made of it.

    ``weight`` is what it was multiplied by, and ``gain`` what its length was, as far as it was
    read.
    """

    weight: float
    gain: float
    ways: tuple[Way, ...]

    def and_more(self, other: _Part) -> _Part:
        ways = sorted((*self.ways, *other.ways), key=lambda way: -abs(way.weight))
        return _Part(self.weight + other.weight, self.gain + other.gain, tuple(ways[:_MOST_WAYS]))


_Parts = Mapping[_Delta, _Part]


def blame(store: Store, ref: ResolvedRef, patterns: Sequence[str], gather: Gather) -> BlameReport:
    """What the tensors of a commit that are asked for are made of. Raises ``UnknownTensor``."""
    commit = store.commit(ref.commit)
    seen = see(store, ref)
    require_some(patterns, seen.ids, "tensor")
    where = spots(seen.ids)
    names = [name for name in where if is_asked_for(name, patterns)]
    blamer = _Blamer(store, gather)
    record = blamer.record(ref.commit)
    base = commit.parents[0] if commit.parents else None
    if record is not None:
        base = record.recipe.base
    return BlameReport(
        ref=ref,
        method=record.recipe.method.name if record is not None else None,
        base=ResolvedRef(name_of(store, base), base) if base is not None else None,
        base_is_merge=base is not None and store.commit(base).recipe is not None,
        experts=tuple(ResolvedRef(e.ref, e.commit) for e in record.recipe.experts)
        if record is not None
        else (),
        tensors=tuple(
            blamer.merged(record, name, where[name], seen.ids[name])
            if record is not None
            else blamer.added(seen, name, where[name])
            for name in sorted(names)
        ),
    )


class _Blamer:
    """Follows tensors through merges. Merges' records are loaded once."""

    def __init__(self, store: Store, gather: Gather) -> None:
        self._store = store
        self._gather = gather
        self._records: dict[CommitId, MergeRecord | None] = {}
        self._ids: dict[CommitId, Mapping[str, TensorId]] = {}
        self._found: dict[_Delta, _Parts] = {}
        self._knowledge = Knowledge(store)

    def record(self, commit: CommitId) -> MergeRecord | None:
        if commit not in self._records:
            self._records[commit] = MergeRecord.of(self._store, commit, self._gather)
        return self._records[commit]

    # -- of the commit that is asked about --------------------------------------------------------

    def added(self, seen: Seen, name: str, spot: Spot) -> TensorBlame:
        """A tensor of a commit that is no merge: its own, or its base's."""
        parents = self._store.commit(seen.commit).parents
        base = self._tensors_of(parents[0]) if parents else {}
        blocks = len(seen.tensor(self._store, name))
        if base.get(name) == seen.ids[name]:
            return TensorBlame(name, spot, "base", (), blocks, tuple(range(blocks)), name)
        at_base: tuple[int, ...] = ()
        if name in base:
            at_base = _same_blocks(seen.tensor(self._store, name), self._store.tensor(base[name]))
        own = Contribution(
            name_of(self._store, seen.commit), seen.commit, name, 1.0, (Way(),), None, 1.0
        )
        below = name if name in base else None
        return TensorBlame(name, spot, "own", (own,), blocks, at_base, below)

    def merged(
        self, record: MergeRecord, name: str, spot: Spot, tensor_id: TensorId
    ) -> TensorBlame:
        """A tensor of a merge."""
        tensor = self._store.tensor(tensor_id)
        blocks = len(tensor)
        copied = record.copied_from(name)
        if copied is not None:
            return self._copied(record, name, spot, tensor_id, copied)
        base_name, base_id = record.base_of(name)
        at_base = _same_blocks(tensor, self._store.tensor(base_id))
        note = record.why_kept(name)
        if not record.is_merged(name):
            return TensorBlame(name, spot, "base", (), blocks, at_base, base_name, None, note)
        merged = record.tensor(name)
        parts = self._merged_parts(record, merged)
        contributions = self._contributions(parts, tensor.elements, blocks)
        return TensorBlame(
            name, spot, "merged", contributions, blocks, at_base, base_name, merged.parameters, note
        )

    def _copied(
        self,
        record: MergeRecord,
        name: str,
        spot: Spot,
        tensor_id: TensorId,
        copied: tuple[int, str],
    ) -> TensorBlame:
        """A tensor that is an expert's own, followed to where it was made."""
        expert, source = copied
        commit = record.recipe.experts[expert].commit
        tensor = self._store.tensor(tensor_id)
        made_by, called, merges = self._made_by(commit, source)
        one = Contribution(
            name_of(self._store, made_by), made_by, called, 1.0, (Way(merges),), None, 1.0
        )
        base_name, base_id = record.base_of(name)
        at_base = _same_blocks(tensor, self._store.tensor(base_id))
        return TensorBlame(name, spot, "copied", (one,), len(tensor), at_base, base_name)

    def _made_by(self, commit: CommitId, name: str) -> tuple[CommitId, str, tuple[str, ...]]:
        """The commit in which a tensor was made that others copied, its name there, and the
        copies on the way."""
        merges: list[str] = []
        while (record := self.record(commit)) is not None:
            copied = record.copied_from(name)
            if copied is None:
                break
            merges.append(name_of(self._store, commit))
            commit, name = record.recipe.experts[copied[0]].commit, copied[1]
        return commit, name, tuple(merges)

    # -- through chains of merges -----------------------------------------------------------------

    def _merged_parts(self, record: MergeRecord, merged: MergedTensor) -> _Parts:
        """What was merged into a tensor, as deltas of commits that are no merges."""
        parts: dict[_Delta, _Part] = {}
        caveats = (merged.caveat,) if merged.caveat is not None else ()
        for share in merged.shares:
            if share.tensor is None:
                continue
            commit = record.recipe.experts[share.expert].commit
            gain = math.copysign(share.gain * math.sqrt(share.known or 0.0), share.weight)
            for delta, part in self._parts(commit, share.name, share.tensor, share.base).items():
                ways = tuple(
                    replace(
                        way,
                        weight=way.weight * share.weight,
                        reads=(share.read, *way.reads),
                        parameters=way.parameters if way.merges else share.parameters,
                        caveats=(*caveats, *way.caveats),
                    )
                    for way in part.ways
                )
                _add(parts, delta, _Part(part.weight * share.weight, part.gain * gain, ways))
        return parts

    def _parts(self, commit: CommitId, name: str, tensor: TensorId, base: TensorId) -> _Parts:
        """What a commit's tensor is made of, beside ``base``; found once for each."""
        delta = _Delta(commit, name, tensor, base)
        if delta not in self._found:
            self._found[delta] = {} if tensor == base else self._find(delta)
        return self._found[delta]

    def _find(self, delta: _Delta) -> _Parts:
        record = self.record(delta.commit)
        if record is None:
            return {delta: _Part(1.0, 1.0, (Way(),))}
        called = name_of(self._store, delta.commit)
        if self._tensors_of(delta.commit).get(delta.name) != delta.tensor:
            caveat = f"{called} was brought to another vocabulary, and is not followed further"
            return {delta: _Part(1.0, 1.0, (Way(caveats=(caveat,)),))}
        copied = record.copied_from(delta.name)
        if copied is not None:
            expert, source = copied
            commit = record.recipe.experts[expert].commit
            below = self._parts(commit, source, delta.tensor, delta.base)
        else:
            below = self._parts_of_merge(record, delta.name, delta.base)
        return {made: _through(called, part) for made, part in below.items()}

    def _parts_of_merge(self, record: MergeRecord, name: str, base: TensorId) -> _Parts:
        """A merge's tensor: what was merged, and what its base is beside ``base``."""
        parts: dict[_Delta, _Part] = {}
        if record.is_merged(name):
            parts.update(self._merged_parts(record, record.tensor(name)))
        base_name, own_base = record.base_of(name)
        for delta, part in self._parts(record.recipe.base, base_name, own_base, base).items():
            _add(parts, delta, part)
        return parts

    def _contributions(self, parts: _Parts, elements: int, blocks: int) -> tuple[Contribution, ...]:
        """Parts with their shares, the largest first."""
        energies: list[float | None] = []
        for delta, part in parts.items():
            known = self._knowledge.change(delta.base, delta.tensor, elements, blocks)
            energies.append(None if known is None else part.gain**2 * known.energy.value)
        total = None if None in energies else sum(energy or 0.0 for energy in energies)
        found = [
            Contribution(
                name_of(self._store, delta.commit),
                delta.commit,
                delta.name,
                part.weight,
                part.ways,
                energy,
                share_of(energy, total),
            )
            for (delta, part), energy in zip(parts.items(), energies, strict=True)
        ]
        return tuple(sorted(found, key=lambda one: -(one.share or 0.0)))

    def _tensors_of(self, commit: CommitId) -> Mapping[str, TensorId]:
        if commit not in self._ids:
            manifest = self._store.manifest(self._store.commit(commit).manifest)
            if is_adapter(manifest):
                self._ids[commit] = see(self._store, ResolvedRef("", commit)).ids
            else:
                self._ids[commit] = manifest.tensors
        return self._ids[commit]


def _add(parts: dict[_Delta, _Part], delta: _Delta, part: _Part) -> None:
    parts[delta] = parts[delta].and_more(part) if delta in parts else part


def _through(merge: str, part: _Part) -> _Part:
    """A part that came by way of a merge."""
    ways = (replace(way, merges=(merge, *way.merges)) for way in part.ways)
    return replace(part, ways=tuple(ways))


def share_of(energy: float | None, total: float | None) -> float | None:
    """An energy's part of a sum; of nothing, nothing."""
    if energy is None or total is None:
        return None
    return energy / total if total else 0.0


def _same_blocks(tensor: Tensor, base: Tensor) -> tuple[int, ...]:
    """The blocks of a tensor that are the base's in their place."""
    if tensor.dtype != base.dtype:
        return ()
    pairs = zip(tensor.blocks(), base.blocks(), strict=False)
    return tuple(index for index, (own, below) in enumerate(pairs) if own == below)
