"""`add`: from a checkpoint on disk to a commit, in one pass over its files."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mergegit.checkpoint.directory import Checkpoint
from mergegit.checkpoint.source import Reader, SourceFile
from mergegit.dtypes import DTYPES, byte_length
from mergegit.encoding import hash_block
from mergegit.objects import (
    BLOCK_ELEMENTS,
    BlockId,
    Manifest,
    Shard,
    Tensor,
    TensorId,
    block_count,
    block_elements,
)
from mergegit.pipeline import ordered_map
from mergegit.repository.measuring import Comparison, StatisticsBuilder, compare
from mergegit.statistics import NO_BASE
from mergegit.storage.prepared import PreparedBlock
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Content:
    """A tensor to store: where its bytes come from, and the base tensor to measure it against."""

    key: tuple[str, str]
    dtype: str
    shape: tuple[int, ...]
    elements: int
    source: SourceFile | bytes
    offset: int = 0
    measured: bool = False
    base: Tensor | None = None
    base_id: TensorId | None = None


@dataclass(slots=True)
class _BlockJob:
    content: _Content
    index: int
    source: Reader | bytes


@dataclass(slots=True)
class _ReadBlock:
    job: _BlockJob
    block: PreparedBlock
    comparison: Comparison


@dataclass(slots=True)
class Added:
    """What was stored: the manifest, bytes of the checkpoint, and how many of them were new."""

    manifest: Manifest
    total_bytes: int = 0
    new_bytes: int = 0
    blocks: int = 0
    new_blocks: int = 0
    nonfinite: dict[str, int] = field(default_factory=dict)


def store_checkpoint(
    store: Store,
    transaction: Transaction,
    checkpoint: Checkpoint,
    base: Manifest | None,
    *,
    plainly: bool,
    threads: int,
    progress: Progress,
) -> Added:
    """Store every block of a checkpoint that is new, with statistics against ``base``.

    Blocks become progressive deltas against the base's where that is smaller, but with
    ``plainly``. Each file is read once, from front to back.
    """
    ids: dict[tuple[str, str], TensorId] = {}
    added = Added(Manifest({}, (), {}))
    total = _total_bytes(checkpoint)

    def read_block(job: _BlockJob) -> _ReadBlock:
        return _read_block(store, job, plainly)

    collector: _Collector | None = None
    contents = list(_contents(store, checkpoint, base))
    for read in ordered_map(read_block, _block_jobs(contents), threads=threads):
        content = read.job.content
        if collector is None:
            collector = _Collector(content)
        if read.job.index >= 0:
            added.blocks += 1
            added.new_blocks += transaction.write_block(read.block)
            collector.add(read)
            added.total_bytes += read.block.size
            progress(added.total_bytes, total)
        if read.job.index == block_count(content.elements) - 1:
            ids[content.key] = collector.finish(transaction)
            if collector.nonfinite:
                added.nonfinite[content.key[1]] = collector.nonfinite
            collector = None
    for source in (*(shard.source for shard in checkpoint.shards), *checkpoint.files):
        _check_unchanged(source)
    added.new_bytes = transaction.block_bytes
    added.manifest = _manifest(checkpoint, ids)
    return added


class _Collector:
    """Gathers the blocks of one tensor."""

    def __init__(self, content: _Content) -> None:
        self._content = content
        self._ids: list[BlockId] = []
        self._statistics = StatisticsBuilder() if content.measured else None

    def add(self, read: _ReadBlock) -> None:
        self._ids.append(read.block.block)
        if self._statistics is not None:
            self._statistics.add(read.comparison)

    @property
    def nonfinite(self) -> int:
        return self._statistics.nonfinite if self._statistics else 0

    def finish(self, transaction: Transaction) -> TensorId:
        content = self._content
        tensor_id = transaction.write_tensor(
            Tensor(content.dtype, content.shape, b"".join(self._ids))
        )
        if self._statistics is not None and tensor_id != content.base_id:
            transaction.write_statistics(
                tensor_id, content.base_id or NO_BASE, self._statistics.finish().to_bytes()
            )
        return tensor_id


def _contents(store: Store, checkpoint: Checkpoint, base: Manifest | None) -> Iterator[_Content]:
    """Everything that becomes a tensor, in the order of the files' bytes."""
    for source in checkpoint.files:
        held = checkpoint.contents.get(source.inside, source)
        yield _Content(("file", source.inside), "U8", (source.size,), source.size, held)
    for path, data in checkpoint.made.items():
        yield _Content(("file", path), "U8", (len(data),), len(data), data)
    for index, shard in enumerate(checkpoint.shards):
        text = shard.header.text
        path = shard.source.inside
        yield _Content(("header", path), "U8", (len(text),), len(text), text)
        for entry in shard.header.tensors:
            owned = checkpoint.owner.get(entry.name) == index
            elements = math.prod(entry.shape)
            measured = owned and DTYPES[entry.dtype].is_float
            base_id = base.tensors.get(entry.name) if base and measured else None
            base_tensor = store.tensor(base_id) if base_id else None
            if base_tensor and not _comparable(base_tensor, entry.shape):
                base_id = base_tensor = None
            yield _Content(
                (path, entry.name),
                entry.dtype,
                entry.shape,
                elements,
                shard.source,
                shard.header.data_offset + entry.begin,
                measured,
                base_tensor,
                base_id,
            )


def _comparable(base: Tensor, shape: tuple[int, ...]) -> bool:
    return base.shape == shape and DTYPES[base.dtype].is_float


def _block_jobs(contents: list[_Content]) -> Iterator[_BlockJob]:
    """The blocks of all contents; a content without any gives one job of index -1."""
    opened: SourceFile | None = None
    source: Reader | bytes = b""
    for content in contents:
        if isinstance(content.source, bytes):
            source, opened = content.source, None
        elif content.source is not opened:
            source, opened = content.source.reader(), content.source
        count = block_count(content.elements)
        for index in range(count) if count else (-1,):
            yield _BlockJob(content, index, source)


def _read_block(store: Store, job: _BlockJob, plainly: bool) -> _ReadBlock:
    content, index = job.content, job.index
    if index < 0:
        return _ReadBlock(job, PreparedBlock(BlockId(b""), content.dtype, (), 0), Comparison())
    elements = block_elements(content.elements, index)
    length = byte_length(content.dtype, elements)
    start = content.offset + byte_length(content.dtype, index * BLOCK_ELEMENTS)
    if isinstance(job.source, bytes):
        data = job.source[start : start + length]
    else:
        data = job.source.read(start, length)
    block = hash_block(data)
    comparison = Comparison()
    if content.measured:
        comparison = compare(store, content.dtype, data, block, content.base, index, elements)
    if comparison.quantised is None or comparison.base_block is None or plainly:
        return _ReadBlock(job, store.prepare_block(block, content.dtype, data), comparison)
    prepared = store.prepare_block(
        block,
        content.dtype,
        data,
        comparison.base_block,
        comparison.base_data,
        comparison.quantised,
    )
    return _ReadBlock(job, prepared, comparison)


def _total_bytes(checkpoint: Checkpoint) -> int:
    files = sum(source.size for source in checkpoint.files)
    files += sum(len(data) for data in checkpoint.made.values())
    return files + sum(shard.header.file_bytes for shard in checkpoint.shards)


def _check_unchanged(source: SourceFile) -> None:
    fd = source.open()
    os.close(fd)


def _manifest(checkpoint: Checkpoint, ids: dict[tuple[str, str], TensorId]) -> Manifest:
    shards = []
    tensors: dict[str, TensorId] = {}
    for index, shard in enumerate(checkpoint.shards):
        path = shard.source.inside
        strays = {}
        for entry in shard.header.tensors:
            if checkpoint.owner.get(entry.name) == index:
                tensors[entry.name] = ids[path, entry.name]
            else:
                strays[entry.name] = ids[path, entry.name]
        names = tuple(entry.name for entry in shard.header.tensors)
        shards.append(Shard(path, ids["header", path], names, strays))
    paths = (*(source.inside for source in checkpoint.files), *checkpoint.made)
    files = {path: ids["file", path] for path in paths}
    return Manifest(tensors, tuple(shards), files, checkpoint.directories)
