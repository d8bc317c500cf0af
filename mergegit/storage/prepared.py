"""Blocks made ready to be written."""

from __future__ import annotations

from dataclasses import dataclass

from mergegit.dtypes import DTYPES
from mergegit.objects import BlockId
from mergegit.storage.pack import Compression, Segment
from mergegit.storage.reader import compress


@dataclass(frozen=True, slots=True)
class PreparedBlock:
    """A block ready to be written, as the layers of one form; no segments where it is stored
    already. ``size`` is its raw length in bytes.

    ``base_copy`` are the bytes of a delta's base that is not stored in its raw form: it will be, so
    that no chain of deltas grows longer than one.
    """

    block: BlockId
    dtype: str
    segments: tuple[Segment, ...]
    size: int
    base: BlockId | None = None
    base_copy: bytes | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(len(segment.payload) for segment in self.segments)


def raw_block(block: BlockId, dtype: str, data: bytes | memoryview) -> PreparedBlock:
    """A block in its raw form; what is no float is compressed where that pays."""
    if DTYPES[dtype].is_float:
        segment = Segment(data, len(data), Compression.NONE)
    else:
        payload, compression = compress(bytes(data))
        segment = Segment(payload, len(data), compression)
    return PreparedBlock(block, dtype, (segment,), len(data))
