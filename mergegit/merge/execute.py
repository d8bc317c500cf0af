"""The executor: streams blocks through the method and hands the merged ones on.

It holds a bounded number of blocks, whatever the size of the models: at most one per expert, base
and output for each of a few blocks in flight. It is handed functions to read and write with, and
never sees a store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.kernels.combine import Coefficients, combine
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor, block_elements
from mergegit.pipeline import ordered_map

ReadBase = Callable[[BlockId], bytes]
ReadExpert = Callable[[BlockId, int], bytes]
WriteBlock = Callable[[BlockId, str, bytes | memoryview], object]


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One tensor to merge.

    ``experts`` has None where an expert lacks the tensor. ``layers`` (experts, blocks) says how
    many layers of each block are read. ``keeps_base`` is true where a block without contributions
    is the base's.
    """

    name: str
    dtype: str
    base: Tensor
    experts: Sequence[Tensor | None]
    layers: npt.NDArray[np.uint8]
    coefficients: Coefficients
    keeps_base: bool


@dataclass(frozen=True, slots=True)
class _BlockJob:
    tensor: TensorJob
    index: int


@dataclass(frozen=True, slots=True)
class _Merged:
    """A merged block; ``data`` is None where it is the base's own."""

    job: _BlockJob
    block: BlockId
    data: bytes | memoryview | None


def execute(
    jobs: Iterable[TensorJob],
    *,
    read_base: ReadBase,
    read_expert: ReadExpert,
    write_block: WriteBlock,
    threads: int,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Merge tensors one after the other; yields each with its name as it is complete.

    Blocks are merged by ``threads`` threads and written in order by the caller's. ``progress`` is
    told the bytes of each merged block.
    """

    def merge_block(job: _BlockJob) -> _Merged:
        return _merge_block(job, read_base, read_expert)

    def block_jobs() -> Iterator[_BlockJob]:
        for job in jobs:
            if len(job.base) == 0:
                yield _BlockJob(job, -1)
            for index in range(len(job.base)):
                yield _BlockJob(job, index)

    ids: list[BlockId] = []
    for merged in ordered_map(merge_block, block_jobs(), threads=threads):
        job = merged.job.tensor
        if merged.job.index >= 0:
            ids.append(merged.block)
            if merged.data is not None:
                write_block(merged.block, job.dtype, merged.data)
            progress(job.base.block_nbytes(merged.job.index))
        if merged.job.index == len(job.base) - 1:
            yield job.name, Tensor(job.dtype, job.base.shape, b"".join(ids))
            ids = []


def _merge_block(job: _BlockJob, read_base: ReadBase, read_expert: ReadExpert) -> _Merged:
    tensor, index = job.tensor, job.index
    if index < 0:
        return _Merged(job, BlockId(b""), None)
    base_id = tensor.base.block(index)
    used = np.flatnonzero(tensor.layers[:, index])
    if not used.size and tensor.keeps_base and tensor.dtype == tensor.base.dtype:
        return _Merged(job, base_id, None)
    elements = block_elements(tensor.base.elements, index)
    rows, codes = _read_rows(tensor, index, used, read_expert)
    data = combine(
        rows,
        codes,
        used,
        np.frombuffer(read_base(base_id), np.uint8),
        tensor.base.dtype,
        elements,
        index * BLOCK_ELEMENTS,
        tensor.coefficients,
        tensor.dtype,
    )
    block = hash_block(data)
    if block == base_id and tensor.dtype == tensor.base.dtype:
        return _Merged(job, block, None)
    return _Merged(job, block, data)


def _read_rows(
    tensor: TensorJob, index: int, used: npt.NDArray[np.int64], read_expert: ReadExpert
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The blocks of the experts in ``used``, one row each, and their dtypes' codes.

    Experts that share a block share one read.
    """
    seen: dict[BlockId, bytes] = {}
    blocks = []
    codes = np.zeros(used.size, np.int64)
    for row, k in enumerate(used):
        expert = tensor.experts[k]
        assert expert is not None
        block = expert.block(index)
        if block not in seen:
            seen[block] = read_expert(block, int(tensor.layers[k, index]))
        blocks.append(seen[block])
        codes[row] = DTYPES[expert.dtype].code
    width = max((len(block) for block in blocks), default=0)
    rows = np.zeros((used.size, width), np.uint8)
    for row, data in enumerate(blocks):
        rows[row, : len(data)] = np.frombuffer(data, np.uint8)
    return rows, codes
