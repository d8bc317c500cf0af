"""The nouns of mergegit, as frozen data.

Ids are 32 bytes of BLAKE3. Each kind has its own type, so that a block's id can't pass for a
commit's; ``.hex()`` is how all of them are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

from mergegit.dtypes import byte_length

BlockId = NewType("BlockId", bytes)
TensorId = NewType("TensorId", bytes)
ManifestId = NewType("ManifestId", bytes)
CommitId = NewType("CommitId", bytes)
PlanId = NewType("PlanId", bytes)
ObjectId = TensorId | ManifestId | CommitId | PlanId

ID_BYTES = 32
BLOCK_ELEMENTS = 1 << 19
"""Elements of a block. A block holds a run of a tensor's elements, row-major; the last may be
shorter. Counted in elements and not in bytes, so that the blocks of a bf16 expert line up with
those of an fp32 base."""


def block_count(elements: int) -> int:
    """Number of blocks of a tensor of ``elements`` elements."""
    return -(-elements // BLOCK_ELEMENTS)


def block_elements(elements: int, index: int) -> int:
    """Number of elements of block ``index`` of a tensor of ``elements`` elements."""
    return min(BLOCK_ELEMENTS, elements - index * BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: its dtype, its shape, and the ids of its blocks, one after the other.

    The contents of files that are not weights are tensors of bytes (``U8``) too, so that one kind
    of object and one grid of blocks serve everything.
    """

    dtype: str
    shape: tuple[int, ...]
    block_ids: bytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return byte_length(self.dtype, self.elements)

    def __len__(self) -> int:
        return len(self.block_ids) // ID_BYTES

    def block(self, index: int) -> BlockId:
        return BlockId(self.block_ids[index * ID_BYTES : (index + 1) * ID_BYTES])

    def blocks(self) -> Iterator[BlockId]:
        return (self.block(index) for index in range(len(self)))

    def block_nbytes(self, index: int) -> int:
        return byte_length(self.dtype, block_elements(self.elements, index))


@dataclass(frozen=True, slots=True)
class Shard:
    """How one safetensors file is laid out.

    ``header`` is the text between the file's length field and its data, padding included, as a
    tensor of bytes. ``names`` are its tensors in the order of their data. ``strays`` are those
    that are not the model's tensor of that name: of a second file of weights beside the model, or
    of a name that the index places in another shard.
    """

    path: str
    header: TensorId
    names: tuple[str, ...]
    strays: Mapping[str, TensorId] = field(default_factory=dict)

    @property
    def belongs_to_model(self) -> bool:
        return len(self.strays) < len(self.names) or not self.names


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one checkpoint contains, enough to write the same files again, byte for byte.

    ``tensors`` are the model's tensors by name, ``shards`` the safetensors files, ``files`` all
    other files by their relative path, ``directories`` the directories with nothing in them.
    """

    tensors: Mapping[str, TensorId]
    shards: tuple[Shard, ...]
    files: Mapping[str, TensorId]
    directories: tuple[str, ...] = ()

    def tensor_of(self, shard: Shard, name: str) -> TensorId:
        return shard.strays.get(name) or self.tensors[name]

    def tensor_ids(self) -> Iterator[TensorId]:
        """Every tensor object that the manifest needs, some of them more than once."""
        yield from self.tensors.values()
        for shard in self.shards:
            yield shard.header
            yield from shard.strays.values()
        yield from self.files.values()


@dataclass(frozen=True, slots=True)
class Commit:
    """A manifest with its history.

    ``time`` is seconds since 1970, UTC. A merge's parents are its base, then the experts in
    order; ``recipe`` is what was asked, ``plan`` what was read, ``execution`` what the merge
    says of itself (the recipe in words, bytes, seconds, version of the program).
    """

    manifest: ManifestId
    parents: tuple[CommitId, ...]
    author: str
    time: int
    message: str
    recipe: Mapping[str, Any] | None = None
    plan: PlanId | None = None
    execution: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        return self.message.split("\n", 1)[0]


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """What a plan reads of one expert.

    ``layers`` has one byte per block of the mergeable tensors, in the plan's order of tensors:
    how many layers of the block are read. ``layer_bytes`` are the stored bytes read of each
    layer. ``blocks_read``, ``blocks_free`` (the base's own blocks) and ``blocks_skipped`` add up
    to the number of blocks. ``predicted_error`` is relative to the expert's weighted delta.
    """

    ref: str
    commit: CommitId
    raw_bytes: int
    planned_bytes: int
    layer_bytes: tuple[int, ...]
    blocks_read: int
    blocks_free: int
    blocks_skipped: int
    predicted_error: float
    layers: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a merge will read, and what that is expected to cost in fidelity.

    ``recipe`` is the recipe in full; ``tensors`` the mergeable tensors in the order of the
    experts' ``layers``; ``kept`` says of every other input tensor why the merge leaves it as the
    base has it. All byte counts are stored bytes as they lie on disk, but ``raw_bytes`` and
    ``write_bytes``, which are bytes of tensors. ``budget_bytes`` is None without a budget.
    ``merged_norm`` is the expected norm of the full-read merge's delta; the errors are relative to
    it. ``predicted_error`` is what is expected; ``error_bound`` is never exceeded, where the method
    is additive, and is None elsewhere.
    """

    recipe: Mapping[str, Any]
    base: CommitId
    tensors: tuple[str, ...]
    kept: Mapping[str, str]
    raw_bytes: int
    budget_bytes: int | None
    planned_bytes: int
    base_bytes: int
    write_bytes: int
    merged_norm: float
    predicted_error: float
    error_bound: float | None
    experts: tuple[ExpertPlan, ...]
