"""The one sum that methods are: blocks, kinds of rows, and who takes part."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.kernels.combine import ALWAYS, DELTA, Coefficients, combine, draw
from mergegit.kernels.floats import PIECE
from tests.families import generator
from tests.merge.reference import ulps
from tests.merge.tensors import (
    BY_NAME,
    NAMES,
    combine_tensors,
    from_bytes,
    random_models,
    random_tensor,
    to_bytes,
)

FLOATS = list(BY_NAME)


def coefficients(
    weights: list[float],
    *,
    thresholds: list[float] | None = None,
    keep: list[float] | None = None,
    scales: list[float] | None = None,
    **rest: object,
) -> Coefficients:
    count = len(weights)
    return Coefficients(
        weights=np.array(weights, np.float32),
        scales=np.array(scales or [1.0] * count, np.float32),
        thresholds=np.array(thresholds or [0.0] * count, np.float32),
        keep=np.array([round(p * ALWAYS) for p in keep or [1.0] * count], np.uint64),
        keys=np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x1234567),
        **rest,  # type: ignore[arg-type]
    )


@st.composite
def any_coefficients(draw_: st.DrawFn, count: int) -> Coefficients:
    number = st.floats(-2, 2, width=32)
    return coefficients(
        draw_(st.lists(number, min_size=count, max_size=count)),
        thresholds=draw_(st.lists(st.floats(0, 2**-7, width=32), min_size=count, max_size=count)),
        keep=draw_(st.lists(st.sampled_from([0.1, 0.5, 1.0]), min_size=count, max_size=count)),
        scales=draw_(st.lists(st.sampled_from([1.0, 2.5]), min_size=count, max_size=count)),
        base_scale=draw_(st.sampled_from([1.0, 0.7])),
        factor=draw_(st.sampled_from([1.0, -0.4])),
        elect=draw_(st.booleans()),
        normalize=draw_(st.booleans()),
    )


def bits(tensor: torch.Tensor) -> bytes:
    return to_bytes(tensor).tobytes()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3 * PIECE),
    st.lists(st.floats(0, 1), max_size=4),
    st.sampled_from(FLOATS),
    any_coefficients(3),
)
def test_any_split_into_blocks_gives_the_whole(
    n: int, cuts: list[float], dtype: str, c: Coefficients
) -> None:
    base, experts = random_models("split", n=n, experts=3, dtype=BY_NAME[dtype])
    whole = combine_tensors(base, dict(enumerate(experts)), c)
    edges = sorted({0, n, *(int(cut * n) for cut in cuts)})
    parts = [
        combine_tensors(
            base[start:stop], {k: e[start:stop] for k, e in enumerate(experts)}, c, first=start
        )
        for start, stop in itertools.pairwise(edges)
    ]
    assert b"".join(map(bits, parts)) == bits(whole)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2 * PIECE), st.sampled_from(FLOATS), st.booleans(), any_coefficients(3))
def test_rows_of_deltas_equal_rows_of_experts(
    n: int, dtype: str, mixed: bool, c: Coefficients
) -> None:
    base, experts = random_models("rows", n=n, experts=3, dtype=BY_NAME[dtype])
    deltas = [expert.float() - base.float() for expert in experts]
    want = combine_tensors(base, dict(enumerate(experts)), c)
    rows = np.zeros((3, 8 * n), np.uint8)
    codes = np.full(3, DELTA, np.int64)
    for place, delta in enumerate(deltas):
        kept = delta.abs() >= float(c.thresholds[place])
        rows[place, : 4 * n] = to_bytes(torch.where(kept, delta, 0.0))
        rows[place, 4 * n :] = to_bytes(kept.float())
    if mixed:
        codes[1] = _code(dtype)
        rows[1] = 0
        data = to_bytes(experts[1])
        rows[1, : data.size] = data
    got = combine(rows, codes, np.arange(3), to_bytes(base), dtype, n, 0, c, dtype)
    assert bytes(got) == bits(want)


def combine_trimmed(
    deltas: list[list[float]], shares: list[list[float]], c: Coefficients
) -> list[float]:
    """Rows of trimmed deltas, with the probabilities of being kept, on a base of zeros."""
    rows = [to_bytes(torch.tensor([*d, *p])) for d, p in zip(deltas, shares, strict=True)]
    n, count = len(deltas[0]), len(deltas)
    codes, used = np.full(count, DELTA, np.int64), np.arange(count)
    base = np.zeros(4 * n, np.uint8)
    data = combine(np.stack(rows), codes, used, base, "F32", n, 0, c, "F32")
    return from_bytes(data, torch.float32).tolist()


def test_a_delta_that_is_trimmed_already_is_not_trimmed_again() -> None:
    c = coefficients([1.0], thresholds=[0.5], elect=True)
    assert combine_trimmed([[0.05, 0.9]], [[0.5, 1.0]], c) == pytest.approx([0.05, 0.9])


def test_what_is_kept_with_a_probability_counts_with_it() -> None:
    """The mean of those that agree, each as far as it is kept, as far as anything is."""
    c = coefficients([1.0, 2.0], thresholds=[0.3, 0.3], elect=True, normalize=True)
    got = combine_trimmed(
        [[0.2, 0.4, 0.1], [0.2, 0.4, -0.1]], [[0.5, 1.0, 0.25], [0.25, 0.5, 1.0]], c
    )
    first = (0.2 + 2 * 0.2) / (0.5 + 2 * 0.25) * (1 - 0.5 * 0.75)
    second = (0.4 + 2 * 0.4) / (1 + 2 * 0.5)
    third = -2 * 0.1 / 2
    assert got == pytest.approx([first, second, third])


def test_what_is_kept_with_a_probability_is_not_averaged_without_normalize() -> None:
    c = coefficients([1.0, 2.0], thresholds=[0.3, 0.3], elect=True)
    assert combine_trimmed([[0.2], [0.3]], [[0.5], [0.5]], c) == pytest.approx([0.8])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2 * PIECE), st.sets(st.integers(0, 3)), any_coefficients(4))
def test_an_expert_that_is_not_used_has_a_delta_of_zero(
    n: int, used: set[int], c: Coefficients
) -> None:
    base, experts = random_models("unused", n=n, experts=4, dtype=torch.bfloat16)
    some = combine_tensors(base, {k: experts[k] for k in sorted(used)}, c)
    zeros = {k: experts[k] if k in used else base for k in range(4)}
    every = combine_tensors(base, zeros, c)
    assert int(ulps(some, every).max()) == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_used_gives_the_base_times_its_scale(dtype: str) -> None:
    base = random_tensor("nothing", n=PIECE + 5).to(BY_NAME[dtype])
    c = coefficients([1.0, 2.0])
    assert int(ulps(combine_tensors(base, {}, c), base).max()) == 0
    half = combine_tensors(base, {}, replace(c, base_scale=0.5))
    assert int(ulps(half, (base.float() * 0.5).to(base.dtype)).max()) == 0


@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("base_dtype", FLOATS)
def test_dtypes_may_differ_between_base_experts_and_output(base_dtype: str, out: str) -> None:
    n = 999
    base = random_tensor("mixed base", n=n).to(BY_NAME[base_dtype])
    experts = [
        (base.float() + random_tensor("mixed", name, n=n, scale=5e-3)).to(BY_NAME[name])
        for name in FLOATS
    ]
    weights = [0.3, -0.2, 0.5, 0.1, 0.4, 0.25]
    got = combine_tensors(base, dict(enumerate(experts)), coefficients(weights), dtype=BY_NAME[out])
    total = torch.zeros(n)
    for weight, expert in zip(weights, experts, strict=True):
        total = total + torch.tensor(weight) * (expert.float() - base.float())
    assert int(ulps(got, (base.float() + total).to(BY_NAME[out])).max()) == 0


def test_the_result_is_rounded_once() -> None:
    # One third of a bf16 unit three times over: rounding each step would lose all of it.
    base = torch.ones(4, dtype=torch.bfloat16)
    unit = 2.0**-7
    experts = [torch.full((4,), 1 + unit / 3) for _ in range(3)]
    got = combine_tensors(base, dict(enumerate(experts)), coefficients([1.0] * 3))
    assert got.tolist() == [1 + unit] * 4


def test_a_threshold_keeps_what_equals_it() -> None:
    base = torch.zeros(4)
    expert = torch.tensor([0.25, -0.25, 0.2499, 0.5])
    got = combine_tensors(base, {0: expert}, coefficients([1.0], thresholds=[0.25]))
    assert got.tolist() == [0.25, -0.25, 0.0, 0.5]


def test_a_threshold_of_infinity_keeps_nothing() -> None:
    base = torch.zeros(3)
    expert = torch.tensor([1.0, -3e38, 0.0])
    got = combine_tensors(base, {0: expert}, coefficients([1.0], thresholds=[float("inf")]))
    assert got.tolist() == [0.0, 0.0, 0.0]


def test_weights_that_sum_to_almost_nothing_do_not_divide() -> None:
    base = torch.zeros(2)
    experts = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 5.0])}
    got = combine_tensors(base, experts, coefficients([0.5, -0.5], normalize=True))
    assert got.tolist() == [-1.0, -1.5]


def test_the_divisor_counts_experts_that_are_not_used() -> None:
    base = torch.zeros(1)
    got = combine_tensors(
        base, {1: torch.tensor([3.0])}, coefficients([1.0, 1.0, 1.0], normalize=True)
    )
    assert got.tolist() == [1.0]


def test_the_election_sees_trimmed_and_weighted_deltas() -> None:
    base = torch.zeros(1)
    experts = {0: torch.tensor([0.3]), 1: torch.tensor([-0.2]), 2: torch.tensor([-0.2])}
    plain = coefficients([1.0, 1.0, 1.0], elect=True)
    assert combine_tensors(base, experts, plain).item() == pytest.approx(-0.4)
    trimmed = coefficients([1.0, 1.0, 1.0], elect=True, thresholds=[0.0, 0.25, 0.0])
    assert combine_tensors(base, experts, trimmed).item() == pytest.approx(0.3)


def test_draws_are_those_of_splitmix64() -> None:
    def expected(key: int, index: int) -> int:
        mask = 2**64 - 1
        z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return (z ^ (z >> 31)) >> 32

    for key in (0, 1, 2**63, 2**64 - 1):
        for index in (0, 1, 4095, 2**40):
            assert draw(np.uint64(key), index) == expected(key, index)


def test_an_element_is_kept_by_its_place_in_the_tensor() -> None:
    n, first = 500, 2**33 + 17
    c = coefficients([1.0], keep=[0.5])
    kept = combine_tensors(torch.zeros(n), {0: torch.ones(n)}, c, first=first) != 0
    threshold = int(c.keep[0])
    want = [int(draw(c.keys[0], first + i)) < threshold for i in range(n)]
    assert kept.tolist() == want


@pytest.mark.parametrize("elect", [True, False])
def test_a_nan_of_an_expert_stays_where_it_is(elect: bool) -> None:
    n = PIECE + 1
    base = random_tensor("nan", n=n)
    expert = base + 1
    expert[7] = float("nan")
    got = combine_tensors(base, {0: expert}, coefficients([1.0], elect=elect))
    others = torch.arange(n) != 7
    assert bool(torch.isfinite(got[others]).all())
    assert torch.allclose(got[others], expert[others])
    assert elect or bool(torch.isnan(got[7]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_of_no_elements_is_empty(dtype: str) -> None:
    empty = torch.empty(0, dtype=BY_NAME[dtype])
    assert combine_tensors(empty, {0: empty}, coefficients([1.0])).numel() == 0


def test_results_do_not_depend_on_what_stands_behind_a_row() -> None:
    base, experts = random_models("padding", n=100, experts=2, dtype=torch.bfloat16)
    c = coefficients([1.0, 0.5])
    want = combine_tensors(base, dict(enumerate(experts)), c)
    rows = np.full((2, 1000), 0xAB, np.uint8)
    for place, expert in enumerate(experts):
        rows[place, :200] = to_bytes(expert)
    codes = np.full(2, _code("BF16"), np.int64)
    got = combine(rows, codes, np.arange(2), to_bytes(base), "BF16", 100, 0, c, "BF16")
    assert bytes(got) == bits(want)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_sums_run_over_experts_in_order(count: int) -> None:
    base = torch.zeros(64)
    experts = [torch.randn(64, generator=generator("order", k)) for k in range(count)]
    got = combine_tensors(base, dict(enumerate(experts)), coefficients([0.1] * count))
    total = torch.zeros(64)
    for expert in experts:
        total = total + torch.tensor(0.1) * expert
    assert torch.equal(got, total)


def test_bytes_and_tensors_go_both_ways() -> None:
    for dtype in NAMES:
        tensor = random_tensor("both", n=10).to(dtype)
        assert bits(from_bytes(bits(tensor), dtype)) == bits(tensor)


def _code(dtype: str) -> int:
    from mergegit.dtypes import DTYPES

    return DTYPES[dtype].code
