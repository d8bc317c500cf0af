"""Safetensors files made by hand, so that they can be wrong in every way."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path


def entry(dtype: str, shape: object, begin: object, end: object) -> dict[str, object]:
    """A tensor's description in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_bytes(header: Mapping[str, object] | bytes, data: bytes = b"") -> bytes:
    """A file with a header, given as facts or as text, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(path: Path, header: Mapping[str, object] | bytes, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_bytes(header, data))
    return path


def write_tensors(path: Path, **tensors: bytes) -> Path:
    """A file of U8 tensors, one after the other."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = entry("U8", [len(data)], at, at + len(data))
        at += len(data)
    return write(path, header, b"".join(tensors.values()))
