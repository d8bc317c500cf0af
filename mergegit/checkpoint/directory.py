"""A checkpoint on disk, inspected: all that headers, index and config can tell, and no weights.

A directory is read as Hugging Face tools read it: ``model.safetensors`` if it is there, else the
shards that ``model.safetensors.index.json`` names, else all ``.safetensors`` files at the top, else
``pytorch_model.bin`` or its shards. Every other file comes along as it is. A single
``.safetensors`` file is a checkpoint too.
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
from typing import Any, Final, NoReturn

from mergegit.checkpoint.header import FileHeader, TensorEntry, read_header
from mergegit.checkpoint.layout import INDEX_FILE, SINGLE_FILE, index_bytes, shard_paths
from mergegit.checkpoint.source import SourceFile
from mergegit.errors import BadCheckpoint

TORCH_FILE: Final = "pytorch_model.bin"
TORCH_INDEX: Final = "pytorch_model.bin.index.json"
CONFIG_FILE: Final = "config.json"
SUFFIX: Final = ".safetensors"
TORCH_SUFFIX: Final = ".bin"
IGNORED: Final = frozenset({".git", ".cache", ".mergegit", "__pycache__", ".ipynb_checkpoints"})
"""Names, at any depth, that are no part of a checkpoint."""
MAX_JSON_BYTES: Final = 64 << 20
_SHARD_NAME: Final = re.compile(r"^(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.\w+$")


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A safetensors file and its header, or a PyTorch file that is seen as one."""

    source: SourceFile
    header: FileHeader


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, inspected.

    ``shards`` are all safetensors files, the model's first; ``owner`` gives for each of the
    model's tensors the index of the shard that holds it. ``contents`` are the bytes of files that
    had to be read for the inspection, so that no file is read twice; ``made`` are those of files
    that belong to the checkpoint as it is kept and are not on disk. ``notes`` say what a careful
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
    made: dict[str, bytes] = field(default_factory=dict)

    def tensors(self) -> dict[str, TensorEntry]:
        """The model's tensors by name."""
        return {
            entry.name: entry
            for index, shard in enumerate(self.shards)
            for entry in shard.header.tensors
            if self.owner.get(entry.name) == index
        }


@dataclass(frozen=True, slots=True)
class _Model:
    """Which files hold the model, and where its index places tensors.

    ``index`` is the index's name, for messages. ``spent`` are files that what is kept replaces.
    """

    shards: tuple[ShardFile, ...]
    weight_map: dict[str, str]
    index: str = INDEX_FILE
    spent: frozenset[str] = frozenset()


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
    config: dict[str, Any] = {}
    if CONFIG_FILE in listing.files:
        config = _read_json(listing.files[CONFIG_FILE], contents)
    model = _find_model(path, listing, contents, config, notes)
    taken = model.spent | {shard.source.inside for shard in model.shards}
    others = [name for name in listing.files if name.endswith(SUFFIX) and name not in taken]
    shards = (*model.shards, *(_read_shard(listing.files[name]) for name in others))
    owner = _owners(model.shards, model.weight_map, model.index)
    notes.extend(_config_notes(config, owner, shards))
    plain = tuple(
        source
        for name, source in listing.files.items()
        if not name.endswith(SUFFIX) and name not in model.spent
    )
    return Checkpoint(
        path,
        _name_of(path.resolve()),
        shards,
        owner,
        plain,
        tuple(listing.directories),
        contents,
        tuple(notes),
        _new_index(model.shards, owner) if model.spent else {},
    )


def _find_model(
    path: Path,
    listing: _Listing,
    contents: dict[str, bytes],
    config: dict[str, Any],
    notes: list[str],
) -> _Model:
    weight_map: dict[str, str] = {}
    if SINGLE_FILE in listing.files:
        names = [SINGLE_FILE]
        if INDEX_FILE in listing.files:
            notes.append(f"{SINGLE_FILE} is taken for the model; {INDEX_FILE} comes along as it is")
    elif INDEX_FILE in listing.files:
        weight_map = _read_index(listing.files[INDEX_FILE], contents, SUFFIX)
        names = _indexed_shards(path, weight_map, listing, INDEX_FILE)
    else:
        names = [name for name in listing.files if name.endswith(SUFFIX) and "/" not in name]
        if not names:
            return _find_torch_model(path, listing, config, notes)
        _check_siblings(path, names, listing)
    return _Model(tuple(_read_shard(listing.files[name]) for name in names), weight_map)


def _find_torch_model(
    path: Path, listing: _Listing, config: dict[str, Any], notes: list[str]
) -> _Model:
    """The model of a directory without safetensors: its PyTorch files, as what they become."""
    from mergegit.checkpoint.legacy import inspect_torch_file

    weight_map: dict[str, str] = {}
    names = [name for name in listing.files if re.match(r"pytorch_model-\d+-of-\d+\.bin$", name)]
    spent = set[str]()
    if TORCH_FILE in listing.files:
        names = [TORCH_FILE]
        if TORCH_INDEX in listing.files:
            notes.append(f"{TORCH_FILE} is taken for the model; {TORCH_INDEX} comes along as it is")
    elif TORCH_INDEX in listing.files:
        weight_map = _read_index(listing.files[TORCH_INDEX], {}, TORCH_SUFFIX)
        names = _indexed_shards(path, weight_map, listing, TORCH_INDEX)
        spent.add(TORCH_INDEX)
    elif names:
        _check_siblings(path, names, listing)
    else:
        _fail_without_weights(path, listing)
    becomes = dict(zip(names, shard_paths(len(names)), strict=True))
    # A config that forbids ties is believed: without the tensor's second name the model would
    # load with random weights under it.
    unties = config.get("tie_word_embeddings") is not False
    shards: list[ShardFile] = []
    left_out: list[str] = []
    for name, inside in becomes.items():
        elsewhere = frozenset(tensor for tensor, file in weight_map.items() if file != name)
        found = inspect_torch_file(listing.files[name], inside, unties=unties, elsewhere=elsewhere)
        shards.append(ShardFile(found.source, found.header))
        for tied, owner in found.ties.items():
            left_out.append(f"{tied} (as {owner})")
            weight_map.pop(tied, None)
    notes.append("read from PyTorch files; it comes back as safetensors")
    if left_out:
        notes.append(f"tensors that have two names are kept under one: {', '.join(left_out)}")
    places = {tensor: becomes[file] for tensor, file in weight_map.items()}
    return _Model(tuple(shards), places, TORCH_INDEX, frozenset(spent.union(names)))


def _fail_without_weights(path: Path, listing: _Listing) -> NoReturn:
    legacy = [name for name in listing.files if name.endswith((".bin", ".pt", ".pth"))]
    raise BadCheckpoint(
        f"{path} holds no safetensors files",
        hint=f"save {legacy[0]} as safetensors first, with save_pretrained of transformers"
        if legacy
        else "name the directory that holds model.safetensors or its shards",
    )


def _new_index(shards: tuple[ShardFile, ...], owner: dict[str, int]) -> dict[str, bytes]:
    """The index of shards that had another, where there are several."""
    if len(shards) == 1:
        return {}
    owned = [
        [entry for entry in shard.header.tensors if owner[entry.name] == index]
        for index, shard in enumerate(shards)
    ]
    total = sum(entry.end - entry.begin for entries in owned for entry in entries)
    names = [[entry.name for entry in entries] for entries in owned]
    paths = [shard.source.inside for shard in shards]
    return {INDEX_FILE: index_bytes(list(zip(paths, names, strict=True)), total)}


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
    return Checkpoint(path, path.stem, (shard,), _owners((shard,), {}, INDEX_FILE), (), (), {})


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


def _read_index(source: SourceFile, contents: dict[str, bytes], suffix: str) -> dict[str, str]:
    """The files that an index places tensors in, all of them ending in ``suffix``."""
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
        if file.startswith("/") or ".." in parts or not file.endswith(suffix):
            raise BadCheckpoint(
                f"{source.path} names the file {file!r}, which can't be a shard",
                hint="download the checkpoint again",
            )
    return weight_map


def _indexed_shards(
    path: Path, weight_map: dict[str, str], listing: _Listing, index: str
) -> list[str]:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if shard not in listing.files]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadCheckpoint(
            f"shard {missing[0]}{more} of {path} is missing; {index} names it",
            hint="download the checkpoint again",
        )
    return shards


def _check_siblings(path: Path, shards: list[str], listing: _Listing) -> None:
    """Whether all shards are there that the names of some of them count."""
    for name in shards:
        match = _SHARD_NAME.match(name)
        if match is None:
            continue
        width = len(match["number"])
        suffix = PurePosixPath(name).suffix
        for number in range(1, int(match["count"]) + 1):
            sibling = f"{match['stem']}-{number:0{width}d}-of-{match['count']}{suffix}"
            if sibling not in listing.files:
                raise BadCheckpoint(
                    f"shard {sibling} of {path} is missing", hint="download the checkpoint again"
                )


def _owners(
    shards: tuple[ShardFile, ...], weight_map: dict[str, str], index_name: str
) -> dict[str, int]:
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
                f"{shards[index].source.path} lacks tensor {name}, which {index_name} places there",
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
