"""Numbers of what differs between two models, from the blocks themselves.

Only blocks that differ are read, a few at a time, whatever the size of the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.kernels.gram import inner_products
from mergegit.objects import BlockId, Tensor, TensorId
from mergegit.pipeline import ordered_map
from mergegit.repository.adapters import ComputedBlock
from mergegit.repository.block_values import BlockValues
from mergegit.repository.change_estimates import Estimates
from mergegit.repository.comparing import Numbers, Pair
from mergegit.repository.figures import ZERO, Figure
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]

_OLD, _NEW, _THIRD = range(3)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that differs: of which pair, and its place in the tensor."""

    pair: int
    index: int


@dataclass(frozen=True, slots=True)
class _Measured:
    """Inner products (3, 3) of the old values and the changes, and elements that are changed."""

    block: _Block
    products: npt.NDArray[np.float64]
    changed: int | None


class Readings:
    """Numbers that are read. Sizes of what is not read come from ``estimates``."""

    def __init__(
        self,
        store: Store,
        computed: Mapping[BlockId, ComputedBlock],
        estimates: Estimates,
        *,
        threads: int,
        progress: Progress,
    ) -> None:
        self._store = store
        self._blocks = BlockValues(store, computed)
        self._estimates = estimates
        self._threads = threads
        self._progress = progress

    @property
    def read_bytes(self) -> int:
        return self._blocks.read.total

    def base_energy(self, tensor: Tensor, tensor_id: TensorId) -> Figure | None:
        return self._estimates.base_energy(tensor, tensor_id)

    def numbers(self, pairs: Sequence[Pair]) -> Iterator[Numbers]:
        jobs = [
            _Block(place, index)
            for place, pair in enumerate(pairs)
            for index in self._differing(pair)
        ]
        total = sum(pairs[job.pair].old.block_nbytes(job.index) for job in jobs)
        done = 0
        sums = [np.zeros((3, 3)) for _ in pairs]
        changed: list[int | None] = [0 for _ in pairs]
        read = [0 for _ in pairs]
        finished = 0

        def measure(job: _Block) -> _Measured:
            return self._measure(pairs[job.pair], job)

        for measured in ordered_map(measure, jobs, threads=self._threads):
            place = measured.block.pair
            sums[place] += measured.products
            before = changed[place]
            here = measured.changed
            changed[place] = None if before is None or here is None else before + here
            read[place] += 1
            done += pairs[place].old.block_nbytes(measured.block.index)
            if place > finished:
                self._blocks.forget(pairs[finished].name)
                finished = place
            self._progress(done, total)
        for place, pair in enumerate(pairs):
            yield self._numbers(pair, sums[place], changed[place], read[place] == len(pair.old))

    def _differing(self, pair: Pair) -> Iterator[int]:
        """The blocks that must be read: those that are not the same in all models."""
        beside = pair.third
        if pair.old_id == pair.new_id:
            known = self._estimates.third_energy(pair)
            if known is not None and known.error is None:
                beside = None  # its change alone is wanted, and known
        for index in range(len(pair.old)):
            own = (pair.old.block(index), pair.old.dtype)
            others = [tensor for tensor in (pair.new, beside) if tensor is not None]
            if any((tensor.block(index), tensor.dtype) != own for tensor in others):
                yield index

    def _measure(self, pair: Pair, job: _Block) -> _Measured:
        if not pair.has_numbers:
            return _Measured(job, np.zeros((3, 3)), self._unequal(pair, job.index))
        third = pair.third or pair.old
        values, changes = self._blocks.changes((pair.old, pair.new, third), job.index)
        products = inner_products(np.concatenate([values[None], changes]))
        return _Measured(job, products, int(np.count_nonzero(changes[0])))

    def _unequal(self, pair: Pair, index: int) -> int | None:
        """How many elements differ of tensors that can't be subtracted, if they can be told
        apart."""
        bits = DTYPES[pair.old.dtype].bits
        if pair.old.dtype != pair.new.dtype or bits % 8:
            return None
        old, new = (
            np.frombuffer(
                self._store.read_block(tensor.block(index), self._blocks.read), np.uint8
            ).reshape(-1, bits // 8)
            for tensor in (pair.old, pair.new)
        )
        return int((old != new).any(axis=1).sum())

    def _numbers(
        self, pair: Pair, sums: npt.NDArray[np.float64], changed: int | None, whole: bool
    ) -> Numbers:
        if not pair.has_numbers:
            return Numbers(elements_changed=changed)
        size = self._estimates.base_energy(pair.old, pair.old_id)
        if whole and (size is None or size.error is not None):
            size = Figure(float(sums[_OLD, _OLD]))
        third: Figure | None = None
        product: Figure | None = None
        if pair.third is not None:
            third, product = Figure(float(sums[_THIRD, _THIRD])), Figure(float(sums[_NEW, _THIRD]))
            if pair.old_id == pair.new_id:
                product = ZERO
                known = self._estimates.third_energy(pair)
                if known is not None and known.error is None:
                    third = known
        return Numbers(Figure(float(sums[_NEW, _NEW])), size, third, product, changed)
