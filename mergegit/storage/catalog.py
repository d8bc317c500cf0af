"""The catalog: an index in LMDB of what lies where in the packs.

It holds no truth. Everything in it comes from packs, and ``mergegit fsck --rebuild-catalog`` makes
it again from them. Keys and values are small and of fixed form; blocks' bytes are never in it.

A value is followed by a checksum of its key and itself, so that what is damaged, or stands under
another key than it was put under, is never taken for the truth. A catalog of before has none.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import lmdb
from blake3 import blake3

from mergegit.errors import UnusableRepository
from mergegit.objects import ID_BYTES
from mergegit.storage import pages
from mergegit.storage.environment import environments
from mergegit.storage.location import no_space, sync_directory
from mergegit.storage.pack import NO_ID, Compression, Encoding, Header, Kind

_FULL_BYTES: Final = 1 << 18
"""With less free space than this, an error of LMDB is taken for a full disk: of a write that was
cut short it does not tell."""

CHECK_BYTES: Final = 8
"""Bytes of a payload's checksum that the catalog keeps."""

_SEAL_BYTES: Final = 8
"""Bytes of the checksum that follows a value."""

_MAX_VALUE: Final = 1 << 18
"""No value is longer: a length beyond it is damage, and following it would leave the file."""

_SLACK: Final = 4 * _MAX_VALUE
"""Bytes that the file is longer than its contents, without taking any on disk: a damaged place or
length in its last pages leads there, and not beyond its end, where the kernel ends a process."""

_MAX_LOOKS: Final = 100
"""So often is a state of the file looked for that others replace meanwhile."""

_MAX_MISSING: Final = 1 << 30
"""A file that is so many bytes shorter than it says is damaged beyond use."""

MAX_RESULTS: Final = 1 << 21
"""Results of merges that are remembered, at about 100 bytes each; with more, all are forgotten."""

_PLACE = struct.Struct("<IQIIB3x8s")
_FORM = struct.Struct("<BBBx32s")
_PACK = struct.Struct("<Q16s")
_NUMBER = struct.Struct(">I")
_LAST_PACK: Final = b"last-pack"
_SEALED: Final = b"sealed"

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: pack number, offset, stored length, size when decompressed.

    ``check`` is the beginning of the payload's checksum, so that a payload can be checked without
    reading its header.
    """

    pack: int
    offset: int
    length: int
    size: int
    compression: Compression = Compression.NONE
    check: bytes = bytes(8)


_NOWHERE = Place(0, 0, 0, 0)
"""Stands for a layer that no known pack holds."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """One form in which a block is stored: its encoding and where each layer lies.

    ``base`` is the block that a delta is relative to, or ``NO_ID``; ``dtype`` the code of the
    element type; a raw block is one layer.
    """

    encoding: Encoding
    dtype: int
    places: tuple[Place, ...]
    base: bytes = NO_ID

    @property
    def is_complete(self) -> bool:
        """Whether every layer is there; layers lie in different packs."""
        return _NOWHERE not in self.places

    @property
    def nbytes(self) -> int:
        return sum(place.length for place in self.places)


@dataclass(frozen=True, slots=True)
class PackFile:
    """A pack that the catalog knows: its name and its length in bytes."""

    name: str
    length: int


class DamagedCatalog(UnusableRepository):
    """A catalog that does not hold what was put there."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"the catalog {path} is damaged: {what}",
            hint="make it anew from the packs with `mergegit fsck --rebuild-catalog`",
        )


class Catalog:
    """The open index of one repository."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._pid = os.getpid()
        self._path = path
        self._closed = False
        with self._explain_errors():
            self._env = environments.open(path, read_only)
            if not read_only:
                self._env.reader_check()
                self._fill_up()
            names = (b"packs", b"pack-numbers", b"blocks", b"objects", b"statistics", b"meta")
            (
                self._packs,
                self._numbers,
                self._blocks,
                self._objects,
                self._statistics,
                self._meta,
            ) = (self._env.open_db(name, create=not read_only) for name in names)
            self._results = self._open_results(read_only)
            self._sealed = self._find_seal(read_only)

    def _find_seal(self, read_only: bool) -> bool:
        """Whether values are followed by checksums: in every catalog that was made with them."""
        with self._env.begin() as txn:
            sealed = txn.get(_SEALED, db=self._meta) is not None
            is_new = not txn.stat(self._packs)["entries"]
        if not sealed and is_new and not read_only:
            with self._env.begin(write=True) as txn:
                sealed = not txn.stat(self._packs)["entries"]
                if sealed:
                    txn.put(_SEALED, b"1", db=self._meta)
        return sealed

    def _open_results(self, read_only: bool) -> lmdb._Database | None:
        """The table of results; a repository that was never written since there is one has none."""
        try:
            return self._env.open_db(b"results", create=not read_only)
        except lmdb.NotFoundError:
            return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            environments.close(self._path)

    def _fill_up(self) -> None:
        """Make the file as long as its map says, so that what was cut off reads as damaged.

        Beyond the end of a mapped file the kernel ends the process. The transaction keeps other
        processes from making the file longer meanwhile.
        """
        if self._missing_bytes() > _SLACK // 2:
            with self._env.begin(write=True):
                missing = self._missing_bytes()
                if missing > 0:
                    file = self._path / "data.mdb"
                    os.truncate(file, file.stat().st_size + missing)

    def _missing_bytes(self) -> int:
        length: int = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"] + _SLACK
        missing = length - (self._path / "data.mdb").stat().st_size
        if missing > _MAX_MISSING:
            raise DamagedCatalog(self._path, f"its file says that it is {length:,} bytes long")
        return missing

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        with self._begin(write=False) as txn:
            yield txn

    @contextmanager
    def _begin(self, *, write: bool) -> Iterator[lmdb.Transaction]:
        if os.getpid() != self._pid:
            raise RuntimeError("a Repository can't be used across a fork; open it again")
        with self._explain_errors(), self._env.begin(write=write, buffers=True) as txn:
            yield txn

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except pages.Unsound as error:
            raise DamagedCatalog(self._path, str(error)) from error
        except lmdb.Error as error:
            lock = self._path / "lock.mdb"
            if lock.exists() and not os.access(lock, os.R_OK | os.W_OK):
                raise UnusableRepository(
                    f"no permission to write to {lock}, where readers mark what they read",
                    hint="ask the owner for permission, or work on a copy of the repository",
                ) from error
            if os.strerror(errno.EDQUOT) in str(error):  # LMDB hands on words, and no number
                raise no_space(self._path.parent, errno.EDQUOT) from error
            status = os.statvfs(self._path.parent)
            is_full = status.f_bavail * status.f_frsize < _FULL_BYTES
            if is_full or isinstance(error, lmdb.DiskError):
                raise no_space(self._path.parent) from error
            raise UnusableRepository(
                f"the catalog {self._path} can't be used ({error})",
                hint="LMDB needs a local file system with free space and a process that may "
                "reserve address space; if the file is damaged, delete the directory and run "
                "`mergegit fsck --rebuild-catalog`",
            ) from error

    # -- values ----------------------------------------------------------------------------------

    def _put(self, txn: lmdb.Transaction, table: lmdb._Database, key: bytes, value: bytes) -> None:
        txn.put(key, value + _seal(key, value) if self._sealed else value, db=table)

    def _take(
        self, key: bytes | memoryview, value: bytes | memoryview, unpack: Callable[[bytes], _Value]
    ) -> _Value:
        """What was put under a key. Raises ``DamagedCatalog``."""
        # LMDB hands out views, and their lengths are not beyond doubt.
        if len(value) <= _MAX_VALUE:
            data = bytes(value)
            body = data[:-_SEAL_BYTES] if self._sealed else data
            if not self._sealed or data[-_SEAL_BYTES:] == _seal(bytes(key), body):
                try:
                    return unpack(body)
                except (struct.error, ValueError):
                    pass  # nor are the values of a catalog without checksums
        raise DamagedCatalog(self._path, f"entry {bytes(key)[:6].hex()} can't be read")

    def _find(
        self,
        txn: lmdb.Transaction,
        table: lmdb._Database,
        key: bytes,
        unpack: Callable[[bytes], _Value],
    ) -> _Value | None:
        value = txn.get(key, db=table)
        return None if value is None else self._take(key, value, unpack)

    @property
    def is_sealed(self) -> bool:
        """Whether values are followed by checksums."""
        return self._sealed

    def damage(self) -> str | None:
        """What is wrong with the pages of its file; None where they are sound."""
        for _ in range(_MAX_LOOKS):
            with self._read() as txn:
                try:
                    if pages.check(self._path / "data.mdb", txn.id()):
                        return None
                except pages.Unsound as error:
                    return str(error)
        return None

    # -- reading ---------------------------------------------------------------------------------

    def pack(self, number: int) -> PackFile | None:
        with self._read() as txn:
            return self._find(txn, self._packs, _NUMBER.pack(number), _pack_file)

    def packs(self) -> dict[int, PackFile]:
        with self._read() as txn:
            found = [(bytes(k), self._take(k, v, _pack_file)) for k, v in txn.cursor(self._packs)]
        return {int.from_bytes(key, "big"): file for key, file in found}

    def forms(self, block: bytes) -> list[StoredForm]:
        """The complete forms in which a block is stored; empty where there is none."""
        return self.forms_of([block]).get(block, [])

    def forms_of(
        self, blocks: Iterable[bytes], *, complete: bool = True
    ) -> dict[bytes, list[StoredForm]]:
        """``forms`` of many blocks in one transaction; blocks that are not stored are left out.

        Forms of which layers are missing are left out unless ``complete`` is false.
        """
        with self._read() as txn:
            found = txn.cursor(self._blocks).getmulti(sorted(set(blocks)))
            stored = {
                bytes(key): [
                    form
                    for form in self._take(key, value, _unpack_forms)
                    if form.is_complete or not complete
                ]
                for key, value in found
            }
        return {block: forms for block, forms in stored.items() if forms}

    def object(self, object_id: bytes) -> Place | None:
        with self._read() as txn:
            return self._find(txn, self._objects, object_id, _unpack_place)

    def objects_with_prefix(self, low: bytes, high: bytes) -> list[bytes]:
        """Ids of objects from ``low`` to ``high``, both included."""
        with self._read() as txn:
            cursor = txn.cursor(self._objects)
            found = []
            if cursor.set_range(low):
                for key in map(bytes, cursor.iternext(values=False)):
                    if key > high:
                        break
                    found.append(key)
        return found

    def statistics(self, tensor: bytes, base: bytes) -> Place | None:
        with self._read() as txn:
            return self._find(txn, self._statistics, tensor + base, _unpack_place)

    def measured_against(self, tensor: bytes) -> list[bytes]:
        """The base tensors beside which statistics of a tensor were taken."""
        with self._read() as txn:
            cursor = txn.cursor(self._statistics)
            found = []
            if cursor.set_range(tensor):
                for key in map(bytes, cursor.iternext(values=False)):
                    if not key.startswith(tensor):
                        break
                    found.append(key[ID_BYTES:])
        return found

    def blocks(self) -> Iterator[tuple[bytes, list[StoredForm]]]:
        """Every block, in the order of ids. Holds a transaction open: for checks alone."""
        with self._read() as txn:
            for key, value in txn.cursor(self._blocks):
                yield bytes(key), self._take(key, value, _unpack_forms)

    def objects(self) -> Iterator[tuple[bytes, Place]]:
        """Every object, in the order of ids."""
        with self._read() as txn:
            for key, value in txn.cursor(self._objects):
                yield bytes(key), self._take(key, value, _unpack_place)

    def statistics_places(self) -> Iterator[tuple[bytes, bytes, Place]]:
        """The place of every statistics: tensor, base tensor, place."""
        with self._read() as txn:
            for key, value in txn.cursor(self._statistics):
                place = self._take(key, value, _unpack_place)
                yield bytes(key[:ID_BYTES]), bytes(key[ID_BYTES:]), place

    def all_statistics(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair of a tensor and a base tensor that statistics were taken of."""
        with self._read() as txn:
            for key in txn.cursor(self._statistics).iternext(values=False):
                yield bytes(key[:ID_BYTES]), bytes(key[ID_BYTES:])

    def results(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The ids of what merges made before, by keys of all that went into it."""
        found: dict[bytes, bytes] = {}
        if self._results is None:
            return found
        with self._read() as txn:
            for key in keys:
                value = self._find(txn, self._results, key, bytes)
                if value is not None:
                    found[key] = value
        return found

    def forget_results(self) -> int:
        """Drop the results that are stored no more; returns how many there were."""
        if self._results is None:
            return 0
        with self._read() as txn:
            made = [(bytes(key), self._take(key, v, bytes)) for key, v in txn.cursor(self._results)]
            stale = [
                key
                for key, value in made
                if txn.get(value, db=self._blocks) is None
                and txn.get(value, db=self._objects) is None
            ]
        if stale:
            with self._begin(write=True) as txn:
                for key in stale:
                    txn.delete(key, db=self._results)
        return len(stale)

    def counts(self) -> dict[str, int]:
        """Number of packs, blocks, objects and statistics."""
        with self._read() as txn:
            return {
                "packs": txn.stat(self._packs)["entries"],
                "blocks": txn.stat(self._blocks)["entries"],
                "objects": txn.stat(self._objects)["entries"],
                "statistics": txn.stat(self._statistics)["entries"],
            }

    # -- writing ---------------------------------------------------------------------------------

    def enter(
        self,
        packs: Mapping[PackFile, Iterable[tuple[Header, int]]],
        drop: Mapping[int, Iterable[Header]] | None = None,
        results: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Enter packs with all their records, in one durable transaction.

        Records are headers with the offsets of their payloads. A pack that is known already keeps
        its number; forms that lost a layer to another pack become whole again. ``drop`` names packs
        by number, with all their records, that are forgotten in the same transaction. ``results``
        are ids of what a merge made, by keys of what went into it.
        """
        if packs and not self.counts()["packs"]:
            # From here on the file is worth something: so must be its name.
            sync_directory(self._path)
            sync_directory(self._path.parent)
        with self._begin(write=True) as txn:
            layers: dict[tuple[bytes, bytes, Encoding], list[tuple[Header, Place]]] = {}
            for pack, records in packs.items():
                number = self._enter_pack(txn, pack)
                for header, offset in records:
                    place = place_of(header, number, offset)
                    match header.kind:
                        case Kind.OBJECT:
                            self._put(txn, self._objects, header.key, _pack_place(place))
                        case Kind.STATISTICS:
                            key = header.key + header.base
                            self._put(txn, self._statistics, key, _pack_place(place))
                        case Kind.SEGMENT:
                            form = (header.key, header.base, header.encoding)
                            layers.setdefault(form, []).append((header, place))
                        case Kind.END:
                            pass
            for (block, base, encoding), places in layers.items():
                self._enter_layers(txn, block, base, encoding, places, set(drop or ()))
            for number, headers in (drop or {}).items():
                self._drop_pack(txn, number, headers)
            if results and self._results is not None:
                if txn.stat(self._results)["entries"] + len(results) > MAX_RESULTS:
                    txn.drop(self._results, delete=False)
                for key, value in results.items():
                    self._put(txn, self._results, key, value)

    def _drop_pack(self, txn: lmdb.Transaction, number: int, headers: Iterable[Header]) -> None:
        """Forget a pack: what lies in it, and every form that has a layer in it."""
        for header in headers:
            if header.kind is not Kind.SEGMENT:
                self._drop_place(txn, number, header)
                continue
            known = self._find(txn, self._blocks, header.key, _unpack_forms)
            if known is None:
                continue
            forms = [f for f in known if all(place.pack != number for place in f.places)]
            if forms:
                self._put(txn, self._blocks, header.key, b"".join(map(_pack_form, forms)))
            else:
                txn.delete(header.key, db=self._blocks)
        key = _NUMBER.pack(number)
        file = self._find(txn, self._packs, key, _pack_file)
        if file is not None:
            txn.delete(file.name.encode(), db=self._numbers)
            txn.delete(key, db=self._packs)

    def _drop_place(self, txn: lmdb.Transaction, number: int, header: Header) -> None:
        """Forget an object or statistics, if they have no place in another pack."""
        is_object = header.kind is Kind.OBJECT
        key = header.key if is_object else header.key + header.base
        table = self._objects if is_object else self._statistics
        place = self._find(txn, table, key, _unpack_place)
        if place is not None and place.pack == number:
            txn.delete(key, db=table)

    def _enter_pack(self, txn: lmdb.Transaction, pack: PackFile) -> int:
        """The number of a pack: its own where it is known, else one that no pack ever had.

        Readers in other processes hold packs open by their numbers.
        """
        name = pack.name.encode()
        known = self._find(txn, self._numbers, name, _unpack_number)
        if known is not None:
            return known
        last = self._find(txn, self._meta, _LAST_PACK, _unpack_number)
        cursor = txn.cursor(self._packs)
        if last is None and cursor.last():
            last = _unpack_number(bytes(cursor.key()))
        number = (last or 0) + 1
        key = _NUMBER.pack(number)
        self._put(txn, self._meta, _LAST_PACK, key)
        self._put(txn, self._numbers, name, key)
        self._put(txn, self._packs, key, _PACK.pack(pack.length, bytes.fromhex(pack.name)))
        return number

    def _enter_layers(
        self,
        txn: lmdb.Transaction,
        block: bytes,
        base: bytes,
        encoding: Encoding,
        layers: list[tuple[Header, Place]],
        leaving: set[int],
    ) -> None:
        forms = self._find(txn, self._blocks, block, _unpack_forms) or []
        same = [form for form in forms if (form.encoding, form.base) == (encoding, base)]
        stays = same and all(place.pack not in leaving for place in same[0].places)
        if stays and same[0].is_complete:
            return
        count = layers[0][0].layers
        places = list(same[0].places) if same else [_NOWHERE] * count
        for header, place in layers:
            places[header.layer] = place
        new = StoredForm(encoding, layers[0][0].dtype, tuple(places), base)
        others = [form for form in forms if form not in same]
        self._put(txn, self._blocks, block, b"".join(map(_pack_form, [*others, new])))


def _seal(key: bytes, value: bytes) -> bytes:
    """The checksum that follows a value."""
    return blake3(key + value).digest(_SEAL_BYTES)


def _unpack_number(value: bytes) -> int:
    number: int
    (number,) = _NUMBER.unpack(value)
    return number


def place_of(header: Header, pack: int, offset: int) -> Place:
    """The place of a record's payload, from its header."""
    check = header.checksum[:CHECK_BYTES]
    return Place(pack, offset, header.length, header.size, header.compression, check)


def _pack_place(place: Place) -> bytes:
    return _PLACE.pack(
        place.pack, place.offset, place.length, place.size, place.compression, place.check
    )


def _unpack_place(value: bytes, offset: int = 0) -> Place:
    pack, at, length, size, compression, check = _PLACE.unpack_from(value, offset)
    return Place(pack, at, length, size, Compression(compression), check)


def _pack_form(form: StoredForm) -> bytes:
    head = _FORM.pack(form.encoding, len(form.places), form.dtype, form.base)
    return head + b"".join(map(_pack_place, form.places))


def _unpack_forms(value: bytes) -> list[StoredForm]:
    forms = []
    offset = 0
    while offset < len(value):
        encoding, layers, dtype, base = _FORM.unpack_from(value, offset)
        offset += _FORM.size
        places = tuple(_unpack_place(value, offset + i * _PLACE.size) for i in range(layers))
        offset += layers * _PLACE.size
        forms.append(StoredForm(Encoding(encoding), dtype, places, base))
    return forms


def _pack_file(value: bytes) -> PackFile:
    length, name = _PACK.unpack(value)
    return PackFile(name.hex(), length)
