"""Blocks as progressive deltas: the stored layers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.storage import delta
from mergegit.storage.pack import Compression, Segment
from tests.kernels.test_progressive import FLOATS, blocks


def payloads(encoded: delta.Delta) -> list[bytes]:
    return [plain(segment) for segment in encoded.segments]


def plain(segment: Segment) -> bytes:
    if segment.compression is Compression.NONE:
        return bytes(segment.payload)
    return zstandard.ZstdDecompressor().decompress(segment.payload)


def encoded_pair(dtype: str, elements: int, sigma: float) -> tuple[delta.Delta, bytes, bytes]:
    expert, base = (row.tobytes() for row in blocks(dtype, elements, sigma))
    encoded = delta.encode(expert, base, dtype)
    assert encoded is not None
    return encoded, expert, base


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_all_layers_give_the_block_back(dtype: str) -> None:
    encoded, expert, base = encoded_pair(dtype, 50_000, 1e-3)
    *planes, residual = payloads(encoded)
    assert delta.decode(planes, residual, base, dtype) == expert


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    elements=st.integers(1, 9000),
    sigma=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0]),
)
def test_a_delta_is_smaller_than_the_block_or_not_made(
    dtype: str, elements: int, sigma: float
) -> None:
    expert, base = (row.tobytes() for row in blocks(dtype, elements, sigma))
    encoded = delta.encode(expert, base, dtype)
    if encoded is not None:
        assert encoded.nbytes < len(expert)
        *planes, residual = payloads(encoded)
        assert delta.decode(planes, residual, base, dtype) == expert


def test_unrelated_blocks_stay_raw() -> None:
    rng = np.random.default_rng(0)
    assert delta.encode(rng.bytes(20_000), rng.bytes(20_000), "F32") is None


@pytest.mark.parametrize(("sigma", "share"), [(1e-3, 0.445), (1e-4, 0.27), (1e-5, 0.12)])
def test_a_bf16_update_takes_a_fraction_of_its_bytes(sigma: float, share: float) -> None:
    encoded, expert, _ = encoded_pair("BF16", 1 << 19, sigma)
    assert encoded.nbytes < share * len(expert)


def test_the_first_planes_cost_an_eighth_of_a_bf16_block() -> None:
    encoded, expert, _ = encoded_pair("BF16", 1 << 19, 1e-3)
    assert sum(len(s.payload) for s in encoded.segments[:2]) < 0.12 * len(expert)


def test_the_decoder_is_pinned_byte_for_byte() -> None:
    """Payloads made by the first version of the format: later versions must read them."""
    encoded, expert, base = encoded_pair("BF16", 5000, 1e-3)
    digest = hashlib.sha256(b"".join(payloads(encoded)[:4])).hexdigest()
    assert digest == "6dbb71d9ec5b16ccf4c98188a8f7de55afca59817ffb2e34008be8147bb0040c"
    assert (
        hashlib.sha256(expert).hexdigest()
        == "808943a299b05054ca9e272ff34947c136bd1a9286aae6ded77cdf1db05b01a6"
    )
    assert len(base) == len(expert)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_layers_give_a_value_error_or_as_many_bytes(data: st.DataObject) -> None:
    encoded, _, base = encoded_pair("BF16", 5000, 1e-3)
    layers = payloads(encoded)
    which = data.draw(st.integers(0, len(layers) - 1))
    layer = bytearray(layers[which])
    at = data.draw(st.integers(0, len(layer) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "grow"])):
        case "flip":
            layer[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del layer[at:]
        case "grow":
            layer += b"more"
    layers[which] = bytes(layer)
    *planes, residual = layers
    try:
        decoded = delta.decode(planes, residual, base, "BF16")
    except ValueError:
        return
    assert len(decoded) == len(base)
