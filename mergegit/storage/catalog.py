"""The catalog: an index in LMDB of what lies where in the packs.

It holds no truth. Everything in it comes from packs, and ``mergegit fsck --rebuild-catalog`` makes
it again from them. Keys and values are small and of fixed form; blocks' bytes are never in it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb

from mergegit.errors import UnusableRepository
from mergegit.objects import ID_BYTES
from mergegit.storage.location import no_space, sync_directory
from mergegit.storage.pack import NO_ID, Compression, Encoding, Header, Kind

MAP_BYTES: Final = 1 << 40
"""Address space reserved once. The file grows with its contents alone."""

_FULL_BYTES: Final = 1 << 18
"""With less free space than this, an error of LMDB is taken for a full disk: of a write that was
cut short it does not tell."""

CHECK_BYTES: Final = 8
"""Bytes of a payload's checksum that the catalog keeps."""

MAX_RESULTS: Final = 1 << 21
"""Results of merges that are remembered, at about 100 bytes each; with more, all are forgotten."""

_PLACE = struct.Struct("<IQIIB3x8s")
_FORM = struct.Struct("<BBBx32s")
_PACK = struct.Struct("<Q16s")
_NUMBER = struct.Struct(">I")
_LAST_PACK: Final = b"last-pack"


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


class _Environments:
    """The LMDB environments that this process has open, each with its number of users.

    LMDB allows an environment to be open once in a process; repositories may be open any number
    of times. What a fork inherits does not count: a child opens its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, str], tuple[lmdb.Environment, int]] = {}

    def open(self, path: Path, read_only: bool) -> lmdb.Environment:
        with self._lock:
            key = (os.getpid(), os.path.realpath(path))
            known = self._open.get(key)
            if known is None:
                known = _open(path, read_only), 0
            self._open[key] = known[0], known[1] + 1
            return known[0]

    def close(self, path: Path) -> None:
        with self._lock:
            key = (os.getpid(), os.path.realpath(path))
            known = self._open.pop(key, None)
            if known is None:
                return
            if known[1] > 1:
                self._open[key] = known[0], known[1] - 1
            else:
                known[0].close()


_environments = _Environments()


def _open(path: Path, read_only: bool) -> lmdb.Environment:
    """Open an environment, which is made if it is not there, one process at a time.

    The first process that opens an environment sets up what all share, which others wait for in
    ``lmdb.open``. If it dies meanwhile they go on with what is not set up, and the next to write
    takes an older state for the newest. So they wait here.
    """
    if not read_only and not path.exists():
        path.mkdir(parents=True, exist_ok=True)
    with _opening(path):
        if not read_only:
            _create(path)
        return lmdb.open(
            os.fspath(path),
            map_size=MAP_BYTES,
            max_dbs=8,
            max_readers=512,
            readonly=read_only,
            create=not read_only,
            lock=True,
        )


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Holds the lock of a directory, if it is one; the kernel frees it when its holder dies."""
    if not path.is_dir():
        yield  # LMDB says what is wrong
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _create(path: Path) -> None:
    """Make an empty environment, if there is none, so that it is there whole or not at all.

    LMDB writes the beginning of its file in place, and would not know it again if that was cut.
    """
    file, fresh = path / "data.mdb", path / "data.mdb.new"
    if file.exists() or not path.is_dir():
        return
    fresh.unlink(missing_ok=True)
    lmdb.open(os.fspath(fresh), subdir=False, lock=False).close()
    _sync_file(fresh)
    os.rename(fresh, file)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Catalog:
    """The open index of one repository."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._pid = os.getpid()
        self._path = path
        self._closed = False
        with self._explain_errors():
            self._env = _environments.open(path, read_only)
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

    def _open_results(self, read_only: bool) -> lmdb._Database | None:
        """The table of results; a repository that was never written since there is one has none."""
        try:
            return self._env.open_db(b"results", create=not read_only)
        except lmdb.NotFoundError:
            return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _environments.close(self._path)

    def _fill_up(self) -> None:
        """Make the file as long as its map says, so that what was cut off reads as damaged.

        Beyond the end of a mapped file the kernel ends the process. The transaction keeps other
        processes from making the file longer meanwhile.
        """
        if self._missing_bytes() > 0:
            with self._env.begin(write=True):
                missing = self._missing_bytes()
                if missing > 0:
                    file = self._path / "data.mdb"
                    os.truncate(file, file.stat().st_size + missing)

    def _missing_bytes(self) -> int:
        length: int = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        return length - (self._path / "data.mdb").stat().st_size

    @contextmanager
    def _read(self) -> Iterator[lmdb.Transaction]:
        with self._begin(write=False) as txn:
            yield txn

    @contextmanager
    def _begin(self, *, write: bool) -> Iterator[lmdb.Transaction]:
        if os.getpid() != self._pid:
            raise RuntimeError("a Repository can't be used across a fork; open it again")
        with self._explain_errors(), self._env.begin(write=write) as txn:
            yield txn

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
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

    # -- reading ---------------------------------------------------------------------------------

    def pack(self, number: int) -> PackFile | None:
        with self._read() as txn:
            value = txn.get(_NUMBER.pack(number), db=self._packs)
        return _pack_file(_bytes(value)) if value else None

    def packs(self) -> dict[int, PackFile]:
        with self._read() as txn:
            rows = list(txn.cursor(self._packs))
        return {_NUMBER.unpack(key)[0]: _pack_file(_bytes(value)) for key, value in rows}

    def forms(self, block: bytes) -> list[StoredForm]:
        """The complete forms in which a block is stored; empty where there is none."""
        return self.forms_of([block]).get(block, [])

    def forms_of(self, blocks: Iterable[bytes]) -> dict[bytes, list[StoredForm]]:
        """``forms`` of many blocks in one transaction; blocks that are not stored are left out."""
        with self._read() as txn:
            found = txn.cursor(self._blocks).getmulti(sorted(set(blocks)))
        stored = {
            bytes(key): [form for form in _unpack_forms(_bytes(value)) if form.is_complete]
            for key, value in found
        }
        return {block: forms for block, forms in stored.items() if forms}

    def object(self, object_id: bytes) -> Place | None:
        with self._read() as txn:
            value = txn.get(object_id, db=self._objects)
        return _unpack_place(_bytes(value)) if value else None

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
            value = txn.get(tensor + base, db=self._statistics)
        return _unpack_place(_bytes(value)) if value else None

    def blocks(self) -> Iterator[tuple[bytes, list[StoredForm]]]:
        """Every block, in the order of ids. Holds a transaction open: for checks alone."""
        with self._read() as txn:
            for key, value in txn.cursor(self._blocks):
                yield bytes(key), _unpack_forms(_bytes(value))

    def objects(self) -> Iterator[tuple[bytes, Place]]:
        """Every object, in the order of ids."""
        with self._read() as txn:
            for key, value in txn.cursor(self._objects):
                yield bytes(key), _unpack_place(_bytes(value))

    def statistics_places(self) -> Iterator[tuple[bytes, bytes, Place]]:
        """The place of every statistics: tensor, base tensor, place."""
        with self._read() as txn:
            for key, value in txn.cursor(self._statistics):
                yield bytes(key[:ID_BYTES]), bytes(key[ID_BYTES:]), _unpack_place(_bytes(value))

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
                value = txn.get(key, db=self._results)
                if value is not None:
                    found[key] = _bytes(value)
        return found

    def forget_results(self) -> int:
        """Drop the results that are stored no more; returns how many there were."""
        if self._results is None:
            return 0
        with self._begin(write=True) as txn:
            stale = [
                bytes(key)
                for key, value in txn.cursor(self._results)
                if txn.get(value, db=self._blocks) is None
                and txn.get(value, db=self._objects) is None
            ]
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
                            txn.put(header.key, _pack_place(place), db=self._objects)
                        case Kind.STATISTICS:
                            key = header.key + header.base
                            txn.put(key, _pack_place(place), db=self._statistics)
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
                    txn.put(key, value, db=self._results)

    def _drop_pack(self, txn: lmdb.Transaction, number: int, headers: Iterable[Header]) -> None:
        """Forget a pack: what lies in it, and every form that has a layer in it."""
        for header in headers:
            if header.kind is not Kind.SEGMENT:
                self._drop_place(txn, number, header)
                continue
            value = txn.get(header.key, db=self._blocks)
            if value is None:
                continue
            forms = [
                form
                for form in _unpack_forms(_bytes(value))
                if all(place.pack != number for place in form.places)
            ]
            if forms:
                txn.put(header.key, b"".join(map(_pack_form, forms)), db=self._blocks)
            else:
                txn.delete(header.key, db=self._blocks)
        key = _NUMBER.pack(number)
        known = txn.get(key, db=self._packs)
        if known is not None:
            txn.delete(_pack_file(_bytes(known)).name.encode(), db=self._numbers)
            txn.delete(key, db=self._packs)

    def _drop_place(self, txn: lmdb.Transaction, number: int, header: Header) -> None:
        """Forget an object or statistics, if they have no place in another pack."""
        is_object = header.kind is Kind.OBJECT
        key = header.key if is_object else header.key + header.base
        table = self._objects if is_object else self._statistics
        value = txn.get(key, db=table)
        if value is not None and _unpack_place(_bytes(value)).pack == number:
            txn.delete(key, db=table)

    def _enter_pack(self, txn: lmdb.Transaction, pack: PackFile) -> int:
        """The number of a pack: its own where it is known, else one that no pack ever had.

        Readers in other processes hold packs open by their numbers.
        """
        name = pack.name.encode()
        known = txn.get(name, db=self._numbers)
        number: int
        if known is not None:
            (number,) = _NUMBER.unpack(known)
            return number
        cursor = txn.cursor(self._packs)
        last = txn.get(_LAST_PACK, db=self._meta) or (cursor.key() if cursor.last() else None)
        number = _NUMBER.unpack(last)[0] + 1 if last else 1
        key = _NUMBER.pack(number)
        txn.put(_LAST_PACK, key, db=self._meta)
        txn.put(name, key, db=self._numbers)
        txn.put(key, _PACK.pack(pack.length, bytes.fromhex(pack.name)), db=self._packs)
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
        value = txn.get(block, db=self._blocks)
        forms = _unpack_forms(_bytes(value)) if value else []
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
        txn.put(block, b"".join(map(_pack_form, [*others, new])), db=self._blocks)


def _bytes(value: bytes | memoryview) -> bytes:
    """What LMDB hands out, as bytes: it gives memory views to those who ask for them alone."""
    return bytes(value)


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
