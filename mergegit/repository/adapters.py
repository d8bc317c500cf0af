"""Adapters as experts: full models whose changed tensors are computed when they are needed.

An adapter's commit holds its factors, as it was added; its parent is its base. Seen as a model, it
has the base's tensors, but those that it changes: their blocks have ids of their own, under which
nothing is stored, and are made from the factors. Reading one costs its factors' bytes, once for
the whole tensor.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mergegit.checkpoint.adapter import (
    WEIGHTS_FILE,
    Adapter,
    LowRank,
    read_adapter,
)
from mergegit.checkpoint.adapter_settings import CONFIG_FILE, MAX_CONFIG_BYTES
from mergegit.checkpoint.directory import Checkpoint
from mergegit.errors import BadCheckpoint, NoBase
from mergegit.kernels.floats import Floats, from_float32, to_float32
from mergegit.kernels.lowrank import add_square_sums, dora_delta, dora_gain, low_rank_delta
from mergegit.merge.match import Model
from mergegit.objects import (
    BLOCK_ELEMENTS,
    BlockId,
    CommitId,
    Manifest,
    Tensor,
    TensorId,
    block_count,
)
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store

_HELD: Final = 16
"""Tensors whose factors are held in memory at a time: blocks of no more are at work at once."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter on disk that is about to be added: its config, and its tensors' shapes."""

    config: bytes
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> AdapterFiles | None:
        """The adapter that a checkpoint is, or None of a model. Raises ``BadCheckpoint``."""
        config = next((file for file in checkpoint.files if file.inside == CONFIG_FILE), None)
        if config is None or [s.source.inside for s in checkpoint.shards] != [WEIGHTS_FILE]:
            return None
        shapes = {name: entry.shape for name, entry in checkpoint.tensors().items()}
        if config.size > MAX_CONFIG_BYTES:
            raise BadCheckpoint(
                f"{config.path} is {config.size:,} bytes long",
                hint="check that it is the config of an adapter",
            )
        return cls(config.reader().read(0, config.size), shapes)

    def check(self, store: Store, of: str, base: Manifest) -> Adapter:
        """What the adapter changes in a base. Raises ``BadCheckpoint`` where it does not fit."""
        if is_adapter_manifest(base):
            raise NoBase(
                f"the base of {of} is an adapter itself",
                hint="merge that one into its base first, and name the result",
            )
        shapes = {name: store.tensor(tensor_id).shape for name, tensor_id in base.tensors.items()}
        return read_adapter(self.config, self.shapes, shapes, of=of)


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
        store: Store,
        how: LowRank,
        below: TensorId,
        is_saved: bool,
        ids: Mapping[str, TensorId],
    ) -> ComputedTensor:
        """What ``how`` makes of the tensor ``below``; ``ids`` are the adapter's tensors."""
        factors = [ids[how.a], ids[how.b], *([ids[how.magnitude]] if how.magnitude else [])]
        asked = json.dumps([how.scale, how.transposed]).encode()
        tensor_id = TensorId(blake3(b"".join([b"low-rank", below, *factors, asked])).digest())
        a, b, *magnitude = map(store.tensor, factors)
        return cls(
            how, store.tensor(below), is_saved, a, b, magnitude[0] if magnitude else None, tensor_id
        )

    def cost(self, stored_bytes: Callable[[Tensor], int]) -> int:
        """Bytes of the adapter that are read to compute the whole tensor."""
        cost = sum(map(stored_bytes, self.factors))
        if self.is_saved:
            # Twice where the lengths of its rows must be known first.
            cost += stored_bytes(self.below) * (2 if self.magnitude is not None else 1)
        return cost

    @property
    def factors(self) -> tuple[Tensor, ...]:
        rest = (self.magnitude,) if self.magnitude is not None else ()
        return (self.a, self.b, *rest)

    def tensor(self) -> Tensor:
        """The tensor as models have it: its blocks are under no id of the store."""
        ids = [
            blake3(self.tensor_id + index.to_bytes(8, "little")).digest()
            for index in range(block_count(self.below.elements))
        ]
        return Tensor(self.below.dtype, self.below.shape, b"".join(ids))


@dataclass(frozen=True, slots=True)
class ComputedBlock:
    """One block of a computed tensor."""

    tensor: ComputedTensor
    index: int


Computed = Mapping[BlockId, ComputedBlock]


@dataclass(frozen=True, slots=True)
class AdapterModel:
    """An adapter seen as a full model, and its computed blocks."""

    model: Model
    computed: Computed


def is_adapter_manifest(manifest: Manifest) -> bool:
    """Whether a commit holds an adapter and no model."""
    return CONFIG_FILE in manifest.files and any(s.path == WEIGHTS_FILE for s in manifest.shards)


def base_of_adapter(store: Store, ref: str, commit: CommitId) -> Manifest:
    """The manifest of an adapter's base. Raises ``NoBase``."""
    parents = store.commit(commit).parents
    manifest = store.manifest(store.commit(parents[0]).manifest) if parents else None
    if manifest is None or is_adapter_manifest(manifest):
        raise NoBase(
            f"the adapter {ref} has no base that is a model",
            hint=f"add it again with `mergegit add {ref} --base REF`",
        )
    return manifest


def adapted_model(store: Store, ref: str, commit: CommitId) -> AdapterModel | None:
    """A commit as a full model where it holds an adapter, else None."""
    manifest = store.manifest(store.commit(commit).manifest)
    if not is_adapter_manifest(manifest):
        return None
    below = base_of_adapter(store, ref, commit)
    config = store.tensor(manifest.files[CONFIG_FILE])
    files = AdapterFiles(
        b"".join(store.read_block(block) for block in config.blocks()),
        {name: store.tensor(tensor_id).shape for name, tensor_id in manifest.tensors.items()},
    )
    adapter = files.check(store, ref, below)
    ids = dict(below.tensors)
    for target, saved in adapter.saved.items():
        ids[target] = manifest.tensors[saved]
    tensors = {name: store.tensor(tensor_id) for name, tensor_id in ids.items()}
    computed: dict[BlockId, ComputedBlock] = {}
    for target, how in adapter.low_rank.items():
        made = ComputedTensor.of(store, how, ids[target], target in adapter.saved, manifest.tensors)
        ids[target], tensors[target] = made.tensor_id, made.tensor()
        for index, block in enumerate(tensors[target].blocks()):
            computed[block] = ComputedBlock(made, index)
    raw = sum(store.tensor(tensor_id).nbytes for tensor_id in manifest.tensors.values())
    return AdapterModel(Model(ref, tensors, ids, raw), computed)


@dataclass(slots=True)
class _Loaded:
    """A tensor's factors in float32, and with DoRA the gain of each output."""

    a: Floats
    b: Floats
    gain: npt.NDArray[np.float64] | None


class LowRankReader:
    """Computes blocks from factors, which it reads once for each tensor and holds for a while.

    ``experts`` counts the bytes of factors, ``bases`` those of the tensors below. Safe to share by
    threads.
    """

    def __init__(
        self,
        store: Store,
        computed: Computed,
        experts: ByteCount | None = None,
        bases: ByteCount | None = None,
    ) -> None:
        self._store = store
        self._computed = computed
        self._experts = experts
        self._bases = bases
        self._lock = threading.Lock()
        self._loaded: OrderedDict[TensorId, _Loaded] = OrderedDict()
        self._locks: dict[TensorId, threading.Lock] = {}

    def __contains__(self, block: BlockId) -> bool:
        return block in self._computed

    def delta(self, block: BlockId, base: BlockId, base_data: bytes, base_dtype: str) -> Floats:
        """The block's deltas from a base block, float32, unrounded."""
        made = self._computed[block]
        below = made.tensor.below
        below_id = below.block(made.index)
        reference = below_data = base_data
        if below_id != base:
            below_data = self._read_below(made.tensor, made.index)
        values = to_float32(below_data, below.dtype)
        delta = self._change(made, values)
        if below_id != base:
            delta += values - to_float32(reference, base_dtype)
        return delta

    def block(self, block: BlockId) -> bytes:
        """The changed block itself, rounded once to the dtype of what is below."""
        made = self._computed[block]
        below = made.tensor.below
        values = to_float32(self._read_below(made.tensor, made.index), below.dtype)
        return from_float32(values + self._change(made, values), below.dtype)

    def _change(self, made: ComputedBlock, values: Floats) -> Floats:
        """What the adapter adds to a block whose elements are ``values``."""
        tensor, first = made.tensor, made.index * BLOCK_ELEMENTS
        loaded = self._load(tensor)
        delta = _low_rank(tensor, loaded, first, values.size)
        if loaded.gain is None:
            return delta
        return dora_delta(
            values, delta, loaded.gain, tensor.how.transposed, first, tensor.below.shape[1]
        )

    def _load(self, tensor: ComputedTensor) -> _Loaded:
        with self._lock:
            loaded = self._loaded.get(tensor.tensor_id)
            if loaded is not None:
                self._loaded.move_to_end(tensor.tensor_id)
                return loaded
            lock = self._locks.setdefault(tensor.tensor_id, threading.Lock())
        with lock:
            with self._lock:
                loaded = self._loaded.get(tensor.tensor_id)
            if loaded is None:
                loaded = self._read(tensor)
                with self._lock:
                    self._loaded[tensor.tensor_id] = loaded
                    if len(self._loaded) > _HELD:
                        self._loaded.popitem(last=False)
            return loaded

    def _read(self, tensor: ComputedTensor) -> _Loaded:
        loaded = _Loaded(self._floats(tensor.a), self._floats(tensor.b), None)
        if tensor.magnitude is not None:
            magnitude = self._floats(tensor.magnitude)
            sums = np.zeros(magnitude.size)
            columns = tensor.below.shape[1]
            for index in range(len(tensor.below)):
                values = to_float32(self._read_below(tensor, index), tensor.below.dtype)
                first = index * BLOCK_ELEMENTS
                delta = _low_rank(tensor, loaded, first, values.size)
                add_square_sums(values, delta, tensor.how.transposed, first, columns, sums)
            loaded.gain = dora_gain(magnitude, sums)
        return loaded

    def _read_below(self, tensor: ComputedTensor, index: int) -> bytes:
        count = self._experts if tensor.is_saved else self._bases
        return self._store.read_block(tensor.below.block(index), count)

    def _floats(self, tensor: Tensor) -> Floats:
        parts = [
            to_float32(self._store.read_block(block, self._experts), tensor.dtype)
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
    kept = (np.abs(delta) >= np.float32(threshold)).astype(np.float32)
    return np.concatenate([delta * kept, kept])
