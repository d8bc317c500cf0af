"""The store: blocks and objects by id, and the one way to add to them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Final, TypeVar

from mergegit.dtypes import DTYPES
from mergegit.encoding import Object, decode, encode, hash_block, hash_object
from mergegit.errors import Damaged, NoSpace
from mergegit.objects import (
    BlockId,
    Commit,
    CommitId,
    Manifest,
    ManifestId,
    ObjectId,
    Plan,
    PlanId,
    Tensor,
    TensorId,
)
from mergegit.storage.catalog import Catalog, PackFile, StoredForm
from mergegit.storage.location import Location, sync_directory
from mergegit.storage.pack import Encoding, Header, Kind, PackWriter, checksum
from mergegit.storage.reader import ByteCount, PackReader, compress
from mergegit.storage.refs import Refs, RefUpdate
from mergegit.storage.workspace import Workspace

_T = TypeVar("_T", bound=Object)

PACK_BYTES: Final = 4 << 30
"""A pack of blocks is closed and the next begun when it has reached this length."""


class DamagedBlock(Damaged):
    """A block whose bytes are not what its id says."""

    def __init__(self, block: BlockId, pack: str) -> None:
        super().__init__(
            f"block {block.hex()[:12]} in pack {pack} is damaged: its bytes do not match its id",
            hint="run `mergegit fsck` to see which commits are affected",
        )
        self.block = block


class Store:
    """An open store. Reading needs no lock; writing goes through ``transaction``."""

    def __init__(self, location: Location, *, read_only: bool = False) -> None:
        self.location = location
        self.catalog = Catalog(location.catalog, read_only=read_only)
        self.reader = PackReader(location, self.catalog)
        self.refs = Refs(location)
        self._decoded = lru_cache(maxsize=8192)(self._read_object)

    def close(self) -> None:
        self._decoded.cache_clear()
        self.reader.close()
        self.catalog.close()

    # -- objects ---------------------------------------------------------------------------------

    def has_object(self, object_id: bytes) -> bool:
        return self.catalog.object(object_id) is not None

    def object(self, object_id: bytes) -> Object:
        """The object with an id, whatever its kind. Raises ``Damaged`` where it is not there."""
        return self._decoded(object_id)

    def tensor(self, tensor_id: TensorId) -> Tensor:
        return self._expect(tensor_id, Tensor)

    def manifest(self, manifest_id: ManifestId) -> Manifest:
        return self._expect(manifest_id, Manifest)

    def commit(self, commit_id: CommitId) -> Commit:
        return self._expect(commit_id, Commit)

    def plan(self, plan_id: PlanId) -> Plan:
        return self._expect(plan_id, Plan)

    def object_bytes(self, object_id: bytes) -> bytes:
        """The canonical bytes of an object, checked against its id."""
        place = self.catalog.object(object_id)
        if place is None:
            raise Damaged(
                f"object {object_id.hex()[:12]} is missing from the store",
                hint="run `mergegit fsck`; if packs were restored by hand, "
                "`mergegit fsck --rebuild-catalog`",
            )
        data = self.reader.read_decompressed(place)
        if hash_object(data) != object_id:
            raise Damaged(
                f"object {object_id.hex()[:12]} in pack {self.reader.pack_name(place)} is damaged",
                hint="run `mergegit fsck` to see which commits are affected",
            )
        return data

    def _read_object(self, object_id: bytes) -> Object:
        return decode(self.object_bytes(object_id))

    def _expect(self, object_id: ObjectId, kind: type[_T]) -> _T:
        value = self.object(object_id)
        if not isinstance(value, kind):
            raise Damaged(
                f"object {object_id.hex()[:12]} is a {type(value).__name__.lower()}, "
                f"not a {kind.__name__.lower()}",
                hint="run `mergegit fsck`",
            )
        return value

    # -- blocks ----------------------------------------------------------------------------------

    def forms(self, blocks: Iterable[BlockId]) -> dict[BlockId, StoredForm]:
        """The form in which each block is read. Raises ``Damaged`` where one is missing."""
        wanted = set(blocks)
        found = self.catalog.forms_of(wanted)
        missing = wanted - found.keys()
        if missing:
            raise Damaged(
                f"block {min(missing).hex()[:12]} is missing from the store",
                hint="run `mergegit fsck` to see which commits are affected",
            )
        return {BlockId(block): forms[0] for block, forms in found.items()}

    def read_block(
        self, block: BlockId, form: StoredForm | None = None, count: ByteCount | None = None
    ) -> bytes:
        """The raw bytes of a block, checked against its id."""
        form = form or self.forms([block])[block]
        place = form.places[0]
        data = self.reader.read_decompressed(place, count)
        if hash_block(data) != block:
            raise DamagedBlock(block, self.reader.pack_name(place))
        return data

    def read_statistics(self, tensor: TensorId, base: bytes) -> bytes | None:
        """The payload of the statistics of a tensor against a base tensor, if they were taken."""
        place = self.catalog.statistics(tensor, base)
        if place is None:
            return None
        return self.reader.read_record(place, Kind.STATISTICS, tensor, base)

    # -- writing ---------------------------------------------------------------------------------

    def transaction(self) -> Transaction:
        return Transaction(self)


@dataclass(slots=True)
class _OpenPack:
    writer: PackWriter
    records: list[tuple[Header, int]]


class Transaction:
    """What one command adds to the store: all of it or nothing.

    Nothing is visible to others until ``publish``. Leaving the context without it drops
    everything.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._workspace = Workspace(store.location)
        self._blocks: _OpenPack | None = None
        self._objects: _OpenPack | None = None
        self._full: list[_OpenPack] = []
        self._new_blocks: set[bytes] = set()
        self._new_objects: set[bytes] = set()
        self.block_bytes = 0
        """Stored bytes of the blocks that were new."""

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pack in (self._blocks, self._objects, *self._full):
            if pack is not None:
                pack.writer.close()
        self._workspace.remove()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(
                f"no space left on the disk of {self._store.location.root}",
                hint="free some space and run the command again; nothing was changed",
            ) from error

    def write_block(self, block: BlockId, dtype: str, data: bytes | memoryview) -> bool:
        """Store a block whose id is known. Returns whether it was new to the store."""
        if block in self._new_blocks or self._store.catalog.forms_of([block]):
            return False
        self._new_blocks.add(block)
        pack = self._block_pack()
        header = Header(
            Kind.SEGMENT,
            block,
            length=len(data),
            size=len(data),
            encoding=Encoding.RAW,
            dtype=DTYPES[dtype].code,
            checksum=checksum(data),
        )
        pack.records.append((header, pack.writer.append(header, data)))
        self.block_bytes += len(data)
        return True

    def write_object(self, value: Object) -> bytes:
        """Store an object, if it is new. Returns its id."""
        data = encode(value)
        object_id = hash_object(data)
        if object_id not in self._new_objects and not self._store.has_object(object_id):
            self._new_objects.add(object_id)
            self._append_object(Kind.OBJECT, object_id, data)
        return object_id

    def write_tensor(self, tensor: Tensor) -> TensorId:
        return TensorId(self.write_object(tensor))

    def write_manifest(self, manifest: Manifest) -> ManifestId:
        return ManifestId(self.write_object(manifest))

    def write_plan(self, plan: Plan) -> PlanId:
        return PlanId(self.write_object(plan))

    def write_commit(self, commit: Commit) -> CommitId:
        return CommitId(self.write_object(commit))

    def write_statistics(self, tensor: TensorId, base: bytes, payload: bytes) -> None:
        """Store statistics of a tensor against a base tensor, if there are none yet."""
        if self._store.catalog.statistics(tensor, base) is None:
            self._append_object(Kind.STATISTICS, tensor, payload, base)

    def publish(self, update: RefUpdate | None = None) -> None:
        """Make everything durable and visible, then move the ref: the point of publication.

        The order is that of docs/format.md: packs, catalog, ref. Raises ``RefConflict`` where the
        ref moved meanwhile; what was written stays without a name then.
        """
        additions: dict[PackFile, list[tuple[Header, int]]] = {}
        packs = self._store.location.packs
        for pack in [*self._full, *filter(None, (self._blocks, self._objects))]:
            name = pack.writer.finish()
            os.rename(pack.writer.path, packs / f"{name}.pack")
            additions[PackFile(name, pack.writer.length)] = pack.records
        if additions:
            sync_directory(packs)
            self._store.catalog.enter(additions)
        if update is not None:
            self._store.refs.update(update)

    def _append_object(
        self, kind: Kind, key: bytes, data: bytes, base: bytes | None = None
    ) -> None:
        if self._objects is None:
            self._objects = self._open("objects")
        payload, compression = compress(data)
        header = Header(
            kind,
            key,
            length=len(payload),
            size=len(data),
            base=base or bytes(32),
            compression=compression,
            checksum=checksum(payload),
        )
        pack = self._objects
        pack.records.append((header, pack.writer.append(header, payload)))

    def _block_pack(self) -> _OpenPack:
        if self._blocks is not None and self._blocks.writer.length >= PACK_BYTES:
            self._full.append(self._blocks)
            self._blocks = None
        if self._blocks is None:
            self._blocks = self._open(f"blocks-{len(self._full)}")
        return self._blocks

    def _open(self, name: str) -> _OpenPack:
        return _OpenPack(PackWriter(self._workspace.path / f"{name}.pack"), [])


__all__ = ["ByteCount", "DamagedBlock", "Store", "Transaction"]
