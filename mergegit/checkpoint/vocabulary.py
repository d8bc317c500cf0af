"""The vocabulary of a model: which token each row of its embeddings stands for.

Read from the files of its tokenizer as Hugging Face tools write them: ``tokenizer.json``, else
``vocab.json`` or ``vocab.txt``; then the tokens that ``tokenizer_config.json`` or, where that names
none, ``added_tokens.json`` adds. The files may come from anywhere and are checked as they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mergegit.checkpoint.json_files import AGAIN, Files, fail, read_object, read_text, shown
from mergegit.errors import BadCheckpoint

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
ADDED_TOKENS: Final = "added_tokens.json"
VOCAB_JSON: Final = "vocab.json"
VOCAB_TXT: Final = "vocab.txt"
OPAQUE: Final = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model",
    "spm.model", "tokenizer.model.v1", "tokenizer.model.v3", "tokenizer.model.v7", "tekken.json",
    "tiktoken.model", "qwen.tiktoken",
)  # fmt: skip
"""Vocabularies in forms that are not read here."""
MAX_ID: Final = 1 << 24
"""Ids from here on are refused: sixteen times the largest vocabulary in use."""
SAVE_FAST: Final = (
    "load its tokenizer with AutoTokenizer of transformers and save it there: "
    "that writes a tokenizer.json"
)
_FLAGS: Final = ("special", "lstrip", "rstrip", "normalized", "single_word")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """How a token that stands beside the tokenizer's own vocabulary is matched in a text."""

    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False

    def to_json(self) -> dict[str, bool]:
        return {flag: getattr(self, flag) for flag in _FLAGS}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens with their ids, each id once; ``added`` are those that were added later."""

    tokens: Mapping[str, int]
    added: Mapping[str, AddedToken]


def read_vocabulary(files: Files, of: str) -> Vocabulary:
    """The vocabulary of model ``of``, from the files beside its weights.

    Raises ``BadCheckpoint`` where they are missing, malformed or contradict one another.
    """
    reading = _Reading(of)
    if TOKENIZER in files:
        _read_tokenizer(reading, files)
    elif VOCAB_JSON in files:
        _read_ids(reading, read_object(files, VOCAB_JSON, of).items(), VOCAB_JSON)
    elif VOCAB_TXT in files:
        _read_ids(reading, ((t, i) for i, t in enumerate(_lines(files, of))), VOCAB_TXT)
    else:
        _refuse(files, of)
    _read_additions(reading, files)
    if not reading.tokens:
        raise BadCheckpoint(f"the vocabulary of {of} is empty", hint=AGAIN)
    try:
        "".join(reading.tokens).encode()
    except UnicodeEncodeError as error:
        raise BadCheckpoint(
            f"a token of {of} has half of a surrogate pair in it", hint=AGAIN
        ) from error
    return Vocabulary(reading.tokens, reading.added)


class _Reading:
    """Tokens of one model as they are found, each checked against those before it."""

    def __init__(self, of: str) -> None:
        self.of = of
        self.tokens: dict[str, int] = {}
        self.added: dict[str, AddedToken] = {}
        self._by_id: dict[int, str] = {}

    def take(self, token: object, number: object, path: str) -> str:
        if not isinstance(token, str):
            fail(self.of, path, f"has a token that is no text: {shown(token)}")
        what = f"gives token {shown(token)} the id {shown(number)}"
        if not isinstance(number, int) or isinstance(number, bool):
            fail(self.of, path, f"{what}, which is no id")
        if not 0 <= number < MAX_ID:
            fail(self.of, path, f"{what}; ids lie from 0 to {MAX_ID - 1:,}")
        known = self.tokens.setdefault(token, number)
        if known != number:
            fail(self.of, path, f"{what}; it has {known} already", SAVE_FAST)
        holder = self._by_id.setdefault(number, token)
        if holder != token:
            fail(self.of, path, f"{what}, which {shown(holder)} has already", SAVE_FAST)
        return token

    def take_added(self, token: object, number: object, flags: AddedToken, path: str) -> None:
        # An empty text matches nowhere: tokenizers leave such tokens out.
        if token != "":
            self.added.setdefault(self.take(token, number, path), flags)


def model_kind(model: Mapping[str, Any]) -> str | None:
    """The type of the ``model`` in a tokenizer.json; old files don't say it."""
    kind = model.get("type")
    if isinstance(kind, str):
        return kind
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"


def read_model(files: Files, of: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tokenizer.json and the ``model`` in it, of a type that is known.

    Raises ``BadCheckpoint``.
    """
    document = read_object(files, TOKENIZER, of)
    model = document.get("model")
    if not isinstance(model, dict):
        fail(of, TOKENIZER, "describes no model")
    kind, vocabulary = model_kind(model), model.get("vocab")
    if kind not in ("BPE", "WordPiece", "WordLevel", "Unigram"):
        fail(
            of, TOKENIZER, f"has a model of the unknown type {shown(kind)}",
            "known are BPE, WordPiece, WordLevel and Unigram",
        )  # fmt: skip
    if not isinstance(vocabulary, list if kind == "Unigram" else dict):
        fail(of, TOKENIZER, f"has a {kind} model without a vocabulary")
    return document, model


def _read_tokenizer(reading: _Reading, files: Files) -> None:
    document, model = read_model(files, reading.of)
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        _read_ids(reading, vocabulary.items(), TOKENIZER)
    else:
        for number, entry in enumerate(vocabulary):
            if not isinstance(entry, list) or len(entry) != 2:
                fail(reading.of, TOKENIZER, f"has {shown(entry)} for token {number}, and no pair")
            _take_once(reading, entry[0], number, TOKENIZER)
    added = document.get("added_tokens")
    if added is None:
        return
    if not isinstance(added, list):
        fail(reading.of, TOKENIZER, "has added_tokens that are no list")
    for entry in added:
        if not isinstance(entry, dict):
            fail(reading.of, TOKENIZER, f"has an added token that is no object: {shown(entry)}")
        flags = _flags(entry, TOKENIZER, reading.of)
        reading.take_added(entry.get("content"), entry.get("id"), flags, TOKENIZER)


def _read_ids(reading: _Reading, pairs: Iterable[tuple[object, object]], path: str) -> None:
    for token, number in pairs:
        _take_once(reading, token, number, path)


def _take_once(reading: _Reading, token: object, number: object, path: str) -> None:
    if isinstance(token, str) and token in reading.tokens:
        first = reading.tokens[token]
        fail(reading.of, path, f"has token {shown(token)} twice, as {first} and {number}")
    reading.take(token, number, path)


def _read_additions(reading: _Reading, files: Files) -> None:
    """Tokens that stand outside of the vocabulary proper."""
    of = reading.of
    config = read_object(files, TOKENIZER_CONFIG, of) if TOKENIZER_CONFIG in files else {}
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        if not isinstance(decoder, dict):
            fail(of, TOKENIZER_CONFIG, "has an added_tokens_decoder that is no object")
        for key, entry in decoder.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                fail(of, TOKENIZER_CONFIG, f"has {shown(key)} for a token's id")
            if not isinstance(entry, dict):
                fail(of, TOKENIZER_CONFIG, f"has no object for token {key}: {shown(entry)}")
            flags = _flags(entry, TOKENIZER_CONFIG, of)
            reading.take_added(entry.get("content"), int(key), flags, TOKENIZER_CONFIG)
    elif ADDED_TOKENS in files:
        special = _special_tokens(config, files, of)
        for token, number in read_object(files, ADDED_TOKENS, of).items():
            flags = AddedToken(special=token in special)
            reading.take_added(token, number, flags, ADDED_TOKENS)


def _special_tokens(config: Mapping[str, Any], files: Files, of: str) -> set[str]:
    """The tokens that a tokenizer's settings name: ends of texts, padding and the like."""
    named = dict(config)
    if SPECIAL_TOKENS in files:
        named.update(read_object(files, SPECIAL_TOKENS, of))
    found = set()
    for key, value in named.items():
        if key.endswith(("_token", "_special_tokens")):
            for entry in value if isinstance(value, list) else [value]:
                text = entry.get("content") if isinstance(entry, dict) else entry
                if isinstance(text, str):
                    found.add(text)
    return found


def _flags(entry: Mapping[str, Any], path: str, of: str) -> AddedToken:
    flags = {flag: entry.get(flag, False) for flag in _FLAGS}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            fail(of, path, f"has {shown(value)} for {flag} of token {entry.get('content')!r}")
    return AddedToken(**flags)


def _lines(files: Files, of: str) -> list[str]:
    """One token to a line; a line ends as it does for Python's text files and nowhere else."""
    text = read_text(files, VOCAB_TXT, of).replace("\r\n", "\n").replace("\r", "\n")
    return text.removesuffix("\n").split("\n") if text else []


def _refuse(files: Files, of: str) -> None:
    for path in OPAQUE:
        if path in files:
            raise BadCheckpoint(
                f"{of} has its vocabulary in {path} alone, which can't be read", hint=SAVE_FAST
            )
    raise BadCheckpoint(
        f"{of} has no vocabulary: none of {TOKENIZER}, {VOCAB_JSON} and {VOCAB_TXT} is there",
        hint="add the model with the files of its tokenizer",
    )
