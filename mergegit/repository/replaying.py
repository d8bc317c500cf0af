"""`replay`: a merge carried out again, into nothing, and held against what is stored of it.

Merged blocks are compared as they come and then forgotten: nothing is written, and memory stays
as bounded as a merge's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.encoding import encode, hash_object
from mergegit.errors import BadRecipe, Damaged
from mergegit.kernels.floats import to_float32
from mergegit.merge.execute import Base
from mergegit.merge.method import Needs
from mergegit.merge.plan import Planner
from mergegit.merge.recipe import Recipe
from mergegit.objects import BlockId, CommitId, Manifest, ManifestId, Plan, PlanId, Tensor, TensorId
from mergegit.repository.manifests import merged_manifest
from mergegit.repository.merging import Counts, merged_tensors
from mergegit.repository.planning import LAYERS, Inputs, Progress, problem_of
from mergegit.repository.remembering import Remembered, Spared
from mergegit.repository.reports import PlanReport
from mergegit.repository.surroundings import differences, surroundings
from mergegit.repository.vocabularies import token_files
from mergegit.storage.store import Store

Layers = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that came out otherwise: how many of its ``blocks`` did, and by how much.

    ``error`` is |stored - replayed| / |stored - base|; None where shape or dtype are others, or the
    stored one is the base's.
    """

    name: str
    blocks: int
    error: float | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What `replay` found.

    ``manifest`` is that of the commit, ``replayed`` that of the merge made again; the contents are
    the same, bit for bit, where both are one. ``tensors`` are those that differ, ``files`` the
    paths of other files that do. ``is_refitted`` where experts are stored in another form by now,
    of which the same was read. ``is_portable`` is false for methods that work on whole matrices:
    these have the same bits only on the same machine, with the same libraries. ``elsewhere`` is
    what the merge was made with that is otherwise here.
    """

    commit: CommitId
    plan: PlanId
    method: str
    manifest: ManifestId
    replayed: ManifestId
    tensors: tuple[TensorDifference, ...]
    files: tuple[str, ...]
    is_refitted: bool
    is_portable: bool
    read_bytes: int
    base_read_bytes: int
    seconds: float
    elsewhere: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        return self.manifest == self.replayed


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """How far a merged tensor is from that of another budget.

    ``difference`` and ``norm`` are the norms of what differs and of the other one's delta;
    ``blocks`` is how many blocks are not the same.
    """

    name: str
    difference: float
    norm: float
    blocks: int

    @property
    def error(self) -> float:
        """The relative error of the tensor's merged delta."""
        return relative(self.difference, self.norm)


@dataclass(frozen=True, slots=True)
class DistanceReport:
    """How far a merge is from the same one at another budget.

    ``error`` is that of the whole merged delta; ``predicted_error`` is what the merge's own plan
    said of it against a full read. ``tensors`` come worst first. ``plan`` is that of the other
    budget, of which ``read_bytes`` were read.
    """

    commit: CommitId
    plan: PlanId
    budget: str | None
    budget_bytes: int | None
    planned_bytes: int
    own_planned_bytes: int
    predicted_error: float
    error: float
    tensors: tuple[TensorDistance, ...]
    read_bytes: int
    base_read_bytes: int
    seconds: float


def relative(difference: float, norm: float) -> float:
    """A norm of a difference in units of another; infinite where that is nothing."""
    if difference == 0.0:
        return 0.0
    return difference / norm if norm > 0.0 else math.inf


# -- a plan, and what is stored by now -------------------------------------------------------------

_WHOLE: Final = LAYERS
"""How many layers are read of a block, as deltas are stored, that is read whole."""


def fitted(plan: Plan, planner: Planner) -> Plan | None:
    """The plan as it reads the same of what is stored by now, or None where that can't be read.

    A plan counts layers of blocks as they were stored when it was made. Those that were read whole
    can be read whole in any form; of which form the counts are is told by the error that the plan
    states for each expert, which depends on what is known of it and on nothing else.
    """
    problem = planner.problem
    sizes = {len(expert.layers) for expert in plan.experts}
    if sizes != {problem.tiny.size} or plan.tensors != problem.tensors:
        return None
    depths = np.stack([expert.depths for expert in problem.experts])
    choices = list(_choices(layers_of(plan), depths))
    stated = [planner.state(choice, plan.budget_bytes) for choice, _ in choices]
    if choices[0][1].all() and stated[0].experts == plan.experts:
        return stated[0]
    chosen = np.zeros_like(depths)
    for k, expert in enumerate(plan.experts):
        for (choice, possible), now in zip(choices, stated, strict=True):
            other = now.experts[k]
            if (
                possible[k]
                and other.predicted_error == expert.predicted_error
                and other.blocks_read == expert.blocks_read
                and other.blocks_free == expert.blocks_free
            ):
                chosen[k] = choice[k]
                break
        else:
            return None
    return planner.state(chosen, plan.budget_bytes)


def layers_of(plan: Plan) -> Layers:
    """How many layers are read of each block: (experts, blocks)."""
    return np.stack([np.frombuffer(expert.layers, np.uint8) for expert in plan.experts])


def _choices(layers: Layers, depths: Layers) -> Iterator[tuple[Layers, npt.NDArray[np.bool_]]]:
    """What the layers of a plan may mean, each with whether an expert's can be read so: as they
    are; with blocks read whole, that were deltas, or plain, in the form that they have now."""
    were_deltas = layers == _WHOLE
    were_plain = layers == 1
    for whole in (np.zeros_like(were_plain), were_deltas, were_plain, were_deltas | were_plain):
        choice = np.where(whole, depths, layers)
        possible = ((choice <= depths) & ((choice > 0) == (layers > 0))).all(axis=1)
        yield np.minimum(choice, depths), possible


# -- merging into nothing --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """A merged block and its bytes."""

    block: BlockId
    data: bytes


@dataclass(slots=True)
class _Sums:
    """What was found of one tensor: squares of the difference and of the new delta, and blocks
    that are not the stored ones."""

    difference: float = 0.0
    delta: float = 0.0
    blocks: int = 0


@dataclass(slots=True)
class _Comparison:
    """Takes merged blocks in order and holds them against a commit's.

    With ``measures_deltas`` the new ones' deltas from the base are measured as well.
    """

    store: Store
    inputs: Inputs
    stored: Mapping[str, Tensor]
    names: tuple[str, ...]
    dtype: str | None
    measures_deltas: bool
    sums: dict[str, _Sums] = field(default_factory=dict)
    _places: Iterator[tuple[str, int]] = field(init=False)
    _at: tuple[str, int] | None = field(init=False)
    _piece: _Piece | None = None

    def __post_init__(self) -> None:
        self._places = (
            (name, index)
            for name in self.names
            for index in range(len(self.inputs.base.tensors[name]))
        )
        self._at = next(self._places, None)

    def write(self, piece: _Piece) -> None:
        self._piece = piece

    def advance(self) -> None:
        """Compare the block whose turn it is: the one that was written, or the base's."""
        assert self._at is not None
        name, index = self._at
        base = self.inputs.base.tensors[name]
        piece, self._piece = self._piece, None
        block = piece.block if piece is not None else base.block(index)
        dtype = self.dtype or base.dtype
        sums = self.sums.setdefault(name, _Sums())
        stored = self.stored[name]
        values = None
        if self.measures_deltas and piece is not None:
            values = to_float32(piece.data, dtype)
            below = to_float32(self.store.read_block(base.block(index)), base.dtype)
            sums.delta += _squares(values, below)
        if (stored.dtype, stored.shape) != (dtype, base.shape) or stored.block(index) != block:
            sums.blocks += 1
            if (stored.dtype, stored.shape) == (dtype, base.shape):
                if values is None:
                    data = piece.data if piece is not None else self.store.read_block(block)
                    values = to_float32(data, dtype)
                other = to_float32(self.store.read_block(stored.block(index)), dtype)
                sums.difference += _squares(values, other)
        self._at = next(self._places, None)


def _squares(values: npt.NDArray[np.float32], others: npt.NDArray[np.float32]) -> float:
    """The sum of the squares of differences; where one is NaN or infinite, none is counted."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(values, others, dtype=np.float64)
    difference[~np.isfinite(difference)] = 0.0
    return float(np.square(difference, out=difference).sum())


@dataclass(frozen=True, slots=True)
class _Outcome:
    tensors: Mapping[str, Tensor]
    sums: Mapping[str, _Sums]
    counts: Counts


def _merge_into_nothing(
    store: Store,
    inputs: Inputs,
    plan: Plan,
    stored: Manifest,
    *,
    measures_deltas: bool,
    threads: int,
    progress: Progress,
) -> _Outcome:
    """Carry out a plan, of which nothing is kept but what it comes to beside a stored merge."""
    missing = [name for name in plan.tensors if name not in stored.tensors]
    if missing:
        raise Damaged(
            f"the merge lacks tensor {missing[0]}, which its plan merges",
            hint="run `mergegit verify` on it",
        )
    counts, spared = Counts(), Spared.none(len(inputs.experts))
    comparison = _Comparison(
        store,
        inputs,
        {name: store.tensor(stored.tensors[name]) for name in plan.tensors},
        plan.tensors,
        inputs.recipe.dtype,
        measures_deltas,
    )

    def prepare(block: BlockId, _dtype: str, data: bytes, _base: Base | None) -> _Piece:
        return _Piece(block, data)

    def advance(done: int, total: int) -> None:
        comparison.advance()
        progress(done, total)

    tensors = dict(
        merged_tensors(
            store,
            inputs,
            plan,
            Remembered(store, inputs.computed, spared, recalls=False),
            counts,
            prepare=prepare,
            write=comparison.write,
            threads=threads,
            progress=advance,
        )
    )
    if counts.experts.total != plan.planned_bytes:
        raise Damaged(
            f"the merge read {counts.experts.total:,} bytes of experts, where its plan lists "
            f"{plan.planned_bytes:,}",
            hint="run `mergegit fsck`",
        )
    return _Outcome(tensors, comparison.sums, counts)


# -- the verbs -------------------------------------------------------------------------------------


def replay(
    store: Store,
    ref: str,
    commit_id: CommitId,
    inputs: Inputs,
    *,
    threads: int,
    progress: Progress,
) -> ReplayReport:
    """Carry out a merge's plan again and compare. Raises ``BadRecipe`` where its layers can't be
    read any more, and ``Damaged``."""
    commit = store.commit(commit_id)
    assert commit.plan is not None
    plan, stored = store.plan(commit.plan), store.manifest(commit.manifest)
    started = time.perf_counter()
    now = fitted(plan, Planner(problem_of(store, inputs)))
    if now is None:
        raise _unreadable(ref, inputs.recipe)
    outcome = _merge_into_nothing(
        store, inputs, now, stored, measures_deltas=False, threads=threads, progress=progress
    )
    vocabularies = inputs.aligned.vocabularies if inputs.aligned is not None else None
    told = token_files(store, inputs.recipe, vocabularies)
    with store.transaction() as transaction:  # which is left without publishing
        found = merged_manifest(store, transaction, inputs, plan, outcome.tensors, told)
    return ReplayReport(
        commit=commit_id,
        plan=commit.plan,
        method=inputs.recipe.method.name,
        manifest=commit.manifest,
        replayed=ManifestId(hash_object(encode(found))),
        tensors=tuple(_differing(store, inputs, stored, found, outcome)),
        files=_differing_files(stored, found),
        is_refitted=now.experts != plan.experts,
        is_portable=inputs.recipe.method.needs is not Needs.TENSOR,
        read_bytes=outcome.counts.experts.total,
        base_read_bytes=outcome.counts.bases.total,
        seconds=time.perf_counter() - started,
        elsewhere=tuple(differences(commit.execution or {}, surroundings(threads))),
    )


def _unreadable(ref: str, recipe: Recipe) -> BadRecipe:
    experts = " ".join(dict.fromkeys(expert.ref for expert in recipe.experts))
    return BadRecipe(
        f"the layers that {ref} was merged from can't be read any more: its experts are stored in "
        "another form than when it was merged",
        hint=f"store them as deltas again with `mergegit repack {experts}`, or see how far it is "
        f"from the full merge with `mergegit replay {ref} --budget 100%`",
    )


def _differing(
    store: Store, inputs: Inputs, stored: Manifest, found: Manifest, outcome: _Outcome
) -> Iterator[TensorDifference]:
    for name in sorted(stored.tensors.keys() | found.tensors.keys()):
        ids = stored.tensors.get(name), found.tensors.get(name)
        if ids[0] == ids[1]:
            continue
        sums = outcome.sums.get(name)
        if sums is None or ids[0] is None:
            yield TensorDifference(name, 0, None)
            continue
        yield TensorDifference(name, sums.blocks, _error(store, inputs, name, ids[0], sums))


def _error(
    store: Store, inputs: Inputs, name: str, tensor_id: TensorId, sums: _Sums
) -> float | None:
    tensor, base = store.tensor(tensor_id), inputs.base.tensors[name]
    if (tensor.dtype, tensor.shape) != (inputs.recipe.dtype or base.dtype, base.shape):
        return None
    delta = 0.0
    for index in range(len(tensor)):
        if (tensor.dtype, tensor.block(index)) != (base.dtype, base.block(index)):
            values = to_float32(store.read_block(tensor.block(index)), tensor.dtype)
            below = to_float32(store.read_block(base.block(index)), base.dtype)
            delta += _squares(values, below)
    return relative(math.sqrt(sums.difference), math.sqrt(delta)) if delta else None


def _differing_files(stored: Manifest, found: Manifest) -> tuple[str, ...]:
    """Paths of files that are not the same, whose contents are no tensors."""
    paths = [
        path
        for path in sorted(stored.files.keys() | found.files.keys())
        if stored.files.get(path) != found.files.get(path)
    ]
    headers = [{s.path: (s.header, s.names) for s in m.shards} for m in (stored, found)]
    for path in sorted(headers[0].keys() | headers[1].keys()):
        if headers[0].get(path) != headers[1].get(path):
            paths.append(path)
    return tuple(paths)


def distance(
    store: Store,
    commit_id: CommitId,
    other: PlanReport,
    inputs: Inputs,
    *,
    threads: int,
    progress: Progress,
) -> DistanceReport:
    """How far a merge is from that by ``other``, the plan of the same one at another budget."""
    started = time.perf_counter()
    commit = store.commit(commit_id)
    assert commit.plan is not None
    own, plan = store.plan(commit.plan), other.plan
    stored = store.manifest(commit.manifest)
    outcome = _merge_into_nothing(
        store, inputs, plan, stored, measures_deltas=True, threads=threads, progress=progress
    )
    tensors = [
        TensorDistance(name, math.sqrt(sums.difference), math.sqrt(sums.delta), sums.blocks)
        for name, sums in outcome.sums.items()
    ]
    difference = math.sqrt(sum(sums.difference for sums in outcome.sums.values()))
    norm = math.sqrt(sum(sums.delta for sums in outcome.sums.values()))
    return DistanceReport(
        commit=commit_id,
        plan=other.id,
        budget=other.budget,
        budget_bytes=plan.budget_bytes,
        planned_bytes=plan.planned_bytes,
        own_planned_bytes=own.planned_bytes,
        predicted_error=own.predicted_error,
        error=relative(difference, norm),
        tensors=tuple(sorted(tensors, key=lambda tensor: (-tensor.error, tensor.name))),
        read_bytes=outcome.counts.experts.total,
        base_read_bytes=outcome.counts.bases.total,
        seconds=time.perf_counter() - started,
    )
