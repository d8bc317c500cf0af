"""The header of a safetensors file: read, checked against named limits, written.

    file = length (8 bytes, little-endian) header (JSON, padded) data

Offsets in the header count from the start of the data. Everything is checked before a byte of the
data is read: the file may come from anywhere.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from mergegit.dtypes import DTYPES, byte_length
from mergegit.errors import BadCheckpoint

MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header that is read; safetensors has the same limit."""
MAX_DIMENSIONS: Final = 64
LENGTH_BYTES: Final = 8
_ALIGNMENT: Final = 8
_AGAIN: Final = "download or save the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a header describes it; ``begin`` and ``end`` are offsets into the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A header: its text as it stands in the file, and its tensors in the order of their data."""

    text: bytes
    tensors: tuple[TensorEntry, ...]

    @property
    def data_offset(self) -> int:
        return LENGTH_BYTES + len(self.text)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + (self.tensors[-1].end if self.tensors else 0)


def read_header(fd: int, path: Path) -> FileHeader:
    """The header of an open file. Raises ``BadCheckpoint``."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, LENGTH_BYTES, 0)
    if len(start) < LENGTH_BYTES:
        _fail(path, f"is {size} bytes long, too short for a safetensors file", _AGAIN)
    (length,) = struct.unpack("<Q", start)
    if length > MAX_HEADER_BYTES:
        _fail(
            path,
            f"claims a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read",
            "check that it is a safetensors file",
        )
    if LENGTH_BYTES + length > size:
        _fail(path, f"claims a header of {length:,} bytes, but is {size:,} bytes long", _AGAIN)
    text = _read_exactly(fd, length, LENGTH_BYTES, path)
    header = FileHeader(text, parse_header(text, path))
    if header.file_bytes > size:
        last = next(t for t in header.tensors if header.data_offset + t.end > size)
        _fail(
            path,
            f"is truncated: {size:,} bytes of {header.file_bytes:,}, cut in tensor {last.name}",
            _AGAIN,
        )
    if header.file_bytes < size:
        _fail(path, f"has {size - header.file_bytes:,} bytes after its last tensor", _AGAIN)
    return header


def parse_header(text: bytes, path: Path) -> tuple[TensorEntry, ...]:
    """The tensors that a header names, in the order of their data. Raises ``BadCheckpoint``."""
    try:
        facts = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        _fail(path, f"has a header that is not valid JSON ({error})", _AGAIN)
    if not isinstance(facts, dict):
        _fail(path, "has a header that is not a JSON object", _AGAIN)
    metadata = facts.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(path, "has a __metadata__ that is not a map of texts", _AGAIN)
    try:
        "".join((*facts, *metadata, *metadata.values())).encode()
    except UnicodeEncodeError:
        _fail(path, "has a header with half of a surrogate pair in a name", _AGAIN)
    entries = [_entry(name, value, path) for name, value in facts.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = 0
    for entry in entries:
        if entry.begin != at:
            word = "overlaps the one before" if entry.begin < at else "leaves a gap before it"
            _fail(path, f"has offsets out of order: tensor {entry.name} {word}", _AGAIN)
        at = entry.end
    return tuple(entries)


def _entry(name: str, value: object, path: Path) -> TensorEntry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        _fail(path, f"describes tensor {name} without dtype, shape and data_offsets", _AGAIN)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _fail(
            path,
            f"gives tensor {name} the unknown dtype {dtype!r}",
            f"known are {', '.join(DTYPES)}; a newer mergegit may know more",
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        _fail(path, f"gives tensor {name} a shape that is no list of sizes", _AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2:
        _fail(path, f"gives tensor {name} offsets that are no pair of numbers", _AGAIN)
    elements = 1
    for size in shape:
        elements *= size
        if elements > 1 << 62:
            _fail(path, f"gives tensor {name} a shape whose product overflows", _AGAIN)
    begin, end = offsets
    try:
        expected = byte_length(dtype, elements)
    except ValueError as error:
        _fail(path, f"gives tensor {name} a shape that does not fit its dtype: {error}", _AGAIN)
    if end - begin != expected:
        _fail(
            path,
            f"gives tensor {name} {end - begin:,} bytes, where {dtype} {list(shape)} takes "
            f"{expected:,}",
            _AGAIN,
        )
    return TensorEntry(name, dtype, tuple(shape), begin, end)


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """A header's text for tensors (name, dtype, shape) whose data follow in this order."""
    facts: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + byte_length(dtype, math.prod(shape))
        facts[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def metadata_of(text: bytes) -> dict[str, str]:
    """The ``__metadata__`` of a header that was checked before."""
    metadata: dict[str, str] | None = json.loads(text).get("__metadata__")
    return metadata or {}


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value
    )


def _no_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def _read_exactly(fd: int, length: int, offset: int, path: Path) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        _fail(path, "became shorter while it was read", "run the command again when it is complete")
    return data


def _fail(path: Path, what: str, hint: str) -> NoReturn:
    raise BadCheckpoint(f"{path} {what}", hint=hint)
