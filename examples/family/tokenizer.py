"""Byte-level byte-pair encoding: trained in seconds, saved as `tokenizer.json`.

Text is cut into words by a regular expression; each word's UTF-8 bytes are then merged pair by
pair in the order in which the merges were learned (Sennrich et al., arXiv 1508.07909). The
expression names its character classes in ASCII, so that Python's `re` and the Rust `tokenizers`
library cut every text alike, whichever version of Unicode they know.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
"""Stands between documents; also the model's begin and end token."""

END_OF_TEXT_ID = 0

FIRST_BYTE_ID = 1
FIRST_MERGE_ID = FIRST_BYTE_ID + 256

WORD = r" ?[A-Za-z]+| ?[0-9]+| ?[^ \t\r\nA-Za-z0-9]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
"""A run of letters, digits or other characters with the blank before it, or white space."""

Tokens = NDArray[np.int64]
Pair = tuple[int, int]


class Tokenizer:
    """Turns text into token ids: 0 for the end of a text, 1 to 256 for bytes, then the merges."""

    def __init__(self, merges: list[Pair]) -> None:
        self.merges = merges
        self._merged = {pair: FIRST_MERGE_ID + rank for rank, pair in enumerate(merges)}
        self._words: dict[str, list[int]] = {}

    @property
    def vocab_size(self) -> int:
        return FIRST_MERGE_ID + len(self.merges)

    def encode(self, text: str) -> Tokens:
        """Token ids of one text, without the token that ends it."""
        ids: list[int] = []
        for word in re.findall(WORD, text):
            if word not in self._words:
                self._words[word] = self._encode_word(word)
            ids.extend(self._words[word])
        return np.array(ids, dtype=np.int64)

    def _encode_word(self, word: str) -> list[int]:
        ids = _byte_ids(word)
        unknown = self.vocab_size
        while len(ids) > 1:
            # Ids grow in the order of the merges, so the smallest id is the earliest merge.
            merged, pair = min((self._merged.get(p, unknown), p) for p in pairwise(ids))
            if merged == unknown:
                break
            ids = _merge(ids, pair, merged)
        return ids


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges until the vocabulary has `vocab_size` entries; ties go to the smaller ids.

    Counts of pairs are kept up to date as words change, and the heap's stale entries are dropped
    when they surface, so that one merge costs only the words that hold its pair.
    """
    frequencies = Counter(word for text in texts for word in re.findall(WORD, text))
    words = [(_byte_ids(word), count) for word, count in frequencies.items()]
    counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for place, (ids, count) in enumerate(words):
        for pair in pairwise(ids):
            counts[pair] += count
            places[pair].add(place)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)

    merges: list[Pair] = []
    while heap and FIRST_MERGE_ID + len(merges) < vocab_size:
        negated, best = heapq.heappop(heap)
        if negated == 0 or -negated != counts[best]:
            continue
        merged = FIRST_MERGE_ID + len(merges)
        merges.append(best)
        changed: set[Pair] = set()
        for place in places.pop(best):
            ids, count = words[place]
            after = _merge(ids, best, merged)
            words[place] = after, count
            for pair in pairwise(ids):
                counts[pair] -= count
                changed.add(pair)
            for pair in pairwise(after):
                counts[pair] += count
                places[pair].add(place)
                changed.add(pair)
        for pair in changed:
            heapq.heappush(heap, (-counts[pair], pair))
    return Tokenizer(merges)


def save(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as the Hugging Face libraries do."""
    special = {
        "id": END_OF_TEXT_ID,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spellings = _spellings(tokenizer)
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [special],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {
                        "type": "Split",
                        "pattern": {"Regex": WORD},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    {"type": "ByteLevel", **byte_level},
                ],
            },
            "post_processor": None,
            "decoder": {"type": "ByteLevel", **byte_level},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {spelling: id_ for id_, spelling in enumerate(spellings)},
                "merges": [f"{spellings[a]} {spellings[b]}" for a, b in tokenizer.merges],
            },
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_prefix_space": False,
            "bos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "model_max_length": max_length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def load(folder: Path) -> Tokenizer:
    """Read the `tokenizer.json` that `save` wrote."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = (merge.split(" ") for merge in model["merges"])
    return Tokenizer([(vocab[first], vocab[second]) for first, second in merges])


def _byte_ids(word: str) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in word.encode()]


def _merge(ids: list[int], pair: Pair, merged: int) -> list[int]:
    """Replace every occurrence of `pair` by `merged`, from the left."""
    out: list[int] = []
    position = 0
    while position < len(ids):
        if tuple(ids[position : position + 2]) == pair:
            out.append(merged)
            position += 2
        else:
            out.append(ids[position])
            position += 1
    return out


def _spellings(tokenizer: Tokenizer) -> list[str]:
    """How each id is written in the vocabulary, in the order of the ids."""
    spellings = [END_OF_TEXT, *_printable_bytes()]
    for first, second in tokenizer.merges:
        spellings.append(spellings[first] + spellings[second])
    return spellings


def _printable_bytes() -> list[str]:
    """The customary visible character for each of the 256 bytes, since GPT-2: bytes that print
    as themselves in Latin-1 stand for themselves, the others move up to U+0100 and on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(moved)) for byte in range(256)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
