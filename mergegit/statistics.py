"""What is known of an expert's tensor beside a base tensor, taken once, when it is added.

Statistics are what a merge is planned with and where exact thresholds come from, so that planning
reads no weights. They are kept per pair of tensors, by the ids of both: experts that share a
tensor share its statistics, under any name and in any commit.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mergegit.errors import Damaged

BIN_SHIFT: Final = 14
BINS: Final = 2 << (31 - BIN_SHIFT)
"""Bins of |delta|. A float32's exponent and upper 9 bits of mantissa number its cell; each cell has
two bins, an even one for the value at its lower edge alone and an odd one for all values above it.
The difference of two 16-bit floats of like size has no more bits than that: it falls on an edge,
and is known exactly."""

SKETCH_BUCKETS: Final = 256
"""Length of a tensor's sketch. The inner product of two sketches estimates that of the deltas,
with a standard error of about |a| |b| / 16 for one tensor, far less for a model."""

NO_BASE: Final = bytes(32)
"""Stands for the id of a base tensor of zeros."""

PLANES: Final = 4
"""Planes of a progressive delta (mergegit.kernels.progressive)."""

_HEAD = struct.Struct("<IIII")


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often |delta| falls into each bin that is not empty.

    ``bins`` are bin numbers (uint32, ascending), ``counts`` elements (uint64). Zeros are not
    counted.
    """

    bins: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.uint64]

    def threshold(self, keep: int) -> np.float32:
        """The magnitude at or above which the ``keep`` largest elements lie.

        Exact where the boundary falls on an edge's own bin, all ties being kept; elsewhere
        interpolated within a cell whose edges differ by 0.2%, which misplaces a few elements in a
        million. Infinity keeps nothing, zero everything.
        """
        if keep <= 0:
            return np.float32(np.inf)
        from_top = np.cumsum(self.counts[::-1])
        if not from_top.size or keep > from_top[-1]:
            return np.float32(0.0)
        at = int(np.searchsorted(from_top, keep))
        index = self.bins.size - 1 - at
        cell, above_edge = divmod(int(self.bins[index]), 2)
        lower, upper = _edge(np.array([cell, cell + 1], np.uint32))
        if not above_edge:
            return np.float32(lower)
        inside = int(self.counts[index])
        wanted = keep - (int(from_top[at]) - inside)
        if wanted == inside:
            return np.float32(np.nextafter(lower, np.float32(np.inf)))
        return np.float32(upper - (float(upper) - float(lower)) * wanted / inside)

    def magnitude(self, threshold: np.float32 | float = 0.0) -> float:
        """Sum of |delta| over elements of at least ``threshold``; bins above an edge count as if
        spread evenly over their cell, which is within 0.1%."""
        cells = self.bins // 2
        lower = _edge(cells).astype(np.float64)
        upper = _edge(cells + 1).astype(np.float64)
        start = np.clip(float(threshold), lower, upper)
        is_above_edge = (self.bins & 1).astype(np.bool_)
        share = np.where(is_above_edge, (upper - start) / (upper - lower), lower >= threshold)
        value = np.where(is_above_edge, (start + upper) / 2, lower)
        return float((share * value) @ self.counts.astype(np.float64))


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of ``delta = tensor - base`` in float32.

    Per block: ``energy``, the sum of squares (float64); ``maximum``, the largest magnitude
    (float32); ``nonzero``, the number of elements that differ; ``nonfinite``, the number of NaN and
    infinite elements of the tensor itself (uint32). Deltas that are not finite count nowhere else.
    ``remaining`` (float64, blocks by ``PLANES``) is the energy left unread after 1, 2, ... planes
    of a progressive delta; zeros where the two tensors' dtypes allow none.
    Per tensor: the ``sketch`` (float32, ``SKETCH_BUCKETS``) and the ``histogram``.
    """

    energy: npt.NDArray[np.float64]
    maximum: npt.NDArray[np.float32]
    nonzero: npt.NDArray[np.uint32]
    nonfinite: npt.NDArray[np.uint32]
    remaining: npt.NDArray[np.float64]
    sketch: npt.NDArray[np.float32]
    histogram: Histogram

    def to_bytes(self) -> bytes:
        """The stored form: counts, then the arrays, the histogram's in planes of bytes."""
        histogram = self.histogram
        gaps = np.diff(histogram.bins, prepend=np.uint32(0)).astype(np.uint32)
        return b"".join(
            (
                _HEAD.pack(1, self.energy.size, self.sketch.size, histogram.bins.size),
                self.energy.astype("<f8").tobytes(),
                self.maximum.astype("<f4").tobytes(),
                self.nonzero.astype("<u4").tobytes(),
                self.nonfinite.astype("<u4").tobytes(),
                self.remaining.astype("<f8").tobytes(),
                self.sketch.astype("<f4").tobytes(),
                _byte_planes(gaps.astype("<u4")),
                _byte_planes(histogram.counts.astype("<u8")),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorStatistics:
        """Raises ``Damaged`` where ``data`` is not the stored form."""
        try:
            version, blocks, buckets, bins = _HEAD.unpack_from(data)
            if version != 1 or buckets != SKETCH_BUCKETS:
                raise ValueError(f"version {version}, {buckets} buckets")
            reader = _Reader(data, _HEAD.size)
            energy = reader.take("<f8", blocks)
            maximum = reader.take("<f4", blocks)
            nonzero = reader.take("<u4", blocks)
            nonfinite = reader.take("<u4", blocks)
            remaining = reader.take("<f8", blocks * PLANES).reshape(blocks, PLANES)
            sketch = reader.take("<f4", buckets)
            gaps = reader.take_planes("<u4", bins)
            counts = reader.take_planes("<u8", bins)
            reader.finish()
        except (ValueError, struct.error) as error:
            raise Damaged(
                f"statistics of the store can't be read ({error})",
                hint="run `mergegit fsck` to see what is affected",
            ) from error
        histogram = Histogram(np.cumsum(gaps, dtype=np.uint32), counts)
        return cls(energy, maximum, nonzero, nonfinite, remaining, sketch, histogram)


class _Reader:
    """Takes arrays from a buffer, one after the other."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset

    def take(self, dtype: str, count: int) -> npt.NDArray[Any]:
        array = np.frombuffer(self._data, dtype, count, self._offset)
        self._offset += array.nbytes
        return array

    def take_planes(self, dtype: str, count: int) -> npt.NDArray[Any]:
        width = np.dtype(dtype).itemsize
        planes = self.take("<u1", count * width).reshape(width, count)
        return np.ascontiguousarray(planes.T).view(dtype).reshape(count)

    def finish(self) -> None:
        if self._offset != len(self._data):
            raise ValueError("length")


def _byte_planes(array: npt.NDArray[np.generic]) -> bytes:
    """First bytes of all elements, then second bytes, and so on: zstd shrinks that better."""
    octets = array.view(np.uint8).reshape(array.size, array.itemsize)
    return np.ascontiguousarray(octets.T).tobytes()


def _edge(cells: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """The lower edges of cells; the largest float stands for infinity."""
    edges = (cells << np.uint32(BIN_SHIFT)).astype(np.uint32).view(np.float32)
    return np.minimum(edges, np.finfo(np.float32).max)
