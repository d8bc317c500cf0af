"""Packs: their bytes, their names, and every way in which they can be damaged."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.errors import Damaged
from mergegit.storage.pack import (
    HEADER,
    PREAMBLE,
    Compression,
    Encoding,
    Header,
    Kind,
    PackWriter,
    checksum,
    scan,
)
from tests.storage.samples import Record, an_id, flip, needs_open_files, record, write_pack

RECORDS = (
    record(1, b"one", Kind.SEGMENT, dtype=11, encoding=Encoding.RAW),
    record(2, b"two" * 50, Kind.SEGMENT, base=an_id(1), encoding=Encoding.DELTA, layers=4, layer=2),
    record(3, b"", Kind.OBJECT),
    record(4, b"four", Kind.STATISTICS, base=an_id(1)),
)

HEADERS = st.builds(
    Header,
    kind=st.sampled_from([Kind.SEGMENT, Kind.OBJECT, Kind.STATISTICS, Kind.END]),
    key=st.binary(min_size=32, max_size=32),
    length=st.integers(0, (1 << 64) - 1),
    size=st.integers(0, (1 << 64) - 1),
    base=st.binary(min_size=32, max_size=32),
    encoding=st.sampled_from(Encoding),
    layer=st.just(0),
    layers=st.integers(1, 255),
    dtype=st.integers(0, 255),
    compression=st.sampled_from(Compression),
    checksum=st.binary(min_size=16, max_size=16),
)


def sealed(raw: bytearray) -> bytes:
    """A header's bytes with the checksum that fits them."""
    return bytes(raw[:-8]) + blake3(bytes(raw[:-8])).digest(8)


# -- headers --------------------------------------------------------------------------------------


def test_the_bytes_of_a_header_are_frozen() -> None:
    header = Header(
        Kind.SEGMENT,
        key=b"\xaa" * 32,
        length=0x0102,
        size=0x0304,
        base=b"\xbb" * 32,
        encoding=Encoding.DELTA,
        layer=2,
        layers=5,
        dtype=11,
        compression=Compression.ZSTD,
        checksum=b"\xcc" * 16,
    )
    assert header.pack().hex() == (
        "4d475243"  # magic
        "01" "01" "02" "05" "0b" "01" "0000"  # kind, encoding, layer, layers, dtype, compression
        "0201000000000000" "0403000000000000"  # length, size
        + "aa" * 32
        + "bb" * 32
        + "cc" * 16
        + "00" * 12
        + "b2fb919461c2ed3c"
    )  # fmt: skip


def test_the_numbers_of_the_format_are_frozen() -> None:
    assert {kind.name: kind.value for kind in Kind} == {
        "SEGMENT": 1,
        "OBJECT": 2,
        "STATISTICS": 3,
        "END": 255,
    }
    assert {encoding.name: encoding.value for encoding in Encoding} == {"RAW": 0, "DELTA": 1}
    assert {c.name: c.value for c in Compression} == {"NONE": 0, "ZSTD": 1}
    assert (PREAMBLE.size, HEADER.size) == (16, 128)


def test_a_checksum_is_the_beginning_of_the_blake3_hash() -> None:
    assert checksum(b"abc").hex() == "6437b3ac38465133ffb63b75273a8db5"


@settings(max_examples=100, deadline=None)
@given(HEADERS)
def test_a_header_comes_back(header: Header) -> None:
    assert Header.unpack(header.pack()) == header


def test_a_flipped_byte_anywhere_in_a_header_is_noticed() -> None:
    packed = RECORDS[1][0].pack()
    for offset in range(len(packed)):
        damaged = bytearray(packed)
        damaged[offset] ^= 1 << (offset % 8)
        with pytest.raises(ValueError, match="checksum"):
            Header.unpack(bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 127, 129])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    packed = RECORDS[0][0].pack()
    with pytest.raises(ValueError, match="checksum"):
        Header.unpack((packed + packed)[:length])


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 0), (4, 0), (4, 9), (5, 2), (9, 2), (6, 4), (7, 0)],
    ids=["magic", "no kind", "kind", "encoding", "compression", "layer", "layers"],
)
def test_a_header_that_means_nothing_known_is_refused(offset: int, value: int) -> None:
    raw = bytearray(RECORDS[1][0].pack())
    raw[offset] = value
    with pytest.raises(ValueError):
        Header.unpack(sealed(raw))


# -- writing --------------------------------------------------------------------------------------


def test_the_bytes_of_a_pack_are_frozen(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    data = path.read_bytes()
    assert data[:16].hex() == "4d4749545041434b0100000000000000"
    assert data[16:144] == RECORDS[0][0].pack()
    assert data[144:147] == b"one"
    assert path.stem == "782b1bff09299614fc81ff021d674465"
    expected = "564931f4bfedd2bc6c1f33421a24071516d7654629f9ed3d6a46f378235ec65c"
    assert blake3(data).hexdigest() == expected


def test_records_come_back_in_order_with_their_places(tmp_path: Path) -> None:
    path, offsets = write_pack(tmp_path, *RECORDS)
    data = path.read_bytes()
    found = list(scan(path))
    assert found == list(zip([header for header, _ in RECORDS], offsets, strict=True))
    assert [data[at : at + header.length] for header, at in found] == [p for _, p in RECORDS]


def test_a_pack_without_records_is_a_pack(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path)
    assert list(scan(path)) == []
    assert path.stat().st_size == PREAMBLE.size + HEADER.size


def test_a_writer_knows_its_length(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "x")
    for header, payload in RECORDS:
        writer.append(header, payload)
        assert writer.length == (tmp_path / "x").stat().st_size
    writer.finish()
    assert writer.length == (tmp_path / "x").stat().st_size


def test_payloads_may_be_views(tmp_path: Path) -> None:
    path, (offset,) = write_pack(tmp_path, (record(1, b"bcd")[0], memoryview(b"abcde")[1:4]))
    assert path.read_bytes()[offset : offset + 3] == b"bcd"


@pytest.mark.parametrize("limit", [1, 5, 129, 1000])
def test_short_writes_are_continued(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole, offsets = write_pack(tmp_path / "whole", *RECORDS)
    calls = []

    def write_few(fd: int, parts: Sequence[bytes]) -> int:
        calls.append(fd)
        return os.write(fd, b"".join(parts)[:limit])

    monkeypatch.setattr(os, "writev", write_few)
    few, few_offsets = write_pack(tmp_path, *RECORDS)
    assert (few.name, few.read_bytes()) == (whole.name, whole.read_bytes())
    assert few_offsets == offsets
    assert len(calls) >= whole.stat().st_size / limit


def test_a_finished_pack_is_read_only(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_finished_pack_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}

    def record_fsync(fd: int) -> None:
        synced[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fsync", record_fsync)
    path, _ = write_pack(tmp_path, *RECORDS)
    assert synced == {path.stat().st_ino: path.stat().st_size}


def test_a_pack_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        PackWriter(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "x")
    writer.close()
    with open(tmp_path / "y", "wb") as other:
        writer.close()
        other.write(b"still open")


def name_of(tmp_path: Path, *records: Record) -> str:
    path, _ = write_pack(tmp_path, *records)
    path.unlink()
    return path.stem


def test_the_same_contents_have_the_same_name(tmp_path: Path) -> None:
    names = {name_of(tmp_path, *RECORDS) for _ in range(2)}
    assert len(names) == 1
    assert len(bytes.fromhex(names.pop())) == 16


def test_other_contents_have_another_name(tmp_path: Path) -> None:
    header, payload = RECORDS[0]
    variants = [
        RECORDS,
        RECORDS[::-1],
        RECORDS[:-1],
        (record(1, b"eno", Kind.SEGMENT, dtype=11), *RECORDS[1:]),
        ((replace(header, dtype=12), payload), *RECORDS[1:]),
        (),
    ]
    assert len({name_of(tmp_path, *records) for records in variants}) == len(variants)


# -- damage ---------------------------------------------------------------------------------------


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    path.chmod(0o644)
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        with pytest.raises(Damaged, match=path.stem):
            list(scan(path))


def test_a_flipped_byte_in_any_header_is_found(tmp_path: Path) -> None:
    path, offsets = write_pack(tmp_path, *RECORDS)
    payloads = {
        at + i
        for (_, payload), at in zip(RECORDS, offsets, strict=True)
        for i in range(len(payload))
    }
    headers = set(range(path.stat().st_size)) - payloads
    assert len(headers) == PREAMBLE.size + 5 * HEADER.size
    for offset in sorted(headers):
        flip(path, offset)
        with pytest.raises(Damaged, match=path.stem):
            list(scan(path))
        flip(path, offset)
    assert len(list(scan(path))) == len(RECORDS)


def test_a_flipped_byte_in_a_payload_is_told_by_its_checksum(tmp_path: Path) -> None:
    path, offsets = write_pack(tmp_path, *RECORDS)
    flip(path, offsets[1] + 7)
    data = path.read_bytes()
    sound = [
        checksum(data[at : at + header.length]) == header.checksum for header, at in scan(path)
    ]
    assert sound == [True, False, True, True]


def test_records_before_the_damage_are_still_found(tmp_path: Path) -> None:
    path, offsets = write_pack(tmp_path, *RECORDS)
    flip(path, offsets[2] - 1)
    records = scan(path)
    assert [next(records)[0].key, next(records)[0].key] == [an_id(1), an_id(2)]
    with pytest.raises(Damaged, match=f"byte {offsets[2] - HEADER.size}"):
        next(records)


def test_bytes_after_the_end_are_found(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    path.chmod(0o644)
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(Damaged, match="after its end"):
        list(scan(path))


def rewritten_end(path: Path, end: Header) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(-HEADER.size, os.SEEK_END)
        file.write(end.pack())


def test_an_end_that_counts_other_records_is_found(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    rewritten_end(path, Header(Kind.END, bytes(32), 0, len(RECORDS) + 1))
    with pytest.raises(Damaged, match="number of records"):
        list(scan(path))


@pytest.mark.parametrize("length", [1, 1 << 40, (1 << 64) - 1])
def test_a_record_that_claims_more_than_there_is_is_found(length: int, tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    rewritten_end(path, replace(RECORDS[0][0], length=length))
    with pytest.raises(Damaged, match="longer than the pack"):
        list(scan(path))


def test_a_newer_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[8] = 2
    path.write_bytes(data)
    with pytest.raises(Damaged, match="format version 2") as caught:
        list(scan(path))
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"MGITPACK", b"PK\x03\x04" + bytes(200)])
def test_a_file_that_is_no_pack_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "0123.pack").write_bytes(data)
    with pytest.raises(Damaged, match="0123"):
        list(scan(tmp_path / "0123.pack"))


@needs_open_files
def test_a_scan_that_is_given_up_leaves_no_open_file(tmp_path: Path) -> None:
    path, _ = write_pack(tmp_path, *RECORDS)
    before = set(os.listdir("/proc/self/fd"))
    records = scan(path)
    next(records)
    records.close()  # type: ignore[attr-defined]
    assert set(os.listdir("/proc/self/fd")) == before
