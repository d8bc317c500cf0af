"""Tensors of the store as torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from mergegit.checkpoint.torch_dtypes import TORCH_DTYPES
from mergegit.errors import Mismatch
from mergegit.objects import Tensor
from mergegit.pipeline import ordered_map
from mergegit.storage.store import Store


def load_tensor(store: Store, tensor: Tensor, threads: int) -> torch.Tensor:
    """A tensor with its shape and dtype. Raises ``Mismatch`` for a dtype that torch lacks."""
    if tensor.dtype not in TORCH_DTYPES:
        raise Mismatch(
            f"torch has no dtype for {tensor.dtype}", hint="check the commit out and read its files"
        )
    data = np.empty(tensor.nbytes, np.uint8)
    at = 0
    for block in ordered_map(store.read_block, tensor.blocks(), threads=threads):
        data[at : at + len(block)] = np.frombuffer(block, np.uint8)
        at += len(block)
    if not data.size:
        return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    return torch.from_numpy(data).view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
