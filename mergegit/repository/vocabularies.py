"""The vocabularies of a merge: whose tokens are whose, and what the merged files say of them.

Works on files beside the weights, and on the shapes and ids of tensors; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from mergegit.checkpoint.alignment import Alignment, TokenOption, TokenRow, align
from mergegit.checkpoint.chat_template import chat_template_files
from mergegit.checkpoint.embeddings import embedding_names, is_head
from mergegit.checkpoint.json_files import read_object, write_object
from mergegit.checkpoint.tokenizer_files import (
    config_with_vocabulary,
    generation_config_with_vocabulary,
    is_tokenizer_file,
    output_files,
)
from mergegit.checkpoint.vocabulary import (
    ADDED_TOKENS,
    OPAQUE,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCAB_JSON,
    VOCAB_TXT,
    Vocabulary,
    read_vocabulary,
)
from mergegit.dtypes import DTYPES
from mergegit.encoding import canonical_json, hash_object
from mergegit.errors import BadCheckpoint, Mismatch
from mergegit.merge.match import Model
from mergegit.merge.recipe import ModelIndex, Recipe, VocabularyRequest
from mergegit.objects import CommitId, Tensor, TensorId
from mergegit.repository.adapters import base_of_adapter
from mergegit.repository.companions import CONFIG
from mergegit.repository.lineage import is_adapter
from mergegit.storage.store import Store

GENERATION: Final = "generation_config.json"
_TIE: Final = "tie_word_embeddings"
_VERSION: Final = 1
"""Goes into what alignments are remembered by: to be raised where they come out otherwise."""
_VOCABULARIES: Final = (TOKENIZER, VOCAB_JSON, VOCAB_TXT, *OPAQUE)
_DECISIVE: Final = (
    TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, VOCAB_JSON, VOCAB_TXT, *OPAQUE,
)  # fmt: skip
"""The files that a vocabulary is read from."""


class StoredFiles(Mapping[str, bytes]):
    """Files of a commit by path; their contents are read when they are asked for, and not held."""

    def __init__(self, store: Store, ids: Mapping[str, TensorId]) -> None:
        self.ids = ids
        self._store = store

    def __getitem__(self, path: str) -> bytes:
        blocks = self._store.tensor(self.ids[path]).blocks()
        return b"".join(self._store.read_block(block) for block in blocks)

    def __contains__(self, path: object) -> bool:
        return path in self.ids

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Member:
    """A model of a merge as far as tokens go: its tensors with a row for each of them, by the
    base's names, and the files that tell them.

    A tied head stands beside the embedding that it is, where the base has a head. ``doubled`` are
    heads that are their embedding once more, where the base has none; ``untied`` those that are
    not their embedding.
    """

    ref: str
    files: StoredFiles
    ids: Mapping[str, TensorId]
    tensors: Mapping[str, Tensor]
    doubled: frozenset[str]
    untied: frozenset[str]
    rows: int


class Vocabularies:
    """The tokens of a merge's models, and of what is to come out.

    ``members`` are the base that deltas are taken against, then the experts, each commit once;
    ``places`` gives the member of each model, the base's first. Raises ``Mismatch`` where tensors
    with a row per token can't be told, and ``BadCheckpoint``.
    """

    def __init__(self, store: Store, recipe: Recipe, models: Sequence[Model]) -> None:
        assert recipe.vocabulary is not None
        self.request: VocabularyRequest = recipe.vocabulary
        commits = [recipe.base, *(expert.commit for expert in recipe.experts)]
        distinct = list(dict.fromkeys(commits))
        self.places = [distinct.index(commit) for commit in commits]
        first = models[0]
        files = [files_of(store, models[commits.index(commit)].ref, commit) for commit in distinct]
        self.names = embedding_names(_shapes(first), _config(files[0], first.ref), first.ref)
        self.members = [
            _member(models[commits.index(commit)], own, first, self.names)
            for commit, own in zip(distinct, files, strict=True)
        ]
        self._check_widths()
        self.base = self.place_of("base", recipe)
        is_merged = recipe.files_from is None or self.places[0] in self.places[1:]
        self.aside = None if is_merged else self.places[0]
        self._source = (
            self.request.source
            if isinstance(self.request.source, str)
            else self.place_of(self.request.source, recipe)
        )
        self._options = {
            token: TokenOption(
                "zero"
                if asked.model is None
                else TokenRow(self.place_of(asked.model, recipe), asked.token),
                asked.force,
            )
            for token, asked in self.request.tokens.items()
        }

    def place_of(self, model: ModelIndex, recipe: Recipe) -> int:
        """The member that a recipe means."""
        if model == "base":
            model = -1 if recipe.files_from is None else recipe.files_from
        assert isinstance(model, int)
        return self.places[model + 1]

    def _check_widths(self) -> None:
        base = self.members[0]
        for member in self.members[1:]:
            for name, tensor in member.tensors.items():
                if tensor.shape[1:] != base.tensors[name].shape[1:]:
                    raise Mismatch(
                        f"tensor {name} is {list(base.tensors[name].shape)} in {base.ref} but "
                        f"{list(tensor.shape)} in {member.ref}",
                        hint="merge models of one width",
                    )
        for member in self.members:
            for name, tensor in member.tensors.items():
                if DTYPES[tensor.dtype].bits % 8:
                    raise Mismatch(
                        f"tensor {name} of {member.ref} is {tensor.dtype}: its rows can't be moved",
                        hint="add the model in an unquantised dtype",
                    )

    @cached_property
    def alignment(self) -> Alignment:
        """Whose row stands where. Raises ``BadCheckpoint``, ``BadRecipe`` and ``Mismatch``."""
        known: dict[bytes, Vocabulary] = {}
        models = []
        for member in self.members:
            key = _decisive_ids(member.files)
            if key not in known:
                known[key] = self._vocabulary(member)
            models.append((member.ref, known[key], member.rows))
        source = self._source
        return align(
            models,
            base=self.base,
            source=source if source != "union" else "union",
            tokens=self._options,
            pad_to_multiple_of=self.request.pad_to_multiple_of,
            base_fills=self.request.base_stands_in,
            aside=self.aside,
        )

    def _vocabulary(self, member: Member) -> Vocabulary:
        """A model's vocabulary; one without files whose matrix is the base's has the base's."""
        base = self.members[0]
        is_bare = not any(path in member.files for path in _VOCABULARIES)
        if is_bare and member.ids == base.ids:
            return read_vocabulary(base.files, base.ref)
        return read_vocabulary(member.files, member.ref)

    def key(self, place: int, name: str, *, kept: bool = False) -> bytes:
        """What a member's aligned tensor is remembered by: a hash of all that it depends on; or,
        where it is ``kept``, that it is the member's own."""
        return hash_object(canonical_json([self._facts, place, name, kept]))

    @cached_property
    def _facts(self) -> str:
        options = [
            [token, option.force, *_origin(option)] for token, option in self._options.items()
        ]
        members = [
            [_decisive_ids(m.files).hex(), {name: i.hex() for name, i in m.ids.items()}]
            for m in self.members
        ]
        facts = [
            "aligned", _VERSION, self._source, options, self.request.pad_to_multiple_of,
            self.request.base_stands_in, self.base, self.aside, members,
        ]  # fmt: skip
        return hash_object(canonical_json(facts)).hex()

    def output(self) -> dict[str, bytes]:
        """The merged model's files that speak of tokens, by path; of the tokenizer all of them.

        Raises ``BadCheckpoint`` and ``Mismatch`` where no tokenizer can have the tokens.
        """
        alignment = self.alignment
        base, start = self.members[alignment.base].files, self.members[alignment.start].files
        out = output_files(alignment, [member.files for member in self.members])
        start_config = start.get(CONFIG)
        if CONFIG in base:
            made = config_with_vocabulary(base[CONFIG], alignment, start_config=start_config)
            out[CONFIG] = self._with_tie(made)
        if GENERATION in base:
            out[GENERATION] = generation_config_with_vocabulary(
                base[GENERATION], alignment, start_config=start_config
            )
        return out

    def _with_tie(self, config: bytes) -> bytes:
        """A config that ties the head to the embedding where they are one, and only there."""
        document = read_object({CONFIG: config}, CONFIG, self.members[self.base].ref)
        stated = document.get(_TIE)
        has_head = any(_is_head_weight(name) for name in self.names)
        if stated is True and any(member.untied for member in self.members):
            return write_object({**document, _TIE: False})
        if stated is False and not has_head and self.base != self.places[0]:
            return write_object({**document, _TIE: True})
        return config


def token_files(
    store: Store, recipe: Recipe, vocabularies: Vocabularies | None
) -> dict[str, bytes]:
    """The files that speak of tokens, as a recipe asks for them: nothing where it does not.

    With ``vocabularies`` they are all there are of the merged model's tokenizer. Raises
    ``BadCheckpoint``, ``BadRecipe`` and ``Mismatch``.
    """
    out = vocabularies.output() if vocabularies is not None else {}
    if recipe.chat_template is None:
        return out
    ref, commit = recipe.base_ref, recipe.base
    if recipe.files_from is not None:
        ref, commit = (
            recipe.experts[recipe.files_from].ref,
            recipe.experts[recipe.files_from].commit,
        )
    models = {commit: ref, **{expert.commit: expert.ref for expert in recipe.experts}}
    files = {known: files_of(store, name, known) for known, name in models.items()}
    own: Mapping[str, bytes] = files[commit]
    if vocabularies is not None:
        own, ref = out, vocabularies.members[vocabularies.alignment.start].ref
    if not any(is_tokenizer_file(path) for path in own):
        raise BadCheckpoint(
            f"{ref} has no tokenizer that a chat template could go with",
            hint="take that of another model with --tokenizer-source, or leave the template out",
        )
    named = [(models[known], files[known]) for known in models]
    return {**out, **chat_template_files(own, recipe.chat_template, named, of=ref)}


def files_of(store: Store, ref: str, commit: CommitId) -> StoredFiles:
    """The files of a commit that speak of tokens. An adapter has its base's, unless it comes with
    a tokenizer of its own. Raises ``NoBase``."""
    manifest = store.manifest(store.commit(commit).manifest)
    found = _speaking(manifest.files)
    if is_adapter(manifest):
        below = _speaking(base_of_adapter(store, ref, commit).files)
        if any(path in found for path in _VOCABULARIES):
            below = {path: i for path, i in below.items() if not is_tokenizer_file(path)} | found
        found = below
    return StoredFiles(store, found)


def _speaking(files: Mapping[str, TensorId]) -> dict[str, TensorId]:
    return {p: i for p, i in files.items() if is_tokenizer_file(p) or p in (CONFIG, GENERATION)}


def _member(model: Model, files: StoredFiles, base: Model, names: Sequence[str]) -> Member:
    """A model as far as tokens go; ``names`` are those of the base's tensors."""
    config = _config(files, model.ref)
    own = embedding_names(_shapes(model), config, model.ref)
    inputs = [name for name in own if not is_head(name)]
    ids = {name: model.ids[name] for name in names if name in own}
    tensors = {name: model.tensors[name] for name in ids}

    def embeddings_of(head: Tensor) -> dict[TensorId, Tensor]:
        """Those that a head could be tied to."""
        found = {model.ids[name]: model.tensors[name] for name in inputs}
        return {i: t for i, t in found.items() if t.shape[1:] == head.shape[1:]}

    tied_to: dict[str, TensorId] = {}
    doubled = set()
    for name in filter(_is_head_weight, dict.fromkeys([*names, *own])):
        found = embeddings_of(model.tensors[name] if name in own else base.tensors[name])
        if len(found) != 1:
            continue
        ((tensor_id, tensor),) = found.items()
        if name not in own and config.get(_TIE) is not False:
            ids[name], tensors[name] = tensor_id, tensor
        elif name in own and name not in names and model.ids[name] == tensor_id:
            doubled.add(name)
        tied_to[name] = tensor_id
    return Member(
        ref=model.ref,
        files=files,
        ids=ids,
        tensors=tensors,
        doubled=frozenset(doubled),
        untied=frozenset(name for name in tied_to.keys() & ids if ids[name] != tied_to[name]),
        rows=model.tensors[own[0]].shape[0],
    )


def _origin(option: TokenOption) -> list[int | str | None]:
    """Where a token's row comes from, for JSON: nowhere, if it is zeros."""
    source = option.source
    return [source.model, source.token] if isinstance(source, TokenRow) else []


def _is_head_weight(name: str) -> bool:
    return is_head(name) and name.endswith(".weight")


def _config(files: StoredFiles, ref: str) -> dict[str, Any]:
    return read_object(files, CONFIG, ref) if CONFIG in files else {}


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in model.tensors.items()}


def _decisive_ids(files: StoredFiles) -> bytes:
    """A hash of what a vocabulary is read from."""
    ids = {path: i.hex() for path, i in files.ids.items() if path in _DECISIVE}
    return hash_object(canonical_json(ids))
