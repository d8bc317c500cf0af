"""Statistics of a delta: thresholds, magnitudes and their stored form."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mergegit.errors import Damaged
from mergegit.kernels.floats import from_float32, to_float32
from mergegit.kernels.measure import measure
from mergegit.statistics import BINS, PLANES, SKETCH_BUCKETS, Histogram, TensorStatistics

Floats = npt.NDArray[np.float32]


def histogram_of(delta: Floats) -> Histogram:
    """The histogram of a delta, as it is measured."""
    found = measure(delta.view(np.uint8), "F32", None, "F32", delta.size, 0)
    bins = np.flatnonzero(found.histogram).astype(np.uint32)
    return Histogram(bins, found.histogram[bins].astype(np.uint64))


def largest(delta: Floats, keep: int) -> np.float32:
    """The magnitude of the ``keep``-th largest element."""
    return np.float32(np.sort(np.abs(delta))[::-1][keep - 1])


def like_size_delta(seed: int, n: int = 5000) -> Floats:
    """The difference of two bf16 tensors whose elements are of like size, with many ties."""
    random = np.random.default_rng(seed)
    sizes = 2.0 ** random.integers(-3, 3, n)
    pair = (random.uniform(1, 2, (2, n)) * sizes).astype(np.float32)
    expert, base = (to_float32(from_float32(values, "BF16"), "BF16") for values in pair)
    return expert - base


def some_statistics(blocks: int = 2, bins: int = 3) -> TensorStatistics:
    return TensorStatistics(
        energy=np.arange(blocks, dtype=np.float64) + 0.5,
        maximum=np.arange(blocks, dtype=np.float32) + 0.25,
        nonzero=np.arange(blocks, dtype=np.uint32) + 7,
        nonfinite=np.arange(blocks, dtype=np.uint32),
        remaining=np.arange(blocks * PLANES, dtype=np.float64).reshape(blocks, PLANES),
        sketch=np.arange(SKETCH_BUCKETS, dtype=np.float32) / 128 - 1,
        histogram=Histogram(
            np.cumsum(np.full(bins, 1000), dtype=np.uint32),
            np.arange(bins, dtype=np.uint64) + np.uint64(1 << 33),
        ),
    )


def assert_same(found: TensorStatistics, expected: TensorStatistics) -> None:
    for field in dataclasses.fields(TensorStatistics):
        if field.name == "histogram":
            continue
        mine, yours = (getattr(value, field.name) for value in (found, expected))
        assert mine.dtype == yours.dtype
        assert mine.tobytes() == yours.tobytes()
    np.testing.assert_array_equal(found.histogram.bins, expected.histogram.bins)
    np.testing.assert_array_equal(found.histogram.counts, expected.histogram.counts)


# -- thresholds -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 30), st.floats(0.001, 1.0))
def test_bf16_pairs_have_exact_thresholds_that_keep_all_ties(seed: int, density: float) -> None:
    delta = like_size_delta(seed)
    keep = min(max(1, int(density * delta.size)), int(np.count_nonzero(delta)))
    assert histogram_of(delta).threshold(keep) == largest(delta, keep)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("shape", ["normal", "uniform", "laplace"])
def test_float32_thresholds_misplace_a_few_elements_in_a_hundred_thousand(
    density: float, shape: str
) -> None:
    n = 400_000
    random = np.random.default_rng(11)
    draw = {"normal": random.standard_normal, "uniform": random.random, "laplace": random.laplace}
    delta = (draw[shape](size=n) * 1e-3).astype(np.float32)
    keep = int(density * n)
    kept = np.count_nonzero(np.abs(delta) >= histogram_of(delta).threshold(keep))
    assert abs(kept - keep) <= n / 10_000


@pytest.mark.parametrize("power", [-100, -50, 50, 100])
def test_thresholds_are_exact_at_every_scale(power: int) -> None:
    delta = like_size_delta(3) * np.float32(2.0**power)
    assert histogram_of(delta).threshold(1000) == largest(delta, 1000)


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.uint32, st.integers(1, 50), elements=st.integers(1, 0x7F7FFFFF)),
    st.data(),
)
def test_a_threshold_lies_in_the_cell_of_the_element_it_stands_for(
    bits: npt.NDArray[np.uint32], data: st.DataObject
) -> None:
    delta = bits.view(np.float32)
    keep = data.draw(st.integers(1, delta.size))
    exact = largest(delta, keep)
    threshold = histogram_of(delta).threshold(keep)
    cell = int(exact.view(np.uint32)) >> 14
    above = np.uint32((cell + 1) << 14).view(np.float32)
    assert np.uint32(cell << 14).view(np.float32) <= threshold <= above


def test_keeping_one_more_never_raises_the_threshold() -> None:
    histogram = histogram_of(np.random.default_rng(12).standard_normal(3000).astype(np.float32))
    thresholds = [histogram.threshold(keep) for keep in range(1, 3001)]
    assert all(a >= b for a, b in pairwise(thresholds))


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_needs_an_endless_threshold(keep: int) -> None:
    assert histogram_of(like_size_delta(1)).threshold(keep) == np.inf


def test_keeping_more_than_there_are_keeps_everything() -> None:
    delta = np.array([0.5, 0.0, -0.25], np.float32)
    assert histogram_of(delta).threshold(2) == 0.25
    assert histogram_of(delta).threshold(3) == 0.0


def test_a_delta_of_nothing_keeps_everything() -> None:
    assert histogram_of(np.zeros(4, np.float32)).threshold(1) == 0.0


def test_all_of_a_bin_above_its_edge_is_kept_where_all_of_it_is_wanted() -> None:
    close = np.nextafter(np.float32(1), np.float32(2))
    delta = np.array([close, close, 1.0], np.float32)
    threshold = histogram_of(delta).threshold(2)
    assert np.count_nonzero(delta >= threshold) == 2


def test_the_largest_floats_have_a_finite_threshold() -> None:
    delta = np.full(10, np.finfo(np.float32).max)
    threshold = histogram_of(delta).threshold(5)
    assert np.isfinite(threshold)
    assert np.isfinite(histogram_of(delta).magnitude())


# -- magnitudes -----------------------------------------------------------------------------------


def test_the_magnitude_of_bf16_pairs_is_exact() -> None:
    delta = np.abs(like_size_delta(2)).astype(np.float64)
    assert histogram_of(like_size_delta(2)).magnitude() == pytest.approx(delta.sum(), rel=1e-12)


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_the_magnitude_above_a_threshold_is_that_of_the_elements_kept(density: float) -> None:
    delta = like_size_delta(4)
    histogram = histogram_of(delta)
    threshold = histogram.threshold(int(density * delta.size))
    size = np.abs(delta).astype(np.float64)
    expected = size[size >= threshold].sum()
    assert histogram.magnitude(threshold) == pytest.approx(expected, rel=1e-12)
    assert 0 < expected < size.sum()


def test_the_magnitude_of_float32_is_within_a_thousandth() -> None:
    delta = (np.random.default_rng(13).standard_normal(50_000) * 1e-3).astype(np.float32)
    histogram = histogram_of(delta)
    size = np.abs(delta).astype(np.float64)
    assert histogram.magnitude() == pytest.approx(size.sum(), rel=1e-3)
    for keep in (100, 10_000, 40_000):
        threshold = histogram.threshold(keep)
        kept = size[size >= threshold].sum()
        assert histogram.magnitude(threshold) == pytest.approx(kept, rel=1e-3)


def test_nothing_lies_above_an_endless_threshold() -> None:
    assert histogram_of(like_size_delta(5)).magnitude(np.float32(np.inf)) == 0.0


# -- the stored form ------------------------------------------------------------------------------


def test_the_stored_form_is_frozen() -> None:
    data = some_statistics().to_bytes()
    assert data[:16].hex() == "01000000020000000001000003000000"
    assert len(data) == 16 + 2 * (8 + 4 + 4 + 4 + 8 * PLANES) + SKETCH_BUCKETS * 4 + 3 * (4 + 8)
    expected = "5b9b992d6c28a59e740fbbe1a2cadce42875b833d809afd8d8213587bafd6451"
    assert blake3(data).hexdigest() == expected


def test_the_bins_are_those_of_the_format() -> None:
    assert (BINS, SKETCH_BUCKETS, PLANES) == (1 << 18, 256, 4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.data())
def test_what_is_stored_comes_back(blocks: int, data: st.DataObject) -> None:
    def array(dtype: str, count: int) -> npt.NDArray[np.generic]:
        return data.draw(hnp.arrays(dtype, count))

    bins = sorted(data.draw(st.sets(st.integers(0, BINS - 1), max_size=8)))
    statistics = TensorStatistics(
        array("<f8", blocks),  # type: ignore[arg-type]
        array("<f4", blocks),  # type: ignore[arg-type]
        array("<u4", blocks),  # type: ignore[arg-type]
        array("<u4", blocks),  # type: ignore[arg-type]
        array("<f8", blocks * PLANES).reshape(blocks, PLANES),  # type: ignore[arg-type]
        array("<f4", SKETCH_BUCKETS),  # type: ignore[arg-type]
        Histogram(np.array(bins, np.uint32), array("<u8", len(bins))),  # type: ignore[arg-type]
    )
    assert_same(TensorStatistics.from_bytes(statistics.to_bytes()), statistics)


@pytest.mark.parametrize(("blocks", "bins"), [(0, 0), (1, 0), (0, 1)])
def test_a_tensor_with_nothing_to_count_has_statistics_too(blocks: int, bins: int) -> None:
    statistics = some_statistics(blocks, bins)
    assert_same(TensorStatistics.from_bytes(statistics.to_bytes()), statistics)


def test_every_truncation_is_noticed() -> None:
    data = some_statistics().to_bytes()
    for length in range(len(data)):
        with pytest.raises(Damaged):
            TensorStatistics.from_bytes(data[:length])


def test_bytes_after_the_end_are_noticed() -> None:
    with pytest.raises(Damaged, match="length"):
        TensorStatistics.from_bytes(some_statistics().to_bytes() + b"\0")


@pytest.mark.parametrize(("offset", "what"), [(0, "version 2"), (8, "257 buckets")])
def test_another_version_or_sketch_is_refused(offset: int, what: str) -> None:
    data = bytearray(some_statistics().to_bytes())
    data[offset] += 1
    with pytest.raises(Damaged, match=what):
        TensorStatistics.from_bytes(bytes(data))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=64).map(lambda x: b"\1\0\0\0" + x))
def test_hostile_bytes_are_damaged_and_nothing_else(data: bytes) -> None:
    with pytest.raises(Damaged):
        TensorStatistics.from_bytes(data)


@pytest.mark.parametrize("count", [0xFFFFFFFF, 0x80000000, 0x00FFFFFF])
@pytest.mark.parametrize("offset", [4, 12])
def test_counts_beyond_all_bytes_are_refused_before_memory_is_taken(
    count: int, offset: int
) -> None:
    data = bytearray(some_statistics().to_bytes())
    data[offset : offset + 4] = count.to_bytes(4, "little")
    with pytest.raises(Damaged):
        TensorStatistics.from_bytes(bytes(data))
