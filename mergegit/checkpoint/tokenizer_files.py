"""The files of the merged model's tokenizer, and what its config says of tokens.

The output has the tokenizer of one model, as it is or with tokens added. A token that its model
added goes where added tokens go, with the flags that it had. A token of a vocabulary proper goes
into the vocabulary proper, behind all others, with the merges that make it or its score: as an
added token it would be matched before everything else, and common pieces such as "ing" would
tear every text apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mergegit.checkpoint.alignment import Addition, Alignment
from mergegit.checkpoint.json_files import Files, fail, read_object, shown, write_object
from mergegit.checkpoint.vocabulary import (
    ADDED_TOKENS,
    OPAQUE,
    SAVE_FAST,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCAB_JSON,
    VOCAB_TXT,
    AddedToken,
    model_kind,
    read_model,
    read_vocabulary,
)
from mergegit.errors import BadCheckpoint, Mismatch

MERGES: Final = "merges.txt"
TOKENIZER_FILES: Final = frozenset(
    {
        TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, VOCAB_JSON, VOCAB_TXT, MERGES,
        "bpe.codes", "chat_template.jinja", "chat_template.json", *OPAQUE,
    }
)  # fmt: skip
"""Names of the files that make a tokenizer, at the top of a checkpoint."""
OLD_VOCABULARIES: Final = frozenset({VOCAB_JSON, VOCAB_TXT, MERGES, "bpe.codes", *OPAQUE})
"""Those that tell the vocabulary to programs that don't read tokenizer.json."""
_CODE: Final = re.compile(r"(?:additional_chat_templates/[^/]+\.jinja|tokenization_\w+\.py)")
_ID_KEYS: Final = re.compile(r".*_token_(?:ids?|index)|(?:begin_)?suppress_tokens")
_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config")


def is_tokenizer_file(path: str) -> bool:
    """Whether a file of a checkpoint belongs to its tokenizer."""
    return path in TOKENIZER_FILES or _CODE.fullmatch(path) is not None


def output_files(alignment: Alignment, files: Sequence[Files]) -> dict[str, bytes]:
    """The tokenizer's files of the output, by path; ``files`` are those of each model.

    Without additions they are those of the model that the output starts from, byte for byte.
    Raises ``BadCheckpoint`` where its files can't be added to, ``Mismatch`` where the tokens of
    another kind of tokenizer would have to be.
    """
    start = files[alignment.start]
    out = {path: data for path, data in start.items() if is_tokenizer_file(path)}
    if not alignment.additions:
        return out
    of = alignment.names[alignment.start]
    added = [addition for addition in alignment.additions if addition.flags is not None]
    proper = [addition for addition in alignment.additions if addition.flags is None]
    if TOKENIZER in out:
        out[TOKENIZER] = _extended_tokenizer(alignment, files, added, proper)
    elif proper:
        raise BadCheckpoint(
            f"{of} has no {TOKENIZER}, to which token {shown(proper[0].token)} could be added",
            hint=SAVE_FAST,
        )
    if proper:
        # They can't be kept in step for all kinds; being absent, they contradict nothing.
        out = {path: data for path, data in out.items() if path not in OLD_VOCABULARIES}
    _add_to_settings(out, added, of)
    return out


def _extended_tokenizer(
    alignment: Alignment,
    files: Sequence[Files],
    added: Sequence[Addition],
    proper: Sequence[Addition],
) -> bytes:
    """The tokenizer.json of the model that the output starts from, with tokens added."""
    of = alignment.names[alignment.start]
    own = read_vocabulary(files[alignment.start], of)
    document, model = read_model(files[alignment.start], of)
    placed: dict[int, tuple[str, float]] = {}
    for index in sorted({a.model for a in proper if a.model is not None}):
        new = [addition for addition in proper if addition.model == index]
        placed.update(_take_over(model, new, files[index], alignment.names[index], of))
    entries: list[dict[str, Any]] = list(document.get("added_tokens") or [])
    listed = {entry["content"] for entry in entries}
    # Tokens that only the settings add are numbered after these: they must be here, too.
    for token, flags in own.added.items():
        if token not in listed:
            entries.append({"id": own.tokens[token], "content": token, **flags.to_json()})
    for addition in added:
        flags = addition.flags or AddedToken()
        entries.append({"id": addition.id, "content": addition.token, **flags.to_json()})
    document["added_tokens"] = sorted(entries, key=lambda entry: int(entry["id"]))
    _place(model, placed, [entry for entry in document["added_tokens"] if entry["content"]], of)
    return write_object(document)


def _take_over(
    model: dict[str, Any], new: Sequence[Addition], files: Files, name: str, of: str
) -> dict[int, tuple[str, float]]:
    """Tokens of another model's vocabulary proper, by id, with their scores (for Unigram); the
    merges that make them (for BPE) are added to ``model``."""
    if TOKENIZER not in files:
        raise BadCheckpoint(
            f"{name} has no {TOKENIZER}, from which token {shown(new[0].token)} could be taken",
            hint=SAVE_FAST,
        )
    theirs = read_model(files, name)[1]
    kind = model_kind(theirs)
    if kind != model_kind(model):
        raise Mismatch(
            f"the tokenizer of {of} is a {model_kind(model)} and that of {name} a {kind}: one "
            "can't have the tokens of both",
            hint="take the tokenizer of one of them: of the base, or of a model that you name",
        )
    if kind == "BPE":
        tokens = {addition.token for addition in new}
        making = [pair for pair in _merges(theirs, name) if pair[0] + pair[1] in tokens]
        _append_merges(model, making, of)
    scores = _scores(theirs, name) if kind == "Unigram" else {}
    return {addition.id: (addition.token, scores.get(addition.token, 0.0)) for addition in new}


def _append_merges(model: dict[str, Any], pairs: Sequence[tuple[str, str]], of: str) -> None:
    """Add merges behind the model's own, which so keep their precedence."""
    own = _merges(model, of)
    as_text = all(isinstance(entry, str) for entry in model["merges"])
    if as_text and not any(" " in part for pair in pairs for part in pair):
        model["merges"] += [" ".join(pair) for pair in pairs]
    else:
        model["merges"] = [list(pair) for pair in [*own, *pairs]]


def _merges(model: Mapping[str, Any], of: str) -> list[tuple[str, str]]:
    """The pairs that a BPE model merges, best first: each is written as a text or as a list."""
    listed = model.get("merges")
    if not isinstance(listed, list):
        fail(of, TOKENIZER, "has a BPE model without merges")
    pairs = []
    for entry in listed:
        match entry.split(" ") if isinstance(entry, str) else entry:
            case [str(left), str(right)]:
                pairs.append((left, right))
            case _:
                fail(of, TOKENIZER, f"has a merge that is no pair: {shown(entry)}")
    return pairs


def _scores(model: Mapping[str, Any], of: str) -> dict[str, float]:
    scores: dict[str, float] = {}
    for entry in model["vocab"]:
        match entry:
            case [str(token), int(score) | float(score)]:
                scores[token] = score
            case _:
                fail(of, TOKENIZER, f"has a token without a score: {shown(entry)}")
    return scores


def _place(
    model: dict[str, Any],
    placed: dict[int, tuple[str, float]],
    entries: Sequence[Mapping[str, Any]],
    of: str,
) -> None:
    """Put tokens into the vocabulary proper, at their ids.

    Readers number added tokens anew, from the size of the vocabulary proper on, unless it has
    them: where that would shift them, it gets them too.
    """
    own = model["vocab"]
    scores = _scores(model, of) if isinstance(own, list) else {}
    known = own if isinstance(own, dict) else {token: place for place, token in enumerate(scores)}
    if not placed and not _would_shift(known, entries):
        return
    lowest = min(scores.values(), default=0.0)
    for entry in entries:
        if entry["content"] not in known:
            placed[entry["id"]] = (entry["content"], lowest)
    if isinstance(own, dict):
        own.update((token, number) for number, (token, _) in placed.items())
        model["vocab"] = dict(sorted(own.items(), key=lambda pair: int(pair[1])))
        return
    for number in range(len(own), max(placed) + 1):
        if number not in placed:
            fail(of, TOKENIZER, f"has no token with the id {number}, before ones with higher ids")
        own.append(list(placed[number]))


def _would_shift(known: Mapping[str, int], entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a reader would give some added token another id than the file does.

    One that the vocabulary proper lacks gets the number after the highest of the added tokens
    before it, or the size of the vocabulary proper where that is more.
    """
    highest = -1
    for entry in entries:
        following = highest + 1 if highest >= len(known) else len(known)
        number = known.get(entry["content"], following)
        if number != entry["id"]:
            return True
        highest = max(highest, number)
    return False


def _add_to_settings(out: dict[str, bytes], added: Sequence[Addition], of: str) -> None:
    """Name the added tokens where the other files name them, too."""
    config = read_object(out, TOKENIZER_CONFIG, of) if TOKENIZER_CONFIG in out else {}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict) and added:
        for addition in added:
            flags = addition.flags or AddedToken()
            decoder[str(addition.id)] = {"content": addition.token, **flags.to_json()}
        out[TOKENIZER_CONFIG] = write_object(config)
    # Where neither of the newer files is there, this one alone can say it.
    alone = TOKENIZER not in out and not isinstance(decoder, dict)
    if added and (ADDED_TOKENS in out or alone):
        listed = read_object(out, ADDED_TOKENS, of) if ADDED_TOKENS in out else {}
        listed.update((addition.token, addition.id) for addition in added)
        out[ADDED_TOKENS] = write_object(listed)


def config_with_vocabulary(
    config: bytes, alignment: Alignment, *, start_config: bytes | None = None
) -> bytes:
    """The base's config.json with the output's number of rows and ids of special tokens.

    ``vocab_size`` is set wherever it stands, at the top and in the config of a text model within.
    Ids are those that the base's tokens have in the output. One that the output lacks is taken from
    ``start_config``, the config of the model whose vocabulary the output has, or becomes null.
    Raises ``BadCheckpoint``.
    """
    of = alignment.names[alignment.base]
    document = read_object({"config.json": config}, "config.json", of)
    before = json.dumps(document)
    parts = _text_parts(document)
    stated = [part for part in parts if "vocab_size" in part]
    if not stated and alignment.rows != alignment.model_rows[alignment.base]:
        stated = parts[-1:]
    for part in stated:
        part["vocab_size"] = alignment.rows
    _move_ids(document, alignment, start_config)
    return config if json.dumps(document) == before else write_object(document)


def generation_config_with_vocabulary(
    config: bytes, alignment: Alignment, *, start_config: bytes | None = None
) -> bytes:
    """The base's generation_config.json with the output's ids, as ``config_with_vocabulary``."""
    path = "generation_config.json"
    document = read_object({path: config}, path, alignment.names[alignment.base])
    before = json.dumps(document)
    _move_ids(document, alignment, start_config)
    return config if json.dumps(document) == before else write_object(document)


def _text_parts(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A config, and the configs of text models within it."""
    parts = [document]
    for part in parts:
        parts += [part[key] for key in _TEXT_CONFIGS if isinstance(part.get(key), dict)]
    return parts


def _move_ids(document: dict[str, Any], alignment: Alignment, start_config: bytes | None) -> None:
    if not alignment.moved:
        return
    theirs: dict[str, Any] = {}
    if start_config is not None:
        name = alignment.names[alignment.start]
        for part in _text_parts(read_object({"config.json": start_config}, "config.json", name)):
            theirs = {**part, **theirs}
    for part in _text_parts(document):
        for key in part:
            if _ID_KEYS.fullmatch(key):
                part[key] = _moved(part[key], alignment.moved, theirs.get(key))


def _moved(value: Any, moved: Mapping[int, int | None], otherwise: Any) -> Any:
    if isinstance(value, list):
        kept = [new for old in value if (new := _moved(old, moved, None)) is not None]
        return kept if kept or not value else otherwise
    is_id = isinstance(value, int) and not isinstance(value, bool)
    if not is_id or value not in moved:
        return value
    new = moved[value]
    return otherwise if new is None else new
