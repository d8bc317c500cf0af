"""The executor: streams blocks through the method and hands the merged ones on.

It holds a bounded number of blocks, whatever the size of the models: at most one per expert, base
and output for each of a few blocks in flight. It is handed functions to read and write with, and
never sees a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.kernels.combine import DELTA, Coefficients, combine
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor, block_elements
from mergegit.pipeline import ordered_map

Prepared = TypeVar("Prepared")
"""A merged block made ready to be written, as the store has it."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base block and its raw bytes."""

    block: BlockId
    data: bytes


ReadBase = Callable[[BlockId], bytes]
ReadExpert = Callable[[BlockId, int, Base, float], tuple[bytes | memoryview, bool]]
"""A block as far as so many layers tell: its raw bytes and false, or, where layers are left out,
its float32 deltas from the base's block and true. Where they are to be trimmed at a threshold, they
are trimmed as well as can be told, and followed by each element's probability of being kept."""
Prepare = Callable[[BlockId, str, bytes, Base | None], Prepared]
"""Encode a merged block; the base is None where its dtype is another."""


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One tensor to merge.

    ``experts`` has None where an expert lacks the tensor. ``layers`` (experts, blocks) says how
    many layers of each block are read.
    """

    name: str
    dtype: str
    base: Tensor
    experts: Sequence[Tensor | None]
    layers: npt.NDArray[np.uint8]
    coefficients: Coefficients


@dataclass(frozen=True, slots=True)
class _BlockJob:
    tensor: TensorJob
    index: int


@dataclass(frozen=True, slots=True)
class _Merged(Generic[Prepared]):
    """A merged block; ``prepared`` is None where it is the base's own."""

    job: _BlockJob
    block: BlockId
    prepared: Prepared | None


def execute(
    jobs: Iterable[TensorJob],
    *,
    read_base: ReadBase,
    read_expert: ReadExpert,
    prepare: Prepare[Prepared],
    write: Callable[[Prepared], object],
    threads: int,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Merge tensors one after the other; yields each with its name as it is complete.

    Blocks are merged and prepared by ``threads`` threads and written in order by the caller's.
    ``progress`` is told the bytes of each merged block.
    """

    def merge_block(job: _BlockJob) -> _Merged[Prepared]:
        merged = _merge_block(job, read_base, read_expert)
        if merged is None:
            return _Merged(job, job.tensor.base.block(job.index), None)
        block, data, base = merged
        same_dtype = job.tensor.dtype == job.tensor.base.dtype
        if block == base.block and same_dtype:
            return _Merged(job, block, None)
        prepared = prepare(block, job.tensor.dtype, data, base if same_dtype else None)
        return _Merged(job, block, prepared)

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
            if merged.prepared is not None:
                write(merged.prepared)
            progress(job.base.block_nbytes(merged.job.index))
        if merged.job.index == len(job.base) - 1:
            yield job.name, Tensor(job.dtype, job.base.shape, b"".join(ids))
            ids = []


def _merge_block(
    job: _BlockJob, read_base: ReadBase, read_expert: ReadExpert
) -> tuple[BlockId, bytes, Base] | None:
    """A merged block's id and bytes with the base's, or None where nothing is to be merged."""
    tensor, index = job.tensor, job.index
    if index < 0:
        return None
    used = np.flatnonzero(tensor.layers[:, index])
    if not used.size and tensor.coefficients.keeps_base and tensor.dtype == tensor.base.dtype:
        return None
    base_id = tensor.base.block(index)
    base = Base(base_id, read_base(base_id))
    rows, codes = _read_rows(tensor, index, used, base, read_expert)
    data = bytes(
        combine(
            rows,
            codes,
            used,
            np.frombuffer(base.data, np.uint8),
            tensor.base.dtype,
            block_elements(tensor.base.elements, index),
            index * BLOCK_ELEMENTS,
            tensor.coefficients,
            tensor.dtype,
        )
    )
    return hash_block(data), data, base


def _read_rows(
    tensor: TensorJob,
    index: int,
    used: npt.NDArray[np.int64],
    base: Base,
    read_expert: ReadExpert,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The blocks of the experts in ``used``, one row each, and the codes of what they hold.

    Experts that share a block and its threshold share one read; the same bytes in another dtype
    are another block.
    """
    seen: dict[tuple[BlockId, str, float], tuple[bytes | memoryview, bool]] = {}
    blocks = []
    codes = np.zeros(used.size, np.int64)
    for row, k in enumerate(used):
        expert = tensor.experts[k]
        assert expert is not None
        block, threshold = expert.block(index), float(tensor.coefficients.thresholds[k])
        key = (block, expert.dtype, threshold)
        if key not in seen:
            seen[key] = read_expert(block, int(tensor.layers[k, index]), base, threshold)
        data, is_delta = seen[key]
        blocks.append(data)
        codes[row] = DELTA if is_delta else DTYPES[expert.dtype].code
    width = max((len(block) for block in blocks), default=0)
    rows = _scratch_rows(used.size, width)
    for row, data in enumerate(blocks):
        rows[row, : len(data)] = np.frombuffer(data, np.uint8)
    return rows, codes


_scratch = threading.local()


def _scratch_rows(count: int, width: int) -> npt.NDArray[np.uint8]:
    """Room for rows, the same for every block of a thread: new memory costs more than the copy."""
    size = count * width
    room: npt.NDArray[np.uint8] | None = getattr(_scratch, "room", None)
    if room is None or room.size < size:
        room = _scratch.room = np.empty(size, np.uint8)
    return room[:size].reshape(count, width)
