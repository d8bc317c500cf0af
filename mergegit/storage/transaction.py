"""The one way to add to a store."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final

from mergegit.dtypes import DTYPES
from mergegit.encoding import Object, encode, hash_object
from mergegit.objects import (
    BlockId,
    Commit,
    CommitId,
    Manifest,
    ManifestId,
    Plan,
    PlanId,
    Tensor,
    TensorId,
)
from mergegit.storage.catalog import PackFile
from mergegit.storage.location import no_space, sync_directory
from mergegit.storage.pack import NO_ID, Encoding, Header, Kind, PackWriter, checksum
from mergegit.storage.prepared import PreparedBlock, raw_block
from mergegit.storage.reader import compress
from mergegit.storage.refs import RefUpdate
from mergegit.storage.workspace import Workspace

if TYPE_CHECKING:
    from mergegit.storage.store import Store

PACK_BYTES: Final = 4 << 30
"""A pack is closed and the next begun when it has reached this length."""


@dataclass(slots=True)
class _OpenPack:
    writer: PackWriter
    records: list[tuple[Header, int]]


class Transaction:
    """What one command adds to the store: all of it or nothing.

    It shares the store's lease as long as it lives: what it found stored stays stored.
    Nothing is visible to others until ``publish``. Leaving the context without it drops
    everything. Each layer of blocks goes to a pack of its own, so that reading one layer of a
    whole expert is one sequential run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease = ExitStack()
        self._lease.enter_context(store.lease.shared())
        self._workspace = Workspace(store.location)
        self._open: dict[str, _OpenPack] = {}
        self._full: list[_OpenPack] = []
        self._new_blocks: set[bytes] = set()
        self._new_raw: set[bytes] = set()
        self._new_objects: set[bytes] = set()
        self._results: dict[bytes, bytes] = {}
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
        with self._lease:
            for pack in (*self._open.values(), *self._full):
                pack.writer.close()
            self._workspace.remove()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(self._store.location.root, error.errno) from error

    def write_block(self, prepared: PreparedBlock) -> bool:
        """Write a prepared block, unless it is stored or written already. Returns whether it was
        new."""
        if not prepared.segments or prepared.block in self._new_blocks:
            return False
        if prepared.base is not None and prepared.base_copy is not None:
            self.write_raw(prepared.base, prepared.dtype, prepared.base_copy)
        self._new_blocks.add(prepared.block)
        self._write_form(prepared)
        return True

    def write_raw(self, block: BlockId, dtype: str, data: bytes) -> None:
        """Make sure that a block is stored in its raw form, as a base's blocks are."""
        forms = self._store.catalog.forms_of([block]).get(block, [])
        if block in self._new_raw or any(form.encoding is Encoding.RAW for form in forms):
            return
        self._new_blocks.add(block)
        self._write_form(raw_block(block, dtype, data))

    def _write_form(self, prepared: PreparedBlock) -> None:
        raw = prepared.base is None
        if raw:
            self._new_raw.add(prepared.block)
        for layer, segment in enumerate(prepared.segments):
            pack = self._pack("raw" if raw else f"layer-{layer}")
            header = Header(
                Kind.SEGMENT,
                prepared.block,
                length=len(segment.payload),
                size=segment.size,
                base=prepared.base or NO_ID,
                encoding=Encoding.RAW if raw else Encoding.DELTA,
                layer=layer,
                layers=len(prepared.segments),
                dtype=DTYPES[prepared.dtype].code,
                compression=segment.compression,
                checksum=checksum(segment.payload),
            )
            pack.records.append((header, pack.writer.append(header, segment.payload)))
            self.block_bytes += len(segment.payload)

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
        pair = tensor + base
        if pair not in self._new_objects and self._store.catalog.statistics(tensor, base) is None:
            self._new_objects.add(pair)
            self._append_object(Kind.STATISTICS, tensor, payload, base)

    def remember(self, key: bytes, result: bytes) -> None:
        """Remember the id of what was made of all that ``key`` is a hash of."""
        self._results[key] = result

    def copy_record(self, header: Header, payload: bytes) -> None:
        """Copy a record out of a pack that will be dropped."""
        role = "raw" if header.encoding is Encoding.RAW else f"layer-{header.layer}"
        if header.kind is not Kind.SEGMENT:
            role = "objects"
        pack = self._pack(role)
        pack.records.append((header, pack.writer.append(header, payload)))

    def publish(
        self,
        update: RefUpdate | None = None,
        drop: Mapping[int, Sequence[Header]] | None = None,
        *,
        remove: bool = True,
    ) -> None:
        """Make everything durable and visible, then move the ref: the point of publication.

        The order is that of docs/format.md: packs, catalog, ref. ``drop`` names packs, with all
        their records, that what was written replaces: they leave the catalog with the entry of the
        new ones, and the disk thereafter, unless ``remove`` is false. Raises ``RefConflict`` where
        the ref moved meanwhile; what was written stays without a name then.
        """
        additions: dict[PackFile, list[tuple[Header, int]]] = {}
        packs = self._store.location.packs
        for pack in (*self._full, *self._open.values()):
            name = pack.writer.finish()
            os.rename(pack.writer.path, packs / f"{name}.pack")
            additions[PackFile(name, pack.writer.length)] = pack.records
        if additions:
            sync_directory(packs)
        files = {number: self._store.catalog.pack(number) for number in drop or ()}
        # A pack that was written just now, because it had been there with the same records, stays.
        leaving = {n: h for n, h in (drop or {}).items() if files[n] not in additions}
        if additions or leaving or self._results:
            self._store.catalog.enter(additions, leaving, self._results)
        if update is not None:
            self._store.refs.update(update, has_looked=True)
        for number in leaving if remove else ():
            file = files[number]
            if file is not None:
                (packs / f"{file.name}.pack").unlink(missing_ok=True)

    def _append_object(
        self, kind: Kind, key: bytes, data: bytes, base: bytes | None = None
    ) -> None:
        payload, compression = compress(data)
        header = Header(
            kind,
            key,
            length=len(payload),
            size=len(data),
            base=base or NO_ID,
            compression=compression,
            checksum=checksum(payload),
        )
        pack = self._pack("objects")
        pack.records.append((header, pack.writer.append(header, payload)))

    def _pack(self, role: str) -> _OpenPack:
        """The open pack for records of one role; a full one is closed and the next begun."""
        pack = self._open.get(role)
        if pack is not None and pack.writer.length >= PACK_BYTES:
            self._full.append(self._open.pop(role))
            pack = None
        if pack is None:
            path = self._workspace.path / f"{role}-{len(self._full)}.pack"
            pack = self._open[role] = _OpenPack(PackWriter(path), [])
        return pack
