"""Sound safetensors files made by hand, of every dtype and layout."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegit.dtypes import byte_length
from tests.checkpoint.handmade import write


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as a header describes it, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def random(cls, dtype: str, *shape: int, seed: int = 0) -> Raw:
        elements = 1
        for size in shape:
            elements *= size
        return cls(dtype, shape, random.Random(seed).randbytes(byte_length(dtype, elements)))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Raw],
    *,
    metadata: Mapping[str, str] | None = None,
    padding: int = 0,
    ascii_only: bool = True,
) -> Path:
    """Write a file whose tensors' data follow in the order given."""
    facts: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        facts[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    header = json.dumps(facts, ensure_ascii=ascii_only).encode() + b" " * padding
    return write(path, header, b"".join(tensor.data for tensor in tensors.values()))
