"""`extract-lora`: what a model changed of its base, as an adapter of low rank.

One matrix is read, decomposed and written at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from mergegit.checkpoint.adapter import WEIGHTS_FILE, inputs_first
from mergegit.checkpoint.adapter_files import (
    WEIGHTS_METADATA,
    AdapterLayout,
    adapter_layout,
    whole_modules,
    written_factor,
)
from mergegit.checkpoint.adapter_settings import CONFIG_FILE
from mergegit.checkpoint.header import build_header
from mergegit.checkpoint.layout import aligned
from mergegit.checkpoint.writer import header_part, new_directory, write_file
from mergegit.dtypes import DTYPES, TORCH_NAMES, dtype_named
from mergegit.errors import BadRecipe, Mismatch, NotFinite
from mergegit.kernels.convert import convert
from mergegit.kernels.floats import Floats, to_float32
from mergegit.merge.extract_lora import energies, factor
from mergegit.merge.layers import is_input
from mergegit.objects import BLOCK_ELEMENTS, Manifest, Tensor
from mergegit.pipeline import ordered_map
from mergegit.repository.companions import CONFIG
from mergegit.repository.lineage import check_base, is_adapter
from mergegit.repository.reports import KindError
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]

_WEIGHT: Final = ".weight"
_PLAIN_BITS: Final = 16
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings)\.weight")
_CAUSAL: Final = ("ForCausalLM", "LMHeadModel")
_CLASS_PREFIXES: Final = {"gpt2": "transformer.", "bloom": "transformer."}
"""What the classes with a head call those tensors that older checkpoints have without a prefix."""
_NUMBERED: Final = re.compile(r".*?(?:^|\.)\d+\.(?=\D)")


@dataclass(slots=True)
class Extracted:
    """What was written: matrices as factors, tensors whole, and bytes; and how far it is off.

    ``error`` is |delta - adapter| / |delta| over the whole model, ``kinds`` has it by kind of
    matrix.
    """

    matrices: int
    whole: int
    nbytes: int
    error: float
    kinds: tuple[KindError, ...]


@dataclass(frozen=True, slots=True)
class Models:
    """An expert and its base: what they are called, and what they hold."""

    expert_ref: str
    expert: Manifest
    base_ref: str
    base: Manifest


def extract(
    store: Store,
    models: Models,
    directory: Path,
    *,
    rank: int,
    dtype: str | None,
    threads: int,
    progress: Progress,
) -> Extracted:
    """Write a directory with an adapter that brings the base near to the expert.

    Every changed matrix becomes the best two factors of ``rank``; whatever else has changed is
    saved whole. Factors are of ``dtype``, by default the expert's own. The directory appears whole
    or not at all. Raises ``Mismatch``, ``BadRecipe``, ``BadCheckpoint``, ``BadTarget``,
    ``NotFinite`` and ``NoSpace``.
    """
    into = _dtype(dtype)
    if rank < 1:
        raise BadRecipe(f"an adapter of rank {rank} changes nothing", hint="give a rank above 0")
    work = _Work.of(store, models, rank, into)
    total = sum(work.expert[name].nbytes for name in work.changed)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    with new_directory(directory) as root:
        nbytes = write_file(root / WEIGHTS_FILE, work.chunks(threads, advance))
        nbytes += write_file(root / CONFIG_FILE, [work.layout.config])
        found = work.found
        if not found.whole:
            raise _no_difference(models)
    return Extracted(
        len(work.matrices),
        len(work.layout.saved),
        nbytes,
        math.sqrt(found.missed / found.whole),
        found.kinds(),
    )


def _dtype(dtype: str | None) -> str | None:
    try:
        return dtype_named(dtype) if dtype is not None else None
    except ValueError as error:
        raise BadRecipe(
            f"{dtype!r} is no dtype for factors",
            hint=f"choose one of {', '.join(TORCH_NAMES.values())}",
        ) from error


@dataclass(slots=True)
class _Found:
    """Energies of the delta so far, missed and whole, and each matrix's error by its kind."""

    missed: float = 0.0
    whole: float = 0.0
    by_kind: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, missed: float, whole: float) -> None:
        self.missed += missed
        self.whole += whole
        error = math.sqrt(missed / whole) if whole else 0.0
        self.by_kind.setdefault(kind_of(name), []).append(error)

    def kinds(self) -> tuple[KindError, ...]:
        return tuple(
            KindError(kind, len(errors), median(errors), max(errors))
            for kind, errors in sorted(self.by_kind.items())
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be written, and what is found on the way."""

    store: Store
    expert: Mapping[str, Tensor]
    base: Mapping[str, Tensor]
    changed: Collection[str]
    matrices: Mapping[str, int]
    layout: AdapterLayout
    transposed: Collection[str]
    dtypes: Mapping[str, str]
    found: _Found = field(default_factory=_Found)

    @classmethod
    def of(cls, store: Store, models: Models, rank: int, dtype: str | None) -> _Work:
        _check_models(models)
        base, expert = (_tensors(store, m) for m in (models.base, models.expert))
        _check_shapes(models, base, expert)
        ids, theirs = models.base.tensors, models.expert.tensors
        changed = [name for name in sorted(ids) if ids[name] != theirs[name]]
        if not changed:
            raise _no_difference(models)
        matrices = {}
        for name in changed:
            if _is_matrix(name, base[name]):
                _check_plain(models, name, base[name], expert[name])
                matrices[name] = min(rank, *base[name].shape)
        if not matrices:
            raise Mismatch(
                f"{models.expert_ref} differs from {models.base_ref} in no matrix of a layer, and "
                "an adapter needs one",
                hint="check the whole model out instead",
            )
        rest = [name for name in changed if name not in matrices]
        saved = whole_modules(rest, matrices, base)
        shapes = {name: tensor.shape for name, tensor in base.items()}
        transposed = inputs_first(shapes, matrices)
        config = _config(store, models.base)
        layout = adapter_layout(
            {name: (shapes[name][0], r, shapes[name][1]) for name, r in matrices.items()},
            saved,
            base_name=models.base_ref,
            task="CAUSAL_LM" if _architecture(config).endswith(_CAUSAL) else None,
            prefix=_prefix(config, base),
            transposed=transposed,
            tied=_tied(config, base),
        )
        dtypes = {name: expert[source].dtype for name, source in layout.saved.items()}
        for name, (target, _) in layout.factors.items():
            dtypes[name] = dtype or expert[target].dtype
        return cls(store, expert, base, [*matrices, *saved], matrices, layout, transposed, dtypes)

    def chunks(self, threads: int, advance: Callable[[int], None]) -> Iterator[bytes | memoryview]:
        """The adapter's weights as a safetensors file."""
        shapes: dict[str, tuple[int, ...]] = dict(self.layout.shapes)
        shapes |= {name: self.expert[source].shape for name, source in self.layout.saved.items()}
        order = aligned((name, self.dtypes[name]) for name in shapes)
        described = [(name, self.dtypes[name], shapes[name]) for name in order]
        yield header_part(build_header(described, WEIGHTS_METADATA)).literal
        counted = set[str]()
        for name in order:
            if name in self.layout.saved:
                source = self.layout.saved[name]
                if source not in counted:
                    counted.add(source)
                    self._measure(source, threads)
                    advance(self.expert[source].nbytes)
                blocks = self.expert[source].blocks()
                yield from ordered_map(self.store.read_block, blocks, threads=threads)
                continue
            target, side = self.layout.factors[name]
            if side == "a":
                # Both are found at once, and the other one is written next.
                factors = self._factors(target, self.dtypes[name], threads)
                advance(self.expert[target].nbytes)
            yield factors[side]

    def _factors(self, target: str, dtype: str, threads: int) -> dict[str, bytes]:
        """The factors of a matrix as they are written, whose error is noted."""
        delta = self._delta(target, threads)
        made = factor(delta, self.matrices[target], name=target)
        a, b = (_rounded(factor, dtype, target) for factor in (made.a, made.b))
        self.found.add(target, *energies(delta, b, a))
        turned = target in self.transposed
        return {
            "a": convert(written_factor(b, a, "a", turned).tobytes(), "F32", dtype)[0],
            "b": convert(written_factor(b, a, "b", turned).tobytes(), "F32", dtype)[0],
        }

    def _delta(self, name: str, threads: int) -> Floats:
        """What the expert changed in a matrix, float32."""
        expert = self.expert[name]
        delta = np.empty(expert.elements, np.float32)
        read = self._reader(name)
        for index, values in enumerate(ordered_map(read, range(len(expert)), threads=threads)):
            first = index * BLOCK_ELEMENTS
            delta[first : first + values.size] = values
        return delta.reshape(expert.shape)

    def _reader(self, name: str) -> Callable[[int], Floats]:
        expert, base, store = self.expert[name], self.base[name], self.store

        def read(index: int) -> Floats:
            theirs = to_float32(store.read_block(expert.block(index)), expert.dtype)
            return theirs - to_float32(store.read_block(base.block(index)), base.dtype)

        return read

    def _measure(self, name: str, threads: int) -> None:
        """Add what a tensor that is saved whole has changed, of which nothing is missed."""
        expert = self.expert[name]
        if not DTYPES[expert.dtype].is_float or not DTYPES[self.base[name].dtype].is_float:
            return
        energy = 0.0
        read = self._reader(name)
        for values in ordered_map(read, range(len(expert)), threads=threads):
            energy += float(np.square(values, dtype=np.float64).sum())
        if not math.isfinite(energy):
            raise NotFinite(
                f"the change of {name} holds NaN or infinity",
                hint="leave this model out, or mend it",
            )
        self.found.whole += energy


def _rounded(values: Floats, dtype: str, name: str) -> Floats:
    """A factor as its dtype can tell it."""
    data, lost = convert(values.tobytes(), "F32", dtype)
    if lost:
        raise NotFinite(
            f"factors of {name} are beyond the range of {TORCH_NAMES[dtype]}",
            hint="choose a wider dtype with --dtype",
        )
    return to_float32(data, dtype).reshape(values.shape)


def kind_of(name: str) -> str:
    """What a matrix is called in every layer: ``self_attn.q_proj``."""
    return _NUMBERED.sub("", name.removesuffix(_WEIGHT))


# -- what can be extracted -------------------------------------------------------------------------


def _check_models(models: Models) -> None:
    if is_adapter(models.expert):
        raise Mismatch(
            f"{models.expert_ref} is an adapter already", hint="write its files with `checkout`"
        )
    check_base(models.base_ref, models.base)


def _check_shapes(models: Models, base: Mapping[str, Tensor], expert: Mapping[str, Tensor]) -> None:
    for name in sorted(base.keys() ^ expert.keys()):
        has, lacks = models.expert_ref, models.base_ref
        if name in base:
            has, lacks = lacks, has
        raise Mismatch(
            f"tensor {name} is in {has} but not in {lacks}",
            hint="name the base that the expert was trained from with --base",
        )
    for name, tensor in base.items():
        ours, theirs = tensor.shape, expert[name].shape
        if ours != theirs:
            raise Mismatch(
                f"tensor {name} is {list(ours)} in {models.base_ref} but {list(theirs)} in "
                f"{models.expert_ref}",
                hint="an adapter can't change shapes: check the whole model out instead",
            )


def _check_plain(models: Models, name: str, base: Tensor, expert: Tensor) -> None:
    for ref, tensor in ((models.base_ref, base), (models.expert_ref, expert)):
        if not DTYPES[tensor.dtype].is_float or DTYPES[tensor.dtype].bits < _PLAIN_BITS:
            raise Mismatch(
                f"tensor {name} is {tensor.dtype} in {ref}: quantised",
                hint="add the model in an unquantised dtype",
            )


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer, as far as its name and shape tell."""
    is_embedding = is_input(name) and "shared_expert" not in name
    return (
        name.endswith(_WEIGHT)
        and len(tensor.shape) == 2
        and 0 not in tensor.shape
        and not is_embedding
    )


def _no_difference(models: Models) -> Mismatch:
    return Mismatch(
        f"{models.expert_ref} does not differ from {models.base_ref}",
        hint="name the base that it was trained from with --base",
    )


def _tensors(store: Store, manifest: Manifest) -> dict[str, Tensor]:
    return {name: store.tensor(tensor_id) for name, tensor_id in manifest.tensors.items()}


# -- what PEFT is to know --------------------------------------------------------------------------


def _config(store: Store, base: Manifest) -> Mapping[str, Any]:
    """The base's config.json, or nothing where there is none that can be read."""
    if CONFIG not in base.files:
        return {}
    blocks = store.tensor(base.files[CONFIG]).blocks()
    try:
        config = json.loads(b"".join(store.read_block(block) for block in blocks))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _prefix(config: Mapping[str, Any], base: Collection[str]) -> str:
    """What the model's class puts before names that the checkpoint has without."""
    prefix = _CLASS_PREFIXES.get(str(config.get("model_type")), "")
    has_head = not _architecture(config).endswith("Model") or "LMHead" in _architecture(config)
    if not has_head or any(name.startswith(prefix) for name in base):
        return ""
    return prefix


def _tied(config: Mapping[str, Any], base: Collection[str]) -> dict[str, str]:
    """The head that the base's config ties to an embedding, and has no tensor of its own."""
    embedding = next((name for name in sorted(base) if _EMBEDDING.fullmatch(name)), None)
    if not config.get("tie_word_embeddings") or embedding is None or _HEAD in base:
        return {}
    return {_HEAD: embedding}
