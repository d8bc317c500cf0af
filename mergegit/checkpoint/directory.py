"""A checkpoint on disk, inspected: all that headers, index and config can tell, and no weights.

A directory is read as Hugging Face tools read it: ``model.safetensors`` if it is there, else the
shards that ``model.safetensors.index.json`` names, else all ``.safetensors`` files at the top.
Every other file comes along as it is. A single ``.safetensors`` file is a checkpoint too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mergegit.checkpoint.header import FileHeader, TensorEntry, read_header
from mergegit.errors import BadCheckpoint

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
CONFIG_FILE: Final = "config.json"
SUFFIX: Final = ".safetensors"
IGNORED: Final = frozenset({".git", ".cache", ".mergegit", "__pycache__", ".ipynb_checkpoints"})
"""Names, at any depth, that are no part of a checkpoint."""
MAX_JSON_BYTES: Final = 64 << 20
_SHARD_NAME: Final = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint: where it is, its path inside, and how it was when inspected."""

    path: Path
    inside: str
    size: int
    mtime_ns: int

    def open(self) -> int:
        """An open descriptor. Raises ``BadCheckpoint`` where the file is not as it was."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BadCheckpoint(
                f"{self.path} vanished while the checkpoint was read", hint="run the command again"
            ) from error
        try:
            self.check_unchanged(fd)
        except BadCheckpoint:
            os.close(fd)
            raise
        return fd

    def check_unchanged(self, fd: int) -> None:
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise BadCheckpoint(
                f"{self.path} changed while it was read", hint="run the command again"
            )


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A safetensors file and its header."""

    source: SourceFile
    header: FileHeader


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, inspected.

    ``shards`` are all safetensors files, the model's first; ``owner`` gives for each of the
    model's tensors the index of the shard that holds it. ``contents`` are the bytes of files that
    had to be read for the inspection, so that no file is read twice. ``notes`` say what a careful
    user should know.
    """

    path: Path
    name: str
    shards: tuple[ShardFile, ...]
    owner: dict[str, int]
    files: tuple[SourceFile, ...]
    directories: tuple[str, ...]
    contents: dict[str, bytes]
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, TensorEntry]:
        """The model's tensors by name."""
        return {
            entry.name: entry
            for index, shard in enumerate(self.shards)
            for entry in shard.header.tensors
            if self.owner.get(entry.name) == index
        }


@dataclass(slots=True)
class _Listing:
    files: dict[str, SourceFile] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)


def inspect(path: Path) -> Checkpoint:
    """Inspect the checkpoint at ``path``. Raises ``BadCheckpoint``."""
    if not path.exists():
        raise BadCheckpoint(
            f"there is no checkpoint at {path}",
            hint="name a directory with safetensors files, or one such file",
        )
    if path.is_file():
        return _inspect_file(path)
    if not path.is_dir():
        raise BadCheckpoint(
            f"{path} is neither a file nor a directory",
            hint="name a checkpoint's directory or a safetensors file",
        )
    listing = _list(path)
    contents: dict[str, bytes] = {}
    notes: list[str] = []
    weight_map: dict[str, str] = {}
    if SINGLE_FILE in listing.files:
        model = [SINGLE_FILE]
        if INDEX_FILE in listing.files:
            notes.append(f"{SINGLE_FILE} is taken for the model; {INDEX_FILE} comes along as it is")
    elif INDEX_FILE in listing.files:
        weight_map = _read_index(listing.files[INDEX_FILE], contents)
        model = _indexed_shards(path, weight_map, listing)
    else:
        model = _top_level_shards(path, listing)
    others = [name for name in listing.files if name.endswith(SUFFIX) and name not in set(model)]
    shards = tuple(_read_shard(listing.files[name]) for name in [*model, *others])
    owner = _owners(shards[: len(model)], weight_map)
    if CONFIG_FILE in listing.files:
        config = _read_json(listing.files[CONFIG_FILE], contents)
        notes.extend(_config_notes(config, owner, shards))
    plain = tuple(source for name, source in listing.files.items() if not name.endswith(SUFFIX))
    return Checkpoint(
        path,
        _name_of(path.resolve()),
        shards,
        owner,
        plain,
        tuple(listing.directories),
        contents,
        tuple(notes),
    )


def _name_of(path: Path) -> str:
    """What people call the checkpoint in a directory: in the Hub's cache, by its repository."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def _inspect_file(path: Path) -> Checkpoint:
    if path.suffix != SUFFIX:
        raise BadCheckpoint(
            f"{path} is not a {SUFFIX} file",
            hint="name a checkpoint's directory or a safetensors file",
        )
    shard = _read_shard(_source(path, path.name))
    return Checkpoint(path, path.stem, (shard,), _owners((shard,), {}), (), (), {})


def _list(root: Path) -> _Listing:
    """Every file below ``root`` by its path inside, in order; links are followed."""
    listing = _Listing()
    for directory, inside in _walk(root, "", frozenset()):
        names = sorted(entry for entry in os.listdir(directory) if entry not in IGNORED)
        empty = True
        for name in names:
            empty = False
            path = directory / name
            below = f"{inside}{name}"
            try:
                below.encode()
                if "\\" in name:
                    raise BadCheckpoint(
                        f"{path} has a backslash in its name, which other systems take for a path",
                        hint="rename it",
                    )
                mode = path.stat().st_mode
            except UnicodeEncodeError as error:
                raise BadCheckpoint(
                    f"{os.fspath(path)!r} has a name that is not UTF-8", hint="rename it"
                ) from error
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                raise BadCheckpoint(
                    f"{path} is a link to a file that is not there",
                    hint="download the checkpoint again, or remove the link",
                ) from error
            if stat.S_ISREG(mode):
                listing.files[below] = _source(path, below)
            elif not stat.S_ISDIR(mode):
                raise BadCheckpoint(f"{path} is neither a file nor a directory", hint="remove it")
        if empty and inside:
            listing.directories.append(inside.rstrip("/"))
    return listing


def _walk(
    directory: Path, inside: str, above: frozenset[tuple[int, int]]
) -> Iterator[tuple[Path, str]]:
    """Every directory with its path inside (ending in '/'); links that lead back are refused."""
    status = directory.stat()
    key = (status.st_dev, status.st_ino)
    if key in above:
        raise BadCheckpoint(
            f"{directory} is a link to a directory above it", hint="remove the link"
        )
    yield directory, inside
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if name not in IGNORED and path.is_dir():
            yield from _walk(path, f"{inside}{name}/", above | {key})


def _source(path: Path, inside: str) -> SourceFile:
    status = path.stat()
    return SourceFile(path, inside, status.st_size, status.st_mtime_ns)


def _read_shard(source: SourceFile) -> ShardFile:
    fd = source.open()
    try:
        return ShardFile(source, read_header(fd, source.path))
    finally:
        os.close(fd)


def _read_json(source: SourceFile, contents: dict[str, bytes]) -> dict[str, Any]:
    """A JSON object from a file, whose bytes are kept in ``contents``."""
    if source.size > MAX_JSON_BYTES:
        raise BadCheckpoint(
            f"{source.path} is {source.size:,} bytes long; at most {MAX_JSON_BYTES:,} are read",
            hint="check the file",
        )
    fd = source.open()
    with os.fdopen(fd, "rb") as file:
        data = file.read()
    contents[source.inside] = data
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{source.path} is not valid JSON ({error})", hint="mend the file or download it again"
        ) from error
    if not isinstance(value, dict):
        raise BadCheckpoint(
            f"{source.path} is not a JSON object", hint="mend the file or download it again"
        )
    return value


def _read_index(source: SourceFile, contents: dict[str, bytes]) -> dict[str, str]:
    weight_map = _read_json(source, contents).get("weight_map")
    if not (
        isinstance(weight_map, dict)
        and weight_map
        and all(isinstance(file, str) for file in weight_map.values())
    ):
        raise BadCheckpoint(
            f"{source.path} has no weight_map of tensor names to files",
            hint="download the checkpoint again",
        )
    for file in weight_map.values():
        parts = PurePosixPath(file).parts
        if file.startswith("/") or ".." in parts or not file.endswith(SUFFIX):
            raise BadCheckpoint(
                f"{source.path} names the file {file!r}, which can't be a shard",
                hint="download the checkpoint again",
            )
    return weight_map


def _indexed_shards(path: Path, weight_map: dict[str, str], listing: _Listing) -> list[str]:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in listing.files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadCheckpoint(
            f"shard {missing[0]}{more} of {path} is missing; {INDEX_FILE} names it",
            hint="download the checkpoint again",
        )
    return shards


def _top_level_shards(path: Path, listing: _Listing) -> list[str]:
    shards = [name for name in listing.files if name.endswith(SUFFIX) and "/" not in name]
    if not shards:
        legacy = [name for name in listing.files if name.endswith((".bin", ".pt", ".pth"))]
        raise BadCheckpoint(
            f"{path} holds no safetensors files",
            hint=f"save {legacy[0]} as safetensors first, with save_pretrained of transformers"
            if legacy
            else "name the directory that holds model.safetensors or its shards",
        )
    for name in shards:
        match = _SHARD_NAME.match(name)
        if match is None:
            continue
        width = len(match["number"])
        for number in range(1, int(match["count"]) + 1):
            sibling = f"{match['stem']}-{number:0{width}d}-of-{match['count']}{SUFFIX}"
            if sibling not in listing.files:
                raise BadCheckpoint(
                    f"shard {sibling} of {path} is missing", hint="download the checkpoint again"
                )
    return shards


def _owners(shards: tuple[ShardFile, ...], weight_map: dict[str, str]) -> dict[str, int]:
    """Which of the model's shards holds each tensor; the index decides where two do."""
    holders: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        for entry in shard.header.tensors:
            holders.setdefault(entry.name, []).append(index)
    by_name = {shard.source.inside: index for index, shard in enumerate(shards)}
    owner: dict[str, int] = {}
    for name, file in weight_map.items():
        index = by_name[file]
        if index not in holders.get(name, ()):
            raise BadCheckpoint(
                f"{shards[index].source.path} lacks tensor {name}, which {INDEX_FILE} places there",
                hint="download the checkpoint again",
            )
        owner[name] = index
    for name, indices in holders.items():
        if name in owner:
            continue
        if len(indices) > 1:
            first, second = (shards[index].source.inside for index in indices[:2])
            raise BadCheckpoint(
                f"tensor {name} stands in both {first} and {second}; no index says which counts",
                hint="remove the file that does not belong to the model",
            )
        owner[name] = indices[0]
    if not owner:
        raise BadCheckpoint(
            f"{shards[0].source.path} holds no tensors", hint="name a checkpoint with weights"
        )
    return owner


def _config_notes(
    config: dict[str, Any], owner: dict[str, int], shards: tuple[ShardFile, ...]
) -> Iterator[str]:
    """Where the config and the weights disagree: worth a word, not a refusal."""
    layers = config.get("num_hidden_layers")
    found = {int(m[1]) for name in owner if (m := re.match(r"model\.layers\.(\d+)\.", name))}
    if isinstance(layers, int) and found and max(found) + 1 < layers:
        yield f"config.json promises {layers} layers; the weights have {max(found) + 1}"
    vocabulary = config.get("vocab_size")
    for index, shard in enumerate(shards):
        for entry in shard.header.tensors:
            if entry.name.endswith("embed_tokens.weight") and owner.get(entry.name) == index:
                rows = entry.shape[0] if entry.shape else 0
                if isinstance(vocabulary, int) and rows < vocabulary:
                    yield f"config.json promises {vocabulary} tokens; {entry.name} has {rows} rows"
