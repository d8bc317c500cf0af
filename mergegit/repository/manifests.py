"""The manifest of a merged model: how its tensors are laid out, and the files around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from mergegit.checkpoint.header import build_header, metadata_of
from mergegit.checkpoint.layout import SHARD_METADATA, aligned, index_bytes, plan_shards
from mergegit.checkpoint.tokenizer_files import is_tokenizer_file
from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.merge.layers import Stack, is_input
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Manifest, Plan, Shard, Tensor, TensorId
from mergegit.repository.card import license_line, model_card
from mergegit.repository.companions import (
    CARD,
    CONFIG,
    INDEX,
    WEIGHT_SUFFIXES,
    config_with_dtype,
    config_with_layers,
    index_with_size,
)
from mergegit.repository.lineage import model_of
from mergegit.repository.naming import ResolvedRef
from mergegit.repository.planning import Inputs
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
    told: Mapping[str, bytes],
) -> Manifest:
    """The manifest of a merged model: the base's layout and files, with the merged tensors.

    ``told`` are the files that speak of tokens, as the recipe asks for them (``token_files``).
    Second files of weights beside the base's model are left out: they would hold its weights. The
    card is written anew, config and index where dtypes, shapes or layers change. Layers that
    slices number anew are laid out in new shards.
    """
    base, recipe = inputs.base_manifest, inputs.recipe
    ids = {**inputs.base.ids, **inputs.copied}
    for name, tensor in merged.items():
        ids[name] = transaction.write_tensor(tensor)
    copied = {name: store.tensor(tensor_id) for name, tensor_id in inputs.copied.items()}
    tensors = {**inputs.base.tensors, **copied, **merged}
    described = _described(store, inputs)
    files = _Files(store, transaction, _companions(described, inputs))
    for path, data in told.items():
        files.write(path, data)
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
        old = {name: store.tensor(tensor_id) for name, tensor_id in base.tensors.items()}
        shards = _old_shards(files, base, old, tensors)
        if total != sum(tensor.nbytes for tensor in old.values()):
            files.change(INDEX, lambda data: index_with_size(data, total))
    dtype = _main_dtype(tensors.values())
    if dtype and dtype != _main_dtype(map(store.tensor, described.tensors.values())):
        files.change(CONFIG, lambda data: config_with_dtype(data, dtype))
    license = license_line(files.read(CARD)) if CARD in files.ids else None
    contents = [store.commit(expert.commit).manifest for expert in recipe.experts]
    files.write(CARD, model_card(plan, store.commit(recipe.base).manifest, contents, license))
    return replace(base, tensors=ids, shards=shards, files=dict(sorted(files.ids.items())))


def _described(store: Store, inputs: Inputs) -> Manifest:
    """The model whose config and other files the merged one takes."""
    recipe = inputs.recipe
    if recipe.files_from is None:
        return inputs.base_manifest
    expert = recipe.experts[recipe.files_from]
    model = model_of(store, ResolvedRef(expert.ref, expert.commit))
    return store.manifest(store.commit(model.commit).manifest)


def _companions(described: Manifest, inputs: Inputs) -> dict[str, TensorId]:
    """The files around the weights; of the index, that of the shards."""
    base = inputs.base_manifest
    files = {p: i for p, i in described.files.items() if not p.endswith(WEIGHT_SUFFIXES)}
    if inputs.aligned is not None:
        files = {path: i for path, i in files.items() if not is_tokenizer_file(path)}
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
    made: dict[str, bytes] = field(default_factory=dict)
    """What was written already, and can't be read before it is published."""

    def read(self, path: str) -> bytes:
        return self.made[path] if path in self.made else read_bytes(self.store, self.ids[path])

    def write(self, path: str, data: bytes) -> None:
        self.made[path] = data
        self.ids[path] = write_bytes(self.store, self.transaction, data)

    def change(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Rewrite a file, if it is there."""
        if path in self.ids:
            self.write(path, change(self.read(path)))


def _old_shards(
    files: _Files, base: Manifest, old: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> tuple[Shard, ...]:
    """The base's shards, with new headers where dtypes or shapes have changed; ``old`` are its
    tensors."""
    changed = {
        name
        for name, tensor in tensors.items()
        if (tensor.dtype, tensor.shape) != (old[name].dtype, old[name].shape)
    }
    shards = []
    for shard in base.shards:
        if not shard.belongs_to_model:
            continue
        header, names = shard.header, shard.names
        if changed & set(names):
            names = aligned((name, tensors[name].dtype) for name in names)
            described = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
            metadata = metadata_of(read_bytes(files.store, shard.header))
            text = build_header(described, metadata)
            header = write_bytes(files.store, files.transaction, text)
        shards.append(Shard(shard.path, header, names))
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
    for path, group in plan_shards(sizes, _SHARD_BYTES):
        held = aligned((name, tensors[name].dtype) for name in group)
        described = [(name, tensors[name].dtype, tensors[name].shape) for name in held]
        text = build_header(described, SHARD_METADATA)
        shards.append(Shard(path, write_bytes(files.store, files.transaction, text), held))
    return tuple(shards)


def _main_dtype(tensors: Iterable[Tensor]) -> str | None:
    """The dtype of most elements that are floats, which configs call the model's."""
    elements: Counter[str] = Counter()
    for tensor in tensors:
        if DTYPES[tensor.dtype].is_float:
            elements[tensor.dtype] += tensor.elements
    return max(elements, key=lambda dtype: (elements[dtype], dtype), default=None)


def read_bytes(store: Store, tensor_id: TensorId) -> bytes:
    """The contents of a tensor of bytes."""
    return b"".join(store.read_block(block) for block in store.tensor(tensor_id).blocks())


def write_bytes(store: Store, transaction: Transaction, data: bytes) -> TensorId:
    """Store bytes as a tensor of bytes."""
    blocks: list[BlockId] = []
    for start in range(0, len(data), BLOCK_ELEMENTS):
        part = data[start : start + BLOCK_ELEMENTS]
        block = hash_block(part)
        transaction.write_block(store.prepare_block(block, "U8", part))
        blocks.append(block)
    return transaction.write_tensor(Tensor("U8", (len(data),), b"".join(blocks)))
