"""From what a person asks for, by flags or in mergekit's YAML, to a checked recipe, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergegit.errors import BadRecipe, NoBase, UnknownRef
from mergegit.merge.mergekit_yaml import Document, SliceSpec, SourceSpec
from mergegit.merge.method import Merges, Method
from mergegit.merge.methods import method as method_named
from mergegit.merge.recipe import Recipe, Slice, Source, make_recipe
from mergegit.merge.settings import Setting
from mergegit.objects import CommitId
from mergegit.repository import lineage
from mergegit.repository.naming import ResolvedRef, resolve
from mergegit.storage.store import Store

_PINNED: Final = 16
"""Digits of the commit ids that recipes are written with."""

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
        files_from=None if chosen.merges is Merges.DELTAS or base else 0,
    )


def _reference(store: Store, method: Method, models: Sequence[ResolvedRef]) -> ResolvedRef:
    """What deltas are read against: the models' merge base, or, where a method merges whole models
    that have none, the first of them. Raises ``NoBase``."""
    if method.merges is Merges.DELTAS:
        return lineage.merge_base(store, models)
    try:
        return lineage.merge_base(store, models)
    except NoBase:
        return models[0]


def recipe_of_document(
    store: Store, document: Document, known: Mapping[str, ResolvedRef], given: str | None = None
) -> Recipe:
    """The recipe of a YAML document, whose text was ``given``.

    ``known`` are commits by the names that the document has for them: results of documents before
    it, and models that were added from paths. Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``.
    """
    asked = _Asked(store, known)
    method = method_named(document.merge_method)
    base = asked.model(document.base_model) if document.base_model else None
    slices = document.slices
    shared = _meaningful(document.parameters)
    if slices:
        slices = tuple(_with_base(part, document.base_model, method, asked) for part in slices)
        for part in slices:
            for source in part.sources:
                asked.model(source.model)
        models = _distinct(slices, asked)
        own: list[dict[str, Setting]] = [{} for _ in models]
    else:
        sources = _with_base(
            SliceSpec(document.models, {}), document.base_model, method, asked
        ).sources
        models = [asked.model(source.model) for source in sources]
        own = [_meaningful(source.parameters) for source in sources]
    dropped: list[int] = []
    if method.merges is Merges.DELTAS and base is not None:
        # A base among the models has no delta; it is listed for its own sake.
        dropped = [k for k, model in enumerate(models) if model.commit == base.commit]
    if method.merges is Merges.EITHER and base is not None:
        shared = {"deltas": Setting.constant(True), **shared}
        dropped = [k for k, model in enumerate(models) if model.commit == base.commit]
    kept = [k for k in range(len(models)) if k not in dropped]
    if not kept:
        raise BadRecipe(
            f"the recipe names no model but its base {document.base_model}",
            hint="list the models to merge under `models`",
        )
    names = [(models[k].name, models[k].commit) for k in kept]
    if base is not None and method.merges in (Merges.DELTAS, Merges.EITHER):
        reference = base
    else:
        reference = _reference(store, method, [models[k] for k in kept])
    return make_recipe(
        method_name=document.merge_method,
        base=(reference.name, reference.commit),
        experts=names,
        parameters=shared,
        expert_parameters=[own[k] for k in kept],
        seed=document.seed or 0,
        dtype=document.out_dtype or document.dtype,
        given=given,
        ignore_extra=document.ignore_extra,
        allow_nonfinite=document.allow_nonfinite,
        slices=_slices(slices, models, kept, asked, reference),
        files_from=_files_from(method, base, [models[k] for k in kept], reference),
    )


def _files_from(
    method: Method, base: ResolvedRef | None, models: Sequence[ResolvedRef], reference: ResolvedRef
) -> int | None:
    """Whose files the merged model takes: the base's that the recipe names, else the first's."""
    if base is not None:
        if base.commit == reference.commit:
            return None
        return next(k for k, model in enumerate(models) if model.commit == base.commit)
    if method.merges is Merges.DELTAS or models[0].commit == reference.commit:
        return None
    return 0


def _meaningful(parameters: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: value for name, value in parameters.items() if name not in _MEANINGLESS}


def _with_base(part: SliceSpec, base_model: str | None, method: Method, asked: _Asked) -> SliceSpec:
    """A slice with the base among its models where the method takes it for one of them."""
    if base_model is None or method.merges in (Merges.DELTAS, Merges.EITHER):
        return part
    base = asked.model(base_model).commit
    own = [s for s in part.sources if asked.model(s.model).commit == base]
    rest = [s for s in part.sources if asked.model(s.model).commit != base]
    if method.merges is Merges.FROM_FIRST:
        if not own and rest:
            own = [SourceSpec(base_model, rest[0].layer_range)]
        return replace(part, sources=(*own, *rest))
    if method.copies is None and not own and rest:
        return replace(part, sources=(*rest, SourceSpec(base_model, rest[0].layer_range)))
    return part


def _distinct(slices: Sequence[SliceSpec], asked: _Asked) -> list[ResolvedRef]:
    """Every model of the slices, once, but as often as it stands in one slice."""
    models: list[ResolvedRef] = []
    for part in slices:
        here = [asked.model(source.model) for source in part.sources]
        for model in here:
            commits = [known.commit for known in models]
            if commits.count(model.commit) < [m.commit for m in here].count(model.commit):
                models.append(model)
    return models


def _slices(
    specs: Sequence[SliceSpec],
    models: Sequence[ResolvedRef],
    kept: Sequence[int],
    asked: _Asked,
    reference: ResolvedRef,
) -> list[Slice]:
    slices = []
    for part in specs:
        free = list(range(len(models)))
        sources, base_layers = [], None
        for source in part.sources:
            commit = asked.model(source.model).commit
            place = next(k for k in free if models[k].commit == commit)
            free.remove(place)
            if source.layer_range is None:
                raise BadRecipe(
                    f"the slice takes {source.model} without a layer_range",
                    hint="give every source of a slice its layer_range, like [0, 32]",
                )
            if commit == reference.commit:
                base_layers = source.layer_range
            if place in kept:
                own = _meaningful(source.parameters)
                sources.append(Source(kept.index(place), source.layer_range, own))
        if not sources:
            raise BadRecipe(
                "a slice has no source but the base", hint="list the models to merge in it"
            )
        layers = base_layers or sources[0].layers
        slices.append(Slice(tuple(sources), layers, _meaningful(part.parameters)))
    return slices


def models_of(document: Document) -> list[str]:
    """The models that a document names, the base first, each once."""
    names = [document.base_model] if document.base_model else []
    sources = [*document.models, *(source for part in document.slices for source in part.sources)]
    names += [source.model for source in sources]
    if document.tokenizer is not None:
        if document.tokenizer.source not in ("base", "union"):
            names.append(document.tokenizer.source)
        names += [token.model for token in document.tokenizer.tokens.values() if token.model]
    return list(dict.fromkeys(names))


def in_order(documents: Sequence[Document]) -> list[Document]:
    """Documents so that each comes after those that it names, the file's last one last.

    Raises ``BadRecipe`` where they name one another in a circle.
    """
    by_name = {document.name: document for document in documents if document.name}
    ordered: list[Document] = []
    open_names: list[str] = []

    def visit(document: Document) -> None:
        if document in ordered:
            return
        if document.name in open_names:
            circle = " -> ".join([*open_names, document.name or ""])
            raise BadRecipe(
                f"the recipes name one another in a circle: {circle}",
                hint="let each recipe name only results of others that do not need it",
            )
        open_names.append(document.name or "")
        for name in models_of(document):
            if name in by_name:
                visit(by_name[name])
        open_names.pop()
        ordered.append(document)

    for document in documents:
        visit(document)
    last = documents[-1]
    return [document for document in ordered if document is not last] + [last]


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
        base, plus, adapter = text.partition("+")
        try:
            return resolve(self.store, text)
        except UnknownRef as error:
            name, at, revision = text.rpartition("@")
            if at and name:
                return ResolvedRef(name, self._revision(name, revision, text))
            if plus and base and adapter:
                return self._adapted(base, adapter)
            raise _not_added(text, error) from error

    def _revision(self, name: str, revision: str, text: str) -> CommitId:
        try:
            return resolve(self.store, revision).commit
        except UnknownRef as error:
            raise UnknownRef(
                f"there is no commit {revision!r}, which {text!r} names",
                hint=f"`mergegit log {name}` shows its commits",
            ) from error

    def _adapted(self, base: str, adapter: str) -> ResolvedRef:
        below, above = self.model(base), self.model(adapter)
        if below.commit not in self.store.commit(above.commit).parents:
            raise BadRecipe(
                f"{adapter} was not added as an adapter of {base}",
                hint=f"add it with `mergegit add ADAPTER --base {base}`",
            )
        return above


def _not_added(text: str, error: UnknownRef) -> UnknownRef:
    """An error that says how to add the model that is meant, where a path or a hub id is."""
    if Path(text).exists():
        return UnknownRef(
            f"{text!r} is a path, and not in the repository",
            hint=f"add it first: `mergegit add {text}`",
        )
    if text.count("/") == 1 and not text.startswith((".", "/")):
        name = text.partition("/")[2]
        return UnknownRef(
            f"{text!r} is not in the repository",
            hint=f"download it (`hf download {text} --local-dir {name}`) and add it: "
            f"`mergegit add {name} --name {text}`",
        )
    return error


def document_of(recipe: Recipe) -> Document:
    """A recipe as it was understood, in mergekit's words: every model with its commit, every
    parameter with its value. Read again, it is the same recipe."""
    method = recipe.method
    names = [f"{expert.ref}@{expert.commit.hex()[:_PINNED]}" for expert in recipe.experts]
    reference = f"{recipe.base_ref}@{recipe.base.hex()[:_PINNED]}"
    base: str | None = reference
    if method.merges in (Merges.MODELS, Merges.FROM_FIRST):
        base = names[recipe.files_from] if recipe.files_from is not None else None
    elif method.merges is Merges.EITHER and recipe.parameters["deltas"] == Setting.constant(False):
        base = None
    slices = []
    for part in recipe.slices:
        sources = [SourceSpec(names[s.expert], s.layers, s.parameters) for s in part.sources]
        if base == reference and part.base_layers != part.sources[0].layers:
            sources.append(SourceSpec(reference, part.base_layers))
        slices.append(SliceSpec(tuple(sources), part.parameters))
    models = tuple(
        SourceSpec(name, None, expert.parameters)
        for name, expert in zip(names, recipe.experts, strict=True)
    )
    return Document(
        merge_method=method.name,
        base_model=base,
        models=() if slices else models,
        slices=tuple(slices),
        parameters={} if slices else recipe.parameters,
        dtype=recipe.dtype,
        seed=recipe.seed or None,
        ignore_extra=recipe.ignore_extra,
        allow_nonfinite=recipe.allow_nonfinite,
    )
