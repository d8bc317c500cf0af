"""An adapter applied to its base, as `checkout` reads it: a model that is stored nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from mergegit.checkpoint.tokenizer_files import is_tokenizer_file
from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.errors import Mismatch
from mergegit.kernels.combine import DELTA, combine
from mergegit.merge.method import weighted
from mergegit.objects import (
    BLOCK_ELEMENTS,
    BlockId,
    CommitId,
    Manifest,
    Shard,
    Tensor,
    TensorId,
    block_elements,
)
from mergegit.repository.adapters import (
    LowRankReader,
    adapted_model,
    base_of_adapter,
    placed,
)
from mergegit.repository.companions import CARD, WEIGHT_SUFFIXES
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store

_HELD: Final = 2
"""Tensors whose factors are held at a time: files are written one tensor after the other."""

_WHOLE: Final = weighted([1.0])


@dataclass(frozen=True, slots=True)
class _Applied:
    """A block that is made of one of the base's and one of the adapter's."""

    index: int
    base: Tensor
    changed: Tensor


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """The base's files with the adapter merged in, read as from a store.

    Every changed block is what `merge` makes of it by task arithmetic: the base's plus the delta,
    in float32, rounded once to the base's dtype. ``manifest`` lists the files: the base's, without
    its card and other files of weights, which ``left_out`` are. ``notes`` say what a careful user
    should know.
    """

    manifest: Manifest
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    _store: Store
    _tensors: Mapping[TensorId, Tensor]
    _blocks: Mapping[BlockId, _Applied]
    _low_rank: LowRankReader

    @classmethod
    def of(cls, store: Store, ref: str, commit: CommitId) -> AppliedAdapter:
        """The model that an adapter makes of its base. Raises ``Mismatch`` for what is none."""
        adapted = adapted_model(store, ref, commit)
        if adapted is None:
            raise Mismatch(
                f"{ref} is no adapter, so that there is nothing to merge into a base",
                hint="check it out without --merged",
            )
        model, computed = placed(adapted.model, adapted.made)
        base = base_of_adapter(store, ref, commit)
        ids = dict(base.tensors)
        tensors: dict[TensorId, Tensor] = {}
        blocks: dict[BlockId, _Applied] = {}
        for name, base_id in base.tensors.items():
            tensor_id, below = model.ids[name], store.tensor(base_id)
            # Integers are kept as the base has them, as merges keep them.
            if tensor_id == base_id or not DTYPES[below.dtype].is_float:
                continue
            key = hash_block(b"applied" + base_id + tensor_id)
            applied = {
                BlockId(hash_block(key + index.to_bytes(8, "little"))): _Applied(
                    index, below, model.tensors[name]
                )
                for index in range(len(below))
            }
            ids[name] = TensorId(key)
            tensors[ids[name]] = Tensor(below.dtype, below.shape, b"".join(applied))
            blocks.update(applied)
        manifest, left_out = _files(base, ids)
        return cls(
            manifest,
            left_out,
            _notes(store, commit, base),
            store,
            tensors,
            blocks,
            LowRankReader(store, computed, held=_HELD),
        )

    def tensor(self, tensor_id: TensorId) -> Tensor:
        return self._tensors.get(tensor_id) or self._store.tensor(tensor_id)

    def read_block(self, block: BlockId, count: ByteCount | None = None) -> bytes:
        """The raw bytes of a block, stored or made. Safe to call by several threads."""
        applied = self._blocks.get(block)
        if applied is None:
            return self._store.read_block(block, count)
        base, changed, index = applied.base, applied.changed, applied.index
        base_id, changed_id = base.block(index), changed.block(index)
        base_data = self._store.read_block(base_id, count)
        if changed_id in self._low_rank:
            delta = self._low_rank.delta(changed_id, base_id, base_data, base.dtype)
            row, code = delta.view(np.uint8), DELTA
        else:
            data = self._store.read_block(changed_id, count)
            row, code = np.frombuffer(data, np.uint8), DTYPES[changed.dtype].code
        made = combine(
            row[None],
            np.array([code], np.int64),
            np.zeros(1, np.int64),
            np.frombuffer(base_data, np.uint8),
            base.dtype,
            block_elements(base.elements, index),
            index * BLOCK_ELEMENTS,
            _WHOLE,
            base.dtype,
        )
        return bytes(made)


def _files(base: Manifest, ids: Mapping[str, TensorId]) -> tuple[Manifest, tuple[str, ...]]:
    """The base's manifest with other tensors, and the paths of what it lists no more."""
    shards = []
    for shard in base.shards:
        if shard.belongs_to_model:
            # A second copy of a model's tensor, which the index does not name, changes with it.
            strays = {
                name: ids[name] if base.tensors.get(name) == tensor_id else tensor_id
                for name, tensor_id in shard.strays.items()
            }
            shards.append(Shard(shard.path, shard.header, shard.names, strays))
    left_out = [shard.path for shard in base.shards if not shard.belongs_to_model]
    left_out += [path for path in base.files if path.endswith(WEIGHT_SUFFIXES)]
    files = {p: i for p, i in base.files.items() if p != CARD and p not in left_out}
    return replace(base, tensors=ids, shards=tuple(shards), files=files), tuple(left_out)


def _notes(store: Store, commit: CommitId, base: Manifest) -> tuple[str, ...]:
    own = store.manifest(store.commit(commit).manifest).files
    if any(is_tokenizer_file(path) and own[path] != base.files.get(path) for path in own):
        return ("the tokenizer is the base's: the adapter has another, which is not taken over",)
    return ()
