"""LoRA adapters as PEFT saves them: which of a base's tensors they change, and how.

An adapter is a directory with ``adapter_config.json`` and ``adapter_model.safetensors``. Its
tensors are named for modules of the base: the weight of module ``M`` is changed by the factors
``base_model.model.M.lora_A.weight``, of shape (r, n), and ``base_model.model.M.lora_B.weight``, of
shape (m, r); an embedding's by ``lora_embedding_A`` and ``lora_embedding_B``. DoRA adds
``lora_magnitude_vector``. Whatever else is there takes the place of a tensor of the base.

All is read from the config and from names and shapes; no weight is read here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NoReturn

from mergegit.checkpoint.adapter_settings import (
    AGAIN,
    CONFIG_FILE,
    MAX_TESTS,
    MERGE_FIRST,
    Settings,
    read_settings,
)
from mergegit.errors import BadCheckpoint

WEIGHTS_FILE: Final = "adapter_model.safetensors"
MAX_NAME_LENGTH: Final = 1024
MAX_NAME_PARTS: Final = 64

Shape = tuple[int, ...]

PREFIX: Final = "base_model.model."
_LINEAR: Final = ("lora_A", "lora_B")
_EMBEDDING: Final = ("lora_embedding_A", "lora_embedding_B")
_MAGNITUDE: Final = "lora_magnitude_vector"
_FACTOR: Final = re.compile(
    rf"(.+)\.({'|'.join((*_LINEAR, *_EMBEDDING, _MAGNITUDE))})(?:\.default)?(?:\.weight)?"
)
_WRAPPER: Final = re.compile(r"(.+?)\.(?:modules_to_save(?:\.default)?|base_layer)\.(.+)")
_OTHER_BASE: Final = "name the base that the adapter was trained on"
_TWO_FILES: Final = "download the adapter again: its two files don't belong together"


@dataclass(frozen=True, slots=True)
class LowRank:
    """How one tensor of the base is changed: by ``scale * B A``.

    ``target`` names the base's tensor; ``a``, of shape (``rank``, n), and ``b``, (m, ``rank``),
    are tensors of the adapter. The target is (m, n), or, where ``transposed``, (n, m): it is
    stored with inputs first, as Conv1D layers and embeddings are. ``magnitude``, with DoRA, is the
    adapter's vector of m lengths that the target's outputs get.
    """

    target: str
    a: str
    b: str
    rank: int
    scale: float
    transposed: bool
    magnitude: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter changes.

    ``low_rank`` has the changed tensors by name. ``saved`` gives tensors of the base that are
    replaced the adapter's tensor that takes their place. A tensor may be in both: then the
    low-rank change is to the adapter's copy. ``base_name`` is what the adapter calls its base: a
    name on the Hub, or a path on some machine. ``ties_head`` is true where it was trained with the
    head kept as the embedding is.
    """

    base_name: str | None
    low_rank: Mapping[str, LowRank]
    saved: Mapping[str, str]
    ties_head: bool = False


def is_adapter(files: Collection[str]) -> bool:
    """Whether these files, by their paths in a directory, are those of an adapter."""
    return CONFIG_FILE in files and WEIGHTS_FILE in files


def read_adapter(
    config: bytes,
    shapes: Mapping[str, Shape],
    base_shapes: Mapping[str, Shape],
    *,
    of: str = "the adapter",
) -> Adapter:
    """What adapter ``of`` changes in a base.

    ``config`` is the text of ``adapter_config.json``; ``shapes`` gives the tensors of
    ``adapter_model.safetensors``, ``base_shapes`` those of the base. Every tensor of the adapter
    is accounted for. Raises ``BadCheckpoint`` where the adapter is not whole, was trained on
    another base, or changes it in a way that is not known here.
    """
    settings = read_settings(config, of)
    parts = _sort(of, shapes)
    return _Reader(of, settings, shapes, base_shapes, parts).read()


@dataclass(frozen=True, slots=True)
class _Parts:
    """An adapter's tensors by what they are for.

    ``factors`` gives each module its factors and magnitude: the kind, and the tensor's name.
    ``whole`` are the paths of tensors that are saved whole, as the adapter sees the base.
    """

    factors: dict[str, dict[str, str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def _sort(of: str, names: Collection[str]) -> _Parts:
    parts = _Parts()
    for name in sorted(names):
        if len(name) > MAX_NAME_LENGTH or name.count(".") >= MAX_NAME_PARTS:
            _fail(of, f"has a tensor with the overlong name {name[:80]}...", AGAIN)
        path = name.removeprefix(PREFIX)
        found = _FACTOR.fullmatch(path)
        if found:
            module, kind = found.groups()
            taken, key = parts.factors.setdefault(module, {}), kind
        else:
            wrapped = _WRAPPER.fullmatch(path)
            taken, key = parts.whole, f"{wrapped[1]}.{wrapped[2]}" if wrapped else path
        if key in taken:
            _fail(of, f"has both {taken[key]} and {name}, which are for one tensor", AGAIN)
        taken[key] = name
    if not names:
        _fail(of, f"has no tensors in {WEIGHTS_FILE}", AGAIN)
    return parts


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two factors of a module: their tensors, and what they make, (outputs, inputs)."""

    a: str
    b: str
    rank: int
    made: Shape
    is_embedding: bool


@dataclass(frozen=True)
class _Reader:
    """Everything that is known while an adapter is read."""

    of: str
    settings: Settings
    shapes: Mapping[str, Shape]
    base: Mapping[str, Shape]
    parts: _Parts

    def read(self) -> Adapter:
        self._check_effort()
        homeless: list[tuple[str, Shape]] = []
        low_rank = self._low_rank(homeless)
        saved = self._saved(homeless)
        self._check_homeless(homeless, low_rank, saved)
        self._check_complete(saved)
        return Adapter(self.settings.base_name, low_rank, saved, self.settings.ties_head)

    def _check_effort(self) -> None:
        patterns = len(self.settings.ranks) + len(self.settings.alphas)
        modules = len(self.parts.factors)
        if patterns * modules > MAX_TESTS:
            self._fail(
                f"has {modules:,} modules and {patterns:,} patterns of their names; at most "
                f"{MAX_TESTS:,} pairs are tried",
                MERGE_FIRST,
            )

    def _low_rank(self, homeless: list[tuple[str, Shape]]) -> dict[str, LowRank]:
        low_rank: dict[str, LowRank] = {}
        for module, tensors in self.parts.factors.items():
            pair = self._pair(module, tensors)
            magnitude = self._magnitude(module, tensors, pair)
            target = self.names.find(f"{module}.weight", self.of)
            if target is None:
                homeless.append((pair.a, pair.made))
                continue
            if target in low_rank:
                self._fail(f"has both {low_rank[target].a} and {pair.a} for {target}", AGAIN)
            low_rank[target] = LowRank(
                target,
                pair.a,
                pair.b,
                pair.rank,
                self.settings.scale_of(module),
                self._is_transposed(target, pair),
                magnitude,
            )
        return low_rank

    def _pair(self, module: str, tensors: Mapping[str, str]) -> _Pair:
        """A module's two factors, whose shapes fit each other and the config."""
        kinds = _EMBEDDING if tensors.keys() & set(_EMBEDDING) else _LINEAR
        if tensors.keys() - {*kinds, _MAGNITUDE}:
            self._fail(f"has factors of two kinds for module {module}", AGAIN)
        for kind in kinds:
            if kind not in tensors:
                there = next(iter(tensors.values()))
                self._fail(f"has tensor {there}, but no {kind} beside it", AGAIN)
        a, b = (tensors[kind] for kind in kinds)
        self._check_matrix(a)
        self._check_matrix(b)
        (rank, inputs), (outputs, other), said = (
            self.shapes[a], self.shapes[b], self.settings.rank_of(module),
        )  # fmt: skip
        if other != rank:
            self._fail(f"has factors of ranks {rank} and {other} for module {module}", AGAIN)
        if rank != said:
            self._fail(
                f"has tensor {a} of rank {rank}, where {CONFIG_FILE} says {said}", _TWO_FILES
            )
        return _Pair(a, b, rank, (outputs, inputs), kinds is _EMBEDDING)

    def _check_matrix(self, name: str) -> None:
        shape = self.shapes[name]
        if len(shape) > 2:
            self._fail(
                f"has tensor {name} of shape {list(shape)}: it changes a convolution, which is "
                "not supported",
                MERGE_FIRST,
            )
        if len(shape) < 2 or 0 in shape:
            self._fail(f"has tensor {name} of shape {list(shape)}, where a matrix is due", AGAIN)

    def _magnitude(self, module: str, tensors: Mapping[str, str], pair: _Pair) -> str | None:
        name = tensors.get(_MAGNITUDE)
        if name is None:
            if self.settings.has_magnitudes:
                self._fail(
                    f"has no {_MAGNITUDE} for module {module}, where {CONFIG_FILE} sets use_dora",
                    _TWO_FILES,
                )
            return None
        if not self.settings.has_magnitudes:
            self._fail(f"has tensor {name}, where {CONFIG_FILE} doesn't set use_dora", _TWO_FILES)
        if self.shapes[name] != pair.made[:1]:
            self._fail(
                f"has tensor {name} of shape {list(self.shapes[name])}, where "
                f"{list(pair.made[:1])} is due",
                AGAIN,
            )
        return name

    def _is_transposed(self, target: str, pair: _Pair) -> bool:
        """Whether the base stores ``target`` as the transpose of ``B A``.

        The shapes say so, but for square weights. Those go the way that the base has for modules
        of the same name. The config's word is asked last: it is true of the last module that
        PEFT made, and may be wrong for others.
        """
        shape, straight, turned = self.base[target], pair.made, pair.made[::-1]
        may_turn = pair.is_embedding
        if not may_turn:
            layouts = self.layouts.get(_module_name(target), set())
            may_turn = True in layouts if len(layouts) == 1 else self.settings.inputs_first
        if shape == turned and may_turn:
            return True
        if shape != straight or pair.is_embedding:
            self._fail(
                f"changes tensor {target} by a matrix of {list(turned if may_turn else straight)}, "
                f"where the base's is {list(shape)}",
                _OTHER_BASE,
            )
        return False

    def _saved(self, homeless: list[tuple[str, Shape]]) -> dict[str, str]:
        saved: dict[str, str] = {}
        for path, name in self.parts.whole.items():
            shape = self.shapes[name]
            target = self.names.find(path, self.of)
            if target is None:
                homeless.append((name, shape))
                continue
            if target in saved:
                self._fail(f"has both {saved[target]} and {name} for {target}", AGAIN)
            if shape != self.base[target]:
                self._fail(
                    f"has tensor {name} of shape {list(shape)}, where the base's {target} is "
                    f"{list(self.base[target])}",
                    MERGE_FIRST if shape[1:] == self.base[target][1:] else _OTHER_BASE,
                )
            saved[target] = name
        return saved

    def _check_homeless(
        self,
        homeless: list[tuple[str, Shape]],
        low_rank: Mapping[str, LowRank],
        saved: Mapping[str, str],
    ) -> None:
        """Refuse tensors for which the base has no place.

        A head that shares the embedding's weights has none either. Where the adapter was trained
        to keep the two alike, the head's tensors are the embedding's once more, and not needed.
        """
        if self.settings.ties_head:
            changed = {target for target, how in low_rank.items() if how.transposed}
            shared = {self.base[target] for target in (*changed, *saved)}
            homeless = [(name, shape) for name, shape in homeless if shape not in shared]
        if homeless:
            more = f" and {len(homeless) - 1} more" if len(homeless) > 1 else ""
            self._fail(
                f"has tensor {homeless[0][0]}{more}, for which the base has no place",
                f"{_OTHER_BASE}; if it has a head of its own, {MERGE_FIRST}",
            )

    def _check_complete(self, saved: Mapping[str, str]) -> None:
        """Refuse an adapter that lacks what its config says was saved whole."""
        modules = set(self.settings.saved_modules)
        lengths = {module.count(".") + 1 for module in modules}
        for name in sorted(self.base.keys() - saved.keys()) if modules else ():
            parts = name.split(".")[:-1]
            runs = (
                ".".join(parts[start : start + length])
                for length in lengths
                for start in range(len(parts) - length + 1)
            )
            inside = next((module for module in runs if module in modules), None)
            if inside is not None:
                self._fail(
                    f"has no tensor for {name}, where {CONFIG_FILE} has {inside!a} in "
                    "modules_to_save",
                    AGAIN,
                )

    @cached_property
    def names(self) -> _Names:
        return _Names(self.base)

    @cached_property
    def layouts(self) -> Mapping[str, set[bool]]:
        return layouts_of(self.base)

    def _fail(self, what: str, hint: str) -> NoReturn:
        _fail(self.of, what, hint)


class _Names:
    """The base's tensors by the end of their names: an adapter's names may have one prefix more
    than the base's, such as ``model.``, or one less."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._by_end: dict[int, dict[str, list[str]]] = {}

    def find(self, path: str, of: str) -> str | None:
        """The tensor that an adapter calls ``path``, if the base has it; two are refused."""
        if path in self._names:
            return path
        count = path.count(".") + 1
        found = [*self._ending(count).get(path, ()), *self._shorter(path)]
        if len(found) > 1:
            _fail(
                of,
                f"has a tensor for {path}, which may be {found[0]} or {found[1]} of the base",
                _OTHER_BASE,
            )
        return found[0] if found else None

    def _shorter(self, path: str) -> Iterator[str]:
        while "." in path:
            path = path.partition(".")[2]
            if "." in path and path in self._names:
                yield path

    def _ending(self, count: int) -> Mapping[str, list[str]]:
        """The longer names by their last ``count`` parts."""
        if count not in self._by_end:
            ends: dict[str, list[str]] = {}
            for name in self._names:
                split = name.rsplit(".", count)
                if len(split) > count:
                    ends.setdefault(".".join(split[1:]), []).append(name)
            self._by_end[count] = ends
        return self._by_end[count]


def layouts_of(shapes: Mapping[str, Shape]) -> Mapping[str, set[bool]]:
    """Whether a model stores weights with inputs first, by the last part of modules' names.

    Where a weight is not square, its bias tells: that is as long as there are outputs.
    """
    found: dict[str, set[bool]] = {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 2 and shape[0] != shape[1]:
            bias = shapes.get(f"{name.removesuffix('.weight')}.bias")
            if bias in (shape[:1], shape[1:]):
                found.setdefault(_module_name(name), set()).add(bias == shape[1:])
    return found


def inputs_first(shapes: Mapping[str, Shape], targets: Collection[str]) -> set[str]:
    """Those of a model's weights that are stored with inputs first, as Conv1D layers are.

    Modules of one name are alike; where they are not, a weight that is not square goes by its own
    bias. Those of which nothing tells go with the others, as a reader of the adapter will take it.
    """
    layouts = layouts_of(shapes)
    found: set[str] = set()
    unknown: set[str] = set()
    for name in targets:
        known = layouts.get(_module_name(name), set())
        rows, columns = shapes[name]
        if len(known) == 1:
            found |= {name} if True in known else set()
        elif known and rows != columns:
            bias = shapes.get(f"{name.removesuffix('.weight')}.bias")
            found |= {name} if bias == (columns,) else set()
        else:
            unknown.add(name)
    alone = len(unknown) == len(targets)
    if found or (alone and set().union(*layouts.values()) == {True}):
        found |= unknown
    return found


def _module_name(target: str) -> str:
    """The last part of the name of the module whose weight ``target`` is."""
    return target.rpartition(".")[0].rpartition(".")[2]


def _fail(of: str, what: str, hint: str) -> NoReturn:
    raise BadCheckpoint(f"{of} {what}", hint=hint)
