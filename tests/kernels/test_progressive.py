"""The embedded quantiser and the exact residual."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.dtypes import DTYPES
from mergegit.kernels import progressive
from mergegit.kernels.floats import from_float32, to_float32
from mergegit.statistics import PLANES

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]


def blocks(dtype: str, elements: int, sigma: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """An expert's and a base's block: normal weights, a normal update."""
    rng = np.random.default_rng(seed)
    base = from_float32(rng.standard_normal(elements, np.float32) * np.float32(0.02), dtype)
    update = rng.standard_normal(elements, np.float32) * np.float32(sigma)
    expert = from_float32(to_float32(base, dtype) + update, dtype)
    return np.frombuffer(expert, np.uint8), np.frombuffer(base, np.uint8)


def delta_of(expert: np.ndarray, base: np.ndarray, dtype: str) -> np.ndarray:
    return to_float32(expert, dtype) - to_float32(base, dtype)


def reconstruction(quantised: progressive.Quantised, planes: int) -> np.ndarray:
    bits = [progressive.plane_bits(quantised.codes, plane) for plane in range(planes)]
    return progressive.reconstruct(bits, quantised.means[planes - 1], quantised.codes.size)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("elements", [1, 7, 4096, 4097, 30_000])
def test_the_energy_left_after_each_plane_is_what_the_reconstruction_leaves(
    dtype: str, elements: int
) -> None:
    expert, base = blocks(dtype, elements, 1e-3)
    quantised = progressive.quantise(expert, base, dtype, elements)
    delta = delta_of(expert, base, dtype).astype(np.float64)
    for planes in range(1, PLANES + 1):
        left = ((delta - reconstruction(quantised, planes)) ** 2).sum()
        assert quantised.remaining[planes - 1] == pytest.approx(left, rel=1e-9, abs=1e-25)


def test_each_plane_about_halves_the_error_of_an_even_update() -> None:
    expert, base = blocks("BF16", 1 << 16, 1e-3)
    quantised = progressive.quantise(expert, base, "BF16", 1 << 16)
    energy = float((delta_of(expert, base, "BF16").astype(np.float64) ** 2).sum())
    errors = np.sqrt(quantised.remaining / energy)
    assert errors == pytest.approx([0.604, 0.348, 0.187, 0.098], abs=0.01)


def test_sparse_updates_keep_their_precision() -> None:
    rng = np.random.default_rng(1)
    expert, base = blocks("F32", 1 << 15, 0.0)
    values = to_float32(base, "F32").copy()
    moved = rng.random(values.size) < 0.02
    values[moved] += rng.standard_normal(int(moved.sum())).astype(np.float32) * np.float32(1e-3)
    expert = np.frombuffer(values.tobytes(), np.uint8)
    quantised = progressive.quantise(expert, base, "F32", values.size)
    energy = float((delta_of(expert, base, "F32").astype(np.float64) ** 2).sum())
    assert quantised.remaining[-1] < 0.05 * energy


def test_the_first_plane_is_the_sign() -> None:
    expert, base = blocks("F32", 1000, 1e-3)
    quantised = progressive.quantise(expert, base, "F32", 1000)
    bits = np.unpackbits(progressive.plane_bits(quantised.codes, 0), bitorder="little")[:1000]
    assert (bits.astype(bool) == (delta_of(expert, base, "F32") < 0)).all()


def test_codes_and_planes_reconstruct_alike() -> None:
    expert, base = blocks("BF16", 9000, 1e-3)
    quantised = progressive.quantise(expert, base, "BF16", 9000)
    from_codes = progressive.reconstruct_codes(quantised)
    assert (from_codes.view(np.uint32) == reconstruction(quantised, PLANES).view(np.uint32)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_two_blocks_round_trip_bit_for_bit(dtype: str, data: st.DataObject) -> None:
    """NaN payloads, infinities, negative zero, subnormals, whatever bits there are."""
    width = DTYPES[dtype].bits // 8
    elements = data.draw(st.integers(1, 300), label="elements")
    expert, base = (
        np.frombuffer(data.draw(st.binary(min_size=n, max_size=n), label=name), np.uint8)
        for name, n in (("expert", elements * width), ("base", elements * width))
    )
    quantised = progressive.quantise(expert, base, dtype, elements)
    prediction = progressive.predict(base, progressive.reconstruct_codes(quantised), dtype)
    planes, _ = progressive.residual_planes(expert, prediction, dtype)
    assert progressive.apply_residual(planes, prediction, dtype) == expert.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_round_trip_bit_for_bit(dtype: str) -> None:
    width = DTYPES[dtype].bits // 8
    rng = np.random.default_rng(2)
    specials = [0, 1 << (8 * width - 1), (1 << (8 * width)) - 1, 1, (1 << (8 * width - 1)) - 1]
    words = [value.to_bytes(width, "little") for value in specials] + [
        rng.bytes(width) for _ in range(11)
    ]
    expert = np.frombuffer(b"".join(words * 16), np.uint8)
    base = np.frombuffer(b"".join(word for word in words for _ in range(16)), np.uint8)
    elements = expert.size // width
    quantised = progressive.quantise(expert, base, dtype, elements)
    assert np.isfinite(quantised.remaining).all()
    prediction = progressive.predict(base, progressive.reconstruct_codes(quantised), dtype)
    planes, _ = progressive.residual_planes(expert, prediction, dtype)
    assert progressive.apply_residual(planes, prediction, dtype) == expert.tobytes()


def test_the_prediction_of_a_base_that_is_not_finite_is_the_base() -> None:
    for dtype, pattern in (("BF16", "<u2"), ("F32", "<u4"), ("F16", "<u2"), ("F64", "<u8")):
        quiet = {"BF16": 0x7FC1, "F32": 0x7FC00001, "F16": 0x7E01, "F64": 0x7FF8000000000001}
        base = np.array([quiet[dtype]] * 8, pattern).view(np.uint8)
        prediction = progressive.predict(base, np.ones(8, np.float32), dtype)
        assert (prediction == quiet[dtype]).all()


@settings(max_examples=30, deadline=None)
@given(
    threshold=st.floats(1e-5, 5e-3),
    planes=st.integers(1, PLANES),
    seed=st.integers(0, 100),
)
def test_trimming_what_is_half_known_keeps_signs_and_shares(
    threshold: float, planes: int, seed: int
) -> None:
    expert, base = blocks("F32", 5000, 1e-3, seed)
    quantised = progressive.quantise(expert, base, "F32", 5000)
    bits = [progressive.plane_bits(quantised.codes, plane) for plane in range(planes)]
    values, shares = progressive.reconstruct_trimmed(
        bits, quantised.means[planes - 1], 5000, threshold
    )
    delta = delta_of(expert, base, "F32")
    assert ((shares >= 0) & (shares <= 1)).all()
    assert (values * delta >= 0).all()
    kept = np.abs(delta) >= threshold
    assert abs(float(shares.mean()) - float(kept.mean())) < 0.12


def test_what_is_expected_of_trimming_is_nearer_than_trimming_what_is_read() -> None:
    """Half-known magnitudes: the expected value beats cutting reconstructions at the threshold."""
    expert, base = blocks("F32", 1 << 16, 1e-3)
    quantised = progressive.quantise(expert, base, "F32", 1 << 16)
    delta = delta_of(expert, base, "F32")
    threshold = float(np.quantile(np.abs(delta), 0.5))
    truth = np.where(np.abs(delta) >= threshold, delta, 0).astype(np.float64)
    for planes in range(1, PLANES + 1):
        bits = [progressive.plane_bits(quantised.codes, plane) for plane in range(planes)]
        soft, _ = progressive.reconstruct_trimmed(
            bits, quantised.means[planes - 1], delta.size, threshold
        )
        plain = reconstruction(quantised, planes)
        hard = np.where(np.abs(plain) >= threshold, plain, 0)
        assert ((soft - truth) ** 2).sum() < ((hard - truth) ** 2).sum()
