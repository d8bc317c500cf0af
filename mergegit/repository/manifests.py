"""The manifest of a merged model: how its tensors are laid out, and the files around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from mergegit.checkpoint.header import build_header, metadata_of
from mergegit.checkpoint.layout import SHARD_METADATA, index_bytes, plan_shards
from mergegit.encoding import hash_block
from mergegit.merge.layers import Stack, is_input
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Manifest, Plan, Shard, Tensor, TensorId
from mergegit.repository.companions import (
    CARD,
    CONFIG,
    INDEX,
    WEIGHT_SUFFIXES,
    config_with_dtype,
    config_with_layers,
    index_with_size,
    license_line,
    model_card,
)
from mergegit.repository.planning import Inputs
from mergegit.storage.prepared import raw_block
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction

_SHARD_BYTES: Final = 5_000_000_000
"""Shards that are laid out anew are as large as Hugging Face tools make them."""


def merged_manifest(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    merged: Mapping[str, Tensor],
) -> Manifest:
    """The manifest of a merged model: the base's layout and files, with the merged tensors.

    Second files of weights beside the base's model are left out: they would hold its weights. The
    card is written anew, config and index where dtypes or layers change. Layers that slices number
    anew are laid out in new shards.
    """
    base, recipe = inputs.base_manifest, inputs.recipe
    ids = {**inputs.base.ids, **inputs.copied}
    for name, tensor in merged.items():
        ids[name] = transaction.write_tensor(tensor)
    copied = {name: store.tensor(tensor_id) for name, tensor_id in inputs.copied.items()}
    tensors = {**inputs.base.tensors, **copied, **merged}
    files = _Files(store, transaction, _companions(store, inputs))
    total = sum(tensor.nbytes for tensor in tensors.values())
    if inputs.stack is not None:
        shards = _new_shards(files, base, inputs.stack, tensors)
        layers = [layer for part in recipe.slices for layer in range(*part.sources[0].layers)]
        files.change(CONFIG, lambda data: config_with_layers(data, layers))
        files.ids.pop(INDEX, None)
        if len(shards) > 1:
            paths = [(shard.path, shard.names) for shard in shards]
            files.write(INDEX, index_bytes(paths, total))
    else:
        shards = _old_shards(files, inputs, tensors)
        if total != sum(tensor.nbytes for tensor in inputs.base.tensors.values()):
            files.change(INDEX, lambda data: index_with_size(data, total))
    if recipe.dtype and _dtypes(tensors) != _dtypes(inputs.base.tensors):
        dtype = recipe.dtype
        files.change(CONFIG, lambda data: config_with_dtype(data, dtype))
    license = license_line(files.read(CARD)) if CARD in files.ids else None
    contents = [store.commit(expert.commit).manifest for expert in recipe.experts]
    files.write(CARD, model_card(plan, store.commit(recipe.base).manifest, contents, license))
    return replace(base, tensors=ids, shards=shards, files=dict(sorted(files.ids.items())))


def _companions(store: Store, inputs: Inputs) -> dict[str, TensorId]:
    """The files around the weights, of the model that the recipe says."""
    recipe, base = inputs.recipe, inputs.base_manifest
    source = base
    if recipe.files_from is not None:
        expert = recipe.experts[recipe.files_from].commit
        source = store.manifest(store.commit(expert).manifest)
    files = {p: i for p, i in source.files.items() if not p.endswith(WEIGHT_SUFFIXES)}
    files.pop(INDEX, None)
    if INDEX in base.files:
        files[INDEX] = base.files[INDEX]
    return files


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a model that is being made: their contents' ids, by path."""

    store: Store
    transaction: Transaction
    ids: dict[str, TensorId]

    def read(self, path: str) -> bytes:
        return read_bytes(self.store, self.ids[path])

    def write(self, path: str, data: bytes) -> None:
        self.ids[path] = write_bytes(self.transaction, data)

    def change(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Rewrite a file, if it is there."""
        if path in self.ids:
            self.write(path, change(self.read(path)))


def _old_shards(files: _Files, inputs: Inputs, tensors: Mapping[str, Tensor]) -> tuple[Shard, ...]:
    """The base's shards, with new headers where dtypes or shapes have changed."""
    old = inputs.base.tensors
    changed = {
        name
        for name, tensor in tensors.items()
        if (tensor.dtype, tensor.shape) != (old[name].dtype, old[name].shape)
    }
    shards = []
    for shard in inputs.base_manifest.shards:
        if not shard.belongs_to_model:
            continue
        header = shard.header
        if changed & set(shard.names):
            described = [(name, tensors[name].dtype, tensors[name].shape) for name in shard.names]
            metadata = metadata_of(read_bytes(files.store, shard.header))
            header = write_bytes(files.transaction, build_header(described, metadata))
        shards.append(Shard(shard.path, header, shard.names))
    return tuple(shards)


def _new_shards(
    files: _Files, base: Manifest, stack: Stack, tensors: Mapping[str, Tensor]
) -> tuple[Shard, ...]:
    """Shards with what lies before the layers, the layers in order, and what lies after."""
    order = {name: place for place, name in enumerate(base.tensors)}

    def place(name: str) -> tuple[int, int]:
        layer = stack.layer_of(name)
        if layer is None:
            return (-1 if is_input(name) else stack.layers), order.get(name, 0)
        # Tensors of a layer lie in the order that the base's first layer has them in.
        return layer, order.get(stack.renamed(name, 0), 0)

    names = sorted(tensors, key=place)
    sizes = [(name, tensors[name].nbytes) for name in names]
    shards = []
    for path, held in plan_shards(sizes, _SHARD_BYTES):
        described = [(name, tensors[name].dtype, tensors[name].shape) for name in held]
        header = write_bytes(files.transaction, build_header(described, SHARD_METADATA))
        shards.append(Shard(path, header, held))
    return tuple(shards)


def _dtypes(tensors: Mapping[str, Tensor]) -> set[str]:
    return {tensor.dtype for tensor in tensors.values()}


def read_bytes(store: Store, tensor_id: TensorId) -> bytes:
    """The contents of a tensor of bytes."""
    return b"".join(store.read_block(block) for block in store.tensor(tensor_id).blocks())


def write_bytes(transaction: Transaction, data: bytes) -> TensorId:
    """Store bytes as a tensor of bytes."""
    blocks: list[BlockId] = []
    for start in range(0, len(data), BLOCK_ELEMENTS):
        part = data[start : start + BLOCK_ELEMENTS]
        block = hash_block(part)
        transaction.write_block(raw_block(block, "U8", part))
        blocks.append(block)
    return transaction.write_tensor(Tensor("U8", (len(data),), b"".join(blocks)))
