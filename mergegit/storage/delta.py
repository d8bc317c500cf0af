"""A block as a progressive delta: planes, each halving the error, and a residual that makes it
exact.

    plane p   = means (BF16, 2^(p-1) per group), then the plane's bits; zstd where that is smaller
    residual  = for each byte of a word, lowest first: length (4 bytes), then its bytes for all
                elements, sorted by the prediction's exponent; the highest bit of the length is
                set where they are stored plainly, else they are one zstd frame

A frame's blocks end where the exponent changes, so that each run has statistics of its own.
mergegit.kernels.progressive has the arithmetic, docs/format.md the layout, and
docs/decisions/002-progressive-delta.md what was measured.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from mergegit.dtypes import DTYPES
from mergegit.kernels import progressive
from mergegit.statistics import PLANES
from mergegit.storage.pack import Compression, Segment

LAYERS: Final = PLANES + 1
"""Planes and residual."""

_LENGTH = struct.Struct("<I")
_PLAIN: Final = 1 << 31
_LEVEL: Final = 1


@dataclass(frozen=True, slots=True)
class Delta:
    """A block's layers, first to last."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(segment.payload) for segment in self.segments)


def can_encode(dtype: str, base_dtype: str) -> bool:
    """Whether blocks of these dtypes have deltas."""
    return dtype == base_dtype and DTYPES[dtype].is_float


def quantise(expert: bytes, base: bytes, dtype: str) -> progressive.Quantised:
    """The planes' part of the work: codes, means, and the energy left after each plane."""
    elements = len(expert) * 8 // DTYPES[dtype].bits
    return progressive.quantise(_row(expert), _row(base), dtype, elements)


def encode(
    expert: bytes, base: bytes, dtype: str, quantised: progressive.Quantised | None = None
) -> Delta | None:
    """The layers of a block against its base block, or None where plain bytes are no longer."""
    known = quantised or quantise(expert, base, dtype)
    segments = []
    for plane in range(PLANES):
        bits = progressive.plane_bits(known.codes, plane)
        segments.append(_compress(known.means[plane].astype("<u2").tobytes() + bits.tobytes()))
    prediction = progressive.predict(_row(base), progressive.reconstruct_codes(known), dtype)
    streams, ends = progressive.residual_planes(_row(expert), prediction, dtype)
    residual = b"".join(_compress_runs(stream, ends) for stream in streams)
    segments.append(Segment(residual, len(residual), Compression.NONE))
    delta = Delta(tuple(segments))
    return delta if delta.nbytes < len(expert) else None


def decode_planes(
    planes: Sequence[bytes], elements: int, threshold: float = 0.0
) -> npt.NDArray[np.float32]:
    """The delta (float32) as far as the first planes tell, from their decompressed payloads.

    With a ``threshold``, two rows: the delta as it is expected to be after trimming, and each
    element's probability of being kept. Raises ``ValueError`` where a payload is not a plane of
    that many elements.
    """
    count = len(planes)
    bits = []
    for plane, payload in enumerate(planes):
        means_bytes = 2 * progressive.group_count(elements) << plane
        if len(payload) != means_bytes + -(-elements // 8):
            raise ValueError(f"plane {plane + 1} of {len(payload)} bytes")
        bits.append(np.frombuffer(payload, np.uint8, offset=means_bytes))
    means_count = progressive.group_count(elements) << (count - 1)
    means = np.frombuffer(planes[-1], "<u2", means_count).astype(np.uint16)
    if threshold > 0.0:
        return progressive.reconstruct_trimmed(bits, means, elements, threshold)
    return progressive.reconstruct(bits, means, elements)


def decode(planes: Sequence[bytes], residual: bytes, base: bytes, dtype: str) -> bytes:
    """The block, from all its layers. Raises ``ValueError`` where they are not its layers."""
    width = DTYPES[dtype].bits // 8
    elements = len(base) // width
    delta = decode_planes(planes, elements)
    streams = np.empty((width, elements), np.uint8)
    at = 0
    for stream in streams:
        if at + _LENGTH.size > len(residual):
            raise ValueError("length of a residual")
        (length,) = _LENGTH.unpack_from(residual, at)
        at += _LENGTH.size
        plain, length = bool(length & _PLAIN), length & ~_PLAIN
        data = residual[at : at + length]
        if not plain:
            data = _decompress(data, elements)
        if len(data) != elements:
            raise ValueError(f"a residual of {len(data)} bytes")
        stream[:] = np.frombuffer(data, np.uint8)
        at += length
    if at != len(residual):
        raise ValueError("length of a residual")
    prediction = progressive.predict(_row(base), delta, dtype)
    return progressive.apply_residual(streams, prediction, dtype)


def _row(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _compress(data: bytes) -> Segment:
    smaller = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    if len(smaller) < len(data):
        return Segment(smaller, len(data), Compression.ZSTD)
    return Segment(data, len(data), Compression.NONE)


def _compress_runs(stream: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=stream.size)
    parts = []
    start = 0
    for end in np.unique(ends):
        if end > start:
            parts.append(compressor.compress(stream[start:end].data))
            parts.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            start = int(end)
    parts.append(compressor.flush())
    frame = b"".join(parts)
    if len(frame) < stream.size:
        return _LENGTH.pack(len(frame)) + frame
    return _LENGTH.pack(stream.size | _PLAIN) + stream.tobytes()


def _decompress(frame: bytes, size: int) -> bytes:
    try:
        if zstandard.frame_content_size(frame) not in (size, -1):
            raise ValueError("size of a residual")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max(size, 1))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
