"""Recipes in mergekit's language: YAML to checked, frozen data and back.

A file holds one recipe, or several with ``---`` between them, which may use each other's results
by name. These keys make a recipe; one without a value counts as not given:

- ``merge_method``: the method's name. Required.
- ``name``: what other recipes in the file call the result. Only the last recipe may lack it.
- ``base_model``: a model.
- ``models``: a list of ``{model, parameters}``, or
- ``slices``: a list of ``{sources, parameters}``, stacked in order, where ``sources`` is a list of
  ``{model, layer_range, parameters}``. ``layer_range: [a, b]`` takes the layers from a to b - 1; if
  one source of a slice has it, all do, of one length. ``base_model`` may stand in a slice if it
  is the recipe's. Or
- ``modules``: one module of any name, with ``models`` or ``slices``, and ``parameters``.
- ``parameters``: a mapping from names to settings (mergegit.merge.settings). The names are the
  methods' own affair and not checked here.
- ``dtype``, ``out_dtype``: as torch or safetensors call it (``bfloat16``, ``BF16``).
- ``tokenizer``: ``{source, tokens, pad_to_multiple_of}``. ``source`` is ``union`` (by default),
  ``base`` or a model. ``tokens`` says by token where its embedding comes from, ``{source, force}``:
  ``source`` is a model, ``{kind: zero}``, or ``{kind: model_token, model, token}`` with
  ``token_id`` in the place of ``token`` if one likes.
- ``tokenizer_source: X``: short for ``tokenizer: {source: X}``.
- ``chat_template``: ``auto``, a template's name, or a template.
- ``seed``, ``ignore_extra``, ``allow_nonfinite``: mergegit's own, as its options of these names.
- ``base_model`` below an item of ``models``: mergegit's own: what that model's delta is taken from,
  where it is not the recipe's base.
- ``reference``: mergegit's own: the model that deltas are read against where whole models are
  merged; by default the merge base of these. Recipes that were made by flags may need it.

A model is text: ``path_or_hub_id``, ``path@revision``, or ``base+lora``. The mapping
``{model: {path, revision}, lora: {path, revision}}`` is read as the same.

Any other key is an error, wherever it stands, as is a key that stands twice. ``yaml_tree`` tells
how YAML itself is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import yaml

from mergegit.dtypes import TORCH_NAMES, dtype_named
from mergegit.errors import BadRecipe
from mergegit.merge.settings import Setting
from mergegit.merge.yaml_tree import FLOAT, Node, plain, read_trees

_T = TypeVar("_T")

_DOCUMENT_KEYS: Final = (
    "name", "merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype",
    "out_dtype", "tokenizer", "tokenizer_source", "chat_template", "seed", "ignore_extra",
    "allow_nonfinite", "reference",
)  # fmt: skip
_INPUT_KEYS: Final = ("models", "slices", "modules")
_KEY_HINTS: Final = {
    "random_seed": "write seed: N",
    "input_model_parameters": "write parameters below the model that they are for",
    "layer_range": "layers are chosen in slices, in each of their sources",
    "lora": "write the adapter behind its base model, as model: base+adapter",
    "residual_weight": "leave it out: it has no effect in mergekit either",
    "override_architecture": "leave it out: tensors are matched by name, whatever the architecture",
}
"""For keys that are unknown where they stand, and that one could have a reason to write."""

_WHOLE: Final = 1e15
"""Whole numbers below this are written without a point, as some methods of mergekit want them."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A model that is merged, or in a slice the layers from ``layer_range[0]`` up to, and without,
    ``layer_range[1]`` of it. ``base`` is what its delta is taken from, where that is not the
    recipe's base."""

    model: str
    layer_range: tuple[int, int] | None = None
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    base: str | None = None


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """Some layers of the result, and what is merged to make them."""

    sources: tuple[SourceSpec, ...]
    parameters: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Where a token's embedding comes from: the same token of ``model`` (kind model), nothing but
    zeros (zero), or another token of ``model`` (token), given as ``token`` or as ``token_id``.

    ``force`` sets it for models that have the token, too.
    """

    kind: Literal["model", "zero", "token"]
    model: str | None = None
    token: str | None = None
    token_id: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The result's vocabulary: ``source`` is ``union``, ``base`` or a model."""

    source: str
    tokens: Mapping[str, TokenSpec] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """One recipe. Either ``models`` or ``slices`` is empty; dtypes are called as in safetensors."""

    merge_method: str
    name: str | None = None
    base_model: str | None = None
    models: tuple[SourceSpec, ...] = ()
    slices: tuple[SliceSpec, ...] = ()
    parameters: Mapping[str, Setting] = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: TokenizerSpec | None = None
    chat_template: str | None = None
    seed: int | None = None
    ignore_extra: bool = False
    allow_nonfinite: bool = False
    reference: str | None = None


def read_documents(text: str) -> tuple[Document, ...]:
    """The recipes in ``text``, in order. Raises ``BadRecipe``, which names the key and the line."""
    roots = [_Part("", root, root.line) for root in read_trees(text)]
    if not roots:
        raise BadRecipe("the recipe is empty", hint="it needs a merge_method and models")
    documents = tuple(_document(root) for root in roots)
    lines: dict[str, int] = {}
    for root, document in zip(roots, documents, strict=True):
        if document.name is None:
            if root is not roots[-1]:
                raise root.bad("has no name", "give it one; only the last of several may lack it")
        elif document.name in lines:
            raise root.bad(
                f"is called {document.name!r} like the one on line {lines[document.name]}",
                "give each recipe a name of its own",
            )
        else:
            lines[document.name] = root.line
    return documents


def write_documents(documents: Iterable[Document]) -> str:
    """YAML that ``read_documents`` reads back as ``documents``."""
    return yaml.dump_all(
        [_document_yaml(document) for document in documents],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


# Reading


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a recipe, the path of keys to it, and the line where the last of them stands."""

    path: str
    node: Node
    line: int

    @property
    def where(self) -> str:
        return f"line {self.line}: {self.path or 'the recipe'}"

    def bad(self, what: str, hint: str) -> BadRecipe:
        return BadRecipe(f"{self.where} {what}", hint=hint)

    def entries(self) -> dict[str, _Part]:
        """The parts of a mapping of any keys."""
        if not isinstance(self.node.value, Mapping):
            raise self.bad(f"is {self.shown()}, not a mapping", "write key: value lines below it")
        prefix = f"{self.path}." if self.path else ""
        return {
            key: _Part(f"{prefix}{_key_text(key)}", entry.node, entry.line)
            for key, entry in self.node.value.items()
        }

    def fields(self, *known: str) -> dict[str, _Part]:
        """The parts of a mapping of ``known`` keys, without those that have no value."""
        entries = self.entries()
        for key, entry in entries.items():
            if key not in known:
                raise BadRecipe(
                    f"line {entry.line}: {self.path or 'the recipe'} has an unknown key "
                    f"{_cut(key)!r}",
                    hint=_key_hint(key, known),
                )
        return {key: entry for key, entry in entries.items() if entry.node.value is not None}

    def items(self) -> list[_Part]:
        if not isinstance(self.node.value, tuple):
            raise self.bad(f"is {self.shown()}, not a list", "write its items below it, with -")
        if not self.node.value:
            raise self.bad("is an empty list", "give it at least one item")
        return [
            _Part(f"{self.path}[{place}]", item, item.line)
            for place, item in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """Any text that is not empty."""
        if not isinstance(self.node.value, str):
            raise self.bad(f"is {self.shown()}, not text", "put it in quotes if it is meant so")
        if not self.node.value:
            raise self.bad("is empty", "give it a value, or leave the key out")
        return self.node.value

    def word(self) -> str:
        """Text on one line without spaces around it."""
        text = self.text()
        if text != text.strip() or not text.isprintable():
            raise self.bad(
                f"is {self.shown()}, which has line breaks or spaces around it", "remove them"
            )
        return text

    def switch(self) -> bool:
        if not isinstance(self.node.value, bool):
            raise self.bad(f"is {self.shown()}, neither true nor false", "write true or false")
        return self.node.value

    def whole(self, low: int | None = None) -> int:
        value = self.node.value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(f"is {self.shown()}, not a whole number", "write a number like 8")
        if low is not None and value < low:
            raise self.bad(f"is {self.shown()}", f"it must be at least {low}")
        return value

    def shown(self) -> str:
        match self.node.value:
            case tuple():
                return "a list"
            case Mapping():
                return "a mapping"
            case None:
                return "empty"
            case str() as text:
                return repr(_cut(text))
            case _:
                return _cut(self.node.text)


def _cut(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _key_text(key: str) -> str:
    return _cut(key) if key and key.isprintable() else repr(_cut(key))


def _key_hint(key: str, known: Sequence[str]) -> str:
    if key in _KEY_HINTS:
        return _KEY_HINTS[key]
    nearest = difflib.get_close_matches(_cut(key), known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known here are {', '.join(known)}"
    return f"{hint}; a method's own stand below parameters" if "parameters" in known else hint


def _required(part: _Part, fields: Mapping[str, _Part], key: str) -> _Part:
    if key not in fields:
        raise part.bad(f"has no {key}", f"write {key}: with a value there")
    return fields[key]


def _document(part: _Part) -> Document:
    fields = part.fields(*_DOCUMENT_KEYS)
    method = _required(part, fields, "merge_method").word()
    base = _optional(fields, "base_model", _model)
    parameters = _parameters(fields)
    holder, inputs = part, fields
    given = [key for key in _INPUT_KEYS if key in fields]
    if len(given) != 1:
        found = f"has both {given[0]} and {given[1]}" if given else "names no models to merge"
        raise part.bad(found, "give either models, slices or modules")
    if "modules" in fields:
        holder = _only_module(fields["modules"])
        inputs = holder.fields("models", "slices", "parameters")
        if ("models" in inputs) == ("slices" in inputs):
            raise holder.bad("needs models or slices, and not both", "give one of them")
        parameters = _overridden(_parameters(inputs), parameters)
    return Document(
        merge_method=method,
        name=_optional(fields, "name", _Part.word),
        base_model=base,
        models=_models(inputs["models"]) if "models" in inputs else (),
        slices=_slices(inputs["slices"], base) if "slices" in inputs else (),
        parameters=parameters,
        dtype=_optional(fields, "dtype", _dtype),
        out_dtype=_optional(fields, "out_dtype", _dtype),
        tokenizer=_tokenizer(part, fields),
        chat_template=_optional(fields, "chat_template", _Part.text),
        seed=_optional(fields, "seed", _Part.whole),
        ignore_extra=_optional(fields, "ignore_extra", _Part.switch) or False,
        allow_nonfinite=_optional(fields, "allow_nonfinite", _Part.switch) or False,
        reference=_optional(fields, "reference", _model),
    )


def _optional(fields: Mapping[str, _Part], key: str, read: Callable[[_Part], _T]) -> _T | None:
    return read(fields[key]) if key in fields else None


def _only_module(part: _Part) -> _Part:
    modules = part.entries()
    if len(modules) != 1:
        names = ", ".join(_key_text(name) for name in modules) or "none"
        raise part.bad(
            f"must be one module, not {len(modules)}: {_cut(names, 200)}",
            "merge each in a recipe of its own",
        )
    return next(iter(modules.values()))


def _overridden(
    nearer: Mapping[str, Setting], farther: Mapping[str, Setting]
) -> dict[str, Setting]:
    """Both scopes in one: what the nearer says, and the farther for what it leaves open."""
    own = {name: setting.otherwise(farther.get(name)) for name, setting in nearer.items()}
    return {**farther, **own}


def _models(part: _Part) -> tuple[SourceSpec, ...]:
    keys = ("model", "base_model", "parameters")
    return tuple(_source(item, item.fields(*keys)) for item in part.items())


def _source(part: _Part, fields: Mapping[str, _Part]) -> SourceSpec:
    return SourceSpec(
        _model(_required(part, fields, "model")),
        _optional(fields, "layer_range", _layer_range),
        _parameters(fields),
        _optional(fields, "base_model", _model),
    )


def _slices(part: _Part, base: str | None) -> tuple[SliceSpec, ...]:
    return tuple(_slice(item, base) for item in part.items())


def _slice(part: _Part, base: str | None) -> SliceSpec:
    fields = part.fields("sources", "base_model", "parameters")
    own_base = _optional(fields, "base_model", _model)
    if own_base not in (None, base):
        raise fields["base_model"].bad(
            f"is {own_base!r}, but {base or 'nothing'} for the recipe",
            "give one base_model for the whole recipe",
        )
    items = _required(part, fields, "sources").items()
    sources = [_source(item, item.fields("model", "layer_range", "parameters")) for item in items]
    _check_lengths(items, sources)
    return SliceSpec(tuple(sources), _parameters(fields))


def _check_lengths(items: Sequence[_Part], sources: Sequence[SourceSpec]) -> None:
    """All sources of a slice have as many layers."""
    lengths = [s.layer_range[1] - s.layer_range[0] if s.layer_range else None for s in sources]
    wanted = next((length for length in lengths if length is not None), None)
    for item, length in zip(items, lengths, strict=True):
        if length is None and wanted is not None:
            raise item.bad(
                "has no layer_range, unlike others of its slice", "give all sources of a slice one"
            )
        if length != wanted:
            raise item.bad(
                f"has {length} layers in its layer_range, the first source of its slice {wanted}",
                "give all sources of a slice as many layers",
            )


def _layer_range(part: _Part) -> tuple[int, int]:
    items = part.items()
    if len(items) != 2:
        raise part.bad(f"has {len(items)} items", "write [first, end], the end not included")
    first, end = items[0].whole(0), items[1].whole(0)
    if first >= end:
        raise part.bad(
            f"is [{_cut(str(first))}, {_cut(str(end))}], which holds no layer",
            "write [first, end], the end not included",
        )
    return first, end


def _parameters(fields: Mapping[str, _Part]) -> dict[str, Setting]:
    if "parameters" not in fields:
        return {}
    return {
        name: Setting.parse(plain(entry.node), entry.where)
        for name, entry in fields["parameters"].entries().items()
    }


def _dtype(part: _Part) -> str:
    try:
        return dtype_named(part.word())
    except ValueError:
        names = ", ".join(TORCH_NAMES.values())
        raise part.bad(f"is {part.word()!r}, no dtype to merge to", f"choose {names}") from None


def _model(part: _Part) -> str:
    """A model as text, from text or from mergekit's mapping."""
    if not isinstance(part.node.value, Mapping):
        return _complete(part, part.word())
    fields = part.fields("model", "lora")
    model = _path_and_revision(_required(part, fields, "model"))
    return f"{model}+{_path_and_revision(fields['lora'])}" if "lora" in fields else model


def _path_and_revision(part: _Part) -> str:
    """``path`` or ``path@revision``."""
    if not isinstance(part.node.value, Mapping):
        return _complete(part, _without("+", part))
    fields = part.fields("path", "revision")
    path = _without("+@", _required(part, fields, "path"))
    return f"{path}@{_without('+@', fields['revision'])}" if "revision" in fields else path


def _complete(part: _Part, text: str) -> str:
    """``text``, if something stands before and after each + and @ in it."""
    for path in text.split("+"):
        if not all(path.split("@")):
            raise part.bad(
                f"is {text!r}, which lacks something before or after + or @",
                "write a model as path, path@revision or base+lora",
            )
    return text


def _without(joints: str, part: _Part) -> str:
    """The text of a part, which must be free of what joins parts of a model's name."""
    text = part.word()
    for joint in joints:
        if joint in text:
            raise part.bad(
                f"is {text!r}, where {joint} could not be told from the one before a "
                f"{'lora' if joint == '+' else 'revision'}",
                "link to it under another name",
            )
    return text


def _tokenizer(part: _Part, fields: Mapping[str, _Part]) -> TokenizerSpec | None:
    if "tokenizer" in fields and "tokenizer_source" in fields:
        raise part.bad(
            "has both tokenizer and tokenizer_source", "write the source below tokenizer"
        )
    if "tokenizer_source" in fields:
        return TokenizerSpec(_model(fields["tokenizer_source"]))
    if "tokenizer" not in fields:
        return None
    own = fields["tokenizer"].fields("source", "tokens", "pad_to_multiple_of")
    tokens = own["tokens"].entries() if "tokens" in own else {}
    return TokenizerSpec(
        source=_optional(own, "source", _model) or "union",
        tokens={name: _token(token) for name, token in tokens.items()},
        pad_to_multiple_of=_optional(own, "pad_to_multiple_of", lambda part: part.whole(1)),
    )


def _token(part: _Part) -> TokenSpec:
    fields = part.fields("source", "force")
    source = _required(part, fields, "source")
    force = _optional(fields, "force", _Part.switch) or False
    if not isinstance(source.node.value, Mapping) or "kind" not in source.node.value:
        return TokenSpec("model", model=_model(source), force=force)
    kind = source.entries()["kind"]
    match kind.node.value:
        case "zero":
            source.fields("kind")
            return TokenSpec("zero", force=force)
        case "model_token":
            return _other_token(source, force)
        case _:
            raise kind.bad(f"is {kind.shown()}", "write zero or model_token")


def _other_token(part: _Part, force: bool) -> TokenSpec:
    fields = part.fields("kind", "model", "token", "token_id")
    if ("token" in fields) == ("token_id" in fields):
        raise part.bad("needs a token or a token_id, and not both", "give one of them")
    return TokenSpec(
        "token",
        model=_model(_required(part, fields, "model")),
        token=_optional(fields, "token", _Part.text),
        token_id=_optional(fields, "token_id", lambda part: part.whole(0)),
        force=force,
    )


# Writing


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values on one line, and text in quotes where it reads as a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def represent_items(self, data: list[Any]) -> yaml.SequenceNode:
        flow = not any(isinstance(item, dict | list) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)

    def represent_text(self, data: str) -> yaml.ScalarNode:
        style = None
        if not all(c.isprintable() or c == "\n" for c in data):
            style = '"'  # the other styles let odd line breaks get lost
        elif "\n" in data.strip() and not data[0].isspace():
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_number(self, data: float) -> yaml.ScalarNode:
        if data.is_integer() and abs(data) < _WHOLE:
            return self.represent_int(int(data))
        return self.represent_float(data)


_Dumper.add_representer(list, _Dumper.represent_items)
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(float, _Dumper.represent_number)
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(f"(?:{FLOAT.pattern})$"), list("-+.0123456789")
)


def _document_yaml(document: Document) -> dict[str, Any]:
    return {
        **_given("name", document.name),
        "merge_method": document.merge_method,
        **_given("base_model", document.base_model),
        **_given("reference", document.reference),
        **_given("models", [_source_yaml(source) for source in document.models]),
        **_given("slices", [_slice_yaml(one) for one in document.slices]),
        **_given("parameters", _parameters_yaml(document.parameters)),
        **_tokenizer_yaml(document.tokenizer),
        **_given("chat_template", document.chat_template),
        **_given("dtype", _torch_name(document.dtype)),
        **_given("out_dtype", _torch_name(document.out_dtype)),
        **({} if document.seed is None else {"seed": document.seed}),
        **_given("ignore_extra", document.ignore_extra),
        **_given("allow_nonfinite", document.allow_nonfinite),
    }


def _given(key: str, value: object) -> dict[str, object]:
    """``key`` with its value, or nothing where that says nothing."""
    return {key: value} if value else {}


def _source_yaml(source: SourceSpec) -> dict[str, Any]:
    return {
        "model": source.model,
        **_given("base_model", source.base),
        **_given("layer_range", list(source.layer_range or ())),
        **_given("parameters", _parameters_yaml(source.parameters)),
    }


def _slice_yaml(one: SliceSpec) -> dict[str, Any]:
    return {
        "sources": [_source_yaml(source) for source in one.sources],
        **_given("parameters", _parameters_yaml(one.parameters)),
    }


def _parameters_yaml(parameters: Mapping[str, Setting]) -> dict[str, Any]:
    return {name: setting.to_json() for name, setting in parameters.items()}


def _torch_name(dtype: str | None) -> str | None:
    return None if dtype is None else TORCH_NAMES[dtype]


def _tokenizer_yaml(tokenizer: TokenizerSpec | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    tokens = {name: _token_yaml(token) for name, token in tokenizer.tokens.items()}
    rest = {
        **_given("tokens", tokens),
        **_given("pad_to_multiple_of", tokenizer.pad_to_multiple_of),
    }
    if not rest:
        return {"tokenizer_source": tokenizer.source}
    return {"tokenizer": {"source": tokenizer.source, **rest}}


def _token_yaml(token: TokenSpec) -> dict[str, Any]:
    source: Any = token.model
    if token.kind == "zero":
        source = {"kind": "zero"}
    elif token.kind == "token":
        by = "token_id" if token.token is None else "token"
        source = {"kind": "model_token", "model": token.model, by: getattr(token, by)}
    return {"source": source, **_given("force", token.force)}
