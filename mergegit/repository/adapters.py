"""Adapters as experts: full models whose changed tensors are computed when they are needed.

An adapter's commit holds its factors, as it was added; its parent is its base. Seen as a model, it
has the base's tensors, but those that it changes: their blocks have ids of their own, under which
nothing is stored, and are made from the factors. Reading one costs its factors' bytes, once for
the whole tensor.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from mergegit.checkpoint.adapter import (
    WEIGHTS_FILE,
    Adapter,
    LowRank,
    read_adapter,
)
from mergegit.checkpoint.adapter_settings import CONFIG_FILE, MAX_CONFIG_BYTES
from mergegit.checkpoint.directory import Checkpoint
from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.errors import BadCheckpoint, NoBase
from mergegit.kernels.floats import Floats, from_float32, to_float32
from mergegit.kernels.lowrank import add_square_sums, dora_delta, dora_gain, low_rank_delta
from mergegit.merge.match import Model
from mergegit.objects import (
    BLOCK_ELEMENTS,
    BlockId,
    CommitId,
    Manifest,
    ManifestId,
    Tensor,
    TensorId,
    block_count,
)
from mergegit.repository.companions import CONFIG
from mergegit.repository.lineage import is_adapter
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store

Shape = tuple[int, ...]
LoadTensor = Callable[[TensorId], Tensor]

_PLAIN_BITS: Final = 16
"""Elements narrower than this are those of quantised models: they mean something only together
with scales that stand elsewhere."""

_EMBEDDING: Final = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight"
)
_HEAD: Final = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")


# -- what an adapter is ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdapterOutline:
    """What tells which tensors an adapter changes: its config, and its tensors' dtypes and
    shapes."""

    config: bytes
    dtypes: Mapping[str, str]
    shapes: Mapping[str, Shape]

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> AdapterOutline | None:
        """The adapter that a checkpoint is, or None of a model. Raises ``BadCheckpoint``."""
        config = next((file for file in checkpoint.files if file.inside == CONFIG_FILE), None)
        shards = {checkpoint.shards[index].source.inside for index in checkpoint.owner.values()}
        if config is None or WEIGHTS_FILE not in shards:
            return None
        others = shards - {WEIGHTS_FILE}
        if others:
            raise BadCheckpoint(
                f"{checkpoint.path} holds an adapter, and other weights in {min(others)}",
                hint="move what is no part of the adapter out of its directory",
            )
        if config.size > MAX_CONFIG_BYTES:
            raise BadCheckpoint(
                f"{config.path} is {config.size:,} bytes long",
                hint="check that it is the config of an adapter",
            )
        entries = checkpoint.tensors()
        return cls(
            config.reader().read(0, config.size),
            {name: entry.dtype for name, entry in entries.items()},
            {name: entry.shape for name, entry in entries.items()},
        )

    @classmethod
    def of_manifest(cls, store: Store, manifest: Manifest) -> AdapterOutline:
        """The adapter that a commit holds."""
        tensors = {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}
        return cls(
            _file(store, manifest, CONFIG_FILE),
            {name: tensor.dtype for name, tensor in tensors.items()},
            {name: tensor.shape for name, tensor in tensors.items()},
        )

    def check(self, store: Store, of: str, base: Manifest) -> Adapter:
        """What the adapter changes in a base. Raises ``BadCheckpoint`` where it does not fit."""
        if is_adapter(base):
            raise NoBase(
                f"the base of {of} is an adapter itself",
                hint="merge that one into its base first, and name the result",
            )
        tensors = {name: store.tensor(tensor_id) for name, tensor_id in base.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        adapter = read_adapter(self.config, self.shapes, shapes, of=of)
        for how in adapter.low_rank.values():
            for name in filter(None, (how.a, how.b, how.magnitude)):
                if not DTYPES[self.dtypes[name]].is_float:
                    raise BadCheckpoint(
                        f"{of} has tensor {name} in {self.dtypes[name]}, and factors are floats",
                        hint="save the adapter again, in float32 or bfloat16",
                    )
        for name in (*adapter.low_rank, *adapter.saved):
            dtype = DTYPES[tensors[name].dtype]
            whole = name in adapter.saved and self.dtypes[adapter.saved[name]] == dtype.name
            if not whole and (not dtype.is_float or dtype.bits < _PLAIN_BITS):
                raise BadCheckpoint(
                    f"{of} changes tensor {name}, which is {dtype.name} in the base: quantised",
                    hint="name the base in an unquantised dtype with --base REF",
                )
        return adapter


def tie_notes(store: Store, of: str, adapter: Adapter, base: Manifest) -> list[str]:
    """What changes with the embedding where the base's config ties the head to it.

    Raises ``BadCheckpoint`` where the adapter changes the head for itself: whoever loads the
    merged model would tie it to the embedding again, and lose the change.
    """
    if adapter.ties_head or not _ties_embeddings(store, base):
        return []
    changed = {*adapter.low_rank, *adapter.saved}
    head = _named(_HEAD, changed)
    if head is not None:
        raise BadCheckpoint(
            f"{of} changes {head}, which the base's {CONFIG} ties to the embedding: whoever loads "
            "the model would lose the change",
            hint=f"add the base with tie_word_embeddings false in its {CONFIG}, and name that one",
        )
    embedding = _named(_EMBEDDING, changed)
    if embedding is None:
        return []
    return [
        f"{of} changes {embedding}, to which the base's {CONFIG} ties the head: merged, the head "
        "changes with it, though it did not when the adapter was trained"
    ]


def _ties_embeddings(store: Store, base: Manifest) -> bool:
    """Whether the base's config says that embedding and head are one."""
    if CONFIG not in base.files:
        return False
    try:
        config = json.loads(_file(store, base, CONFIG))
    except (ValueError, RecursionError):
        return False
    if not isinstance(config, dict):
        return False
    parts = (config, config.get("text_config"))
    said = [part.get("tie_word_embeddings") for part in parts if isinstance(part, dict)]
    return True in said


def _named(pattern: re.Pattern[str], names: Collection[str]) -> str | None:
    return next((name for name in sorted(names) if pattern.fullmatch(name)), None)


def base_of_adapter(store: Store, ref: str, commit: CommitId) -> Manifest:
    """The manifest of an adapter's base. Raises ``NoBase``."""
    parents = store.commit(commit).parents
    manifest = store.manifest(store.commit(parents[0]).manifest) if parents else None
    if manifest is None or is_adapter(manifest):
        raise NoBase(
            f"the adapter {ref} has no base that is a model",
            hint=f"add it again with `mergegit add {ref} --base REF`",
        )
    return manifest


def _file(store: Store, manifest: Manifest, path: str) -> bytes:
    blocks = store.tensor(manifest.files[path]).blocks()
    return b"".join(store.read_block(block) for block in blocks)


# -- the model that it makes -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that an adapter changes: what it is made of.

    ``below`` is the tensor that is changed, of the adapter's base or, where ``is_saved``, of the
    adapter; ``a``, ``b`` and ``magnitude`` are tensors of the adapter.
    """

    how: LowRank
    below: Tensor
    is_saved: bool
    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    tensor_id: TensorId

    @classmethod
    def of(
        cls,
        load: LoadTensor,
        how: LowRank,
        below: TensorId,
        is_saved: bool,
        ids: Mapping[str, TensorId],
    ) -> ComputedTensor:
        """What ``how`` makes of the tensor ``below``; ``ids`` are the adapter's tensors."""
        factors = [ids[how.a], ids[how.b], *([ids[how.magnitude]] if how.magnitude else [])]
        asked = json.dumps([how.scale, how.transposed]).encode()
        tensor_id = TensorId(hash_block(b"".join([b"low-rank", below, *factors, asked])))
        a, b, *magnitude = map(load, factors)
        return cls(how, load(below), is_saved, a, b, magnitude[0] if magnitude else None, tensor_id)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The tensors of the adapter that are read, once, before any block is computed."""
        rest = (self.magnitude,) if self.magnitude is not None else ()
        return (self.a, self.b, *rest)

    @property
    def needs_lengths(self) -> bool:
        """Whether all that is below is read once more, for the lengths of the outputs."""
        return self.magnitude is not None

    def is_block_of(self, base: Tensor, index: int) -> bool:
        """Whether a block below is the base's, so that it is there already."""
        return self.below.dtype == base.dtype and self.below.block(index) == base.block(index)

    def tensor(self, name: str) -> Tensor:
        """The tensor as models have it: its blocks are under no id of the store.

        Under another name it has other blocks: what is read is counted where it is needed.
        """
        key = self.tensor_id + name.encode()
        ids = [
            hash_block(key + index.to_bytes(8, "little"))
            for index in range(block_count(self.below.elements))
        ]
        return Tensor(self.below.dtype, self.below.shape, b"".join(ids))


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """One block of a computed tensor, in the place where a model calls it ``name``."""

    tensor: ComputedTensor
    index: int
    name: str


Made = Mapping[TensorId, ComputedTensor]
Computed = Mapping[BlockId, ComputedBlock]


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """An adapter seen as a full model, and the tensors of that model that are computed."""

    model: Model
    made: Made


def adapted_model(
    store: Store, ref: str, commit: CommitId, on: ManifestId | None = None
) -> AdaptedModel | None:
    """A commit as a full model where it holds an adapter, else None.

    ``on`` is the base on which it is merged, by default its own. On another one, a tool that reads
    all of the expert reads the adapter's base besides. Raises ``NoBase`` and ``BadCheckpoint``.
    """
    manifest_id = store.commit(commit).manifest
    manifest = store.manifest(manifest_id)
    if not is_adapter(manifest):
        return None
    below = base_of_adapter(store, ref, commit)
    adapter = AdapterOutline.of_manifest(store, manifest).check(store, ref, below)
    ids = dict(below.tensors)
    for target, saved in adapter.saved.items():
        ids[target] = manifest.tensors[saved]
    made: dict[TensorId, ComputedTensor] = {}
    for target, how in adapter.low_rank.items():
        # PEFT saves embeddings beside their factors, changed or not.
        is_saved = ids[target] != below.tensors[target]
        tensor = ComputedTensor.of(store.tensor, how, ids[target], is_saved, manifest.tensors)
        ids[target] = tensor.tensor_id
        made[tensor.tensor_id] = tensor
    read = list(manifest.tensors.values())
    if on not in (None, store.commit(store.commit(commit).parents[0]).manifest):
        read += below.tensors.values()
    tensors = {
        name: made[tensor_id].tensor(name) if tensor_id in made else store.tensor(tensor_id)
        for name, tensor_id in ids.items()
    }
    raw = sum(store.tensor(tensor_id).nbytes for tensor_id in read)
    return AdaptedModel(Model(ref, tensors, ids, raw), made)


def placed(model: Model, made: Made) -> tuple[Model, dict[BlockId, ComputedBlock]]:
    """A model whose computed tensors have blocks for the names that they have in it, and those.

    Slices may have moved tensors to other names, and one tensor to several.
    """
    tensors = dict(model.tensors)
    computed: dict[BlockId, ComputedBlock] = {}
    for name, tensor_id in model.ids.items():
        if tensor_id in made:
            tensors[name] = made[tensor_id].tensor(name)
            for index, block in enumerate(tensors[name].blocks()):
                computed[block] = ComputedBlock(made[tensor_id], index, name)
    return replace(model, tensors=tensors), computed


# -- what reading it costs, and reading it ---------------------------------------------------------


class ReadingCost(NamedTuple):
    """Stored bytes that are read to compute a tensor on a base: ``expert`` are those of the
    adapter, for the whole of it; ``below`` those of the adapter's base, for each block."""

    expert: int
    below: list[int]


def reading_cost(
    made: ComputedTensor, base: Tensor, stored_bytes: Callable[[Tensor], list[int]]
) -> ReadingCost:
    """What it costs to compute a tensor; ``stored_bytes`` are those of a tensor's blocks."""
    factors = sum(sum(stored_bytes(factor)) for factor in made.factors)
    below = [
        nbytes * (made.needs_lengths + (not made.is_block_of(base, index)))
        for index, nbytes in enumerate(stored_bytes(made.below))
    ]
    if made.is_saved:
        return ReadingCost(factors + sum(below), [0] * len(below))
    return ReadingCost(factors, below)


class Counts(NamedTuple):
    """Where bytes are counted: those of adapters, and those of the bases below them."""

    experts: ByteCount | None = None
    bases: ByteCount | None = None


@dataclass(slots=True)
class _Loaded:
    """A tensor's factors in float32, and with DoRA the gain of each output."""

    a: Floats
    b: Floats
    gain: npt.NDArray[np.float64] | None = None


_Key = tuple[str, TensorId, float]


class LowRankReader:
    """Computes blocks from factors, which it reads once for each tensor.

    It holds the factors of a tensor until it is told to ``forget`` it, but of no more than ``held``
    tensors where that is given. ``experts`` and ``bases`` count what is read, where a call does not
    say otherwise. Safe to share by threads.
    """

    def __init__(
        self,
        store: Store,
        computed: Computed,
        experts: ByteCount | None = None,
        bases: ByteCount | None = None,
        *,
        held: int | None = None,
    ) -> None:
        self._store = store
        self._computed = computed
        self._counts = Counts(experts, bases)
        self._held = held
        self._lock = threading.Lock()
        self._loaded: OrderedDict[_Key, _Loaded] = OrderedDict()
        self._locks: dict[_Key, threading.Lock] = {}

    def __contains__(self, block: BlockId) -> bool:
        return block in self._computed

    def delta(
        self,
        block: BlockId,
        base: BlockId,
        base_data: bytes,
        base_dtype: str,
        counts: Counts | None = None,
        threshold: float = 0.0,
    ) -> Floats:
        """The block's deltas from a base block, float32, unrounded.

        Blocks that are to be trimmed at another ``threshold`` are other reads, as those of models
        are.
        """
        counts = counts or self._counts
        made = self._computed[block]
        below = made.tensor.below
        is_base = below.dtype == base_dtype and below.block(made.index) == base
        data = base_data if is_base else self._read_below(made.tensor, made.index, counts)
        values = to_float32(data, below.dtype)
        delta = self._change(made, values, counts, threshold)
        if not is_base:
            delta += values - to_float32(base_data, base_dtype)
        return delta

    def block(self, block: BlockId) -> bytes:
        """The changed block itself, rounded once to the dtype of what is below."""
        made = self._computed[block]
        below = made.tensor.below
        values = to_float32(self._read_below(made.tensor, made.index, self._counts), below.dtype)
        return from_float32(values + self._change(made, values, self._counts, 0.0), below.dtype)

    def _change(
        self, made: ComputedBlock, values: Floats, counts: Counts, threshold: float
    ) -> Floats:
        """What the adapter adds to a block whose elements are ``values``."""
        tensor, first = made.tensor, made.index * BLOCK_ELEMENTS
        loaded = self._load((made.name, tensor.tensor_id, threshold), tensor, counts)
        delta = _low_rank(tensor, loaded, first, values.size)
        if loaded.gain is None:
            return delta
        return dora_delta(
            values, delta, loaded.gain, tensor.how.transposed, first, tensor.below.shape[1]
        )

    def forget(self, name: str) -> None:
        """Let go of the factors of the tensors of this name, all of whose blocks are computed."""
        with self._lock:
            for key in [key for key in self._locks if key[0] == name]:
                self._loaded.pop(key, None)
                del self._locks[key]

    def _load(self, key: _Key, tensor: ComputedTensor, counts: Counts) -> _Loaded:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                loaded = self._loaded.get(key)
            if loaded is None:
                loaded = self._read(tensor, counts)
                with self._lock:
                    self._loaded[key] = loaded
                    if self._held is not None and len(self._loaded) > self._held:
                        self._locks.pop(self._loaded.popitem(last=False)[0], None)
            return loaded

    def _read(self, tensor: ComputedTensor, counts: Counts) -> _Loaded:
        loaded = _Loaded(self._floats(tensor.a, counts), self._floats(tensor.b, counts))
        if tensor.magnitude is not None:
            magnitude = self._floats(tensor.magnitude, counts)
            sums = np.zeros(magnitude.size)
            columns = tensor.below.shape[1]
            for index in range(len(tensor.below)):
                data = self._read_below(tensor, index, counts)
                values = to_float32(data, tensor.below.dtype)
                first = index * BLOCK_ELEMENTS
                delta = _low_rank(tensor, loaded, first, values.size)
                add_square_sums(values, delta, tensor.how.transposed, first, columns, sums)
            loaded.gain = dora_gain(magnitude, sums)
        return loaded

    def _read_below(self, tensor: ComputedTensor, index: int, counts: Counts) -> bytes:
        count = counts.experts if tensor.is_saved else counts.bases
        return self._store.read_block(tensor.below.block(index), count)

    def _floats(self, tensor: Tensor, counts: Counts) -> Floats:
        parts = [
            to_float32(self._store.read_block(block, counts.experts), tensor.dtype)
            for block in tensor.blocks()
        ]
        return np.concatenate(parts).reshape(tensor.shape)


def _low_rank(tensor: ComputedTensor, loaded: _Loaded, first: int, elements: int) -> Floats:
    rows, columns = tensor.below.shape
    how = tensor.how
    return low_rank_delta(
        loaded.a, loaded.b, how.scale, how.transposed, (rows, columns), first, elements
    )


def trimmed(delta: Floats, threshold: float) -> Floats:
    """Deltas that are known exactly, trimmed at a threshold, followed by which were kept."""
    kept = np.abs(delta) >= np.float32(threshold)
    zero = np.float32(0.0)
    return np.concatenate([np.where(kept, delta, zero), kept.astype(np.float32)])
