"""The element types of safetensors as torch has them."""

from __future__ import annotations

from typing import Final

import torch

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}  # fmt: skip
"""Those of which a tensor has the same shape in both, by their names in safetensors."""

if hasattr(torch, "float8_e8m0fnu"):  # since torch 2.7
    TORCH_DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

TORCH_PAIRS: Final[torch.dtype | None] = getattr(torch, "float4_e2m1fn_x2", None)
"""torch's dtype of two F4 in one element, since 2.8; safetensors counts single ones."""
