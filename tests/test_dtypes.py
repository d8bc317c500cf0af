"""The table of element types: what it holds is part of the format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegit.dtypes import BY_CODE, DTYPES, TORCH_NAMES, byte_length, dtype_named

TABLE = {
    "BOOL": (1, 8),
    "U8": (2, 8),
    "I8": (3, 8),
    "U16": (4, 16),
    "I16": (5, 16),
    "U32": (6, 32),
    "I32": (7, 32),
    "U64": (8, 64),
    "I64": (9, 64),
    "F16": (10, 16),
    "BF16": (11, 16),
    "F32": (12, 32),
    "F64": (13, 64),
    "F8_E4M3": (14, 8),
    "F8_E5M2": (15, 8),
    "F8_E4M3FNUZ": (16, 8),
    "F8_E5M2FNUZ": (17, 8),
    "F8_E8M0": (18, 8),
    "F6_E2M3": (19, 6),
    "F6_E3M2": (20, 6),
    "F4": (21, 4),
    "C64": (22, 64),
}
"""Codes stand in packs: one that changes makes old repositories unreadable."""


def test_codes_and_widths_are_those_of_the_format() -> None:
    assert {name: (dtype.code, dtype.bits) for name, dtype in DTYPES.items()} == TABLE


def test_every_code_leads_back_to_its_type() -> None:
    assert {code: dtype.name for code, dtype in BY_CODE.items()} == {
        code: name for name, (code, _) in TABLE.items()
    }


def test_types_that_can_be_added_are_floats_with_one_scale_per_element() -> None:
    floats = {name for name, dtype in DTYPES.items() if dtype.is_float}
    assert floats == {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"}


@given(st.sampled_from([name for name, (_, bits) in TABLE.items() if bits >= 8]), st.integers(0))
def test_whole_bytes_take_elements_times_width(dtype: str, elements: int) -> None:
    assert byte_length(dtype, elements) == elements * TABLE[dtype][1] // 8


@pytest.mark.parametrize(("dtype", "elements", "nbytes"), [("F4", 6, 3), ("F6_E2M3", 8, 6)])
def test_packed_elements_share_bytes(dtype: str, elements: int, nbytes: int) -> None:
    assert byte_length(dtype, elements) == nbytes


@pytest.mark.parametrize(("dtype", "elements"), [("F4", 3), ("F6_E2M3", 5), ("F6_E3M2", 6)])
def test_elements_that_end_inside_a_byte_are_refused(dtype: str, elements: int) -> None:
    with pytest.raises(ValueError, match=f"{elements} elements of {dtype}"):
        byte_length(dtype, elements)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("float32", "F32"), ("torch.bfloat16", "BF16"), ("FP16", "F16"), ("bf16", "BF16"),
        ("F64", "F64"), ("float8_e4m3fn", "F8_E4M3"), ("f8_e5m2", "F8_E5M2"),
    ],
)  # fmt: skip
def test_a_dtype_has_the_names_that_torch_mergekit_and_safetensors_give_it(
    text: str, name: str
) -> None:
    assert dtype_named(text) == name


def test_every_dtype_that_can_be_merged_to_has_a_name() -> None:
    assert {name for name, dtype in DTYPES.items() if dtype.is_float} == set(TORCH_NAMES)
    for name, torch_name in TORCH_NAMES.items():
        assert dtype_named(torch_name) == dtype_named(name) == name


@pytest.mark.parametrize("text", ["", "int64", "I64", "float", "float320", "C64", "torch."])
def test_what_cannot_be_merged_to_is_refused_with_a_list(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is not one of float32, bfloat16, float16"):
        dtype_named(text)
