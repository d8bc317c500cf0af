"""Packs: append-only files of records that describe themselves.

    pack    = preamble record* end
    record  = header (128 bytes) payload
    end     = a header of kind END, whose ``size`` is the number of records before it

A record's header says what its payload is, so that the catalog can be rebuilt from packs alone,
and carries a checksum of the payload and one of itself. Payloads are read without their headers:
the bytes that a plan counts are payload bytes, and those alone are read. docs/format.md draws the
layout.

A pack is written under a temporary name, synced, renamed, made read-only, and never changed.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergegit.encoding import FORMAT_VERSION
from mergegit.errors import Damaged

PREAMBLE: Final = struct.Struct("<8sII")
MAGIC: Final = b"MGITPACK"
HEADER: Final = struct.Struct("<4sBBBBBB2xQQ32s32s16s12x8s")
EMPTY_BYTES: Final = PREAMBLE.size + HEADER.size
"""Bytes of a pack that are not its records'."""
RECORD_MAGIC: Final = b"MGRC"
NO_ID: Final = bytes(32)


class Kind(enum.IntEnum):
    """What a record holds."""

    SEGMENT = 1
    OBJECT = 2
    STATISTICS = 3
    END = 255


class Encoding(enum.IntEnum):
    """How a block is stored."""

    RAW = 0
    DELTA = 1


class Compression(enum.IntEnum):
    """What was done to a payload before it was written."""

    NONE = 0
    ZSTD = 1


@dataclass(frozen=True, slots=True)
class Header:
    """A record's description of itself.

    ``key`` is the id of what it holds: of a block for a segment, of an object, of the tensor that
    statistics are about. ``base`` is the id of the block or tensor that it is relative to, or
    ``NO_ID``. ``layer`` of ``layers`` is the segment's place in its block's encoding. ``length``
    is the payload as stored and ``size`` as it is after decompression, in bytes.
    """

    kind: Kind
    key: bytes
    length: int
    size: int
    base: bytes = NO_ID
    encoding: Encoding = Encoding.RAW
    layer: int = 0
    layers: int = 1
    dtype: int = 0
    compression: Compression = Compression.NONE
    checksum: bytes = bytes(16)

    def pack(self) -> bytes:
        data = HEADER.pack(
            RECORD_MAGIC,
            self.kind,
            self.encoding,
            self.layer,
            self.layers,
            self.dtype,
            self.compression,
            self.length,
            self.size,
            self.key,
            self.base,
            self.checksum,
            bytes(8),
        )
        return data[:-8] + blake3(data[:-8]).digest(8)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """Raises ``ValueError`` where ``data`` is not a sound header."""
        if len(data) != HEADER.size or data[-8:] != blake3(data[:-8]).digest(8):
            raise ValueError("checksum of a record's header")
        (
            magic,
            kind,
            encoding,
            layer,
            layers,
            dtype,
            compression,
            length,
            size,
            key,
            base,
            check,
            _,
        ) = HEADER.unpack(data)
        if magic != RECORD_MAGIC:
            raise ValueError("magic of a record")
        if layer >= layers:
            raise ValueError(f"layer {layer} of {layers}")
        return cls(
            kind=Kind(kind),
            key=key,
            length=length,
            size=size,
            base=base,
            encoding=Encoding(encoding),
            layer=layer,
            layers=layers,
            dtype=dtype,
            compression=Compression(compression),
            checksum=check,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer of a block as it is stored; ``size`` is its length before compression."""

    payload: bytes | memoryview
    size: int
    compression: Compression


def checksum(payload: bytes | memoryview) -> bytes:
    """The checksum of a stored payload, 16 bytes."""
    return blake3(payload).digest(16)


class PackWriter:
    """Writes one pack. ``finish`` makes it durable; until then it is a temporary file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._records = 0
        self._names = blake3()
        self.length = 0
        try:
            self._write(PREAMBLE.pack(MAGIC, FORMAT_VERSION, 0))
        except BaseException:
            self.close()
            raise

    def append(self, header: Header, payload: bytes | memoryview) -> int:
        """Append a record; returns the offset of its payload."""
        packed = header.pack()
        self._write(packed, payload)
        self._names.update(packed)
        self._records += 1
        return self.length - header.length

    def finish(self) -> str:
        """Write the end, sync, make read-only; returns the name that the pack should have.

        The name is a hash of the records' headers, and so of their contents: the same pack
        written twice has one name.
        """
        name = self._names.hexdigest(16)
        self._write(Header(Kind.END, bytes.fromhex(name).ljust(32, b"\0"), 0, self._records).pack())
        os.fchmod(self._fd, 0o444)
        os.fsync(self._fd)
        self.close()
        return name

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, *parts: bytes | memoryview) -> None:
        pending = [memoryview(part).cast("B") for part in parts if len(part)]
        while pending:
            written = os.writev(self._fd, pending)
            self.length += written
            while pending and written >= len(pending[0]):
                written -= len(pending.pop(0))
            if written:
                pending[0] = pending[0][written:]


def read_preamble(fd: int, name: str) -> None:
    """Check that an open file is a pack of a version known here. Raises ``Damaged``."""
    data = os.pread(fd, PREAMBLE.size, 0)
    magic, version, reserved = PREAMBLE.unpack(data.ljust(PREAMBLE.size, b"\0"))
    if magic != MAGIC or version == 0 or (version == FORMAT_VERSION and reserved):
        raise Damaged(f"pack {name} does not begin like a pack", hint="run `mergegit fsck`")
    if version > FORMAT_VERSION:
        raise Damaged(
            f"pack {name} has format version {version}; this mergegit knows {FORMAT_VERSION}",
            hint="upgrade mergegit",
        )


def scan(path: Path) -> Iterator[tuple[Header, int]]:
    """Every record of a finished pack with the offset of its payload, the end left out.

    Reads headers only. Raises ``Damaged`` at the first header that is not sound, or where the
    pack ends without its end record; what came before is then still good.
    """
    name = path.stem
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        read_preamble(fd, name)
        offset = PREAMBLE.size
        records = 0
        total = os.fstat(fd).st_size
        while True:
            data = os.pread(fd, HEADER.size, offset)
            try:
                header = Header.unpack(data)
                if offset + HEADER.size + header.length > total:
                    raise ValueError("a record longer than the pack")
                if header.kind is Kind.END and header.size != records:
                    raise ValueError("number of records")
                if header.kind is Kind.END and offset + HEADER.size != total:
                    raise ValueError("bytes after its end")
            except ValueError as error:
                raise Damaged(
                    f"pack {name} is damaged at byte {offset} ({error})",
                    hint="run `mergegit fsck` to see which commits need it",
                ) from error
            if header.kind is Kind.END:
                return
            yield header, offset + HEADER.size
            offset += HEADER.size + header.length
            records += 1
    finally:
        os.close(fd)
