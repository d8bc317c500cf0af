"""The element types of safetensors, and which of them mergegit can do arithmetic on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    ``code`` is the number that stands for it in pack records, ``bits`` the width of an element.
    ``is_float`` is true where values can be added: experts' deltas exist for these alone. Types
    of which several elements share a scale (F4, F6, F8_E8M0), integers and complex numbers are
    stored and deduplicated like all others, but never merged.
    """

    name: str
    code: int
    bits: int
    is_float: bool = False


_TABLE = (
    DType("BOOL", 1, 8),
    DType("U8", 2, 8),
    DType("I8", 3, 8),
    DType("U16", 4, 16),
    DType("I16", 5, 16),
    DType("U32", 6, 32),
    DType("I32", 7, 32),
    DType("U64", 8, 64),
    DType("I64", 9, 64),
    DType("F16", 10, 16, is_float=True),
    DType("BF16", 11, 16, is_float=True),
    DType("F32", 12, 32, is_float=True),
    DType("F64", 13, 64, is_float=True),
    DType("F8_E4M3", 14, 8, is_float=True),
    DType("F8_E5M2", 15, 8, is_float=True),
    DType("F8_E4M3FNUZ", 16, 8),
    DType("F8_E5M2FNUZ", 17, 8),
    DType("F8_E8M0", 18, 8),
    DType("F6_E2M3", 19, 6),
    DType("F6_E3M2", 20, 6),
    DType("F4", 21, 4),
    DType("C64", 22, 64),
)

DTYPES = {dtype.name: dtype for dtype in _TABLE}
BY_CODE = {dtype.code: dtype for dtype in _TABLE}

TORCH_NAMES: Final = {
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""The dtypes that can be merged to, and what torch and mergekit call them."""

_SHORT_NAMES: Final = {"fp32": "F32", "fp16": "F16", "fp64": "F64"}
_BY_NAME: Final = {
    **{name.lower(): name for name in TORCH_NAMES},
    **{torch_name: name for name, torch_name in TORCH_NAMES.items()},
    **_SHORT_NAMES,
}


def dtype_named(text: str) -> str:
    """The name of a dtype to merge to, as torch, mergekit or safetensors call it, in any case.

    Raises ``ValueError``, which lists what there is.
    """
    try:
        return _BY_NAME[text.lower().removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"{text!r} is not one of {', '.join(TORCH_NAMES.values())}") from None


def byte_length(dtype: str, elements: int) -> int:
    """Bytes that ``elements`` elements of ``dtype`` take; a count that ends inside a byte fails.

    Raises ``ValueError`` where the bits do not fill whole bytes (F4 and F6 are packed).
    """
    bits = DTYPES[dtype].bits * elements
    if bits % 8:
        raise ValueError(f"{elements} elements of {dtype} do not fill whole bytes")
    return bits // 8
