"""How tensors are laid out over shards, and the index that names them: no disk, no weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from mergegit.dtypes import DTYPES

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
SHARD_METADATA: Final = {"format": "pt"}
"""The ``__metadata__`` of a shard that is laid out anew: transformers loads no file without it."""


def plan_shards(
    names_and_bytes: Sequence[tuple[str, int]], shard_bytes: int
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Files and the names of their tensors, with at most ``shard_bytes`` of tensors in each.

    ``names_and_bytes`` are tensors with their sizes in bytes, in the order in which they are
    wanted, and they stay in it. A tensor that is larger than ``shard_bytes`` gets a shard of its
    own. The files are called as Hugging Face tools call them: ``model.safetensors`` where one is
    enough, else ``model-00001-of-00002.safetensors`` and so on; without tensors there is none.
    Raises ``ValueError`` where ``shard_bytes`` is not positive.
    """
    if shard_bytes < 1:
        raise ValueError(f"shards of {shard_bytes} bytes hold nothing")
    groups: list[list[str]] = []
    room = 0
    for name, nbytes in names_and_bytes:
        if not groups or nbytes > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= nbytes
    paths = shard_paths(len(groups))
    return tuple((path, tuple(group)) for path, group in zip(paths, groups, strict=True))


def shard_paths(count: int) -> tuple[str, ...]:
    """The names of ``count`` shards, in order."""
    if count == 1:
        return (SINGLE_FILE,)
    return tuple(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1))


def aligned(names_and_dtypes: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The names of a shard's tensors in the order of their data, else as they come: those with the
    widest elements first.

    So every tensor begins at a multiple of its element's width, which readers that map the file
    into memory rely on.
    """
    ordered = sorted(names_and_dtypes, key=lambda tensor: -DTYPES[tensor[1]].bits)
    return tuple(name for name, _ in ordered)


def index_bytes(shards: Sequence[tuple[str, Sequence[str]]], total_bytes: int) -> bytes:
    """The text of ``model.safetensors.index.json`` for files and the names of their tensors.

    ``total_bytes`` are those of the tensors alone, without headers, as its ``total_size`` is
    understood. Names are sorted, as Hugging Face tools sort them.
    """
    weight_map = {name: path for path, names in shards for name in names}
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
