"""Reading payloads from packs, counted and checked."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Final

import zstandard

from mergegit.encoding import MAX_OBJECT_BYTES
from mergegit.errors import Damaged
from mergegit.storage.catalog import CHECK_BYTES, Catalog, Place
from mergegit.storage.location import Location
from mergegit.storage.pack import Compression, checksum, read_preamble

_OPEN_PACKS: Final = 128
_FSCK = "run `mergegit fsck` to see which commits are affected"


class DamagedRecord(Damaged):
    """A payload that is not what its checksum or its declared length says; ``pack`` is where."""

    def __init__(self, pack: str, what: str) -> None:
        super().__init__(f"a record of pack {pack} {what}", hint=_FSCK)
        self.pack = pack


class PackGone(Damaged):
    """A pack that is not where the catalog said: it may have been replaced meanwhile."""


class ByteCount:
    """Counts bytes where they are read, from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


class PackReader:
    """Reads payloads by place. Keeps a bounded number of packs open; safe to share by threads."""

    def __init__(self, location: Location, catalog: Catalog) -> None:
        self._location = location
        self._catalog = catalog
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _OpenPack] = OrderedDict()

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def read(self, place: Place, count: ByteCount | None = None) -> bytes:
        """The payload at a place as it is stored."""
        pack = self._pack(place.pack)
        data = os.pread(pack.fd, place.length, place.offset)
        while len(data) < place.length:
            more = os.pread(pack.fd, place.length - len(data), place.offset + len(data))
            if not more:
                raise DamagedRecord(
                    pack.name, f"is cut off after {len(data)} of its {place.length} bytes"
                )
            data += more
        if count is not None:
            count.add(len(data))
        return data

    def read_decompressed(self, place: Place, count: ByteCount | None = None) -> bytes:
        """The payload at a place as it was before compression."""
        data = self.read(place, count)
        if place.compression is Compression.NONE:
            return data
        return decompress(data, place.size, self.pack_name(place))

    def read_stored(self, place: Place, count: ByteCount | None = None) -> bytes:
        """The payload at a place as it is stored, checked by its checksum."""
        data = self.read(place, count)
        if checksum(data)[:CHECK_BYTES] != place.check:
            raise DamagedRecord(self.pack_name(place), f"is damaged at byte {place.offset}")
        return data

    def read_checked(self, place: Place, count: ByteCount | None = None) -> bytes:
        """The payload at a place, checked by its checksum, then decompressed.

        For payloads that no id vouches for: statistics, and some but not all layers of a block.
        """
        data = self.read_stored(place, count)
        if place.compression is Compression.NONE:
            return data
        return decompress(data, place.size, self.pack_name(place))

    def pack_name(self, place: Place) -> str:
        return self._pack(place.pack).name

    def _pack(self, number: int) -> _OpenPack:
        with self._lock:
            pack = self._open.get(number)
            if pack is not None:
                self._open.move_to_end(number)
                return pack
            known = self._catalog.pack(number)
            if known is None:
                raise PackGone(
                    f"the catalog names pack {number}, which it does not list",
                    hint="run `mergegit fsck --rebuild-catalog`",
                )
            pack = _OpenPack(self._location, known.name)
            self._open[number] = pack
            if len(self._open) > _OPEN_PACKS:
                self._open.popitem(last=False)
            return pack


class _OpenPack:
    """An open pack file; closed when the last reader lets go of it."""

    def __init__(self, location: Location, name: str) -> None:
        self.name = name
        self.fd = -1
        self.fd = _open_file(location, name)
        read_preamble(self.fd, name)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _open_file(location: Location, name: str) -> int:
    """Open a pack where it is or, if a `gc` moved it there meanwhile, in the trash."""
    for directory in (location.packs, location.trash):
        try:
            return os.open(directory / f"{name}.pack", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
    raise PackGone(f"pack {name} is missing from {location.packs}", hint=_FSCK)


def decompress(data: bytes, size: int, pack: str) -> bytes:
    """Decompress a payload to exactly ``size`` bytes, never more. Raises ``Damaged``."""
    try:
        if size > MAX_OBJECT_BYTES:
            raise ValueError(f"{size} bytes declared")
        # A frame that tells its size is given memory for it, whatever the limit is.
        told = zstandard.frame_content_size(data)
        if told not in (size, -1):
            raise ValueError(f"{told} bytes where {size} were declared")
        out = zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1))
        if len(out) != size:
            raise ValueError(f"{len(out)} bytes where {size} were declared")
    except (zstandard.ZstdError, ValueError) as error:
        raise DamagedRecord(pack, f"can't be decompressed ({error})") from error
    return out


def compress(data: bytes, level: int = 3) -> tuple[bytes, Compression]:
    """``data`` under zstd where that is smaller, else as it is."""
    smaller = zstandard.ZstdCompressor(level=level).compress(data)
    if len(smaller) < len(data):
        return smaller, Compression.ZSTD
    return data, Compression.NONE
