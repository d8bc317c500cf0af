"""From what a person asks for, by flags or in mergekit's YAML, to a checked recipe, and back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mergegit.checkpoint.chat_template import check_template
from mergegit.errors import BadRecipe, NoBase, UnknownRef
from mergegit.merge.layers import stacks
from mergegit.merge.mergekit_yaml import (
    Document,
    SliceSpec,
    SourceSpec,
    TokenizerSpec,
    TokenSpec,
)
from mergegit.merge.method import Merges, Method
from mergegit.merge.methods import method as method_named
from mergegit.merge.recipe import (
    ModelIndex,
    Range,
    Recipe,
    Slice,
    Source,
    TokenRequest,
    VocabularyRequest,
    make_recipe,
)
from mergegit.merge.settings import Rule, Setting
from mergegit.objects import CommitId
from mergegit.repository import lineage
from mergegit.repository.naming import ResolvedRef, resolve
from mergegit.storage.store import Store

_PINNED: Final = 16
"""Digits of the commit ids that recipes are written with."""

_TRUE: Final = Setting.constant(True)
_FALSE: Final = Setting.constant(False)

_MEANINGLESS: Final = frozenset({"int8_mask"})
"""Parameters of mergekit that choose how it stores what we do not store: no result depends on
them."""


def recipe_of_flags(
    store: Store,
    experts: Sequence[str],
    *,
    base: str | None,
    method: str,
    parameters: Mapping[str, object],
    seed: int,
    dtype: str | None,
    ignore_extra: bool,
    allow_nonfinite: bool,
    tokenizer_source: str | None = None,
    chat_template: str | None = None,
) -> Recipe:
    """The recipe of a command line. Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``."""
    resolved = [resolve(store, expert) for expert in experts]
    shared: dict[str, Setting] = {}
    own: list[dict[str, Setting]] = [{} for _ in experts]
    for key, value in parameters.items():
        expert, dot, name = key.rpartition(".")
        setting = Setting.parse(value, key)
        if not dot:
            shared[name] = setting
        elif expert in experts:
            for place, ref in enumerate(experts):
                if ref == expert:
                    own[place][name] = setting
        else:
            raise BadRecipe(
                f"parameter {key!r} names {expert!r}, which is no expert of this merge",
                hint=f"the experts are {', '.join(experts)}",
            )
    chosen = method_named(method)
    reference = resolve(store, base) if base else _reference(store, chosen, resolved)
    if chosen.merges is Merges.EITHER and base:
        shared.setdefault("deltas", Setting.constant(True))
    if chosen.merges is Merges.FROM_FIRST and len(resolved) == 1:
        # One expert alone is seen from its base.
        resolved, own = [reference, *resolved], [{}, *own]
    takes_deltas = _takes_deltas(chosen, shared)
    from_base = takes_deltas or (base and chosen.merges is not Merges.EITHER)
    tokens = _Tokens(
        models=resolved,
        reference=reference,
        files_from=_files_from(reference if from_base else resolved[0], resolved, reference),
        base_stands_in=_stands_in(chosen, takes_deltas, bool(base)),
    )
    vocabulary = None
    if tokenizer_source in ("base", "union"):
        vocabulary = tokens.request(TokenizerSpec(tokenizer_source), {})
    elif tokenizer_source is not None:
        model = resolve(store, tokenizer_source)
        vocabulary = tokens.request(TokenizerSpec(tokenizer_source), {tokenizer_source: model})
    if chat_template is not None:
        check_template(chat_template)
    return make_recipe(
        method_name=method,
        base=(reference.name, reference.commit),
        experts=[(expert.name, expert.commit) for expert in resolved],
        parameters=shared,
        expert_parameters=own,
        seed=seed,
        dtype=dtype,
        ignore_extra=ignore_extra,
        allow_nonfinite=allow_nonfinite,
        files_from=tokens.files_from,
        vocabulary=vocabulary,
        chat_template=chat_template,
    )


def _takes_deltas(method: Method, shared: Mapping[str, Setting]) -> bool:
    """Whether what is merged are deltas, and not whole models."""
    if method.merges is Merges.EITHER:
        return shared.get("deltas", _FALSE) != _FALSE
    return method.merges is Merges.DELTAS


def _reference(
    store: Store, method: Method, models: Sequence[ResolvedRef], layers: int = 0
) -> ResolvedRef:
    """What deltas are read against: the models' merge base, or, where a method merges whole models
    that have none, the first of them, if it has so many ``layers``. Raises ``NoBase``."""
    if method.merges is Merges.DELTAS:
        return lineage.merge_base(store, models)
    try:
        found = [lineage.merge_base(store, models)]
    except NoBase:
        found = []
    whole = [*found, *(lineage.model_of(store, model) for model in models)]
    if not layers:
        return whole[0]
    deep_enough = (model for model in whole if _layers(store, model) >= layers)
    return next(deep_enough, whole[len(found)])


def _layers(store: Store, model: ResolvedRef) -> int:
    """The layers of a model, 0 where its tensors' names tell of none."""
    names = store.manifest(store.commit(model.commit).manifest).tensors
    return max((stack.layers for stack in stacks(names)), default=0)


def recipe_of_document(
    store: Store, document: Document, known: Mapping[str, ResolvedRef], given: str | None = None
) -> Recipe:
    """The recipe of a YAML document, whose text was ``given``.

    ``known`` are commits by the names that the document has for them: results of documents before
    it, and models that were added from paths. Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``.
    """
    check_words(document)
    asked = _Asked(store, known)
    method = method_named(document.merge_method)
    base = asked.model(document.base_model) if document.base_model else None
    shared = _understood(document.parameters, method)
    if method.merges is Merges.EITHER and base is not None:
        shared = {"deltas": _TRUE, **shared}
    takes_deltas = _takes_deltas(method, shared)
    _check_base(document, method, takes_deltas)
    whole = (SliceSpec(document.models),) if document.models else document.slices
    parts = [_sources(part, document, method, takes_deltas, asked) for part in whole]
    own: list[dict[str, Setting]]
    bases: list[ResolvedRef | None] = []
    if document.slices:
        models = _distinct(parts, asked)
        own = [{} for _ in models]
    else:
        models = [asked.model(source.model) for source in parts[0]]
        bases = [asked.model(source.base) if source.base else None for source in parts[0]]
        own = [_understood(source.parameters, method) for source in parts[0]]
    if document.reference is not None:
        reference = asked.model(document.reference)
    elif base is not None and (takes_deltas or not _is_among(base, models)):
        reference = base
    else:
        ranges = [source.layer_range or (0, 0) for part in parts for source in part]
        longest = max(stop - start for start, stop in ranges)
        reference = _reference(store, method, models, longest)
    if base is not None and not (base.commit == reference.commit or _is_among(base, models)):
        raise BadRecipe(
            f"base_model {document.base_model} is neither merged nor the reference",
            hint="leave out one of base_model and reference",
        )
    depth = None if takes_deltas else _layers(store, reference)
    is_named = base is not None or document.reference is not None
    tokens = _Tokens(
        models=models,
        reference=reference,
        files_from=_files_from(
            base or (reference if takes_deltas or _has_reference(document, method) else models[0]),
            models,
            reference,
        ),
        base_stands_in=_stands_in(method, takes_deltas, is_named),
    )
    vocabulary = None
    if document.tokenizer is not None:
        named = {name: asked.model(name) for name in _tokens_models(document.tokenizer)}
        vocabulary = tokens.request(document.tokenizer, named)
    if document.chat_template is not None:
        check_template(document.chat_template)
    return make_recipe(
        method_name=document.merge_method,
        base=(reference.name, reference.commit),
        experts=[(model.name, model.commit) for model in models],
        parameters=shared,
        expert_parameters=own,
        seed=document.seed or 0,
        dtype=document.out_dtype or document.dtype,
        given=given,
        ignore_extra=document.ignore_extra,
        allow_nonfinite=document.allow_nonfinite,
        slices=[
            _slice(spec, sources, method, models, asked, reference, depth)
            for spec, sources in zip(document.slices, parts, strict=False)
        ],
        files_from=tokens.files_from,
        vocabulary=vocabulary,
        chat_template=document.chat_template,
        expert_bases=[(below.name, below.commit) if below else None for below in bases],
    )


def _stands_in(method: Method, takes_deltas: bool, is_named: bool) -> bool:
    """Whether rows of the base stand in for tokens that other models lack: where there is a base.

    Methods that see models from the first have one always; where a base would mean that deltas
    are taken, there is none without.
    """
    if method.merges in (Merges.DELTAS, Merges.FROM_FIRST):
        return True
    return takes_deltas if method.merges is Merges.EITHER else is_named


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The models of a recipe as far as their tokens may be named."""

    models: Sequence[ResolvedRef]
    reference: ResolvedRef
    files_from: int | None
    base_stands_in: bool

    def request(
        self, tokenizer: TokenizerSpec, named: Mapping[str, ResolvedRef]
    ) -> VocabularyRequest:
        """What a tokenizer's description asks for; ``named`` are the models that it names.

        Raises ``BadRecipe`` for one that is not merged.
        """
        by_name: dict[str, Literal["base", "union"]] = {"base": "base", "union": "union"}
        source = by_name.get(tokenizer.source)
        return VocabularyRequest(
            source or self._place(tokenizer.source, named),
            {
                token: TokenRequest(
                    None if asked.model is None else self._place(asked.model, named),
                    asked.token_id if asked.token is None else asked.token,
                    asked.force,
                )
                for token, asked in tokenizer.tokens.items()
            },
            tokenizer.pad_to_multiple_of,
            self.base_stands_in,
        )

    def _place(self, name: str, named: Mapping[str, ResolvedRef]) -> ModelIndex:
        commit = named[name].commit
        for place, model in enumerate(self.models):
            if model.commit == commit:
                return place
        if self.files_from is None and commit == self.reference.commit:
            return "base"
        raise BadRecipe(
            f"tokens are to come from {name}, which is none of the models that are merged",
            hint=f"these are {', '.join(dict.fromkeys(model.name for model in self.models))}",
        )


def _tokens_models(tokenizer: TokenizerSpec) -> list[str]:
    """The models that a tokenizer's description names."""
    names = [] if tokenizer.source in ("base", "union") else [tokenizer.source]
    return [*names, *(token.model for token in tokenizer.tokens.values() if token.model)]


def _tokenizer_of(recipe: Recipe, names: Sequence[str], reference: str) -> TokenizerSpec | None:
    """The tokenizer's description of a recipe; ``names`` are its experts'."""
    request = recipe.vocabulary
    if request is None:
        return None
    base = reference if recipe.files_from is None else names[recipe.files_from]

    def spec(asked: TokenRequest) -> TokenSpec:
        if asked.model is None:
            return TokenSpec("zero", force=asked.force)
        model = base if asked.model == "base" else names[asked.model]
        if asked.token is None:
            return TokenSpec("model", model, force=asked.force)
        if isinstance(asked.token, str):
            return TokenSpec("token", model, token=asked.token, force=asked.force)
        return TokenSpec("token", model, token_id=asked.token, force=asked.force)

    return TokenizerSpec(
        request.source if isinstance(request.source, str) else names[request.source],
        {token: spec(asked) for token, asked in request.tokens.items()},
        request.pad_to_multiple_of,
    )


def check_words(document: Document) -> None:
    """What can be told of a recipe before its models are looked at: its method, and the names and
    values of its parameters. Raises ``BadRecipe``."""
    method = method_named(document.merge_method)
    shared = [("", document.parameters), *(("", part.parameters) for part in document.slices)]
    sources = [*document.models, *(source for part in document.slices for source in part.sources)]
    for model, given in [*shared, *((source.model, source.parameters) for source in sources)]:
        for name, setting in _understood(given, method).items():
            parameter = method.parameter(name)
            of = f"{model}.{name}" if model else name
            if model and not parameter.per_expert:
                raise BadRecipe(
                    f"{of}: an expert can't have a {name} of its own",
                    hint=f"give it for all, as {name}",
                )
            for value in setting.values:
                parameter.check(value, of)


def check_models(store: Store, document: Document, known: Mapping[str, ResolvedRef]) -> None:
    """Look for the models of a recipe, but those that are directories and may be added, and
    adapters on these. Raises ``UnknownRef``."""
    asked = _Asked(store, known)
    for name in models_of(document):
        if not Path(name).is_dir() and "+" not in name:
            asked.model(name)


def _check_base(document: Document, method: Method, takes_deltas: bool) -> None:
    if document.reference is not None and takes_deltas:
        raise BadRecipe(
            f"{method.name} merges what changed of a base, and the recipe names a reference",
            hint="name it as base_model",
        )
    if method.merges is Merges.EITHER and document.base_model and not takes_deltas:
        raise BadRecipe(
            "the recipe names a base_model, and deltas from it are not to be taken",
            hint="leave out base_model, or deltas",
        )


def _has_reference(document: Document, method: Method) -> bool:
    """Whether the merged model takes the files of the reference that the recipe names. Where a
    base would mean that deltas are taken, there is no other way to name the first model's."""
    return document.reference is not None and method.merges is not Merges.EITHER


def _is_among(model: ResolvedRef, models: Sequence[ResolvedRef]) -> bool:
    return any(other.commit == model.commit for other in models)


def _files_from(
    wanted: ResolvedRef, models: Sequence[ResolvedRef], reference: ResolvedRef
) -> int | None:
    """The place of the model whose files the merged one takes, None for the reference."""
    if wanted.commit == reference.commit:
        return None
    return next(k for k, model in enumerate(models) if model.commit == wanted.commit)


def _understood(parameters: Mapping[str, Setting], method: Method) -> dict[str, Setting]:
    """Parameters as mergekit takes them: those without meaning here are left out, and 0 and 1 of
    a switch are false and true."""
    understood = {}
    for name, setting in parameters.items():
        if name not in _MEANINGLESS:
            switch = method.parameter(name).is_switch
            understood[name] = _switched(setting) if switch else setting
    return understood


def _switched(setting: Setting) -> Setting:
    rules = [
        Rule(rule.filter, (bool(rule.values[0]),)) if rule.values in ((0.0,), (1.0,)) else rule
        for rule in setting.rules
    ]
    return Setting(tuple(rules))


def _sources(
    part: SliceSpec, document: Document, method: Method, takes_deltas: bool, asked: _Asked
) -> list[SourceSpec]:
    """The sources of a slice, or of a whole model, that are merged.

    Where deltas are taken the base is listed for its own sake and dropped, unless a slice has
    nothing else. Where whole models are merged it is one of them, if it is listed or no slices
    are; what is seen from the first is seen from it. Raises ``BadRecipe``.
    """
    listed = list(part.sources)
    if document.slices:
        _check_ranges(listed)
    name = document.base_model
    if name is None:
        return listed
    if takes_deltas:
        rest = [source for source in listed if source.model != name]
        if not rest and not document.slices:
            raise BadRecipe(
                f"the recipe names no model but its base {name}",
                hint="list the models to merge under `models`",
            )
        return rest or listed[:1]
    commit = asked.model(name).commit
    own = [source for source in listed if asked.model(source.model).commit == commit]
    rest = [source for source in listed if asked.model(source.model).commit != commit]
    if method.merges is Merges.FROM_FIRST:
        return [*(own or [SourceSpec(name, rest[0].layer_range)]), *rest]
    if own or document.slices or method.copies is not None:
        return listed
    return [*listed, SourceSpec(name)]


def _check_ranges(sources: Sequence[SourceSpec]) -> None:
    for source in sources:
        if source.layer_range is None:
            raise BadRecipe(
                f"the slice takes {source.model} without a layer_range",
                hint="give every source of a slice its layer_range, like [0, 32]",
            )


def _distinct(parts: Sequence[Sequence[SourceSpec]], asked: _Asked) -> list[ResolvedRef]:
    """Every model of the slices, once, but as often as it stands in one slice."""
    models: list[ResolvedRef] = []
    for part in parts:
        here = [asked.model(source.model) for source in part]
        for model in here:
            commits = [known.commit for known in models]
            if commits.count(model.commit) < [m.commit for m in here].count(model.commit):
                models.append(model)
    return models


def _slice(
    spec: SliceSpec,
    sources: Sequence[SourceSpec],
    method: Method,
    models: Sequence[ResolvedRef],
    asked: _Asked,
    reference: ResolvedRef,
    depth: int | None,
) -> Slice:
    """A slice of ``sources``, which are those of ``spec`` that are merged. ``depth`` is how many
    layers the reference has if any of them may be read against, else None."""
    free = list(range(len(models)))
    merged = []
    for source in sources:
        commit = asked.model(source.model).commit
        place = next(k for k in free if models[k].commit == commit)
        free.remove(place)
        assert source.layer_range is not None, "checked before"
        merged.append(Source(place, source.layer_range, _understood(source.parameters, method)))
    layers = merged[0].layers
    if depth is not None:
        layers = _within(layers, depth)
    for source in (*spec.sources, *sources):
        if asked.model(source.model).commit == reference.commit and source.layer_range:
            layers = source.layer_range
    return Slice(tuple(merged), layers, _understood(spec.parameters, method))


def _within(layers: Range, count: int) -> Range:
    """As many layers of a model that has ``count``, those of the same numbers if it has them.

    Whole models may be read against any layers of the reference.
    """
    start, stop = layers
    beyond = max(stop - count, 0)
    return layers if beyond > start else (start - beyond, stop - beyond)


def models_of(document: Document) -> list[str]:
    """The models that a document names, the base first, each once."""
    names = [name for name in (document.base_model, document.reference) if name]
    sources = [*document.models, *(source for part in document.slices for source in part.sources)]
    names += [name for source in sources for name in (source.model, source.base) if name]
    if document.tokenizer is not None:
        names += _tokens_models(document.tokenizer)
    return list(dict.fromkeys(names))


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Documents so that each comes after those that it names, the file's last one last.

    Raises ``BadRecipe`` where they name one another in a circle, or name the last one.
    """
    by_name = {document.name: document for document in documents if document.name}
    ordered: list[Document] = []
    done: set[str | None] = set()
    for document in documents:
        opened: dict[str | None, list[Document]] = {}
        todo = [document]
        while todo:
            at = todo[-1]
            if at.name in done:
                todo.pop()
                continue
            if at.name not in opened:
                needed = [by_name[name] for name in models_of(at) if name in by_name]
                opened[at.name] = [other for other in reversed(needed) if other.name not in done]
            if not opened[at.name]:
                done.add(at.name)
                ordered.append(todo.pop())
                continue
            following = opened[at.name].pop()
            if following.name in opened and following.name not in done:
                _refuse_circle([*[other.name for other in todo], following.name])
            todo.append(following)
    last = documents[-1]
    for document in documents[:-1]:
        if last.name is not None and last.name in models_of(document):
            raise BadRecipe(
                f"recipe {document.name} needs {last.name}, the last recipe of the file",
                hint="put last the recipe that needs the others",
            )
    return [document for document in ordered if document is not last] + [last]


def _refuse_circle(names: Sequence[str | None]) -> None:
    first = names.index(names[-1])
    circle = " -> ".join(name or "the last" for name in names[first:])
    raise BadRecipe(
        f"the recipes name one another in a circle: {circle}",
        hint="let each recipe name only results of others that do not need it",
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The models that a document names, as commits."""

    store: Store
    known: Mapping[str, ResolvedRef]

    def model(self, text: str) -> ResolvedRef:
        """A model by a name that is known, a ref, ``REF@REVISION``, or a base with an
        adapter on it as ``BASE+ADAPTER``. Raises ``UnknownRef`` and ``BadRecipe``."""
        if text in self.known:
            return self.known[text]
        try:
            return resolve(self.store, text)
        except UnknownRef as error:
            unknown = error
        name, at, revision = text.rpartition("@")
        if at and name:
            try:
                return ResolvedRef(name, resolve(self.store, revision).commit)
            except UnknownRef:
                pass
        base, plus, adapter = text.partition("+")
        if plus and base and adapter:
            return self._adapted(base, adapter)
        if not at or not name:
            raise _not_added(text, None, unknown) from unknown
        self._refuse_revision(name, revision)
        raise _not_added(name, revision, unknown) from unknown

    def _refuse_revision(self, name: str, revision: str) -> None:
        """Refuse a revision of a model that is there."""
        try:
            resolve(self.store, name)
        except UnknownRef:
            return
        raise UnknownRef(
            f"there is no commit {revision!r}, which {name}@{revision} names",
            hint=f"`mergegit log {name}` shows its commits",
        )

    def _adapted(self, base: str, adapter: str) -> ResolvedRef:
        below, above = self.model(base), self.model(adapter)
        if self.store.commit(above.commit).parents[:1] != (below.commit,):
            raise BadRecipe(
                f"{adapter} was not added as an adapter of {base}",
                hint=f"add it with `mergegit add ADAPTER --base {base}`",
            )
        return above


def _not_added(text: str, revision: str | None, error: UnknownRef) -> UnknownRef:
    """An error that says how to add the model that is meant, where a path or a hub id is."""
    if Path(text).exists():
        return UnknownRef(
            f"{text!r} is a path, and not in the repository",
            hint=f"add it first: `mergegit add {shlex.quote(text)}`",
        )
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        directory = shlex.quote(text.partition("/")[2])
        pinned = f" --revision {shlex.quote(revision)}" if revision else ""
        return UnknownRef(
            f"{text!r} is not in the repository",
            hint=f"download it (`hf download {shlex.quote(text)}{pinned} --local-dir {directory}`) "
            f"and add it: `mergegit add {directory} --name {shlex.quote(text)}`",
        )
    return error


def document_of(recipe: Recipe, *, pinned: bool = True) -> Document:
    """A recipe as it was understood, in mergekit's words: every model with its commit, but where
    it is not to be ``pinned``, every parameter with its value. Read again, it is the same recipe.
    """
    method = recipe.method

    def named(ref: str, commit: CommitId) -> str:
        return f"{ref}@{commit.hex()[:_PINNED]}" if pinned else ref

    names = [named(expert.ref, expert.commit) for expert in recipe.experts]
    reference = named(recipe.base_ref, recipe.base)
    shared = recipe.slices[0].parameters if recipe.slices else recipe.parameters
    takes_deltas = _takes_deltas(method, shared)
    base: str | None = reference
    if takes_deltas and pinned:
        # A base that is merged as well has another name, lest it be taken for the base alone.
        names = [
            f"{expert.ref}@{expert.commit.hex()}" if name == reference else name
            for name, expert in zip(names, recipe.experts, strict=True)
        ]
    elif not takes_deltas:
        has_base = recipe.files_from is not None and method.merges is not Merges.EITHER
        base = names[recipe.files_from or 0] if has_base else None
    # Where no base was named none may be: its rows would stand in for tokens that others lack.
    nameless = method.merges is Merges.MODELS and (
        recipe.vocabulary is not None and not recipe.vocabulary.base_stands_in
    )
    slices = []
    for part in recipe.slices:
        sources = [SourceSpec(names[s.expert], s.layers, s.parameters) for s in part.sources]
        if takes_deltas and part.base_layers != part.sources[0].layers:
            sources.append(SourceSpec(reference, part.base_layers))
        slices.append(SliceSpec(tuple(sources), part.parameters))
    models = tuple(
        SourceSpec(
            name,
            None,
            expert.parameters,
            named(expert.base_ref or "", expert.base) if expert.base else None,
        )
        for name, expert in zip(names, recipe.experts, strict=True)
    )
    return Document(
        merge_method=method.name,
        base_model=None if nameless else base,
        reference=None if takes_deltas or nameless else reference,
        models=() if slices else models,
        slices=tuple(slices),
        parameters={} if slices else recipe.parameters,
        dtype=recipe.dtype,
        tokenizer=_tokenizer_of(recipe, names, reference),
        chat_template=recipe.chat_template,
        seed=recipe.seed or None,
        ignore_extra=recipe.ignore_extra,
        allow_nonfinite=recipe.allow_nonfinite,
    )
