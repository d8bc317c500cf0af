"""What is measured of a delta, against numpy in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.dtypes import DTYPES
from mergegit.kernels.floats import PIECE, from_float32, to_float32
from mergegit.kernels.measure import BlockMeasure, measure
from mergegit.statistics import BINS, SKETCH_BUCKETS

Floats = npt.NDArray[np.float32]
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_float)


def row(values: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(from_float32(values, dtype), np.uint8)


def pair(seed: int, n: int) -> tuple[Floats, Floats]:
    """An expert and its base, alike as fine-tunes are; a tenth of the elements did not move."""
    random = np.random.default_rng(seed)
    base = (random.standard_normal(n) * 0.02).astype(np.float32)
    delta = random.standard_normal(n) * 1e-3 * (random.random(n) > 0.1)
    return (base + delta).astype(np.float32), base


def measured(
    expert: Floats, base: Floats | None, dtype: str = "F32", base_dtype: str = "F32", first: int = 0
) -> BlockMeasure:
    base_row = None if base is None else row(base, base_dtype)
    return measure(row(expert, dtype), dtype, base_row, base_dtype, expert.size, first)


def true_delta(
    expert: Floats, base: Floats, dtype: str, base_dtype: str
) -> npt.NDArray[np.float64]:
    """The float32 difference of what the two types hold, in float64."""
    held = to_float32(from_float32(expert, dtype), dtype)
    held_base = to_float32(from_float32(base, base_dtype), base_dtype)
    return (held - held_base).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("base_dtype", ["F32", "BF16"])
@pytest.mark.parametrize("n", [1, 7, PIECE, 3 * PIECE + 5])
def test_measures_are_those_of_the_difference_in_float32(
    dtype: str, base_dtype: str, n: int
) -> None:
    expert, base = pair(1, n)
    delta = true_delta(expert, base, dtype, base_dtype)
    found = measured(expert, base, dtype, base_dtype)
    assert found.energy == pytest.approx(delta @ delta, rel=1e-12)
    assert found.maximum == np.abs(delta).max()
    assert found.nonzero == np.count_nonzero(delta)
    assert found.nonfinite == 0
    assert found.histogram.sum() == found.nonzero


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, (1 << 32) - 1)] * 2), min_size=1, max_size=40))
def test_any_floats_are_measured_as_numpy_measures_them(bits: list[tuple[int, int]]) -> None:
    both = np.array(bits, np.uint32).view(np.float32)
    expert, base = both[:, 0].copy(), both[:, 1].copy()
    with np.errstate(all="ignore"):
        delta = (expert - base).astype(np.float64)
    counted = delta[np.isfinite(delta)]
    found = measured(expert, base)
    assert found.nonfinite == np.count_nonzero(~np.isfinite(expert))
    assert found.nonzero == np.count_nonzero(counted)
    assert found.maximum == np.abs(counted).max(initial=0.0)
    assert found.energy == pytest.approx(counted @ counted, rel=1e-12)


def test_without_a_base_the_weights_themselves_are_measured() -> None:
    expert, _ = pair(2, 5000)
    zeros = np.zeros_like(expert)
    alone, against_zeros = measured(expert, None), measured(expert, zeros)
    assert alone[:4] == against_zeros[:4]
    np.testing.assert_array_equal(alone.sketch, against_zeros.sketch)
    np.testing.assert_array_equal(alone.histogram, against_zeros.histogram)
    assert alone.energy == pytest.approx(np.sum(expert.astype(np.float64) ** 2), rel=1e-12)


def test_equal_tensors_have_no_delta() -> None:
    expert, _ = pair(3, 100)
    found = measured(expert, expert)
    assert found[:4] == (0.0, 0.0, 0, 0)
    assert not found.sketch.any()
    assert not found.histogram.any()


def test_negative_zero_beside_zero_is_no_difference() -> None:
    assert measured(np.array([-0.0], np.float32), np.array([0.0], np.float32)).nonzero == 0


def test_the_smallest_difference_counts() -> None:
    tiny = np.array([1e-45], np.float32)
    found = measured(tiny, np.zeros(1, np.float32))
    assert (found.nonzero, found.maximum) == (1, tiny[0])
    assert found.energy == float(tiny[0]) ** 2 > 0


def test_elements_that_are_not_finite_are_counted_and_nothing_more() -> None:
    expert, base = pair(4, 1000)
    clean = measured(np.delete(expert, [10, 500, 999]), np.delete(base, [10, 500, 999]))
    expert[[10, 500, 999]] = [np.nan, np.inf, -np.inf]
    found = measured(expert, base)
    assert found.nonfinite == 3
    assert (found.nonzero, found.maximum) == (clean.nonzero, clean.maximum)
    assert found.energy == pytest.approx(clean.energy, rel=1e-12)
    np.testing.assert_array_equal(found.histogram, clean.histogram)


def test_what_is_not_finite_in_the_base_is_not_held_against_the_expert() -> None:
    expert, base = pair(5, 10)
    base[3] = np.inf
    found = measured(expert, base)
    assert found.nonfinite == 0
    assert np.isfinite(found.energy)


def test_a_difference_that_overflows_counts_nowhere() -> None:
    largest = np.full(1, np.finfo(np.float32).max)
    assert measured(largest, -largest)[:4] == (0.0, 0.0, 0, 0)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 5),
    st.lists(st.integers(1, 40).map(lambda runs: runs * SKETCH_BUCKETS), max_size=3),
    st.integers(1, 2 * PIECE),
)
def test_blocks_add_up_to_the_whole(seed: int, full: list[int], last: int) -> None:
    expert, base = pair(seed, sum(full) + last)
    whole = measured(expert, base)
    starts = np.cumsum([0, *full, last])
    parts = [
        measured(expert[a:b].copy(), base[a:b].copy(), first=int(a)) for a, b in pairwise(starts)
    ]
    assert sum(part.energy for part in parts) == pytest.approx(whole.energy, rel=1e-12)
    assert max(part.maximum for part in parts) == whole.maximum
    assert sum(part.nonzero for part in parts) == whole.nonzero
    np.testing.assert_array_equal(
        sum(part.histogram.astype(int) for part in parts), whole.histogram
    )
    np.testing.assert_allclose(sum(part.sketch for part in parts), whole.sketch, rtol=0, atol=1e-12)


def test_the_same_block_is_measured_the_same_every_time() -> None:
    expert, base = pair(6, 50_000)
    once, again = measured(expert, base), measured(expert, base)
    assert once[:4] == again[:4]
    assert once.sketch.tobytes() == again.sketch.tobytes()


def test_the_place_in_the_tensor_moves_what_the_sketch_holds() -> None:
    expert, base = pair(7, 100)
    here, there = (measured(expert, base, first=first).sketch for first in (0, SKETCH_BUCKETS))
    assert not np.array_equal(here, there)
    assert here.any()


def test_every_element_goes_to_one_bucket_with_its_sign() -> None:
    places = range(0, 1 << 22, 17 * SKETCH_BUCKETS)
    buckets, signs = set(), set()
    for first in places:
        sketch = measured(np.array([0.5], np.float32), None, first=first).sketch
        (bucket,) = np.flatnonzero(sketch)
        assert abs(sketch[bucket]) == 0.5
        buckets.add(int(bucket))
        signs.add(float(sketch[bucket]))
    assert signs == {0.5, -0.5}
    assert len(buckets) > 0.9 * SKETCH_BUCKETS


@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9, -0.7])
def test_sketches_estimate_the_inner_product_of_deltas(cosine: float) -> None:
    n = 200_000
    random = np.random.default_rng(8)
    a = random.standard_normal(n)
    b = cosine * a + np.sqrt(1 - cosine**2) * random.standard_normal(n)
    one, two = (measured(delta.astype(np.float32), None) for delta in (a, b))
    norms = np.sqrt(one.energy * two.energy)
    standard_error = 1 / np.sqrt(SKETCH_BUCKETS)
    assert one.sketch @ two.sketch / norms == pytest.approx(a @ b / norms, abs=3 * standard_error)


def test_columns_of_a_matrix_do_not_meet_in_one_bucket() -> None:
    """Rows of as many elements as there are buckets, all of whose weight lies in one column."""
    rows = 256
    delta = np.zeros((2, rows, SKETCH_BUCKETS), np.float32)
    delta[:, :, 5] = np.random.default_rng(10).standard_normal((2, rows))
    one, two = (measured(x.ravel(), None) for x in delta)
    assert np.count_nonzero(one.sketch) > SKETCH_BUCKETS / 2
    exact = float(np.vdot(delta[0].astype(np.float64), delta[1]))
    error = (one.sketch @ two.sketch - exact) / np.sqrt(one.energy * two.energy)
    assert abs(error) < 3 / np.sqrt(SKETCH_BUCKETS)


def test_sketches_of_many_tensors_are_right_on_average() -> None:
    random = np.random.default_rng(9)
    errors = []
    for tensor in range(150):
        a, b = random.standard_normal((2, 2000)).astype(np.float32)
        one, two = (measured(x, None, first=tensor << 20) for x in (a, b))
        errors.append((one.sketch @ two.sketch - a @ b) / np.sqrt(one.energy * two.energy))
    assert np.mean(errors) == pytest.approx(0.0, abs=4 / np.sqrt(150 * SKETCH_BUCKETS))
    assert np.std(errors) == pytest.approx(1 / np.sqrt(SKETCH_BUCKETS), rel=0.3)


def test_a_value_on_an_edge_has_a_bin_of_its_own() -> None:
    edge = np.float32(1.0)
    above = np.nextafter(edge, np.float32(2))
    below = np.nextafter(edge, np.float32(0))
    at, over, under = (
        int(np.flatnonzero(measured(np.array([x], np.float32), None).histogram)[0])
        for x in (edge, above, below)
    )
    assert (at % 2, over, under) == (0, at + 1, at - 1)


def test_bins_rise_with_the_magnitude_and_not_the_sign() -> None:
    sizes = np.geomspace(1e-44, 3.3e38, 500).astype(np.float32)
    numbers = [
        np.flatnonzero(measured(np.array([sign * x], np.float32), None).histogram)
        for x in sizes
        for sign in (1, -1)
    ]
    flat = np.concatenate(numbers).reshape(-1, 2)
    np.testing.assert_array_equal(flat[:, 0], flat[:, 1])
    assert (np.diff(flat[:, 0]) >= 0).all()
    assert flat.max() < BINS
