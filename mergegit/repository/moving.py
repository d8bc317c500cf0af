"""Experts on another base than their own: what they changed of their own one is carried over.

Seen on the other base, such an expert has that base's tensors, but those that it changed: their
blocks have ids of their own, under which nothing is stored. What stands behind one is the expert's
block and the block of its own base, from which its layers tell the delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mergegit.dtypes import DTYPES
from mergegit.encoding import hash_block
from mergegit.errors import Mismatch
from mergegit.merge.match import Model
from mergegit.objects import BlockId, Tensor, TensorId


@dataclass(frozen=True, slots=True)
class Pair:
    """An expert's tensor, and the base's that its delta is taken from."""

    tensor_id: TensorId
    tensor: Tensor
    base_id: TensorId
    base: Tensor


@dataclass(frozen=True, slots=True)
class MovedBlock:
    """What stands behind a block that is carried to another base."""

    block: BlockId
    dtype: str
    below: BlockId
    below_dtype: str


@dataclass(frozen=True, slots=True)
class Moved:
    """An expert seen on another base: its model, the pairs behind the tensors that it changes, and
    what stands behind their blocks."""

    model: Model
    pairs: Mapping[str, Pair]
    blocks: Mapping[BlockId, MovedBlock]


def moved_model(expert: Model, own: Model, base: Model) -> Moved:
    """What an expert changed of its ``own`` base, seen on ``base``.

    What it did not change is the base's, whatever that has there. Raises ``Mismatch`` where it
    can't be told what it changed; where that does not fit the base, ``match`` will tell.
    """
    tensors: dict[str, Tensor] = {}
    ids: dict[str, TensorId] = {}
    pairs: dict[str, Pair] = {}
    blocks: dict[BlockId, MovedBlock] = {}
    for name, tensor in expert.tensors.items():
        below, target = own.tensors.get(name), base.tensors.get(name)
        if below is None and target is not None:
            raise Mismatch(
                f"expert {expert.ref} has tensor {name}, which its base {own.ref} lacks: what it "
                "changed of it can't be told",
                hint="merge it as a whole model, with `mergegit merge --base`",
            )
        ids[name], tensors[name] = expert.ids[name], tensor
        if below is None:
            continue
        if expert.ids[name] == own.ids[name]:
            del ids[name], tensors[name]
            if target is not None:
                ids[name], tensors[name] = base.ids[name], target
            continue
        if tensor.shape != below.shape:
            raise Mismatch(
                f"tensor {name} is {list(tensor.shape)} in {expert.ref} but {list(below.shape)} "
                f"in its base {own.ref}",
                hint="what changed its shape can't be carried to another base: merge it as a "
                "whole model, with `mergegit merge --base`",
            )
        is_float = DTYPES[tensor.dtype].is_float and DTYPES[below.dtype].is_float
        if target is None or not is_float:
            continue
        if tensor.shape != target.shape:
            raise Mismatch(
                f"{expert.ref} changed tensor {name}, which is {list(tensor.shape)} there but "
                f"{list(target.shape)} in {base.ref}",
                hint="what it changed fits a base of the same shapes alone",
            )
        pair = pairs[name] = Pair(expert.ids[name], tensor, own.ids[name], below)
        tensors[name], made = _moved(pair, target)
        ids[name] = TensorId(hash_block(b"moved tensor" + pair.tensor_id + pair.base_id))
        blocks.update(made)
    model = replace(expert, tensors=tensors, ids=ids, stored_bytes=expert.nbytes)
    return Moved(model, pairs, blocks)


def _moved(pair: Pair, target: Tensor) -> tuple[Tensor, dict[BlockId, MovedBlock]]:
    """A tensor on a base's; the blocks that are as its own base has them are that base's."""
    tensor, below = pair.tensor, pair.base
    ids: list[BlockId] = []
    blocks: dict[BlockId, MovedBlock] = {}
    for index in range(len(tensor)):
        made = MovedBlock(tensor.block(index), tensor.dtype, below.block(index), below.dtype)
        if (made.block, made.dtype) == (made.below, made.below_dtype):
            ids.append(target.block(index))
            continue
        dtypes = f"moved {made.dtype} {made.below_dtype} ".encode()
        block = BlockId(hash_block(dtypes + made.block + made.below))
        blocks[block] = made
        ids.append(block)
    return Tensor(target.dtype, target.shape, b"".join(ids)), blocks
