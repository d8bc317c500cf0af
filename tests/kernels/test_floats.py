"""Element types as float32 and back, against torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.dtypes import DTYPES
from mergegit.kernels.floats import PIECE, from_float32, load, to_float32

Floats = npt.NDArray[np.float32]

TORCH = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_float)

small_types = pytest.mark.parametrize("dtype", TORCH)
every_type = pytest.mark.parametrize("dtype", FLOATS)


def every_code(dtype: str) -> bytes:
    """Every element that an 8- or 16-bit type has."""
    bits = DTYPES[dtype].bits
    return np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8).tobytes()


def torch_to_float32(data: bytes, dtype: str) -> Floats:
    raw = torch.frombuffer(bytearray(data), dtype=TORCH[dtype])
    return raw.to(torch.float32).numpy()


def torch_from_float32(values: Floats, dtype: str) -> bytes:
    rounded = torch.from_numpy(values.copy()).to(TORCH[dtype])
    return rounded.view(torch.uint8).numpy().tobytes()


def assert_same_floats(found: Floats, expected: Floats) -> None:
    """The same bits, signs of zeros included; NaN where NaN is expected."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def assert_same_rounding(values: Floats, dtype: str) -> None:
    """What torch rounds to, and NaN where torch has one."""
    found, expected = from_float32(values, dtype), torch_from_float32(values, dtype)
    nan = np.isnan(torch_to_float32(expected, dtype))
    np.testing.assert_array_equal(np.isnan(torch_to_float32(found, dtype)), nan)
    width = DTYPES[dtype].bits // 8
    codes = [np.frombuffer(data, f"<u{width}")[~nan] for data in (found, expected)]
    np.testing.assert_array_equal(codes[0], codes[1])


def hard_values(dtype: str) -> Floats:
    """Every value of a type, every point half-way between two neighbours, and both of its sides."""
    exact = torch_to_float32(every_code(dtype), dtype)
    ordered = np.unique(exact[np.isfinite(exact)])
    middles = ((ordered[1:].astype(np.float64) + ordered[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.concatenate([exact, middles, *around])


@small_types
def test_every_element_becomes_the_float_that_it_is(dtype: str) -> None:
    data = every_code(dtype)
    assert_same_floats(to_float32(data, dtype), torch_to_float32(data, dtype))


@small_types
def test_every_element_comes_back_as_it_was(dtype: str) -> None:
    data = every_code(dtype)
    values = to_float32(data, dtype)
    width = DTYPES[dtype].bits // 8
    before, after = (np.frombuffer(d, f"<u{width}") for d in (data, from_float32(values, dtype)))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(after[number], before[number])
    assert np.isnan(to_float32(from_float32(values, dtype), dtype)[~number]).all()


@small_types
def test_values_half_way_are_rounded_to_even(dtype: str) -> None:
    assert_same_rounding(hard_values(dtype), dtype)


@small_types
def test_floats_of_every_size_are_rounded_once(dtype: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 400_000, dtype=np.uint32)
    assert_same_rounding(bits.view(np.float32), dtype)


@small_types
def test_floats_in_reach_of_the_type_are_rounded_once(dtype: str) -> None:
    random = np.random.default_rng(2)
    scale = 2.0 ** random.integers(-30, 18, 200_000)
    values = (random.standard_normal(200_000) * scale).astype(np.float32)
    assert_same_rounding(values, dtype)


@small_types
@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=20))
def test_any_float_is_rounded_as_torch_rounds_it(dtype: str, bits: list[int]) -> None:
    assert_same_rounding(np.array(bits, np.uint32).view(np.float32), dtype)


@pytest.mark.parametrize(
    ("dtype", "beyond", "code"),
    [
        ("F16", 65520.0, b"\x00\x7c"),
        ("BF16", 3.4e38, b"\x80\x7f"),
        ("F8_E5M2", 61440.0, b"\x7c"),
        ("F8_E4M3", 1e6, b"\x7e"),
    ],
)
def test_overflow_gives_infinity_or_the_largest_where_there_is_none(
    dtype: str, beyond: float, code: bytes
) -> None:
    assert from_float32(np.array([beyond], np.float32), dtype) == code


@every_type
def test_nan_and_infinity_stay_what_they_are(dtype: str) -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    back = to_float32(from_float32(values, dtype), dtype)
    assert np.isnan(back[:2]).all()
    largest = np.float32(448.0 if dtype == "F8_E4M3" else np.inf)
    assert list(back[2:]) == [largest, -largest]


@every_type
def test_negative_zero_keeps_its_sign(dtype: str) -> None:
    back = to_float32(from_float32(np.array([0.0, -0.0], np.float32), dtype), dtype)
    assert list(np.signbit(back)) == [False, True]


def test_float32_passes_through_bit_for_bit() -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 50_000, dtype=np.uint32)
    special = [0, 1, 0x80000000, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC12345]
    data = np.concatenate([bits, np.array(special, np.uint32)]).tobytes()
    assert to_float32(data, "F32").tobytes() == data
    assert from_float32(np.frombuffer(data, np.float32), "F32") == data


def test_bf16_keeps_the_payload_of_nan() -> None:
    data = np.array([0x7FC1, 0xFFFF, 0x7F81], np.uint16).tobytes()
    values = to_float32(data, "BF16")
    assert values.tobytes() == np.array([0x7FC10000, 0xFFFF0000, 0x7F810000], np.uint32).tobytes()


def test_bf16_never_rounds_nan_to_infinity() -> None:
    values = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(to_float32(from_float32(values, "BF16"), "BF16")).all()


def test_float64_is_rounded_to_float32() -> None:
    random = np.random.default_rng(4)
    bits = random.integers(0, 1 << 64, 50_000, dtype=np.uint64)
    near = random.standard_normal(50_000) * 2.0 ** random.integers(-160, 140, 50_000)
    special = [0.0, -0.0, np.inf, -np.inf, 1e300, -1e300, 1e-46, 7e-46, 3.4028235677973366e38]
    values = np.concatenate([bits.view(np.float64), near, special])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float32)
    assert_same_floats(to_float32(values.tobytes(), "F64"), expected)


def test_float32_becomes_the_float64_of_the_same_value() -> None:
    values = np.random.default_rng(5).standard_normal(1000).astype(np.float32)
    values[:3] = [np.float32(1e-45), np.inf, -0.0]
    doubles = np.frombuffer(from_float32(values, "F64"), np.float64)
    np.testing.assert_array_equal(doubles, values.astype(np.float64))
    assert np.signbit(doubles[2])


@every_type
@pytest.mark.parametrize("count", [0, 1, PIECE - 1, PIECE, PIECE + 1])
def test_any_number_of_elements_is_converted(dtype: str, count: int) -> None:
    values = (np.arange(count) % 9).astype(np.float32)
    data = from_float32(values, dtype)
    assert len(data) == count * DTYPES[dtype].bits // 8
    np.testing.assert_array_equal(to_float32(data, dtype), values)


@every_type
def test_a_part_of_a_row_is_loaded_from_where_it_starts(dtype: str) -> None:
    row = np.frombuffer(from_float32(np.arange(14, dtype=np.float32), dtype), np.uint8)
    out = np.full(6, -1, np.float32)
    load(DTYPES[dtype].code, row, 5, 9, out)
    assert list(out) == [5, 6, 7, 8, -1, -1]


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - set(FLOATS)))
def test_types_without_arithmetic_can_not_be_rounded_to(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        from_float32(np.zeros(2, np.float32), dtype)
