"""Tokenizers made and used by transformers, for models whose vocabularies differ.

    python vocabulary_driver.py make ROOT
    python vocabulary_driver.py encode < REQUEST
    python vocabulary_driver.py load DIRECTORY
    python vocabulary_driver.py generate TEXT DIRECTORY...

Executed by an interpreter that has transformers; imports nothing of mergegit. ``encode`` takes
``{"directories": [...], "texts": [...]}`` and gives for each directory its vocabulary and each
text's ids and tokens, as JSON; ``load`` says what became of a model's weights, and ``generate``
for each directory besides, how its model goes on after a text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import (
    BpeTrainer,
    UnigramTrainer,
    WordLevelTrainer,
    WordPieceTrainer,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertTokenizerFast,
    GPT2TokenizerFast,
    LlamaTokenizerFast,
    PreTrainedTokenizerFast,
)

CORPUS = (
    "the model that was merged keeps what both of its parents had learned before the merge",
    "for every token that a model lacks another model gives the row that stands for it",
    "def merge(base, experts): return base + sum(expert - base for expert in experts)",
    "tokens that the base had are where they were and new tokens follow after them",
)

SPECIAL = ["<unk>", "<s>", "</s>"]


def bpe(size: int) -> Tokenizer:
    """Byte-level BPE; a larger one has the merges of a smaller one, and more after them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace_bpe(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def word_piece(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=size,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=size, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_level(corpus: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        corpus, WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


def save(
    tokenizer: Tokenizer,
    path: Path,
    *added: AddedToken | str,
    kind: type = PreTrainedTokenizerFast,
    **settings: str,
) -> None:
    settings = settings or {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(path)
    loaded = kind.from_pretrained(path)
    loaded.add_tokens([*added])
    loaded.save_pretrained(path)


def make(root: Path) -> None:
    start, end = AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)
    think = AddedToken("<think>", lstrip=True, normalized=False)
    save(bpe(340), root / "base", "<|pad|>")
    save(bpe(340), root / "chat", "<|pad|>", start, end, think)
    save(bpe(340), root / "code", end, AddedToken("<fim>"), "<|pad|>")
    save(bpe(372), root / "long", "<|pad|>", start, AddedToken("<tool>", special=True))
    save(metaspace_bpe(90), root / "llama-base", "<|pad|>", kind=LlamaTokenizerFast)
    save(metaspace_bpe(120), root / "llama-long", start, "<|pad|>", kind=LlamaTokenizerFast)
    save(bpe(340), root / "gpt2-base", "<|pad|>", kind=GPT2TokenizerFast)
    save(bpe(372), root / "gpt2-long", start, "<|pad|>", kind=GPT2TokenizerFast)
    bert = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    save(word_piece(110), root / "bert-base", "[X]", kind=BertTokenizerFast, **bert)
    save(word_piece(160), root / "bert-long", start, "[X]", kind=BertTokenizerFast, **bert)
    save(unigram(60), root / "unigram-base", "<|pad|>")
    save(unigram(90), root / "unigram-long", start, "<|pad|>")
    save(word_level(CORPUS[:2]), root / "words-base", "<|pad|>")
    save(word_level(CORPUS), root / "words-long", start, "<|pad|>")


def encode(request: dict[str, list[str]]) -> dict[str, object]:
    told: dict[str, object] = {}
    for directory in request["directories"]:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in request["texts"]]
        told[directory] = {
            "vocabulary": tokenizer.get_vocab(),
            "ids": ids,
            "tokens": [tokenizer.convert_ids_to_tokens(row) for row in ids],
            "without special": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        }
    return told


def load(directory: str) -> dict[str, object]:
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    return {
        "rows": model.get_input_embeddings().num_embeddings,
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "mismatched": sorted(map(str, report["mismatched_keys"])),
    }


def generate(text: str, directory: str) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(given["input_ids"], max_new_tokens=8, do_sample=False, eos_token_id=None)
    return {
        "wrong": [str(key) for keys in report.values() for key in keys],
        "rows": model.get_input_embeddings().num_embeddings,
        "tied": bool(model.config.tie_word_embeddings),
        "tokens": tokenizer.convert_ids_to_tokens(given["input_ids"][0]),
        "ids": out[0].tolist(),
        "text": tokenizer.decode(out[0]),
    }


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    elif sys.argv[1] == "generate":
        json.dump([generate(sys.argv[2], directory) for directory in sys.argv[3:]], sys.stdout)
    elif sys.argv[1] == "load":
        json.dump(load(sys.argv[2]), sys.stdout)
    else:
        json.dump(encode(json.load(sys.stdin)), sys.stdout)
