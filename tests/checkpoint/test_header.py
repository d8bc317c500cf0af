"""The header of a safetensors file: what is accepted, what is refused, and what is written."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from mergegit.checkpoint.header import (
    MAX_HEADER_BYTES,
    FileHeader,
    TensorEntry,
    build_header,
    metadata_of,
    parse_header,
    read_header,
)
from mergegit.dtypes import DTYPES, byte_length
from mergegit.errors import BadCheckpoint
from tests.checkpoint.handmade import entry, file_bytes, write

A = Path("a.safetensors")

WRITTEN_BY_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}


def read(path: Path) -> FileHeader:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, path)
    finally:
        os.close(fd)


def names(header: FileHeader) -> list[str]:
    return [tensor.name for tensor in header.tensors]


# -- files that others write ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WRITTEN_BY_TORCH)
def test_a_file_that_safetensors_wrote_is_understood(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    count = byte_length(dtype, 12)
    raw = (torch.arange(count) % 2).to(torch.uint8)
    tensor = raw.view(WRITTEN_BY_TORCH[dtype]).reshape(3, 4)
    scalar = raw[: byte_length(dtype, 1)].view(WRITTEN_BY_TORCH[dtype]).reshape(()).clone()
    tensors = {"b": tensor, "a": scalar, "empty": tensor[:0].clone()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    header = read(path)
    with safe_open(path, "pt") as file:
        assert metadata_of(header.text) == file.metadata()
        assert sorted(names(header)) == sorted(file.keys())
        data = path.read_bytes()[header.data_offset :]
        for found in header.tensors:
            piece = file.get_slice(found.name)
            assert (found.dtype, list(found.shape)) == (piece.get_dtype(), piece.get_shape())
            assert found.dtype == dtype
            expected = tensors[found.name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[found.begin : found.end] == expected
    assert header.file_bytes == path.stat().st_size


def test_a_file_of_many_types_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        f"{number:02}.{dtype}": np.ones((number, 3), dtype)
        for number, dtype in enumerate(["f2", "u1", "i8", "f8", "?", "i2", "f4", "u4"])
    }
    safetensors.numpy.save_file(tensors, path)
    found = {tensor.name: tensor for tensor in read(path).tensors}
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: array.shape for name, array in tensors.items()
    }
    assert all(
        found[name].end - found[name].begin == array.nbytes for name, array in tensors.items()
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_that_safetensors_knows_is_known(dtype: str, tmp_path: Path) -> None:
    assert len(DTYPES) == 22
    length = byte_length(dtype, 8)
    path = write(tmp_path / "x.safetensors", {"t": entry(dtype, [2, 4], 0, length)}, bytes(length))
    with safe_open(path, "np") as file:
        piece = file.get_slice("t")
        assert (piece.get_dtype(), piece.get_shape()) == (dtype, [2, 4])
    assert read(path).tensors == (TensorEntry("t", dtype, (2, 4), 0, length),)


# -- what is understood ---------------------------------------------------------------------------


def test_tensors_come_in_the_order_of_their_data(tmp_path: Path) -> None:
    header = {
        "a": entry("U8", [2], 3, 5),
        "b": entry("U8", [3], 0, 3),
        "c": entry("I16", [0, 7], 3, 3),
    }
    path = write(tmp_path / "x.safetensors", header, b"12345")
    assert names(read(path)) == ["b", "c", "a"]


def test_the_text_is_kept_as_it_stands_in_the_file(tmp_path: Path) -> None:
    text = b'{ "t" :{"shape":[1], "dtype":"U8","data_offsets":[0,1]}}   \n'
    header = read(write(tmp_path / "x.safetensors", text, b"1"))
    assert header.text == text
    assert (header.data_offset, header.file_bytes) == (8 + len(text), 9 + len(text))


def test_a_scalar_is_one_element(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"t": entry("F32", [], 0, 4)}, bytes(4))
    assert read(path).tensors[0].shape == ()


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    header = read(write(tmp_path / "x.safetensors", b"{}"))
    assert (header.tensors, header.file_bytes) == ((), 10)


def test_metadata_is_a_map_of_texts() -> None:
    text = b'{"__metadata__":{"format":"pt","\xc3\xa9":"\xe2\x82\xac"}}'
    assert metadata_of(text) == {"format": "pt", "é": "€"}
    assert metadata_of(b"{}") == {}


@pytest.mark.parametrize(
    "header",
    [
        {"t": {**entry("U8", [1], 0, 1), "comment": "of a later version"}},
        {"__metadata__": None, "t": entry("U8", [1], 0, 1)},
    ],
    ids=["a key that is not known", "metadata of nothing"],
)
def test_what_safetensors_overlooks_is_overlooked(
    header: dict[str, object], tmp_path: Path
) -> None:
    path = write(tmp_path / "x.safetensors", header, b"1")
    with safe_open(path, "np") as file:
        assert list(file.keys()) == ["t"]
    assert names(read(path)) == ["t"]
    assert metadata_of(read(path).text) == {}


# -- what is refused ------------------------------------------------------------------------------

ONE = entry("U8", [1], 0, 1)

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "too short"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "too short"),
    "header longer than the file": (struct.pack("<Q", 100) + b"{}", "header of 100 bytes"),
    "header over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
    "header of all the bytes there are": (b"\xff" * 8 + b"{}", "at most"),
    "header of no bytes": (struct.pack("<Q", 0), "not valid JSON"),
    "not JSON": (file_bytes(b"hello"), "not valid JSON"),
    "JSON cut short": (file_bytes(b'{"t":{"dtype":"U8"'), "not valid JSON"),
    "JSON with more after it": (file_bytes(b"{}{}"), "not valid JSON"),
    "padded with zeros": (file_bytes(b"{}\0\0"), "not valid JSON"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "not valid JSON"),
    "UTF-16": (file_bytes("{}".encode("utf-16-le")), "not valid JSON"),
    "byte order mark": (file_bytes(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "half a surrogate pair": (
        file_bytes(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
        "surrogate pair",
    ),
    "nested without end": (file_bytes(b'{"t":' * 20_000), "not valid JSON"),
    "a list": (file_bytes(b"[]"), "not a JSON object"),
    "a number": (file_bytes(b"7"), "not a JSON object"),
    "duplicate tensor": (
        file_bytes(b'{"t":%s,"t":%s}' % ((json.dumps(ONE).encode(),) * 2), b"1"),
        "'t' stands twice",
    ),
    "duplicate key of a tensor": (
        file_bytes(b'{"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"1"),
        "'dtype' stands twice",
    ),
    "metadata not a map": (file_bytes({"__metadata__": ["pt"]}), "__metadata__"),
    "metadata of an empty list": (file_bytes({"__metadata__": []}), "__metadata__"),
    "metadata of numbers": (file_bytes({"__metadata__": {"epoch": 3}}), "__metadata__"),
    "metadata that looks like a tensor": (file_bytes({"__metadata__": ONE}, b"1"), "__metadata__"),
    "tensor not a map": (file_bytes({"t": 1}, b"1"), "describes tensor t without"),
    "no dtype": (file_bytes({"t": {"shape": [1], "data_offsets": [0, 1]}}, b"1"), "without dtype"),
    "no shape": (file_bytes({"t": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1"), "without dtype"),
    "no offsets": (file_bytes({"t": {"dtype": "U8", "shape": [1]}}, b"1"), "without dtype"),
    "unknown dtype": (file_bytes({"t": entry("F128", [1], 0, 16)}, bytes(16)), "dtype 'F128'"),
    "dtype in small letters": (file_bytes({"t": entry("u8", [1], 0, 1)}, b"1"), "dtype 'u8'"),
    "dtype not a text": (file_bytes({"t": {**ONE, "dtype": ["U8"]}}, b"1"), "unknown dtype"),
    "shape a number": (file_bytes({"t": entry("U8", 1, 0, 1)}, b"1"), "list of sizes"),
    "shape of fractions": (file_bytes({"t": entry("U8", [1.0], 0, 1)}, b"1"), "list of sizes"),
    "shape of texts": (file_bytes({"t": entry("U8", ["1"], 0, 1)}, b"1"), "list of sizes"),
    "shape of booleans": (file_bytes({"t": entry("U8", [True], 0, 1)}, b"1"), "list of sizes"),
    "negative size": (file_bytes({"t": entry("U8", [-1], 0, 1)}, b"1"), "list of sizes"),
    "two negative sizes": (file_bytes({"t": entry("U8", [-1, -1], 0, 1)}, b"1"), "list of sizes"),
    "size beyond 62 bits": (file_bytes({"t": entry("U8", [1 << 62], 0, 1)}, b"1"), "list of sizes"),
    "size beyond 64 bits": (
        file_bytes({"t": entry("U8", [(1 << 64) + 1], 0, 1)}, b"1"),
        "list of sizes",
    ),
    "too many dimensions": (file_bytes({"t": entry("U8", [1] * 65, 0, 1)}, b"1"), "list of sizes"),
    "shape whose product overflows": (
        file_bytes({"t": entry("U8", [1 << 33, 1 << 33], 0, 4)}, bytes(4)),
        "overflows",
    ),
    "shape whose product overflows before it meets zero": (
        file_bytes({"t": entry("U8", [1 << 61, 1 << 61, 0], 0, 0)}),
        "overflows",
    ),
    "shape larger than the data": (file_bytes({"t": entry("U8", [2], 0, 1)}, b"1"), "takes 2"),
    "shape smaller than the data": (file_bytes({"t": entry("F32", [], 0, 8)}, bytes(8)), "takes 4"),
    "offsets a number": (file_bytes({"t": {**ONE, "data_offsets": 1}}, b"1"), "pair of numbers"),
    "one offset": (file_bytes({"t": {**ONE, "data_offsets": [1]}}, b"1"), "pair of numbers"),
    "three offsets": (
        file_bytes({"t": {**ONE, "data_offsets": [0, 1, 2]}}, b"1"),
        "pair of numbers",
    ),
    "offsets of texts": (file_bytes({"t": entry("U8", [1], "0", "1")}, b"1"), "pair of numbers"),
    "offsets of fractions": (
        file_bytes({"t": entry("U8", [1], 0.0, 1.0)}, b"1"),
        "pair of numbers",
    ),
    "offsets of booleans": (
        file_bytes({"t": entry("U8", [1], False, True)}, b"1"),
        "pair of numbers",
    ),
    "negative offset": (file_bytes({"t": entry("U8", [1], -1, 0)}, b"1"), "pair of numbers"),
    "endless offset": (
        file_bytes(b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1e999]}}', b"1"),
        "pair of numbers",
    ),
    "offsets the wrong way round": (file_bytes({"t": entry("U8", [1], 1, 0)}, b"1"), "-1 bytes"),
    "overlapping offsets": (
        file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
        "tensor b overlaps",
    ),
    "shared offsets": (
        file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"12"),
        "tensor b overlaps",
    ),
    "gap between tensors": (
        file_bytes({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
        "tensor b leaves a gap",
    ),
    "gap before the first": (file_bytes({"a": entry("U8", [1], 1, 2)}, b"12"), "leaves a gap"),
    "bytes after the last": (file_bytes({"a": ONE}, b"12"), "1 bytes after its last tensor"),
    "bytes without tensors": (file_bytes({}, b"1"), "1 bytes after its last tensor"),
    "data cut short": (
        file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [4], 2, 6)}, b"123"),
        "cut in tensor b",
    ),
    "F4 of odd elements": (file_bytes({"t": entry("F4", [3], 0, 2)}, bytes(2)), "F4"),
    "F6 of odd elements": (file_bytes({"t": entry("F6_E2M3", [5], 0, 4)}, bytes(4)), "F6_E2M3"),
}

OVERLOOKED_BY_SAFETENSORS = {
    "duplicate tensor",
    "too many dimensions",
}
"""Read by safetensors, which takes one of the two, or any number of dimensions."""


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_refused_with_what_is_wrong(kind: str, tmp_path: Path) -> None:
    data, what = MALFORMED[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint) as caught:
        read(path)
    assert what in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("kind", sorted(set(MALFORMED) - OVERLOOKED_BY_SAFETENSORS))
def test_what_is_refused_here_is_refused_by_safetensors(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(MALFORMED[kind][0])
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass


def test_a_header_at_the_limit_is_not_refused_for_its_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES) + b"{}")
        file.truncate(8 + MAX_HEADER_BYTES)
    with pytest.raises(BadCheckpoint, match="not valid JSON"):
        read(path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    data = file_bytes({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 4, 8)}, b"12345678")
    path = tmp_path / "x.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(BadCheckpoint):
            read(path)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=80)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just("U8"),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.text(max_size=2) | st.sampled_from(["dtype", "shape", "data_offsets"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_hostile_text_is_a_bad_checkpoint_and_nothing_else(text: bytes) -> None:
    try:
        tensors = parse_header(text, A)
    except BadCheckpoint:
        return
    assert sum(tensor.end - tensor.begin for tensor in tensors) == max(
        (tensor.end for tensor in tensors), default=0
    )


# -- what is written ------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.sampled_from([name for name, dtype in DTYPES.items() if dtype.bits >= 8]),
        SHAPES,
    ),
    max_size=4,
    unique_by=lambda tensor: tensor[0],
)


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_what_is_built_is_understood(
    tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    text = build_header(tensors, metadata)
    found = parse_header(text, A)
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in found] == tensors
    assert metadata_of(text) == metadata
    assert (8 + len(text)) % 8 == 0


def test_what_is_built_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = [("é", "BF16", (2, 3)), ("a", "F32", ()), ("none", "I8", (0,))]
    path = write(tmp_path / "x.safetensors", build_header(tensors, {"format": "pt"}), bytes(16))
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
        assert shapes == {
            "é": [2, 3],
            "a": [],
            "none": [0],
        }


def test_a_header_without_metadata_has_no_key_for_it() -> None:
    text = build_header([("t", "U8", (1,))], {})
    assert text.rstrip() == b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
