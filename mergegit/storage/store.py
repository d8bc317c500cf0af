"""The store: blocks and objects by id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from mergegit.dtypes import BY_CODE
from mergegit.encoding import Object, decode, hash_block, hash_object
from mergegit.errors import Damaged
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
from mergegit.storage.catalog import Catalog, Place, StoredForm
from mergegit.storage.lease import Lease
from mergegit.storage.location import Location
from mergegit.storage.pack import (
    Encoding,
)
from mergegit.storage.prepared import PreparedBlock, raw_block
from mergegit.storage.reader import ByteCount, DamagedRecord, PackGone, PackReader
from mergegit.storage.refs import Refs
from mergegit.storage.transaction import Transaction

if TYPE_CHECKING:
    from mergegit.kernels.progressive import Quantised

_T = TypeVar("_T", bound=Object)
_Read = TypeVar("_Read")


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
        self.is_writable = not read_only
        self.catalog = Catalog(location.catalog, read_only=read_only)
        self.reader = PackReader(location, self.catalog)
        self.refs = Refs(location)
        self.lease = Lease(location)
        self._decoded = lru_cache(maxsize=8192)(self._read_object)

    def close(self) -> None:
        self.forget()
        self.catalog.close()

    def forget(self) -> None:
        """Let go of what was read: decoded objects, and open packs that may be gone from disk."""
        self._decoded.cache_clear()
        self.reader.close()

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
        return _again_where_packs_left(lambda: self._read_object_bytes(object_id))

    def _read_object_bytes(self, object_id: bytes) -> bytes:
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

    def forms(self, blocks: Iterable[BlockId]) -> dict[BlockId, list[StoredForm]]:
        """The forms in which each block is stored. Raises ``Damaged`` where one is missing."""
        wanted = set(blocks)
        found = self.catalog.forms_of(wanted)
        missing = wanted - found.keys()
        if missing:
            raise Damaged(
                f"block {min(missing).hex()[:12]} is missing from the store",
                hint="run `mergegit fsck` to see which commits are affected",
            )
        return {BlockId(block): forms for block, forms in found.items()}

    def read_block(self, block: BlockId, count: ByteCount | None = None) -> bytes:
        """The raw bytes of a block, checked against its id; a delta's base is read as well."""
        return _again_where_packs_left(
            lambda: self.read_form(block, _plainest(self.forms([block])[block]), count)
        )

    def read_form(
        self,
        block: BlockId,
        form: StoredForm,
        count: ByteCount | None = None,
        base: bytes | None = None,
        base_count: ByteCount | None = None,
    ) -> bytes:
        """The raw bytes of a block from one of its forms; ``base`` are its base block's bytes.

        Where they are not given they are read, and counted by ``base_count``, or by ``count``.
        """
        if form.encoding is Encoding.RAW:
            try:
                data = self.reader.read_decompressed(form.places[0], count)
            except DamagedRecord as error:
                raise DamagedBlock(block, error.pack) from error
        else:
            known = base
            if known is None:
                known = self.read_block(BlockId(form.base), base_count or count)
            data = self._decode_delta(block, form, known, count)
        if hash_block(data) != block:
            raise DamagedBlock(block, self.reader.pack_name(form.places[0]))
        return data

    def layer_costs(self, forms: Sequence[StoredForm], base: BlockId) -> tuple[int, ...]:
        """Stored bytes of each layer that a merge on ``base`` can read of a block."""
        form = _nearest(forms, base)
        if form.encoding is Encoding.RAW or form.base == base:
            return tuple(place.length for place in form.places)
        return (form.nbytes,)

    def other_base_cost(self, forms: Sequence[StoredForm], base: BlockId) -> int:
        """Stored bytes of another base's block that a merge on ``base`` reads beside a block."""
        form = _nearest(forms, base)
        if form.encoding is Encoding.RAW or form.base == base:
            return 0
        other = BlockId(form.base)
        return self.whole_cost(self.forms([other])[other])

    def whole_cost(self, forms: Sequence[StoredForm]) -> int:
        """Stored bytes that ``read_block`` reads of a block with these forms."""
        form = _plainest(forms)
        if form.encoding is Encoding.RAW:
            return form.nbytes
        base = BlockId(form.base)
        return form.nbytes + self.whole_cost(self.forms([base])[base])

    def read_layers(
        self,
        block: BlockId,
        layers: int,
        base: BlockId,
        base_data: bytes,
        threshold: float,
        count: ByteCount | None = None,
        base_count: ByteCount | None = None,
    ) -> tuple[bytes | memoryview, bool]:
        """A block as far as ``layers`` of those that ``layer_costs`` lists tell.

        Returns its raw bytes and false, or, where layers are left out, its float32 deltas from the
        base block and true; with a ``threshold`` at which they are to be trimmed, what
        ``delta.decode_planes`` knows of the trimmed ones. A delta from another base is read whole,
        and that base's block is counted by ``base_count``.
        """
        return _again_where_packs_left(
            lambda: self._read_layers(block, layers, base, base_data, threshold, count, base_count)
        )

    def _read_layers(
        self,
        block: BlockId,
        layers: int,
        base: BlockId,
        base_data: bytes,
        threshold: float,
        count: ByteCount | None,
        base_count: ByteCount | None,
    ) -> tuple[bytes | memoryview, bool]:
        form = _nearest(self.forms([block])[block], base)
        if form.encoding is Encoding.RAW or form.base != base:
            return self.read_form(block, form, count, base_count=base_count), False
        if layers >= len(form.places):
            return self.read_form(block, form, count, base_data), False
        from mergegit.storage import delta

        planes = self._read_segments(block, form.places[:layers], count)
        elements = len(base_data) * 8 // BY_CODE[form.dtype].bits
        try:
            return delta.decode_planes(planes, elements, threshold).data.cast("B"), True
        except ValueError as error:
            raise DamagedBlock(block, self.reader.pack_name(form.places[0])) from error

    def _decode_delta(
        self, block: BlockId, form: StoredForm, base: bytes, count: ByteCount | None
    ) -> bytes:
        from mergegit.storage import delta

        *planes, residual = self._read_segments(block, form.places, count)
        try:
            return delta.decode(planes, residual, base, BY_CODE[form.dtype].name)
        except ValueError as error:
            raise DamagedBlock(block, self.reader.pack_name(form.places[0])) from error

    def _read_segments(
        self, block: BlockId, places: Sequence[Place], count: ByteCount | None
    ) -> list[bytes]:
        """Layers of a block, each checked by its own checksum.

        The block's id does not vouch for all of them: decoding uses the means of the last plane.
        """
        try:
            return [self.reader.read_checked(place, count) for place in places]
        except DamagedRecord as error:
            raise DamagedBlock(block, error.pack) from error

    def read_statistics(self, tensor: TensorId, base: bytes) -> bytes | None:
        """The payload of the statistics of a tensor against a base tensor, if they were taken."""

        def read() -> bytes | None:
            place = self.catalog.statistics(tensor, base)
            return None if place is None else self.reader.read_checked(place)

        return _again_where_packs_left(read)

    # -- writing ---------------------------------------------------------------------------------

    def prepare_block(
        self,
        block: BlockId,
        dtype: str,
        data: bytes | memoryview,
        base: BlockId | None = None,
        base_data: bytes | None = None,
        quantised: Quantised | None = None,
    ) -> PreparedBlock:
        """A block made ready to be written: encoded, unless the store has it.

        Against ``base``, of the same dtype, it becomes a progressive delta where that is smaller.
        Safe to call from any thread; costly, so that it is worth many.
        """
        if self.catalog.forms_of([block]):
            return PreparedBlock(block, dtype, (), len(data))
        if base is not None and base_data is not None:
            from mergegit.storage import delta

            encoded = delta.encode(bytes(data), base_data, dtype, quantised)
            if encoded is not None:
                copy = None if self._has_raw(base) else base_data
                return PreparedBlock(block, dtype, encoded.segments, len(data), base, copy)
        return raw_block(block, dtype, data)

    def _has_raw(self, block: BlockId) -> bool:
        forms = self.catalog.forms_of([block]).get(block, [])
        return any(form.encoding is Encoding.RAW for form in forms)

    def transaction(self) -> Transaction:
        return Transaction(self)


def _again_where_packs_left(read: Callable[[], _Read]) -> _Read:
    """What ``read`` gives, which looks up places and reads there.

    Readers hold no lease: between the two, a `gc` or `repack` may have replaced a pack. Then the
    catalog has the new place.
    """
    try:
        return read()
    except PackGone:
        return read()


def _plainest(forms: Sequence[StoredForm]) -> StoredForm:
    """The form from which a block is read whole with the least work."""
    return next((form for form in forms if form.encoding is Encoding.RAW), forms[0])


def _nearest(forms: Sequence[StoredForm], base: BlockId) -> StoredForm:
    """The form in which a block is read for a merge on a base block."""
    return next((form for form in forms if form.base == base), _plainest(forms))
