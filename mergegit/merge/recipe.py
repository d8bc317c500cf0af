"""Recipes: what was asked of a merge, complete and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mergegit.dtypes import DTYPES
from mergegit.errors import BadRecipe
from mergegit.merge.method import Merges, Method, Parameter, Parameters
from mergegit.merge.methods import method
from mergegit.merge.settings import Setting
from mergegit.objects import CommitId

Settings = Mapping[str, Setting]
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Expert:
    """An expert of a recipe: the ref as it was given, its commit, its own parameters in full.

    In a recipe of slices, parameters stand with the slices' sources and not here. ``base`` is the
    commit that its delta is taken from, where that is not the recipe's base.
    """

    ref: str
    commit: CommitId
    parameters: Settings
    base_ref: str | None = None
    base: CommitId | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """An expert's layers (start, stop) in a slice, and its own parameters there, in full."""

    expert: int
    layers: Range
    parameters: Settings


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers of the merged model, as many as each source has; slices are stacked in order.

    ``base_layers`` are those of the base that deltas are taken against. ``parameters`` are what
    holds for all sources, in full.
    """

    sources: tuple[Source, ...]
    base_layers: Range
    parameters: Settings


ModelIndex = Literal["base"] | int
"""A model of a merge: an expert by its place, or the one whose files the merged model takes."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Where the rows of one token come from: those of a token of ``model``, named by its text or
    id, or of the same one (``token`` None); without a model they are zeros.

    ``force`` sets them in models that have the token, too.
    """

    model: ModelIndex | None
    token: str | int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class VocabularyRequest:
    """The vocabulary that the merged model is to have: the base's, a model's, or the base's with
    all tokens of the others behind it (``union``).

    ``base`` is the model whose files the merged model takes. Its rows stand in for those that
    other models lack, where ``base_stands_in``; else the mean of all rows that there are does, as
    in a recipe that names no base. Embeddings have as many rows as the multiple needs.
    """

    source: Literal["base", "union"] | int
    tokens: Mapping[str, TokenRequest] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None
    base_stands_in: bool = True


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a merge is asked to do. Every parameter has a value.

    Without ``slices`` every layer is merged where it stands. ``files_from`` is the expert whose
    config, tokenizer and other files the merged model takes, None for the base; ``given`` is the
    text that the recipe was read from, if it was. ``dtype`` is the output's, or None for
    each tensor's own in the base. ``ignore_extra`` leaves out tensors that an expert has and the
    base has not; ``allow_nonfinite`` merges experts with NaN or infinity in them. Without a
    ``vocabulary`` tokens are not looked at; ``chat_template`` is the name of one, or one itself.
    """

    method: Method
    base_ref: str
    base: CommitId
    experts: tuple[Expert, ...]
    parameters: Settings
    seed: int = 0
    dtype: str | None = None
    ignore_extra: bool = False
    allow_nonfinite: bool = False
    slices: tuple[Slice, ...] = ()
    files_from: int | None = None
    given: str | None = None
    vocabulary: VocabularyRequest | None = None
    chat_template: str | None = None

    @property
    def parents(self) -> tuple[CommitId, ...]:
        """The base, then the experts; one that is the base, or comes twice, is named once."""
        return tuple(dict.fromkeys((self.base, *(expert.commit for expert in self.experts))))

    @property
    def has_own_bases(self) -> bool:
        """Whether there is an expert that is seen from a base of its own."""
        return any(expert.base is not None for expert in self.experts)

    def parts(self) -> Iterator[tuple[tuple[int, ...], Sequence[Settings], Settings]]:
        """For each slice, or for the whole: the experts in it, their parameters, and those for
        all."""
        if not self.slices:
            own = [expert.parameters for expert in self.experts]
            yield tuple(range(len(self.experts))), own, self.parameters
        for part in self.slices:
            experts = tuple(source.expert for source in part.sources)
            yield experts, [source.parameters for source in part.sources], part.parameters

    def refuse_gradients(self) -> None:
        """For models without layers. Raises ``BadRecipe`` where a value depends on the layer."""
        for experts, own, shared in self.parts():
            named = dict(shared)
            for place, settings in zip(experts, own, strict=True):
                ref = self.experts[place].ref
                named |= {f"{ref}.{name}": setting for name, setting in settings.items()}
            for of, setting in named.items():
                if setting.is_gradient:
                    raise BadRecipe(
                        f"{of} is a gradient over layers, and the tensors' names tell of none",
                        hint="give one value; layers are named like model.layers.0.mlp.weight",
                    )

    def to_json(self) -> dict[str, Any]:
        """The recipe as commits and plans carry it."""
        value: dict[str, Any] = {
            "method": self.method.name,
            "base": {"ref": self.base_ref, "commit": self.base.hex()},
            "experts": [
                {
                    "ref": expert.ref,
                    "commit": expert.commit.hex(),
                    "parameters": _json(expert.parameters),
                    **_own_base(expert),
                }
                for expert in self.experts
            ],
            "parameters": _json(self.parameters),
            "seed": self.seed,
            "dtype": self.dtype,
            "ignore_extra": self.ignore_extra,
            "allow_nonfinite": self.allow_nonfinite,
        }
        if self.files_from is not None:
            value["files_from"] = self.files_from
        if self.given is not None:
            value["given"] = self.given
        if self.vocabulary is not None:
            value["vocabulary"] = _vocabulary_json(self.vocabulary)
        if self.chat_template is not None:
            value["chat_template"] = self.chat_template
        if self.slices:
            value["slices"] = [
                {
                    "sources": [
                        {
                            "expert": source.expert,
                            "layers": list(source.layers),
                            "parameters": _json(source.parameters),
                        }
                        for source in part.sources
                    ],
                    "base_layers": list(part.base_layers),
                    "parameters": _json(part.parameters),
                }
                for part in self.slices
            ]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recipe:
        """The inverse of ``to_json``. Raises ``BadRecipe``."""
        try:
            if type(value["seed"]) is not int:
                raise TypeError("seed is no integer")
            for switch in ("ignore_extra", "allow_nonfinite"):
                if not isinstance(value[switch], bool):
                    raise TypeError(f"{switch} is neither true nor false")
            if not isinstance(value.get("chat_template"), str | None):
                raise TypeError("chat_template is no text")
            return make_recipe(
                method_name=value["method"],
                base=(value["base"]["ref"], CommitId(bytes.fromhex(value["base"]["commit"]))),
                experts=[
                    (expert["ref"], CommitId(bytes.fromhex(expert["commit"])))
                    for expert in value["experts"]
                ],
                parameters=_settings(value["parameters"]),
                expert_parameters=[_settings(e["parameters"]) for e in value["experts"]],
                seed=value["seed"],
                dtype=value["dtype"],
                ignore_extra=value["ignore_extra"],
                allow_nonfinite=value["allow_nonfinite"],
                slices=[_slice(part) for part in value.get("slices", [])],
                files_from=value.get("files_from"),
                given=value.get("given"),
                vocabulary=_vocabulary(value["vocabulary"]) if "vocabulary" in value else None,
                chat_template=value.get("chat_template"),
                expert_bases=[_base_of(expert.get("base")) for expert in value["experts"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecipe(
                f"the recipe can't be read ({type(error).__name__}: {error})",
                hint="make the plan again",
            ) from error


def make_recipe(
    *,
    method_name: str,
    base: tuple[str, CommitId],
    experts: Sequence[tuple[str, CommitId]],
    parameters: Settings,
    expert_parameters: Sequence[Settings],
    seed: int = 0,
    dtype: str | None = None,
    ignore_extra: bool = False,
    allow_nonfinite: bool = False,
    slices: Sequence[Slice] = (),
    files_from: int | None = None,
    given: str | None = None,
    vocabulary: VocabularyRequest | None = None,
    chat_template: str | None = None,
    expert_bases: Sequence[tuple[str, CommitId] | None] = (),
) -> Recipe:
    """A recipe with every value filled in and checked. Raises ``BadRecipe``.

    ``parameters`` hold for all; a parameter that each expert has its own of may be given there
    for all of them, and in ``expert_parameters``, or in the sources of ``slices``, for one. What
    stands nearer to the expert goes first, and where none of its rules fits a tensor, the next.
    ``expert_bases`` are what experts' deltas are taken from, where that is not ``base``.
    """
    chosen = method(method_name)
    if not experts:
        raise BadRecipe("a merge needs at least one expert", hint="name one or more refs")
    if dtype is not None and not (dtype in DTYPES and DTYPES[dtype].is_float):
        floats = ", ".join(name for name, d in DTYPES.items() if d.is_float)
        raise BadRecipe(f"{dtype!r} is no dtype to merge to", hint=f"choose one of {floats}")
    if files_from is not None:
        _check_place(files_from, len(experts), "files come")
    if vocabulary is not None:
        _check_models(vocabulary, len(experts))
    bases = [None if own and own[1] == base[1] else own for own in expert_bases]
    if any(bases):
        _check_bases(chosen, bool(slices), vocabulary is not None)
    refs = [ref for ref, _ in experts]
    parts: list[Slice] = []
    own: Sequence[Settings]
    shared: Settings
    if not slices:
        filled = _Filled.of(chosen, refs, expert_parameters, parameters)
        own, shared = filled.own, filled.shared
    else:
        _refuse_own(expert_parameters)
        own, shared = [{} for _ in experts], {}
        for part in slices:
            for source in part.sources:
                _check_place(source.expert, len(experts), "layers are taken")
            names = [refs[source.expert] for source in part.sources]
            filled = _Filled.of(
                chosen, names, [s.parameters for s in part.sources], part.parameters, parameters
            )
            _check_lengths(part, names)
            sources = [
                Source(source.expert, source.layers, settings)
                for source, settings in zip(part.sources, filled.own, strict=True)
            ]
            parts.append(Slice(tuple(sources), part.base_layers, filled.shared))
    return Recipe(
        method=chosen,
        base_ref=base[0],
        base=base[1],
        experts=tuple(
            Expert(ref, commit, settings, *(below or (None, None)))
            for (ref, commit), settings, below in zip(
                experts, own, bases or [None] * len(experts), strict=True
            )
        ),
        parameters=shared,
        seed=seed,
        dtype=dtype,
        ignore_extra=ignore_extra,
        allow_nonfinite=allow_nonfinite,
        slices=tuple(parts),
        files_from=files_from,
        given=given,
        vocabulary=vocabulary,
        chat_template=chat_template,
    )


@dataclass(frozen=True, slots=True)
class _Filled:
    """Every parameter of a method: each expert's own, and those for all."""

    own: Sequence[Settings]
    shared: Settings

    @classmethod
    def of(
        cls, method: Method, refs: Sequence[str], own: Sequence[Settings], *shared: Settings
    ) -> _Filled:
        """Fill in what is not given; of ``shared`` the first goes before the next."""
        _check_count(method, refs)
        for given in shared:
            for name in given:
                method.parameter(name)
        filled = []
        for ref, given in zip(refs, own, strict=True):
            for name in given:
                if not method.parameter(name).per_expert:
                    raise BadRecipe(
                        f"{ref}.{name}: an expert can't have a {name} of its own",
                        hint=f"give it for all, as {name}",
                    )
            filled.append(
                {
                    p.name: _filled(p, f"{ref}.{p.name}", (given, *shared), method)
                    for p in method.parameters
                    if p.per_expert
                }
            )
        for_all = {
            p.name: _filled(p, p.name, shared, method)
            for p in method.parameters
            if not p.per_expert
        }
        return cls(filled, for_all)


def _filled(parameter: Parameter, of: str, given: Sequence[Settings], method: Method) -> Setting:
    value: Setting | None = None
    for settings in given:
        here = settings.get(parameter.name)
        if here is not None:
            for scalar in here.values:
                parameter.check(scalar, of)
            value = here if value is None else value.otherwise(here)
    if parameter.default is not None:
        default = Setting.constant(parameter.default)
        return default if value is None else value.otherwise(default)
    if value is None or value.rules[-1].filter is not None:
        missing = "is not given" if value is None else "has no value for some tensors"
        raise BadRecipe(
            f"{of} {missing}, and {method.name} needs it", hint=f"{of}: {parameter.help}"
        )
    return value


def _check_count(method: Method, refs: Sequence[str]) -> None:
    low, high = method.models  # high is low or None
    if low <= len(refs) and (high is None or len(refs) <= high):
        return
    wanted = f"at least {low}" if high is None else str(low)
    models = "models" if low > 1 else "model"
    raise BadRecipe(
        f"{method.name} merges {wanted} {models}, and {len(refs)} are named: {', '.join(refs)}",
        hint="choose another method (`mergegit methods`), or other models",
    )


def _check_bases(method: Method, has_slices: bool, has_vocabulary: bool) -> None:
    """Whether experts may have bases of their own."""
    if method.merges is not Merges.DELTAS:
        raise BadRecipe(
            f"{method.name} merges whole models, and an expert is to be seen from its own base",
            hint="choose a method that merges what experts changed, like task_arithmetic",
        )
    if has_slices or has_vocabulary:
        raise BadRecipe(
            "an expert is to be seen from a base of its own, which goes neither with slices nor "
            "with another vocabulary",
            hint="carry it to the recipe's base first, with `mergegit rebase`",
        )


def _own_base(expert: Expert) -> dict[str, Any]:
    if expert.base is None:
        return {}
    return {"base": {"ref": expert.base_ref, "commit": expert.base.hex()}}


def _base_of(value: Mapping[str, Any] | None) -> tuple[str, CommitId] | None:
    if value is None:
        return None
    if not isinstance(value["ref"], str):
        raise TypeError(f"an expert's base is called {value['ref']!r}")
    return value["ref"], CommitId(bytes.fromhex(value["commit"]))


def _check_lengths(part: Slice, names: Sequence[str]) -> None:
    first = part.sources[0].layers
    ranges = [*(source.layers for source in part.sources), part.base_layers]
    for name, (start, stop) in zip([*names, "the base"], ranges, strict=True):
        if not 0 <= start < stop:
            raise BadRecipe(
                f"layers [{start}, {stop}] of {name} are no range",
                hint="a layer_range is [first, last + 1]",
            )
        if stop - start != first[1] - first[0]:
            raise BadRecipe(
                f"a slice takes {first[1] - first[0]} layers of {names[0]} and {stop - start} of "
                f"{name}",
                hint="give all sources of a slice layer ranges of one length",
            )


def _refuse_own(expert_parameters: Sequence[Settings]) -> None:
    if any(expert_parameters):
        raise BadRecipe(
            "an expert has parameters outside the slices",
            hint="give them with the slices' sources",
        )


def _json(settings: Settings) -> dict[str, Any]:
    return {name: value.to_json() for name, value in settings.items()}


def _settings(value: Mapping[str, Any]) -> Settings:
    return {name: Setting.parse(setting, name) for name, setting in value.items()}


def _slice(value: Mapping[str, Any]) -> Slice:
    return Slice(
        tuple(
            Source(source["expert"], _range(source["layers"]), _settings(source["parameters"]))
            for source in value["sources"]
        ),
        _range(value["base_layers"]),
        _settings(value["parameters"]),
    )


def _range(value: Sequence[int]) -> Range:
    start, stop = value
    if type(start) is not int or type(stop) is not int:
        raise TypeError("layers are no integers")
    return start, stop


def _check_models(vocabulary: VocabularyRequest, experts: int) -> None:
    for model in (vocabulary.source, *(token.model for token in vocabulary.tokens.values())):
        if isinstance(model, int):
            _check_place(model, experts, "tokens come")


def _check_place(place: int, experts: int, what: str) -> None:
    if type(place) is not int or place not in range(experts):
        raise BadRecipe(
            f"{what} from expert {place!r}, and there are {experts}", hint="make the plan again"
        )


def _vocabulary_json(vocabulary: VocabularyRequest) -> dict[str, Any]:
    value: dict[str, Any] = {"source": vocabulary.source}
    if vocabulary.tokens:
        # A list: new tokens get their ids in this order, and objects of JSON have none.
        value["tokens"] = [
            {"name": name, "model": asked.model, "token": asked.token, "force": asked.force}
            for name, asked in vocabulary.tokens.items()
        ]
    if vocabulary.pad_to_multiple_of is not None:
        value["pad_to_multiple_of"] = vocabulary.pad_to_multiple_of
    if not vocabulary.base_stands_in:
        value["base_stands_in"] = False
    return value


def _vocabulary(value: Mapping[str, Any]) -> VocabularyRequest:
    source, multiple = value["source"], value.get("pad_to_multiple_of")
    stands_in = value.get("base_stands_in", True)
    if source not in ("base", "union") and type(source) is not int:
        raise TypeError(f"the vocabulary's source is {source!r}")
    if multiple is not None and type(multiple) is not int:
        raise TypeError(f"pad_to_multiple_of is {multiple!r}")
    if not isinstance(stands_in, bool):
        raise TypeError("base_stands_in is neither true nor false")
    tokens = {asked["name"]: _token(asked) for asked in value.get("tokens", [])}
    return VocabularyRequest(source, tokens, multiple, stands_in)


def _token(value: Mapping[str, Any]) -> TokenRequest:
    model, token, force = value["model"], value["token"], value["force"]
    if not isinstance(value["name"], str):
        raise TypeError(f"a token is called {value['name']!r}")
    if model not in ("base", None) and type(model) is not int:
        raise TypeError(f"a token's model is {model!r}")
    if token is not None and type(token) not in (str, int):
        raise TypeError(f"a token is {token!r}")
    if not isinstance(force, bool):
        raise TypeError("force is neither true nor false")
    return TokenRequest(model, token, force)


def resolved(settings: Settings, name: str, position: float) -> Parameters:
    """Parameters as they apply to one tensor at a position among its slice's layers."""
    values = {}
    for key, setting in settings.items():
        value = setting.at(name, position)
        assert value is not None, "a recipe's settings end with a default"
        values[key] = value
    return values
