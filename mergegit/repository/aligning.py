"""Models of different vocabularies, seen alike: their tensors with a row per token, in one order.

An aligned tensor is a tensor of the store like any other: its blocks are stored as deltas from the
aligned base's, with statistics, so that it is planned and read by layers. Blocks that are stored
already are not stored again: where tokens were appended that is all but the last. No commit names
an aligned tensor; `gc` may take it, and then it is made again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mergegit.checkpoint.alignment import LACKS, Rows
from mergegit.checkpoint.embeddings import Bytes, gather_rows, mean_of_tokens
from mergegit.dtypes import DTYPES, byte_length
from mergegit.encoding import hash_block
from mergegit.errors import Mismatch, UnusableRepository
from mergegit.kernels.floats import from_float32, to_float32
from mergegit.merge.match import Model
from mergegit.merge.recipe import Recipe
from mergegit.objects import (
    BLOCK_ELEMENTS,
    BlockId,
    Tensor,
    TensorId,
    block_count,
    block_elements,
)
from mergegit.pipeline import ordered_map
from mergegit.repository.adapters import Counts, LowRankReader, Made, placed
from mergegit.repository.measuring import Comparison, StatisticsBuilder, compare_data
from mergegit.repository.vocabularies import Vocabularies
from mergegit.storage import delta
from mergegit.storage.pack import Encoding
from mergegit.storage.prepared import PreparedBlock, raw_block
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]

HELD_BYTES: Final = 256 << 20
"""Bytes of blocks that are held in memory at a time because rows of them are needed again; what
is more waits in a file."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """The models of a merge with one vocabulary.

    ``read_bytes`` are stored bytes of the experts' tensors that were read for it just now: none
    where it was done before. ``passing`` are the base's blocks that were made for it: what is to
    stay should not be stored as a delta from these, which would have to stay as well.
    """

    base: Model
    experts: Sequence[Model]
    vocabularies: Vocabularies
    read_bytes: int
    passing: frozenset[BlockId]


def align_models(
    store: Store,
    recipe: Recipe,
    base: Model,
    experts: Sequence[Model],
    made: Made,
    *,
    threads: int,
    progress: Progress,
) -> Aligned:
    """Bring a recipe's models to the vocabulary that it asks for; ``made`` are the tensors that
    adapters make of their factors.

    Whatever aligned tensors are not stored are made, once. Raises ``BadCheckpoint``, ``BadRecipe``
    and ``Mismatch`` where tokens can't be told or matched, before a weight is read.
    """
    models = [base, *experts]
    vocabularies = Vocabularies(store, recipe, models)
    known = _remembered(store, vocabularies, made)
    read = ByteCount()
    if known is None:
        if not store.is_writable:
            raise UnusableRepository(
                "the models' vocabularies must be aligned, and the repository can't be written to",
                hint="make the plan once where it can, or work on a copy of the repository",
            )
        vocabularies.output()  # what no tokenizer can be made of is refused before anything is read
        known = _Making(store, vocabularies, made, read, threads, progress).all()
    views = [
        _view(store, model, vocabularies, place, known)
        for model, place in zip(models, vocabularies.places, strict=True)
    ]
    own, aligned = (
        {block for name in vocabularies.names for block in model.tensors[name].blocks()}
        for model in (base, views[0])
    )
    return Aligned(views[0], views[1:], vocabularies, read.total, frozenset(aligned - own))


Known = Mapping[tuple[int, str], TensorId]
"""The aligned tensors: by member and name."""


def _view(
    store: Store, model: Model, vocabularies: Vocabularies, place: int, known: Known
) -> Model:
    """A model with its aligned tensors in the place of its own."""
    member = vocabularies.members[place]
    ids = {name: i for name, i in model.ids.items() if name not in member.doubled}
    tensors = {name: model.tensors[name] for name in ids}
    for name in vocabularies.names:
        aligned = known.get((place, name))
        if aligned is not None and aligned != model.ids.get(name):
            own = member.tensors[name] if aligned == member.ids[name] else None
            ids[name], tensors[name] = aligned, own or store.tensor(aligned)
    return replace(model, ids=ids, tensors=tensors, stored_bytes=model.nbytes)


def _remembered(store: Store, vocabularies: Vocabularies, made: Made) -> Known | None:
    """The aligned tensors, where all of them were made before and are stored."""
    places = [
        (place, name, tensor_id)
        for place, member in enumerate(vocabularies.members)
        for name, tensor_id in member.ids.items()
    ]
    keys = {(p, n): vocabularies.key(p, n) for p, n, _ in places}
    kept = {(p, n): vocabularies.key(p, n, kept=True) for p, n, own in places if own in made}
    found = store.catalog.results([*keys.values(), *kept.values()])
    known: dict[tuple[int, str], TensorId] = {}
    for place, name, own in places:
        result = found.get(keys[place, name])
        if kept.get((place, name)) in found:
            known[place, name] = own
        elif result is not None:
            known[place, name] = TensorId(result)
        else:
            return None
    members = {tensor_id for _, _, tensor_id in places}
    return known if _are_stored(store, {*known.values()} - members) else None


def _are_stored(store: Store, tensors: set[TensorId]) -> bool:
    """Whether tensors that no commit may need are there whole, with all that they are read from."""
    if not all(map(store.has_object, tensors)):
        return False
    wanted: set[bytes] = {block for i in tensors for block in store.tensor(i).blocks()}
    checked: set[bytes] = set()
    while wanted:
        forms = store.catalog.forms_of(wanted)
        if len(forms) < len(wanted):
            return False
        checked |= wanted
        below = {
            form.base
            for known in forms.values()
            if not any(form.encoding is Encoding.RAW for form in known)
            for form in known
        }
        wanted = below - checked
    return True


@dataclass(frozen=True, slots=True)
class _Target:
    """An aligned tensor that is made: of ``members``, which all have ``source`` at the same rows.

    ``is_own`` where it is the source itself, which is only compared with the aligned base's.
    """

    members: tuple[int, ...]
    source: TensorId
    dtype: str
    is_own: bool


@dataclass(slots=True)
class _Piece:
    """A block of every target, the base's first."""

    index: int
    data: list[bytes]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A target's block: its id, what is to be written of it, and how it differs from the base's."""

    block: BlockId
    stored: PreparedBlock | None
    comparison: Comparison


@dataclass(slots=True)
class _Making:
    """Makes the aligned tensors of a merge."""

    store: Store
    vocabularies: Vocabularies
    made: Made
    read: ByteCount
    threads: int
    progress: Progress
    bases: ByteCount = field(default_factory=ByteCount)
    _done: int = 0
    _total: int = 0

    def all(self) -> Known:
        targets = {name: self._targets(name) for name in self.vocabularies.names}
        self._total = sum(
            byte_length(target.dtype, self.elements(name))
            for name, made in targets.items()
            for target in made
        )
        known = {
            (place, name): tensor_id
            for place, member in enumerate(self.vocabularies.members)
            for name, tensor_id in member.ids.items()
        }
        for name, made in targets.items():
            for target, tensor_id in self._make(name, made):
                known.update({(place, name): tensor_id for place in target.members})
        base = self.vocabularies.members[0]
        with self.store.transaction() as transaction:
            for (place, name), tensor_id in known.items():
                # What an adapter makes has no id of the store: it would be taken for collected.
                kept = tensor_id in self.made
                key = self.vocabularies.key(place, name, kept=kept)
                transaction.remember(key, base.ids[name] if kept else tensor_id)
            transaction.publish()
        return known

    def elements(self, name: str) -> int:
        return self.vocabularies.alignment.rows * self.width(name)

    def width(self, name: str) -> int:
        """Elements of a row."""
        tensor = self.vocabularies.members[0].tensors[name]
        return tensor.shape[1] if len(tensor.shape) == 2 else 1

    def _targets(self, name: str) -> list[_Target]:
        """What is made of one tensor, the base's first: nothing where all have one vocabulary."""
        alignment, members = self.vocabularies.alignment, self.vocabularies.members
        grouped: dict[tuple[TensorId, bytes], list[int]] = {}
        for place, member in enumerate(members):
            if name in member.ids:
                rows = alignment.gather[place].tobytes()
                grouped.setdefault((member.ids[name], rows), []).append(place)
        targets = [
            _Target(
                tuple(places),
                source,
                members[places[0]].tensors[name].dtype,
                alignment.is_identity(places[0]),
            )
            for (source, _), places in grouped.items()
        ]
        if targets[0].is_own:
            # Beside the base's own tensor, others that stay as they are were compared before.
            targets = [targets[0], *(target for target in targets[1:] if not target.is_own)]
            return targets if len(targets) > 1 else []
        return targets

    def _make(self, name: str, targets: Sequence[_Target]) -> list[tuple[_Target, TensorId]]:
        """Make one tensor's targets, with statistics beside the base's."""
        if not targets:
            return []
        blocks: list[list[BlockId]] = [[] for _ in targets]
        statistics = [StatisticsBuilder() for _ in targets]

        def prepare(piece: _Piece) -> list[_Prepared]:
            return self._prepare(piece, targets, self.elements(name))

        made = []
        with ExitStack() as stack:
            transaction = stack.enter_context(self.store.transaction())
            sources = stack.enter_context(_Sources(self, name, targets))
            for prepared in ordered_map(prepare, sources.pieces(), threads=self.threads):
                for at, target in enumerate(targets):
                    stored = prepared[at].stored
                    if stored is not None:
                        transaction.write_block(stored)
                    statistics[at].add(prepared[at].comparison)
                    index = len(blocks[at])
                    blocks[at].append(prepared[at].block)
                    elements = block_elements(self.elements(name), index)
                    self._done += byte_length(target.dtype, elements)
                self.progress(self._done, self._total)
            for at, target in enumerate(targets):
                shape = self._shape(name)
                tensor = Tensor(target.dtype, shape, b"".join(blocks[at]))
                made.append((target, transaction.write_tensor(tensor)))
            (_, base_id), *experts = made
            for at, (target, tensor_id) in enumerate(experts, 1):
                is_float = DTYPES[target.dtype].is_float and DTYPES[targets[0].dtype].is_float
                if tensor_id != base_id and is_float:
                    payload = statistics[at].finish().to_bytes()
                    transaction.write_statistics(tensor_id, base_id, payload)
            transaction.publish()
        return made

    def _shape(self, name: str) -> tuple[int, ...]:
        own = self.vocabularies.members[0].tensors[name].shape
        return (self.vocabularies.alignment.rows, *own[1:])

    def _prepare(
        self, piece: _Piece, targets: Sequence[_Target], all_elements: int
    ) -> list[_Prepared]:
        """Encode a block of every target: the base's plainly, the others' as deltas from it."""
        elements = block_elements(all_elements, piece.index)
        base_data, base_dtype = piece.data[0], targets[0].dtype
        base = hash_block(base_data)
        plain = self.store.prepare_block(base, base_dtype, base_data)
        prepared = [_Prepared(base, plain, Comparison())]
        for target, data in zip(targets[1:], piece.data[1:], strict=True):
            block, stored, comparison = hash_block(data), None, Comparison()
            if not (DTYPES[target.dtype].is_float and DTYPES[base_dtype].is_float):
                stored = self.store.prepare_block(block, target.dtype, data)
            elif (block, target.dtype) != (base, base_dtype):
                comparison = compare_data(
                    target.dtype, data, base_dtype, base, base_data, piece.index, elements
                )
                stored = self._delta(block, target.dtype, data, comparison)
            prepared.append(_Prepared(block, stored, comparison))
        return prepared

    def _delta(
        self, block: BlockId, dtype: str, data: bytes, comparison: Comparison
    ) -> PreparedBlock | None:
        """A block as a delta from the aligned base's, beside another form that it may have: where
        it was added without a base, it is stored plainly, and could only be read whole."""
        store, base, base_data = self.store, comparison.base_block, comparison.base_data
        forms = store.catalog.forms_of([block]).get(block, [])
        if comparison.quantised is None or base is None or base_data is None:
            return None if forms else raw_block(block, dtype, data)
        if any(form.base == base for form in forms):
            return None
        encoded = delta.encode(data, base_data, dtype, comparison.quantised)
        if encoded is None:
            return None if forms else raw_block(block, dtype, data)
        return PreparedBlock(block, dtype, encoded.segments, len(data), base, base_data)


def _reader(
    making: _Making, name: str, tensor_id: TensorId, tensor: Tensor, count: ByteCount
) -> Callable[[int], bytes]:
    """How a tensor's blocks are read by their number, or computed where an adapter makes them."""
    store = making.store
    if tensor_id not in making.made:
        return lambda index: _read_block(store, tensor.block(index), count, making.bases)
    model, computed = placed(Model("", {name: tensor}, {name: tensor_id}), making.made)
    low_rank = LowRankReader(store, computed, held=1)
    counts = Counts(count, making.bases)

    def compute(index: int) -> bytes:
        block, below = model.tensors[name].block(index), making.made[tensor_id].below
        below_id = below.block(index)
        data = store.read_block(below_id, making.bases)
        change = low_rank.delta(block, below_id, data, below.dtype, counts)
        return from_float32(to_float32(data, below.dtype) + change, below.dtype)

    return compute


def _read_block(store: Store, block: BlockId, count: ByteCount, bases: ByteCount) -> bytes:
    """A block as ``Store.read_block`` reads it, a delta's base counted by itself."""
    forms = store.forms([block])[block]
    plain = next((form for form in forms if form.encoding is Encoding.RAW), forms[0])
    return store.read_form(block, plain, count, base_count=bases)


class _Sources:
    """The rows of all members' tensors of one name, as the targets need them, front to back."""

    def __init__(self, making: _Making, name: str, targets: Sequence[_Target]) -> None:
        self._targets = targets
        self._alignment = making.vocabularies.alignment
        self._members = making.vocabularies.members
        self._name = name
        self._width = making.width(name)
        self._elements = making.elements(name)
        base = self._members[0].ids[name]
        tensors = {m.ids[name]: m.tensors[name] for m in self._members if name in m.ids}
        self._rows: dict[TensorId, _StoredRows] = {}
        for tensor_id, tensor in tensors.items():
            count = making.bases if tensor_id == base else making.read
            self._rows[tensor_id] = _StoredRows(
                tensor,
                self._width,
                _reader(making, name, tensor_id, tensor, count),
                self._last_uses(tensor_id, tensor),
                max(HELD_BYTES // len(tensors), 4 * tensor.block_nbytes(0)),
                os.fspath(making.store.location.temporary),
            )

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *error: object) -> None:
        for rows in self._rows.values():
            rows.close()

    def pieces(self) -> Iterator[_Piece]:
        """Block by block, the bytes of each target."""
        centre = self._centre()
        for index in range(block_count(self._elements)):
            first = index * BLOCK_ELEMENTS
            last = first + block_elements(self._elements, index)
            start, stop = first // self._width, -(-last // self._width)
            data = []
            for target in self._targets:
                rows = gather_rows(
                    self._alignment,
                    target.members[0],
                    start,
                    stop,
                    elements=self._width,
                    dtypes=self._dtypes(),
                    read_rows=self._read_rows,
                    centre=centre,
                )
                begin = byte_length(target.dtype, first - start * self._width)
                end = begin + byte_length(target.dtype, last - first)
                data.append(rows.reshape(-1)[begin:end].tobytes())
            yield _Piece(index, data)
            for rows_of in self._rows.values():
                rows_of.release(index)

    def _dtypes(self) -> list[str]:
        """Each member's; one that lacks the tensor is asked for no rows of it."""
        base = self._members[0].tensors[self._name].dtype
        return [
            member.tensors[self._name].dtype if self._name in member.tensors else base
            for member in self._members
        ]

    def _read_rows(self, member: int, rows: Rows) -> Bytes:
        own = self._members[member]
        if self._name not in own.ids:
            row = int(rows[0])
            raise Mismatch(
                f"{own.ref} has no tensor {self._name}, and its row {row} is needed",
                hint="merge models that all have it, or give the row's token another source",
            )
        return self._rows[own.ids[self._name]].read(rows)

    def _centre(self) -> npt.NDArray[np.float32] | None:
        """The mean of the base's tokens, where rows are padded with it."""
        if not any(fill.kind == "centre" for fill in self._alignment.fills.values()):
            return None
        return mean_of_tokens(
            self._alignment, elements=self._width, dtypes=self._dtypes(), read_rows=self._read_rows
        )

    def _last_uses(self, tensor_id: TensorId, tensor: Tensor) -> npt.NDArray[np.int64]:
        """For each block of a tensor the last block of the output that has a row of it, or -1."""
        alignment, width = self._alignment, self._width
        last = np.full(len(tensor), -1, np.int64)
        members = [m for m, own in enumerate(self._members) if own.ids.get(self._name) == tensor_id]
        pairs = [np.empty((0, 2), np.int64)]
        for target in self._targets:
            if target.members[0] in members:
                own = alignment.gather[target.members[0]]
                at = np.flatnonzero(own != LACKS)
                pairs.append(np.stack([at, own[at]], axis=1))
        filled = [
            (at, row)
            for at, fill in alignment.fills.items()
            for member, row in fill.sources
            if member in members
        ]
        pairs.append(np.array(filled, np.int64).reshape(-1, 2))
        out, rows = np.concatenate(pairs).T
        used_by = ((out + 1) * width - 1) // BLOCK_ELEMENTS
        for edge in (rows * width, (rows + 1) * width - 1):
            np.maximum.at(last, edge // BLOCK_ELEMENTS, used_by)
        return last


class _StoredRows:
    """Rows of one tensor. Each of its blocks is read once, and kept until the last time that it is
    needed: in memory as long as there is room, else in a file."""

    def __init__(
        self,
        tensor: Tensor,
        width: int,
        read: Callable[[int], bytes],
        last_uses: npt.NDArray[np.int64],
        held_bytes: int,
        directory: str,
    ) -> None:
        self._row_bytes = byte_length(tensor.dtype, width)
        self._block_bytes = byte_length(tensor.dtype, BLOCK_ELEMENTS)
        self._read = read
        self._last_uses = last_uses
        self._room = max(held_bytes // self._block_bytes, 1)
        self._directory = directory
        self._held: dict[int, bytes] = {}
        self._spilled: set[int] = set()
        self._fd = -1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, rows: Rows) -> Bytes:
        """The bytes of rows, which ascend: uint8 (rows, bytes of a row)."""
        out = np.empty((rows.size, self._row_bytes), np.uint8)
        flat = out.reshape(-1)
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        at = 0
        for run in np.split(rows, cuts):
            if run.size:
                start = int(run[0]) * self._row_bytes
                length = run.size * self._row_bytes
                self._copy(start, flat[at : at + length])
                at += length
        return out

    def release(self, done: int) -> None:
        """Let go of what only blocks of the output up to ``done`` needed."""
        for block in [b for b in self._held if self._last_uses[b] <= done]:
            del self._held[block]

    def _copy(self, start: int, out: Bytes) -> None:
        at = 0
        while at < out.size:
            block, offset = divmod(start + at, self._block_bytes)
            length = min(self._block_bytes - offset, out.size - at)
            out[at : at + length] = np.frombuffer(self._piece(block, offset, length), np.uint8)
            at += length

    def _piece(self, block: int, offset: int, length: int) -> bytes | memoryview:
        if block in self._spilled:
            return _read_all(self._fd, length, block * self._block_bytes + offset)
        data = self._held.get(block)
        if data is None:
            data = self._read(block)
            while len(self._held) >= self._room:
                self._spill(next(iter(self._held)))
            self._held[block] = data
        return memoryview(data)[offset : offset + length]

    def _spill(self, block: int) -> None:
        if self._fd < 0:
            self._fd, path = tempfile.mkstemp(dir=self._directory)
            os.unlink(path)  # it is gone with this process, however that ends
        _write_all(self._fd, self._held.pop(block), block * self._block_bytes)
        self._spilled.add(block)


def _read_all(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise OSError(f"a temporary file ends at byte {offset + len(data)}")
        data += more
    return data


def _write_all(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, memoryview(data)[done:], offset + done)
