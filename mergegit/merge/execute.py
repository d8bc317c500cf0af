"""The executor: streams blocks through the method and hands the merged ones on.

It holds a bounded number of blocks, whatever the size of the models: at most one per expert, base
and output for each of a few blocks in flight, and as many bands as the method needs whole. It is
handed functions to read and write with, and never sees a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.kernels.combine import DELTA, Coefficients, combine, load_deltas
from mergegit.kernels.floats import Floats, from_float32
from mergegit.merge.bands import cut, regroup
from mergegit.merge.method import Band, Banded, Rule, Survey, Unit
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Tensor, block_elements
from mergegit.pipeline import ordered_map

Prepared = TypeVar("Prepared")
"""A merged block made ready to be written, as the store has it."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base block, its raw bytes and their dtype."""

    block: BlockId
    data: bytes
    dtype: str


class Reader(Protocol):
    """How blocks are read, and counted."""

    def base(self, block: BlockId) -> bytes: ...

    def expert(
        self, block: BlockId, layers: int, base: Base, threshold: float
    ) -> tuple[bytes | memoryview, bool]:
        """A block as far as so many layers tell: its raw bytes and false, or, where layers are left
        out, its float32 deltas from the base's block and true. Where they are to be trimmed at a
        threshold, they are trimmed as well as can be told, and followed by each element's
        probability of being kept."""


class Memory(Protocol):
    """What earlier merges made of the same, for one tensor."""

    def recall_block(self, index: int, coefficients: Coefficients) -> BlockId | None: ...

    def keep_block(self, index: int, coefficients: Coefficients, block: BlockId) -> None: ...

    def recall_tensor(self) -> Tensor | None: ...

    def keep_tensor(self, tensor: Tensor) -> None: ...


Prepare = Callable[[BlockId, str, bytes, Base | None], Prepared]
"""Encode a merged block; the base is None where its dtype is another."""


@dataclass(frozen=True, slots=True)
class TensorJob:
    """One tensor to merge.

    ``experts`` are those that take part, with None where one lacks the tensor. ``layers`` (experts,
    blocks) says how many layers of each block are read. ``rule`` gives the method's rule from what
    ``survey`` found, or from None where there is no survey. ``memory`` knows what was merged of the
    same before.
    """

    name: str
    dtype: str
    base: Tensor
    experts: Sequence[Tensor | None]
    layers: npt.NDArray[np.uint8]
    rule: Callable[[Any], Rule]
    survey: Survey | None = None
    memory: Memory | None = None

    @property
    def is_read_twice(self) -> bool:
        return self.survey is not None and bool(self.layers.any())


@dataclass(frozen=True, slots=True)
class _BlockJob:
    """A block to merge by ``coefficients``; ``values`` are its merged elements where they are
    computed already, and ``known`` is the block itself where the tensor is remembered."""

    tensor: TensorJob
    index: int
    coefficients: Coefficients | None = None
    values: Floats | None = None
    known: BlockId | None = None


@dataclass(frozen=True, slots=True)
class _Merged(Generic[Prepared]):
    """A merged block; ``prepared`` is None where it is the base's own, or stored already.

    ``is_new`` tells whether it was computed, and is worth remembering.
    """

    job: _BlockJob
    block: BlockId
    prepared: Prepared | None
    is_new: bool = False


def execute(
    jobs: Iterable[TensorJob],
    *,
    reader: Reader,
    again: Reader,
    prepare: Prepare[Prepared],
    write: Callable[[Prepared], object],
    threads: int,
    progress: Callable[[int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Merge tensors one after the other; yields each with its name as it is complete.

    Blocks are merged and prepared by ``threads`` threads and written in order by the caller's.
    Tensors that are surveyed first are read by ``reader`` for the survey and then, a second time,
    by ``again``. ``progress`` is told the bytes of each merged block.
    """

    def merge_block(job: _BlockJob) -> _Merged[Prepared]:
        tensor = job.tensor
        known = job.known or _recalled(job)
        if known is not None:
            return _Merged(job, known, None)
        # Blocks whose elements are computed already have been read, the base's among them.
        second = again if tensor.is_read_twice or job.values is not None else reader
        merged = _merge_block(job, second)
        if merged is None:
            return _Merged(job, tensor.base.block(job.index), None)
        block, data, base = merged
        same_dtype = tensor.dtype == tensor.base.dtype
        if same_dtype and block == tensor.base.block(job.index):
            return _Merged(job, block, None, is_new=True)
        if same_dtype and base is None:
            base_id = tensor.base.block(job.index)
            base = Base(base_id, second.base(base_id), tensor.base.dtype)
        prepared = prepare(block, tensor.dtype, data, base if same_dtype else None)
        return _Merged(job, block, prepared, is_new=True)

    ids: dict[str, list[BlockId]] = {}
    block_jobs = (block for job in jobs for block in _block_jobs(job, reader, again, threads))
    for merged in ordered_map(merge_block, block_jobs, threads=threads):
        job = merged.job.tensor
        done = ids.setdefault(job.name, [])
        if merged.job.index >= 0:
            done.append(merged.block)
            if merged.prepared is not None:
                write(merged.prepared)
            if merged.is_new:
                _keep(merged.job, merged.block)
            progress(job.base.block_nbytes(merged.job.index))
        if len(done) == len(job.base):
            tensor = Tensor(job.dtype, job.base.shape, b"".join(done))
            if job.memory is not None and merged.is_new:
                job.memory.keep_tensor(tensor)
            yield job.name, tensor
            del ids[job.name]


def _block_jobs(job: TensorJob, reader: Reader, again: Reader, threads: int) -> Iterator[_BlockJob]:
    """The blocks of one tensor, after its survey if there is one."""
    known = job.memory.recall_tensor() if job.memory is not None else None
    if known is not None:
        for index in range(len(job.base)):
            yield _BlockJob(job, index, known=known.block(index))
        return
    found = None
    if job.survey is not None:
        found = _survey(job, job.survey, reader, threads)
        reader = again if job.is_read_twice else reader
    rule = job.rule(found)
    nearest = rule if isinstance(rule, Coefficients) else rule.nearest
    if not len(job.base):
        yield _BlockJob(job, -1, nearest)
    elif isinstance(rule, Coefficients) or _is_base(job, nearest):
        for index in range(len(job.base)):
            yield _BlockJob(job, index, nearest)
    else:
        for index, values in enumerate(_merged_values(job, rule, reader, threads)):
            yield _BlockJob(job, index, nearest, values)


def _recalled(job: _BlockJob) -> BlockId | None:
    """The block as it was merged before, where it is one weighted sum of what is read of it."""
    memory, coefficients = job.tensor.memory, job.coefficients
    if memory is None or coefficients is None or job.index < 0 or job.values is not None:
        return None
    if not job.tensor.layers[:, job.index].any():
        return None
    return memory.recall_block(job.index, coefficients)


def _keep(job: _BlockJob, block: BlockId) -> None:
    memory, coefficients = job.tensor.memory, job.coefficients
    if memory is not None and coefficients is not None and job.values is None:
        memory.keep_block(job.index, coefficients, block)


def _is_base(job: TensorJob, nearest: Coefficients) -> bool:
    """Whether nothing is read of any expert, so that the base is all there is."""
    return nearest.keeps_base and not job.layers.any()


def _survey(job: TensorJob, survey: Survey, reader: Reader, threads: int) -> Any:
    if job.is_read_twice:

        def measure(index: int) -> Any:
            return survey.measure(_read_band(job, index, reader))

        for measured in ordered_map(measure, range(len(job.base)), threads=threads):
            survey.add(measured)
    return survey.finish()


def _merged_values(job: TensorJob, rule: Banded, reader: Reader, threads: int) -> Iterator[Floats]:
    """The merged elements of a tensor, block by block."""

    def read(index: int) -> Band:
        return _read_band(job, index, reader, rule.nearest.thresholds)

    alone = threads if rule.unit is Unit.TENSOR else 1

    def merge(band: Band) -> Floats:
        if not band.deltas.any() and rule.nearest.keeps_base:
            return band.base
        return rule.apply(replace(band, threads=alone))

    blocks = ordered_map(read, range(len(job.base)), threads=threads)
    bands = regroup(blocks, rule.unit, job.base.shape)
    return cut(ordered_map(merge, bands, threads=threads), BLOCK_ELEMENTS)


def _read_band(
    job: TensorJob, index: int, reader: Reader, thresholds: Floats | None = None
) -> Band:
    base_id = job.base.block(index)
    base = Base(base_id, reader.base(base_id), job.base.dtype)
    used = np.flatnonzero(job.layers[:, index])
    if thresholds is None:
        thresholds = np.zeros(len(job.experts), np.float32)
    rows, codes = _read_rows(job, index, used, base, thresholds, reader)
    elements = block_elements(job.base.elements, index)
    reference, deltas = load_deltas(
        rows, codes, used, np.frombuffer(base.data, np.uint8), job.base.dtype, elements,
        len(job.experts),
    )  # fmt: skip
    return Band(reference, deltas, index * BLOCK_ELEMENTS)


def _merge_block(job: _BlockJob, reader: Reader) -> tuple[BlockId, bytes, Base | None] | None:
    """A merged block's id and bytes, with the base's if it was read, or None where nothing is to be
    merged."""
    tensor, index = job.tensor, job.index
    if index < 0:
        return None
    if job.values is not None:
        data = bytes(from_float32(job.values, tensor.dtype))
        return hash_block(data), data, None
    coefficients = job.coefficients
    assert coefficients is not None
    used = np.flatnonzero(tensor.layers[:, index])
    if not used.size and coefficients.keeps_base and tensor.dtype == tensor.base.dtype:
        return None
    base_id = tensor.base.block(index)
    base = Base(base_id, reader.base(base_id), tensor.base.dtype)
    rows, codes = _read_rows(tensor, index, used, base, coefficients.thresholds, reader)
    data = bytes(
        combine(
            rows,
            codes,
            used,
            np.frombuffer(base.data, np.uint8),
            tensor.base.dtype,
            block_elements(tensor.base.elements, index),
            index * BLOCK_ELEMENTS,
            coefficients,
            tensor.dtype,
        )
    )
    return hash_block(data), data, base


def _read_rows(
    tensor: TensorJob,
    index: int,
    used: npt.NDArray[np.int64],
    base: Base,
    thresholds: Floats,
    reader: Reader,
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
        block, threshold = expert.block(index), float(thresholds[k])
        key = (block, expert.dtype, threshold)
        if key not in seen:
            seen[key] = reader.expert(block, int(tensor.layers[k, index]), base, threshold)
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
