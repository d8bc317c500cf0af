"""Elements of one float dtype in another: as torch rounds them, and what is beyond their range."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mergegit.kernels.convert import convert

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
PAIRS = list(itertools.permutations(TORCH, 2))
LARGEST = {dtype: torch.finfo(torch_dtype).max for dtype, torch_dtype in TORCH.items()}


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def tensor_of(data: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(TORCH[dtype])


def converted(values: list[float], source: str, target: str) -> tuple[list[float], int]:
    """Values that ``source`` holds exactly, in ``target``, and how many are lost."""
    tensor = torch.tensor(values, dtype=torch.float64).to(TORCH[source])
    data, lost = convert(bytes_of(tensor), source, target)
    return tensor_of(data, target).to(torch.float64).tolist(), lost


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_all_values_within_the_range_are_rounded_as_torch_rounds_them(
    source: str, target: str
) -> None:
    """Every bit pattern of 16 bits, spread over the source's, or of the 8 that it has."""
    width = TORCH[source].itemsize
    patterns = np.arange(1 << 8 * min(width, 2), dtype=np.uint64) << np.uint64(
        8 * max(width - 2, 0)
    )
    if width > 2:
        patterns |= np.uint64(0x5A5A5A5A5A5A5A5A & ((1 << 8 * (width - 2)) - 1))
    data = patterns.astype(f"<u{width}").tobytes()
    values = tensor_of(data, source).float()
    inside = values.isfinite() & (values.abs() <= LARGEST[target])
    data = bytes_of(tensor_of(data, source)[inside])
    result, lost = convert(data, source, target)
    expected = tensor_of(data, source).float().to(TORCH[target])
    assert lost == 0
    assert result == bytes_of(expected)


@pytest.mark.parametrize(
    ("source", "target", "values", "lost"),
    [
        ("F32", "F16", [65504.0, 65519.0, -65519.0], 0),
        ("F32", "F16", [65520.0, -65520.0, 1e30, 1.0], 3),
        ("F32", "BF16", [3.38e38, -3.38e38], 0),
        ("F32", "BF16", [3.4e38, 1.0], 1),
        ("F64", "F32", [3.4e38, -1.0], 0),
        ("F64", "F32", [3.5e38, -1e300], 2),
        ("F64", "F16", [1e300, 1e5, 1.0], 2),
        ("F32", "F8_E5M2", [57344.0, 61439.0], 0),
        ("F32", "F8_E5M2", [61440.0], 1),
        ("F32", "F8_E4M3", [448.0, 464.0, -464.0], 0),
        ("F32", "F8_E4M3", [465.0, -1000.0], 2),
        ("F32", "F64", [3.4e38], 0),
        ("BF16", "F32", [3.38e38], 0),
    ],
)
def test_what_is_beyond_the_range_is_counted(
    source: str, target: str, values: list[float], lost: int
) -> None:
    assert converted(values, source, target)[1] == lost


@pytest.mark.parametrize(("source", "target"), [p for p in PAIRS if p[0] != "F8_E4M3"])
def test_what_was_infinite_stays_so_where_there_is_infinity(source: str, target: str) -> None:
    infinite = [float("inf"), float("-inf")]
    values, lost = converted([*infinite, 1.0], source, target)
    if target == "F8_E4M3":
        assert lost == 2
    else:
        assert (values, lost) == ([*infinite, 1.0], 0)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_nan_stays_nan_and_zero_keeps_its_sign(source: str, target: str) -> None:
    values, lost = converted([float("nan"), -0.0, 0.0], source, target)
    assert lost == 0
    assert np.isnan(values[0])
    assert np.signbit(values[1:]).tolist() == [True, False]


@pytest.mark.parametrize("target", ["F16", "F32", "F8_E4M3"])
def test_nothing_becomes_nothing(target: str) -> None:
    assert convert(b"", "BF16", target) == (b"", 0)
