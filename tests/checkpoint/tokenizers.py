"""Tokenizers made by hand: the files that tell a vocabulary, of each kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mergegit.checkpoint.vocabulary import Vocabulary, read_vocabulary

Files = dict[str, bytes]


def dump(value: object) -> bytes:
    return json.dumps(value).encode()


def load(files: Mapping[str, bytes], path: str = "tokenizer.json") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(files[path])
    return value


def added_token(token: str, number: int, **flags: bool) -> dict[str, Any]:
    """An added token as tokenizer.json lists it."""
    known = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": number, "content": token, **known, **flags}


def tokenizer(model: Mapping[str, Any], *added: Mapping[str, Any], **settings: object) -> Files:
    """tokenizer.json, with a tokenizer_config.json where there are settings."""
    files = {"tokenizer.json": dump({"version": "1.0", "added_tokens": added, "model": model})}
    if settings:
        files["tokenizer_config.json"] = dump(settings)
    return files


def numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def bpe(tokens: Sequence[str], *added: Mapping[str, Any], merges: Sequence[Any] = ()) -> Files:
    return tokenizer({"type": "BPE", "vocab": numbered(tokens), "merges": list(merges)}, *added)


def word_level(tokens: Sequence[str], *added: Mapping[str, Any]) -> Files:
    return tokenizer({"type": "WordLevel", "vocab": numbered(tokens)}, *added)


def word_piece(tokens: Sequence[str], *added: Mapping[str, Any]) -> Files:
    return tokenizer({"type": "WordPiece", "vocab": numbered(tokens)}, *added)


def unigram(scored: Mapping[str, float], *added: Mapping[str, Any]) -> Files:
    return tokenizer({"type": "Unigram", "vocab": [list(pair) for pair in scored.items()]}, *added)


def vocabulary(*tokens: str, **others: int) -> Vocabulary:
    """A vocabulary of tokens with the ids 0, 1, ..., and of others with ids of their own."""
    return read_vocabulary({"vocab.json": dump({**numbered(tokens), **others})}, "model")
