"""`checkout`: from a commit to files, as they are stored or in another form."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mergegit.checkpoint.header import build_header, metadata_of
from mergegit.checkpoint.layout import (
    SHARD_METADATA,
    SINGLE_FILE,
    aligned,
    index_bytes,
    plan_shards,
)
from mergegit.checkpoint.writer import (
    FilePart,
    check_path,
    file_parts,
    header_part,
    new_directory,
    write_file,
)
from mergegit.dtypes import DTYPES, TORCH_NAMES, byte_length, dtype_named
from mergegit.errors import BadBudget, BadRecipe, Mismatch, NotFinite
from mergegit.merge.budget import Budget
from mergegit.objects import BlockId, Manifest, Shard, Tensor, TensorId
from mergegit.pipeline import ordered_map
from mergegit.repository.companions import (
    CARD,
    CONFIG,
    INDEX,
    WEIGHT_SUFFIXES,
    config_with_dtype,
    index_with_size,
)
from mergegit.repository.updating import update_directory
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]

_WIDER = {"F16": "bfloat16", "F8_E4M3": "bfloat16", "F8_E5M2": "bfloat16", "BF16": "float32",
          "F32": "float64"}  # fmt: skip
"""To which dtype of a wider range those can turn whose numbers are beyond that of another."""


class Contents(Protocol):
    """What a manifest names, by id: a store, or models that are made as they are read."""

    def tensor(self, tensor_id: TensorId, /) -> Tensor: ...

    def read_block(self, block: BlockId, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Form:
    """How files are to differ from what is stored.

    ``dtype`` is that of all floating tensors, ``shard_bytes`` the most bytes of tensors in one
    file; None leaves them as they are.
    """

    dtype: str | None = None
    shard_bytes: int | None = None

    @classmethod
    def parse(cls, dtype: str | None, shard_size: str | int | None) -> Form:
        """A form as people write it: ``float16``, ``5GB``. Raises ``BadRecipe``."""
        try:
            name = dtype_named(dtype) if dtype is not None else None
        except ValueError as error:
            floats = ", ".join(TORCH_NAMES.values())
            raise BadRecipe(
                f"{dtype!r} is no dtype to check out in", hint=f"choose one of {floats}"
            ) from error
        return cls(name, None if shard_size is None else _shard_bytes(shard_size))

    def dtype_of(self, tensor: Tensor) -> str:
        """What a tensor's elements are written as."""
        return self.dtype if self.dtype and DTYPES[tensor.dtype].is_float else tensor.dtype

    def nbytes_of(self, tensor: Tensor) -> int:
        return byte_length(self.dtype_of(tensor), tensor.elements)

    def changes(self, tensor: Tensor) -> bool:
        return self.dtype_of(tensor) != tensor.dtype


def _shard_bytes(size: str | int) -> int:
    nbytes: int | None
    try:
        nbytes = size if isinstance(size, int) else Budget.parse(size).nbytes
    except BadBudget:
        nbytes = None
    if nbytes is None or nbytes < 1:
        raise BadRecipe(f"{size!r} is not a shard size", hint="write it like 5GB or 500MiB")
    return nbytes


@dataclass(frozen=True, slots=True)
class Written:
    """What was written, and the paths of weights beside the model that were not.

    Of an update, how many files were the commit's already, and notes on those that were not.
    """

    files: int
    nbytes: int
    left_out: tuple[str, ...]
    unchanged: int = 0
    notes: tuple[str, ...] = ()


def check_out(
    store: Contents,
    manifest: Manifest,
    directory: Path,
    form: Form,
    *,
    threads: int,
    progress: Progress,
    update: Store | None = None,
    signature: bytes = b"",
) -> Written:
    """Write a manifest's files in the form asked for, block by block.

    ``signature`` is written at the end of the model card, if there is one.

    With ``update``, the store that the directory's files may be in, the directory is one that is
    there, of which files are rewritten that differ (mergegit.repository.updating).

    The directory appears whole or not at all. In another form than the stored one, second files of
    weights beside the model are left out, as merges leave them out: they would not agree with it.
    Raises ``BadTarget``, ``NoSpace``, ``Mismatch`` where the weights' dtype has a meaning that
    others lack, and ``NotFinite`` where a number is beyond the range of the dtype.
    """
    files, left_out = _plan_files(store, manifest, form)
    if signature:
        files = [
            (path, [*parts, FilePart(literal=signature)] if path == CARD else parts)
            for path, parts in files
        ]
    total = sum(part.nbytes for _, parts in files for part in parts)
    done = 0

    def chunks(parts: Sequence[FilePart]) -> Iterator[bytes]:
        nonlocal done
        for part in parts:
            for chunk in _chunks(store, part, threads):
                yield chunk
                done += len(chunk)
                progress(done, total)

    if update is not None:
        changed = update_directory(update, directory, files, manifest.directories, chunks)
        notes = [f"removed {path}, which the commit has not" for path in changed.removed]
        notes += [f"{path} is none of the commit's, and stays" for path in changed.kept]
        return Written(changed.written, changed.nbytes, left_out, changed.unchanged, tuple(notes))
    with new_directory(directory) as root:
        for path in manifest.directories:
            (root / check_path(path)).mkdir(parents=True, exist_ok=True)
        for path, parts in files:
            write_file(root / check_path(path), chunks(parts))
    return Written(len(files), done, left_out)


def _chunks(store: Contents, part: FilePart, threads: int) -> Iterator[bytes]:
    tensor, dtype = part.tensor, part.dtype
    if tensor is None:
        return iter((part.literal,))
    if dtype is None:
        return ordered_map(store.read_block, tensor.blocks(), threads=threads)
    read = functools.partial(_read_converted, store, part.name, tensor.dtype, dtype)
    return ordered_map(read, tensor.blocks(), threads=threads)


def _read_converted(store: Contents, name: str, source: str, target: str, block: BlockId) -> bytes:
    # numba takes its time to load, and most checkouts convert nothing.
    from mergegit.kernels.convert import convert

    data, lost = convert(store.read_block(block), source, target)
    if lost:
        raise NotFinite(
            f"tensor {name} holds numbers beyond the range of {TORCH_NAMES[target]}",
            hint=f"choose {_WIDER[target]}, whose range is wider",
        )
    return data


# -- which files, and what is in them --------------------------------------------------------------

_Files = list[tuple[str, list[FilePart]]]


def _plan_files(store: Contents, manifest: Manifest, form: Form) -> tuple[_Files, tuple[str, ...]]:
    """Every file with what it is made of, and the paths of those that are left out."""
    tensors = {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}
    converts = any(form.changes(tensor) for tensor in tensors.values())
    if form.shard_bytes is None and not converts:
        return list(file_parts(manifest, store.tensor, functools.partial(_bytes_of, store))), ()
    model = [shard for shard in manifest.shards if shard.belongs_to_model]
    total = sum(form.nbytes_of(tensor) for tensor in tensors.values())
    anew: dict[str, bytes | None] = {}
    if converts and form.dtype and CONFIG in manifest.files:
        config = _file(store, manifest, CONFIG)
        _check_convertible(config)
        anew[CONFIG] = config_with_dtype(config, form.dtype)
    if form.shard_bytes is not None:
        names = [name for shard in model for name in shard.names if name not in shard.strays]
        sizes = [(name, form.nbytes_of(tensors[name])) for name in names]
        plan = plan_shards(sizes, form.shard_bytes)
        metadata = _common_metadata(store, model)
        shards = [
            (path, _shard_parts([(name, tensors[name]) for name in held], form, metadata))
            for path, held in plan
        ]
        anew[INDEX] = index_bytes(plan, total) if len(plan) > 1 else None
    else:
        shards = [(shard.path, _converted_parts(store, manifest, shard, form)) for shard in model]
        # Beside the file that stands for the whole model, an index says nothing of it.
        if INDEX in manifest.files and SINGLE_FILE not in {shard.path for shard in model}:
            anew[INDEX] = index_with_size(_file(store, manifest, INDEX), total)
    left_out = [shard.path for shard in manifest.shards if not shard.belongs_to_model]
    left_out += [path for path in manifest.files if path.endswith(WEIGHT_SUFFIXES)]
    files = [
        (path, [FilePart(tensor=store.tensor(tensor_id))])
        for path, tensor_id in manifest.files.items()
        if path not in anew and path not in left_out
    ]
    files += [(path, [FilePart(literal=data)]) for path, data in anew.items() if data is not None]
    return files + shards, tuple(left_out)


def _check_convertible(config: bytes) -> None:
    if json.loads(config).get("quantization_config"):
        raise Mismatch(
            "the model is quantised: its weights mean something only as they are stored",
            hint="check it out without another dtype",
        )


def _common_metadata(store: Contents, shards: Sequence[Shard]) -> dict[str, str]:
    """What the headers of all shards say beside their tensors, if they agree."""
    found = [metadata_of(_bytes_of(store, store.tensor(shard.header))) for shard in shards]
    agreed = found[0] if all(metadata == found[0] for metadata in found) else {}
    return agreed or dict(SHARD_METADATA)


def _converted_parts(
    store: Contents, manifest: Manifest, shard: Shard, form: Form
) -> list[FilePart]:
    """A stored shard with its tensors converted."""
    named = [(name, store.tensor(manifest.tensor_of(shard, name))) for name in shard.names]
    header = _bytes_of(store, store.tensor(shard.header))
    if not any(form.changes(tensor) for _, tensor in named):
        return [header_part(header), *(FilePart(tensor=tensor) for _, tensor in named)]
    return _shard_parts(named, form, metadata_of(header))


def _shard_parts(
    named: Sequence[tuple[str, Tensor]], form: Form, metadata: Mapping[str, str]
) -> list[FilePart]:
    """What a shard of these tensors is made of."""
    tensors = dict(named)
    order = aligned((name, form.dtype_of(tensor)) for name, tensor in named)
    described = [(name, form.dtype_of(tensors[name]), tensors[name].shape) for name in order]
    parts = [header_part(build_header(described, metadata))]
    for name in order:
        tensor = tensors[name]
        dtype = form.dtype if form.changes(tensor) else None
        parts.append(FilePart(tensor=tensor, dtype=dtype, name=name))
    return parts


def _file(store: Contents, manifest: Manifest, path: str) -> bytes:
    return _bytes_of(store, store.tensor(manifest.files[path]))


def _bytes_of(store: Contents, tensor: Tensor) -> bytes:
    """The contents of a tensor of bytes."""
    return b"".join(store.read_block(block) for block in tensor.blocks())
