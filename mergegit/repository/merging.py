"""From a plan to merged tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mergegit.errors import BadRecipe
from mergegit.merge.execute import Base, TensorJob, execute
from mergegit.merge.method import Rule, TensorContext
from mergegit.objects import BlockId, Plan, Tensor
from mergegit.repository.adapters import Computed, LowRankReader, trimmed
from mergegit.repository.planning import Inputs, Progress, context_of, known_of
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

    @classmethod
    def over(
        cls, store: Store, computed: Computed, experts: ByteCount, bases: ByteCount
    ) -> _StoreReader:
        return cls(store, experts, bases, LowRankReader(store, computed, experts, bases))

    def base(self, block: BlockId) -> bytes:
        return self.store.read_block(block, self.bases)

    def expert(
        self, block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes | memoryview, bool]:
        if block in self.low_rank:
            delta = self.low_rank.delta(block, base.block, base.data, base.dtype)
            if threshold > 0:
                delta = trimmed(delta, threshold)
            return delta.data.cast("B"), True
        return self.store.read_layers(
            block, layers, base.block, base.data, threshold, self.experts, self.bases
        )


def merge_blocks(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    *,
    plainly: bool,
    threads: int,
    counts: Counts,
    progress: Progress,
) -> dict[str, Tensor]:
    """Carry out a plan: the merged tensors by name. Raises ``BadRecipe`` where the plan does not
    fit its commits any more."""
    if plan.tensors != inputs.matching.merged:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    total = sum(inputs.base.tensors[name].nbytes for name in plan.tensors)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    def prepare(block: BlockId, dtype: str, data: bytes, base: Base | None) -> PreparedBlock:
        if plainly or base is None:
            return store.prepare_block(block, dtype, data)
        return store.prepare_block(block, dtype, data, base.block, base.data)

    merged = execute(
        _jobs(store, inputs, plan),
        reader=_StoreReader.over(store, inputs.computed, counts.experts, counts.bases),
        again=_StoreReader.over(store, inputs.computed, counts.again, counts.again),
        prepare=prepare,
        write=transaction.write_block,
        threads=threads,
        progress=advance,
    )
    return dict(merged)


def _jobs(store: Store, inputs: Inputs, plan: Plan) -> Iterator[TensorJob]:
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
        experts = inputs.part(name).experts

        def rule(found: Any, context: TensorContext = context) -> Rule:
            return method.rule(replace(context, surveyed=found))

        yield TensorJob(
            name=name,
            dtype=recipe.dtype or base.dtype,
            base=base,
            experts=[inputs.experts[k].tensors.get(name) for k in experts],
            layers=layers[list(experts), at : at + len(base)],
            rule=rule,
            survey=method.survey(context) if method.survey else None,
        )
        at += len(base)
