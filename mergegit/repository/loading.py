"""Tensors of the store as torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from mergegit.errors import Mismatch
from mergegit.objects import Tensor
from mergegit.pipeline import ordered_map
from mergegit.storage.store import Store

_TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}  # fmt: skip


def load_tensor(store: Store, tensor: Tensor, threads: int) -> torch.Tensor:
    """A tensor with its shape and dtype. Raises ``Mismatch`` for a dtype that torch lacks."""
    if tensor.dtype not in _TORCH:
        raise Mismatch(
            f"torch has no dtype for {tensor.dtype}", hint="check the commit out and read its files"
        )
    data = np.empty(tensor.nbytes, np.uint8)
    at = 0
    for block in ordered_map(store.read_block, tensor.blocks(), threads=threads):
        data[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)
    if not data.size:
        return torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
    return torch.from_numpy(data).view(_TORCH[tensor.dtype]).reshape(tensor.shape)
