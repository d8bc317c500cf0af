"""How alike experts' changes of their base are, from the blocks themselves.

Blocks are read a few at a time, whatever the size of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mergegit.kernels.gram import inner_products
from mergegit.objects import BlockId
from mergegit.pipeline import ordered_map
from mergegit.repository.adapters import ComputedBlock
from mergegit.repository.block_values import BlockValues
from mergegit.repository.figures import Figure
from mergegit.repository.known import Doubles, Knowledge
from mergegit.repository.seen import Seen
from mergegit.repository.similarity import Compared, Sums
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Block:
    tensor: int
    index: int


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of one block: its place, inner products (1 + K, 1 + K) with the base's values first, and
    numbers of elements that both changed, and moved to the same side (K, K)."""

    block: _Block
    products: Doubles
    both: Doubles
    agreeing: Doubles


def read_sums(
    store: Store,
    knowledge: Knowledge,
    compared: Sequence[Compared],
    base: Seen,
    experts: Sequence[Seen],
    *,
    threads: int,
    progress: Progress,
) -> tuple[Sums, int]:
    """What the blocks tell, and the stored bytes that were read of them.

    Of an expert only blocks are read that are not the base's own; where all are, none of the base.
    """
    computed: dict[BlockId, ComputedBlock] = {}
    for model in (base, *experts):
        computed.update(model.computed)
    blocks = BlockValues(store, computed)
    jobs = [
        _Block(place, index)
        for place, tensor in enumerate(compared)
        for index in range(len(tensor.base))
        if any(tensor.differs(k, index) for k in range(len(experts)))
    ]
    total = sum(compared[job.tensor].base.block_nbytes(job.index) for job in jobs)
    done, finished = 0, 0
    sums = Sums(len(experts))
    seen = [0.0] * len(compared)
    read_blocks = [0] * len(compared)

    def measure(job: _Block) -> _Measured:
        tensor = compared[job.tensor]
        values, changes = blocks.changes((tensor.base, *tensor.tensors), job.index)
        signs = np.sign(changes)
        moved = np.abs(signs)
        # Sums of ones and minus ones below 2^24: exact in float32.
        both = (moved @ moved.T).astype(np.float64)
        agreeing = (both + signs @ signs.T) / 2
        products = inner_products(np.concatenate([values[None], changes]))
        return _Measured(job, products, both, agreeing)

    for measured in ordered_map(measure, jobs, threads=threads):
        place = measured.block.tensor
        sums.products += measured.products[1:, 1:]
        sums.both += measured.both
        sums.agreeing += measured.agreeing
        seen[place] += float(measured.products[0, 0])
        read_blocks[place] += 1
        done += compared[place].base.block_nbytes(measured.block.index)
        progress(done, total)
        if place > finished:
            blocks.forget(compared[finished].name)
            finished = place
    for place, tensor in enumerate(compared):
        sums.elements += tensor.base.elements
        size = knowledge.size(tensor.base_id, tensor.base.elements, len(tensor.base))
        known = size.energy if size is not None else None
        if (known is None or known.error is not None) and read_blocks[place] == len(tensor.base):
            known = Figure(seen[place])
        sums.add_base(known)
    return sums, blocks.read.total
