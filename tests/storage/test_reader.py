"""Reading payloads: counted, checked, bounded, and refused where the pack is not what it was."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.encoding import MAX_OBJECT_BYTES
from mergegit.errors import Damaged
from mergegit.storage.catalog import Catalog, PackFile, Place
from mergegit.storage.location import Location
from mergegit.storage.pack import Compression
from mergegit.storage.reader import ByteCount, PackReader, compress, decompress
from mergegit.storage.trash import Trash
from tests.storage.samples import (
    Record,
    an_id,
    flip,
    needs_open_files,
    record,
    some_bytes,
    write_pack,
)


@pytest.fixture
def catalog(location: Location) -> Iterator[Catalog]:
    with closing(Catalog(location.catalog)) as catalog:
        yield catalog


@pytest.fixture
def reader(location: Location, catalog: Catalog) -> Iterator[PackReader]:
    with closing(PackReader(location, catalog)) as reader:
        yield reader


def compressed(number: int, payload: bytes) -> Record:
    data, compression = compress(payload)
    assert compression is Compression.ZSTD
    header, _ = record(number, data, compression=compression)
    return replace(header, size=len(payload)), data


def store_pack(location: Location, catalog: Catalog, *records: Record) -> tuple[Path, list[Place]]:
    """A pack that the catalog knows, and where its objects lie."""
    path, offsets = write_pack(location.packs, *records)
    headers = [header for header, _ in records]
    pack = PackFile(path.stem, path.stat().st_size)
    catalog.enter({pack: list(zip(headers, offsets, strict=True))})
    places = [catalog.object(header.key) for header in headers]
    return path, [place for place in places if place is not None]


# -- reading --------------------------------------------------------------------------------------


def test_a_payload_is_read_from_its_place(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    _, places = store_pack(
        location, catalog, record(1, b"one"), record(2, b""), record(3, b"three")
    )
    assert [reader.read(place) for place in places] == [b"one", b"", b"three"]


def test_a_compressed_payload_is_read_as_it_was(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    payload = b"again and " * 100
    _, (packed, plain) = store_pack(location, catalog, compressed(1, payload), record(2, b"plain"))
    assert reader.read_decompressed(packed) == payload
    assert reader.read_decompressed(plain) == b"plain"
    assert reader.read_checked(packed) == payload
    assert len(reader.read(packed)) == packed.length < len(payload)


def test_payloads_of_several_packs_are_read_by_turns(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    places = {
        number: store_pack(location, catalog, record(number, some_bytes(number)))[1][0]
        for number in range(3)
    }
    for number in (0, 1, 2, 0, 2, 1):
        assert reader.read(places[number]) == some_bytes(number)


def test_stored_bytes_are_counted(location: Location, catalog: Catalog, reader: PackReader) -> None:
    _, (packed, plain) = store_pack(
        location, catalog, compressed(1, bytes(5000)), record(2, b"plain")
    )
    count = ByteCount()
    reader.read_decompressed(packed, count)
    assert count.total == packed.length < 100
    reader.read(plain, count)
    reader.read_checked(plain, count)
    reader.read(plain)
    assert count.total == packed.length + 2 * len(b"plain")


def test_the_count_is_what_the_file_was_asked_for(
    location: Location,
    catalog: Catalog,
    reader: PackReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, places = store_pack(location, catalog, record(1, some_bytes(1)), compressed(2, bytes(9000)))
    for place in places:
        reader.read(place)
    pread, seen = os.pread, 0

    def count_pread(fd: int, length: int, offset: int) -> bytes:
        nonlocal seen
        data = pread(fd, length, offset)
        seen += len(data)
        return data

    monkeypatch.setattr(os, "pread", count_pread)
    count = ByteCount()
    for place in places:
        reader.read_decompressed(place, count)
    assert count.total == seen == sum(place.length for place in places)


def test_short_reads_are_continued(
    location: Location,
    catalog: Catalog,
    reader: PackReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, (place,) = store_pack(location, catalog, record(1, some_bytes(1)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 100), offset))
    count = ByteCount()
    assert reader.read(place, count) == some_bytes(1)
    assert count.total == 1024


def test_threads_read_and_count_together(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    places = [
        store_pack(location, catalog, record(number, some_bytes(number)))[1][0]
        for number in range(4)
    ]
    count = ByteCount()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: reader.read(places[i % 4], count), range(400)))
    assert found == [some_bytes(i % 4) for i in range(400)]
    assert count.total == 400 * 1024


# -- open files -----------------------------------------------------------------------------------


def open_packs() -> int:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.exists(link) and os.readlink(link).endswith(".pack") for link in links)


@needs_open_files
def test_a_bounded_number_of_packs_is_open(
    location: Location,
    catalog: Catalog,
    reader: PackReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    entries = {}
    for number in range(150):
        path, (offset,) = write_pack(location.packs, record(number, some_bytes(number, 8)))
        pack = PackFile(path.stem, path.stat().st_size)
        entries[pack] = [(record(number, some_bytes(number, 8))[0], offset)]
    catalog.enter(entries)
    places = [catalog.object(an_id(number)) for number in range(150)]
    for _ in range(2):
        for number, place in enumerate(places):
            assert place is not None
            assert reader.read(place) == some_bytes(number, 8)
            assert open_packs() <= 128
    reader.close()
    assert open_packs() == 0


def test_a_pack_is_opened_once(
    location: Location,
    catalog: Catalog,
    reader: PackReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, places = store_pack(location, catalog, record(1, b"one"), record(2, b"two"))
    opened = []
    really_open = os.open

    def record_open(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(path)
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", record_open)
    for place in places * 3:
        reader.read(place)
    assert len(opened) == 1


# -- packs that are not what they were ------------------------------------------------------------


def test_every_truncation_of_a_payload_is_damage(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, record(1, some_bytes(1, 50)))
    path.chmod(0o644)
    assert reader.read(place) == some_bytes(1, 50)
    for length in reversed(range(place.offset + place.length)):
        os.truncate(path, length)
        with pytest.raises(Damaged, match=path.stem):
            reader.read(place)


def test_a_pack_that_is_missing_is_named(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, record(1, b"one"))
    path.unlink()
    with pytest.raises(Damaged, match=f"pack {path.stem} is missing"):
        reader.read(place)


def test_a_pack_in_the_trash_is_read_there(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, record(1, b"one"))
    Trash(location).put([path.stem], 1_700_000_000)
    assert reader.read(place) == b"one"


def test_a_pack_of_a_newer_version_asks_for_an_upgrade(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, record(1, b"one"))
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 7)
    path.write_bytes(data)
    with pytest.raises(Damaged, match="format version 7") as caught:
        reader.read(place)
    assert "upgrade" in caught.value.hint


def test_a_file_that_is_no_pack_is_damage(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, record(1, b"one"))
    path.chmod(0o644)
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(Damaged, match=path.stem):
        reader.read(place)


def test_a_pack_that_the_catalog_does_not_list_asks_for_a_rebuild(reader: PackReader) -> None:
    with pytest.raises(Damaged, match="pack 77") as caught:
        reader.read(Place(77, 144, 3, 3))
    assert "--rebuild-catalog" in caught.value.hint


@pytest.mark.parametrize("packed", [False, True])
def test_a_flipped_byte_anywhere_is_noticed_where_payloads_are_checked(
    packed: bool, location: Location, catalog: Catalog, reader: PackReader
) -> None:
    item = compressed(1, b"again and " * 20) if packed else record(1, b"a plain payload")
    path, (place,) = store_pack(location, catalog, item)
    for offset in range(place.offset, place.offset + place.length):
        flip(path, offset)
        with pytest.raises(Damaged, match=path.stem):
            reader.read_checked(place)
        flip(path, offset)
    assert len(reader.read_checked(place)) == place.size


def test_a_packed_payload_that_is_garbled_is_damage_even_unchecked(
    location: Location, catalog: Catalog, reader: PackReader
) -> None:
    path, (place,) = store_pack(location, catalog, compressed(1, b"again and " * 20))
    flip(path, place.offset)
    with pytest.raises(Damaged, match="decompressed"):
        reader.read_decompressed(place)


# -- compression ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200) | st.binary(min_size=1, max_size=8).map(lambda x: x * 50))
def test_what_is_compressed_comes_back_and_is_never_larger(data: bytes) -> None:
    payload, compression = compress(data)
    assert len(payload) <= len(data)
    if compression is Compression.ZSTD:
        assert len(payload) < len(data)
        assert decompress(payload, len(data), "x") == data
    else:
        assert payload == data


@pytest.mark.parametrize("size", [0, 1, 999, 1001, 1 << 20, MAX_OBJECT_BYTES + 1])
@pytest.mark.parametrize("tells_its_size", [True, False])
def test_another_size_than_declared_is_damage(size: int, tells_its_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=tells_its_size)
    with pytest.raises(Damaged, match="pack x can't be decompressed"):
        decompress(compressor.compress(bytes(1000)), size, "x")


@pytest.mark.parametrize("tells_its_size", [True, False])
def test_a_small_payload_can_not_take_much_memory(tells_its_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=tells_its_size)
    bomb = compressor.compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(Damaged):
            decompress(bomb, 1000, "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_payload_that_claims_to_be_endless_is_damage() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    assert frame[4:9] == b"\xa0\x00\x00\x10\x00", "one segment, its size in four bytes"
    endless = frame[:4] + b"\xe0" + b"\xff" * 7 + b"\x7f" + frame[9:]
    with pytest.raises(Damaged):
        decompress(bytes(endless), 1 << 20, "x")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_hostile_payloads_are_damage_and_nothing_else(data: bytes, size: int) -> None:
    with suppress(Damaged):
        assert len(decompress(data, size, "x")) == size
