"""Weights in PyTorch files: read safely, and seen as the safetensors files that they will become.

A PyTorch file is a zip archive of a pickle, which says what there is, and of the tensors' storages.
The pickle is read by torch with ``weights_only``, which runs none of the code that it may name; the
storages are mapped into memory and read where a tensor's bytes are asked for. There is no other way
in: what torch refuses is refused.
"""

from __future__ import annotations

import bisect
import math
import os
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch

from mergegit.checkpoint.header import FileHeader, build_header, parse_header
from mergegit.checkpoint.layout import SHARD_METADATA, aligned
from mergegit.checkpoint.source import Reader, SourceFile
from mergegit.checkpoint.torch_dtypes import TORCH_DTYPES, TORCH_PAIRS
from mergegit.errors import BadCheckpoint

SAFE_TORCH: Final = (2, 10)
"""Before it a file could corrupt memory in spite of ``weights_only`` (CVE-2026-24747)."""
_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NESTED: Final = ("state_dict", "model_state_dict")
"""Under which keys training programs put a model's tensors beside other things."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters, which have no place in UTF-8."""
_AGAIN: Final = "download it again"
_SAVE: Final = "save the model's state_dict as safetensors where it was made"


@dataclass(frozen=True, slots=True)
class TorchFile(SourceFile):
    """A PyTorch file of weights, read as the safetensors file ``inside`` without ``left_out``."""

    left_out: frozenset[str] = frozenset()

    def reader(self) -> Reader:
        return _TorchReader(self)


@dataclass(frozen=True, slots=True)
class TorchContents:
    """What a PyTorch file holds: the header of the safetensors file that it becomes, and the names
    that are left out of it, each with the name that its tensor is kept under."""

    source: TorchFile
    header: FileHeader
    ties: dict[str, str]


def inspect_torch_file(
    source: SourceFile, inside: str, *, unties: bool, elsewhere: frozenset[str]
) -> TorchContents:
    """All that can be told of a file without reading a weight. Raises ``BadCheckpoint``.

    With ``unties`` a tensor that has several names is kept under one of them. Names ``elsewhere``,
    which stand for tensors of other files, are not looked at for that.
    """
    os.close(source.open())
    tensors = _load(source.path)
    ties = _ties(tensors, elsewhere) if unties else {}
    left_out = frozenset(ties)
    file = TorchFile(source.path, inside, source.size, source.mtime_ns, left_out)
    return TorchContents(file, _header(source.path, tensors, left_out), ties)


def _ties(tensors: dict[str, torch.Tensor], elsewhere: frozenset[str]) -> dict[str, str]:
    """Names of tensors that are another's very elements, with the first name that they have.

    save_pretrained of transformers writes a tied tensor once, under the name of the module that
    owns it, and leaves the head out; loading ties it again. The owner is registered before those
    that are tied to it, so its name is the first in the file. (save_model of safetensors keeps the
    first in the alphabet, which would be ``lm_head.weight``.)
    """
    first: dict[tuple[object, ...], str] = {}
    ties = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or name in elsewhere:
            continue
        view = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype,
                tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())  # fmt: skip
        owner = first.setdefault(view, name)
        if owner != name:
            ties[name] = owner
    return ties


def _header(path: Path, tensors: dict[str, torch.Tensor], left_out: frozenset[str]) -> FileHeader:
    """The header of the safetensors file: tensors by width, then by name, as ``save_file`` does."""
    described = {
        name: _dtype_and_shape(tensors[name]) for name in sorted(tensors) if name not in left_out
    }
    order = aligned((name, dtype) for name, (dtype, _) in described.items())
    text = build_header([(name, *described[name]) for name in order], SHARD_METADATA)
    return FileHeader(text, parse_header(text, path))


def _dtype_and_shape(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """What a header says of a tensor."""
    if tensor.dtype == TORCH_PAIRS:
        return "F4", (*tensor.shape[:-1], 2 * tensor.shape[-1])
    return _NAMES[tensor.dtype], tuple(tensor.shape)


class _TorchReader:
    """Reads the safetensors file that a PyTorch file becomes, by offsets into that."""

    def __init__(self, source: TorchFile) -> None:
        self._source = source
        self._fd = source.open()
        tensors = _load(source.path)
        header = _header(source.path, tensors, source.left_out)
        self._data_offset = header.data_offset
        # Tensors without elements begin where the next one does, and no byte of them is read.
        entries = [entry for entry in header.tensors if entry.end > entry.begin]
        self._begins = [entry.begin for entry in entries]
        self._tensors = [tensors[entry.name] for entry in entries]

    def read(self, offset: int, length: int) -> bytes:
        # A mapped file that becomes shorter would end the process.
        self._source.check_unchanged(self._fd)
        begin = offset - self._data_offset
        place = bisect.bisect_right(self._begins, begin) - 1
        tensor = self._tensors[place]
        width = tensor.element_size()
        return _run(tensor, (begin - self._begins[place]) // width, length // width)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _run(tensor: torch.Tensor, start: int, count: int) -> bytes:
    """The bytes of ``count`` elements, row-major, from element ``start`` on.

    Of a tensor that lies otherwise in memory, the rows that they are in are copied, not all of it.
    """
    if not tensor.is_contiguous():
        while tensor.shape[0] == 1:
            tensor = tensor[0]
        row = math.prod(tensor.shape[1:])
        first = start // row
        tensor = tensor[first : -(-(start + count) // row)].contiguous()
        start -= first * row
    run = tensor.reshape(-1)[start : start + count].resolve_conj().resolve_neg()
    return run.view(torch.uint8).numpy().tobytes()


def _load(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, their elements mapped from it. Raises ``BadCheckpoint``."""
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if version < SAFE_TORCH:
        wanted = ".".join(map(str, SAFE_TORCH))
        _fail(path, f"is not safe to read with torch {torch.__version__}",
              f"install torch {wanted} or newer")  # fmt: skip
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kinds of files that are refused below
            value = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{path} holds what could run code, or is damaged: torch refuses it", hint=_SAVE
        ) from error
    except Exception as error:  # a stranger's file may raise anything on its way through torch
        raise BadCheckpoint(f"{path} can't be read as a PyTorch file", hint=_AGAIN) from error
    return _state_dict(path, value)


def _check_archive(path: Path) -> None:
    """Whether the file is whole and its storages lie in it plainly, as they are to be mapped."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            hint = f"{_AGAIN}, or load it and save it again with a newer torch"
            _fail(path, "is not a file of PyTorch 1.6 or newer", hint)
        try:
            records = zipfile.ZipFile(file).infolist()
        except Exception as error:  # what is damaged may fail anywhere in it
            raise BadCheckpoint(f"{path} is truncated or damaged", hint=_AGAIN) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        _fail(path, "is compressed, which torch.save never does", f"{_AGAIN}, or save it again")


def _state_dict(path: Path, value: object) -> dict[str, torch.Tensor]:
    """The tensors by name that a file holds, at the top or one level below."""
    found = _entries(value)
    if not any(isinstance(item, torch.Tensor) for item in found.values()):
        below = {key: _entries(item) for key, item in found.items()}
        models = [key for key, items in below.items() if _are_tensors(items)]
        if len(models) > 1:
            _fail(path, f"holds tensors under {models[0]!a} and under {models[1]!a}", _SAVE)
        if len(models) == 1 and models[0] in _NESTED:
            found = below[models[0]]
        elif models or found or not isinstance(value, dict):
            _fail(path, "holds no state dict", _SAVE)
    return {_name(path, name): _tensor(path, name, item) for name, item in found.items()}


def _entries(value: object) -> dict[object, object]:
    # What a file may set on a dict that it brings along hides that dict's own methods.
    return dict(dict.items(value)) if isinstance(value, dict) else {}


def _are_tensors(items: dict[object, object]) -> bool:
    return bool(items) and all(
        isinstance(name, str) and isinstance(item, torch.Tensor) for name, item in items.items()
    )


def _name(path: Path, name: object) -> str:
    if not isinstance(name, str) or name == "__metadata__" or _SURROGATE.search(name):
        _fail(path, f"holds a tensor called {name!a}, which safetensors can't name so", _SAVE)
    return name


def _tensor(path: Path, name: object, value: object) -> torch.Tensor:
    """A value of a state dict, if it is a tensor that safetensors can hold."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        _fail(path, f"holds {name!a}, which is no tensor", _SAVE)
    assert isinstance(value, torch.Tensor)
    plain = torch.Tensor.detach(value)
    if plain.device.type != "cpu":
        _fail(path, f"holds tensor {name} without its elements", _SAVE)
    if plain.layout is not torch.strided or plain.is_nested:
        _fail(path, f"holds tensor {name}, which is not dense", _SAVE)
    pairs = plain.dtype == TORCH_PAIRS and plain.ndim
    if plain.dtype not in _NAMES and not pairs:
        _fail(path, f"holds tensor {name} of {plain.dtype}, which safetensors lacks", _SAVE)
    return plain


def _fail(path: Path, what: str, hint: str) -> NoReturn:
    raise BadCheckpoint(f"{path} {what}", hint=hint)
