"""Small families of checkpoints whose vocabularies differ, with the files of their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoint.tokenizers import added_token, word_level
from tests.families import generator

WIDTH = 384
"""Blocks end within rows of this length."""
ROWS = 1500
"""Tokens of the base: more than a block of rows."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROJ = "model.layers.0.mlp.up_proj.weight"
WORDS = tuple(f"w{number}" for number in range(ROWS))

Tensors = dict[str, torch.Tensor]


def base_tensors(rows: int = ROWS, *, head: bool = True, width: int = WIDTH) -> Tensors:
    """float32 weights of a base with an embedding of so many rows."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBED: (rows, width),
        PROJ: (64, width),
        "model.layers.0.input_layernorm.weight": (width,),
        "model.norm.weight": (width,),
    }
    if head:
        shapes[HEAD] = (rows, width)
    return {
        name: torch.randn(shape, generator=generator("vocabulary", name)) * 0.02
        for name, shape in shapes.items()
    }


def expert_tensors(base: Mapping[str, torch.Tensor], name: str, more: int = 0) -> Tensors:
    """float32 weights of an expert with so many more rows of tokens than its base."""
    out = {}
    for key, tensor in base.items():
        moved = tensor + torch.randn(tensor.shape, generator=generator(name, key)) * 1e-3
        if key in (EMBED, HEAD) and more:
            new = torch.randn((more, tensor.shape[1]), generator=generator(name, key, "new"))
            moved = torch.cat([moved, new * 0.02])
        out[key] = moved
    return out


def tokenizer_files(tokens: Sequence[str], added: Sequence[str] = ()) -> dict[str, bytes]:
    """A tokenizer of whole words, and of special tokens behind them."""
    entries = [
        added_token(token, len(tokens) + place, special=True) for place, token in enumerate(added)
    ]
    files = word_level(tokens, *entries)
    files["tokenizer_config.json"] = json.dumps({"eos_token": tokens[2]}).encode()
    return files


def save(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    files: Mapping[str, bytes],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    **config: Any,
) -> Path:
    path.mkdir(parents=True)
    typed = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    names = list(typed)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: typed[name] for name in names[shard::shards]}
        save_file(held, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    if shards > 1:
        total = sum(tensor.nbytes for tensor in typed.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    known = {
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": len(tensors[EMBED]),
        "eos_token_id": 2, "tie_word_embeddings": HEAD not in tensors, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(known | config))
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


CHAT = ("<|user|>", "<|bot|>")
CODE = ("<fim>", "<|user|>")


def make_chat_family(root: Path) -> dict[str, Path]:
    """A base, an expert of its vocabulary (math), and two with tokens of their own behind the
    base's, of which they have one in common."""
    base = base_tensors()
    return {
        "base": save(root / "base", base, tokenizer_files(WORDS)),
        "math": save(root / "math", expert_tensors(base, "math"), tokenizer_files(WORDS)),
        "chat": save(root / "chat", expert_tensors(base, "chat", 2), tokenizer_files(WORDS, CHAT)),
        "code": save(root / "code", expert_tensors(base, "code", 2), tokenizer_files(WORDS, CODE)),
    }
