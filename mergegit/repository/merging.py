"""From a plan to a merged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from mergegit.checkpoint.header import build_header, metadata_of
from mergegit.encoding import hash_block
from mergegit.errors import BadRecipe
from mergegit.merge.execute import Base, TensorJob, execute
from mergegit.objects import BLOCK_ELEMENTS, BlockId, Manifest, Plan, Shard, Tensor, TensorId
from mergegit.repository.companions import (
    CARD,
    CONFIG,
    INDEX,
    WEIGHT_SUFFIXES,
    config_with_dtype,
    index_with_size,
    license_line,
    model_card,
)
from mergegit.repository.planning import Inputs, Progress, coefficients_of, known_of
from mergegit.storage.prepared import PreparedBlock, raw_block
from mergegit.storage.reader import ByteCount
from mergegit.storage.store import Store
from mergegit.storage.transaction import Transaction


def merge_blocks(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    *,
    plainly: bool,
    threads: int,
    expert_count: ByteCount,
    base_count: ByteCount,
    progress: Progress,
) -> dict[str, Tensor]:
    """Carry out a plan: the merged tensors by name. Raises ``BadRecipe`` where the plan does not
    fit its commits any more."""
    if plan.tensors != inputs.matching.merged:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    total = sum(inputs.base.tensors[name].nbytes for name in plan.tensors)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    def prepare(block: BlockId, dtype: str, data: bytes, base: Base | None) -> PreparedBlock:
        if plainly or base is None:
            return store.prepare_block(block, dtype, data)
        return store.prepare_block(block, dtype, data, base.block, base.data)

    merged = execute(
        _jobs(store, inputs, plan),
        read_base=lambda block: store.read_block(block, base_count),
        read_expert=lambda block, layers, base, threshold: store.read_layers(
            block, layers, base.block, base.data, threshold, expert_count, base_count
        ),
        prepare=prepare,
        write=transaction.write_block,
        threads=threads,
        progress=advance,
    )
    return dict(merged)


def _jobs(store: Store, inputs: Inputs, plan: Plan) -> Iterator[TensorJob]:
    recipe = inputs.recipe
    layers = np.stack([np.frombuffer(expert.layers, np.uint8) for expert in plan.experts])
    blocks = sum(len(inputs.base.tensors[name]) for name in plan.tensors)
    if layers.shape[1] != blocks:
        raise BadRecipe("the plan does not fit its models", hint="make the plan again")
    at = 0
    for name in plan.tensors:
        base = inputs.base.tensors[name]
        coefficients = coefficients_of(inputs, name, known_of(store, inputs, name))
        yield TensorJob(
            name=name,
            dtype=recipe.dtype or base.dtype,
            base=base,
            experts=[expert.tensors.get(name) for expert in inputs.experts],
            layers=layers[:, at : at + len(base)],
            coefficients=coefficients,
        )
        at += len(base)


def merged_manifest(
    store: Store,
    transaction: Transaction,
    inputs: Inputs,
    plan: Plan,
    merged: Mapping[str, Tensor],
) -> Manifest:
    """The manifest of a merged model: the base's layout and files, with the merged tensors.

    Second files of weights beside the base's model are left out: they would hold its weights. The
    card is written anew, config and index where the dtype changes.
    """
    base = inputs.base_manifest
    tensors = dict(base.tensors)
    for name, tensor in merged.items():
        tensors[name] = transaction.write_tensor(tensor)
    changed = {name for name, t in merged.items() if t.dtype != inputs.base.tensors[name].dtype}
    shards = tuple(
        Shard(
            shard.path,
            _new_header(store, transaction, shard, inputs, merged)
            if changed & set(shard.names)
            else shard.header,
            shard.names,
        )
        for shard in base.shards
        if shard.belongs_to_model
    )
    files = {
        path: tensor_id
        for path, tensor_id in base.files.items()
        if not path.endswith(WEIGHT_SUFFIXES)
    }

    def replace_file(path: str, change: Callable[[bytes], bytes]) -> None:
        if path in files:
            files[path] = write_bytes(transaction, change(read_bytes(store, files[path])))

    if changed and inputs.recipe.dtype:
        dtype = inputs.recipe.dtype
        sizes = (merged.get(name) or inputs.base.tensors[name] for name in base.tensors)
        total = sum(tensor.nbytes for tensor in sizes)
        replace_file(CONFIG, lambda data: config_with_dtype(data, dtype))
        replace_file(INDEX, lambda data: index_with_size(data, total))
    license = license_line(read_bytes(store, files[CARD])) if CARD in files else None
    recipe = inputs.recipe
    contents = [store.commit(expert.commit).manifest for expert in recipe.experts]
    card = model_card(plan, store.commit(recipe.base).manifest, contents, license)
    files[CARD] = write_bytes(transaction, card)
    return replace(base, tensors=tensors, shards=shards, files=dict(sorted(files.items())))


def _new_header(
    store: Store,
    transaction: Transaction,
    shard: Shard,
    inputs: Inputs,
    merged: Mapping[str, Tensor],
) -> TensorId:
    """The shard's header with the merged tensors' dtypes; order and metadata stay."""
    tensors = [(name, merged.get(name) or inputs.base.tensors[name]) for name in shard.names]
    old = read_bytes(store, shard.header)
    text = build_header([(n, t.dtype, t.shape) for n, t in tensors], metadata_of(old))
    return write_bytes(transaction, text)


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
