"""From a plan to merged tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mergegit.errors import BadRecipe
from mergegit.kernels.combine import Coefficients
from mergegit.kernels.floats import to_float32
from mergegit.merge.execute import Base, Prepare, Prepared, TensorJob, execute
from mergegit.merge.method import Rule, TensorContext
from mergegit.objects import BlockId, Plan, Tensor
from mergegit.repository import adapters
from mergegit.repository.adapters import LowRankReader, trimmed
from mergegit.repository.moving import MovedBlock
from mergegit.repository.planning import Inputs, Progress, context_of, known_of
from mergegit.repository.remembering import Remembered, Spared
from mergegit.storage.prepared import PreparedBlock
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction


@dataclass(frozen=True, slots=True)
class Counts:
    """Bytes read: of experts and of bases, and those read a second time, after a survey."""

    experts: ByteCount = field(default_factory=ByteCount)
    bases: ByteCount = field(default_factory=ByteCount)
    again: ByteCount = field(default_factory=ByteCount)


@dataclass(frozen=True, slots=True)
class _StoreReader:
    """Blocks of the store, with the bytes of experts and bases counted."""

    store: Store
    experts: ByteCount
    bases: ByteCount
    low_rank: LowRankReader
    moved: Mapping[BlockId, MovedBlock]

    def base(self, block: BlockId) -> bytes:
        return self.store.read_block(block, self.bases)

    def expert(
        self, block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes | memoryview, bool]:
        if block in self.moved:
            return self._moved(self.moved[block], layers, base, threshold), True
        if block in self.low_rank:
            counts = adapters.Counts(self.experts, self.bases)
            delta = self.low_rank.delta(block, base.block, base.data, base.dtype, counts, threshold)
            if threshold > 0:
                delta = trimmed(delta, threshold)
            return delta.data.cast("B"), True
        return self.store.read_layers(
            block, layers, base.block, base.data, threshold, self.experts, self.bases
        )

    def _moved(
        self, moved: MovedBlock, layers: int, base: Base, threshold: float
    ) -> bytes | memoryview:
        """The deltas of a block from the block of its expert's own base."""
        below = base
        if (moved.below, moved.below_dtype) != (base.block, base.dtype):
            below = Base(moved.below, self.base(moved.below), moved.below_dtype)
        data, is_delta = self.expert(moved.block, layers, below, threshold)
        if is_delta:
            return data
        delta = to_float32(data, moved.dtype) - to_float32(below.data, below.dtype)
        if threshold > 0:
            delta = trimmed(delta, threshold)
        return delta.data.cast("B")


def merge_blocks(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    *,
    plainly: bool,
    threads: int,
    counts: Counts,
    spared: Spared,
    anew: bool,
    progress: Progress,
) -> dict[str, Tensor]:
    """Carry out a plan: the merged tensors by name. Raises ``BadRecipe`` where the plan does not
    fit its commits any more. With ``anew`` nothing that was merged before is taken for it."""
    passing = inputs.aligned.passing if inputs.aligned is not None else frozenset()

    def prepare(block: BlockId, dtype: str, data: bytes, base: Base | None) -> PreparedBlock:
        if plainly or base is None or base.block in passing:
            return store.prepare_block(block, dtype, data)
        return store.prepare_block(block, dtype, data, base.block, base.data)

    remembered = Remembered(store, inputs.computed, spared, transaction, recalls=not anew)
    merged = merged_tensors(
        store, inputs, plan, remembered, counts,
        prepare=prepare, write=transaction.write_block, threads=threads, progress=progress,
    )  # fmt: skip
    return dict(merged)


def merged_tensors(
    store: Store,
    inputs: Inputs,
    plan: Plan,
    remembered: Remembered,
    counts: Counts,
    *,
    prepare: Prepare[Prepared],
    write: Callable[[Prepared], object],
    threads: int,
    progress: Progress,
) -> Iterator[tuple[str, Tensor]]:
    """Merge by a plan: tensors with their names, each as it is complete, in the plan's order.

    ``prepare`` is handed every block that is computed, by any thread; ``write`` what it makes of
    it, in order. Blocks that are the base's own are not among them. ``progress`` is told of each
    block after that. Raises ``BadRecipe`` where the plan does not fit its commits.
    """
    if plan.tensors != inputs.matching.merged:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    total = sum(inputs.base.tensors[name].nbytes for name in plan.tensors)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    low_rank = LowRankReader(store, inputs.computed)
    for name, tensor in execute(
        _jobs(store, inputs, plan, remembered),
        reader=_StoreReader(store, counts.experts, counts.bases, low_rank, inputs.moved),
        again=_StoreReader(store, counts.again, counts.again, low_rank, inputs.moved),
        prepare=prepare,
        write=write,
        threads=threads,
        progress=advance,
    ):
        low_rank.forget(name)
        yield name, tensor


def spared_by_memory(store: Store, inputs: Inputs, plan: Plan) -> Spared:
    """What of a plan need not be read, because earlier merges made it of the same."""
    spared = Spared.none(len(inputs.experts))
    for job in _jobs(store, inputs, plan, Remembered(store, inputs.computed, spared)):
        if job.memory is None:
            continue
        if job.memory.recall_tensor() is None and job.survey is None:
            rule = job.rule(None)
            for index in np.flatnonzero(job.layers.any(axis=0)):
                if isinstance(rule, Coefficients):
                    job.memory.recall_block(int(index), rule)
    return spared


def _jobs(store: Store, inputs: Inputs, plan: Plan, remembered: Remembered) -> Iterator[TensorJob]:
    recipe = inputs.recipe
    method = recipe.method
    layers = np.stack([np.frombuffer(expert.layers, np.uint8) for expert in plan.experts])
    blocks = sum(len(inputs.base.tensors[name]) for name in plan.tensors)
    if layers.shape[1] != blocks:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    at = 0
    for name in plan.tensors:
        base = inputs.base.tensors[name]
        context = context_of(inputs, name, known_of(store, inputs, name))
        places = inputs.part(name).experts
        experts = [inputs.experts[k].tensors.get(name) for k in places]
        dtype = recipe.dtype or base.dtype
        read = layers[list(places), at : at + len(base)]
        planned = method.rule(context)
        nearest = planned if isinstance(planned, Coefficients) else planned.nearest

        def rule(found: Any, context: TensorContext = context, planned: Rule = planned) -> Rule:
            return planned if found is None else method.rule(replace(context, surveyed=found))

        memory = None
        if not any(name in pairs for pairs in inputs.own_pairs):
            # Keys name blocks as they are stored, on the base that they are merged on.
            memory = remembered.of_tensor(
                method.name, context, base, experts, places, read, dtype, nearest.thresholds,
                as_one=method.survey is not None or planned is not nearest,
            )  # fmt: skip
        yield TensorJob(
            name=name,
            dtype=dtype,
            base=base,
            experts=experts,
            layers=read,
            rule=rule,
            survey=method.survey(context) if method.survey else None,
            memory=memory,
        )
        at += len(base)
