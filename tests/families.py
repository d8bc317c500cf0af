"""Small families of checkpoints, made deterministically, as Hugging Face tools write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (700, 96),
    "model.layers.0.self_attn.q_proj.weight": (96, 96),
    "model.layers.0.mlp.up_proj.weight": (6000, 96),
    "model.layers.0.input_layernorm.weight": (96,),
    "model.layers.1.self_attn.q_proj.weight": (96, 96),
    "model.layers.1.mlp.up_proj.weight": (6000, 96),
    "model.layers.1.input_layernorm.weight": (96,),
    "model.norm.weight": (96,),
    "lm_head.weight": (700, 96),
}
"""Two of the tensors have more than one block; norms are tiny."""

EXPERTS = ("math", "code", "prose")


@dataclass(frozen=True, slots=True)
class Family:
    """Directories of a base and its experts."""

    base: Path
    experts: tuple[Path, ...]


def generator(*key: object) -> torch.Generator:
    seed = sum(ord(letter) * 131**i for i, letter in enumerate(repr(key))) % 2**63
    return torch.Generator().manual_seed(seed)


def base_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 weights of a base."""
    return {
        name: torch.randn(shape, generator=generator(seed, name)) * 0.02
        + (1.0 if "norm" in name else 0.0)
        for name, shape in SHAPES.items()
    }


def expert_tensors(
    base: Mapping[str, torch.Tensor], expert: str, sigma: float = 1e-3
) -> dict[str, torch.Tensor]:
    """float32 weights of an expert: each kind of module moves by its own measure, norms stay."""
    out = {}
    for place, (name, tensor) in enumerate(base.items()):
        noise = torch.randn(tensor.shape, generator=generator(expert, name))
        scale = 0.0 if "layernorm" in name else sigma * (1 + place % 3)
        out[name] = tensor + noise * scale
    return out


def save_checkpoint(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16,
    shards: int = 2,
) -> Path:  # fmt: skip
    """Write a checkpoint directory with shards, index, config, tokenizer and a nested file."""
    path.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        file = (
            "model.safetensors"
            if shards == 1
            else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        )
        mine = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        part = {name: tensors[name].to(dtype).contiguous() for name in mine}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    if shards > 1:
        total = sum(t.numel() for t in tensors.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 700}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"vocab": {}}}))
    (path / "README.md").write_text(f"---\nlicense: apache-2.0\n---\n\n# {path.name}\n")
    (path / "original").mkdir()
    (path / "original" / "params.json").write_text("{}\n")
    return path


def make_family(root: Path) -> Family:
    """A base and three experts in bf16."""
    base = base_tensors()
    experts = tuple(save_checkpoint(root / name, expert_tensors(base, name)) for name in EXPERTS)
    return Family(save_checkpoint(root / "base", base), experts)


TINY_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 8),
    "model.layers.0.mlp.up_proj.weight": (40, 8),
    "model.norm.weight": (8,),
}
"""For tests that need many checkpoints, and care little what is in them."""


def tiny_checkpoint(path: Path, seed: int = 0, *, moved: int | None = None) -> Path:
    """A checkpoint of a few hundred weights in one file. ``moved`` makes it an expert of ``seed``:
    one of the tensors, by turns, stays the base's."""
    tensors = {}
    for place, (name, shape) in enumerate(TINY_SHAPES.items()):
        tensors[name] = torch.randn(shape, generator=generator(seed, name)) * 0.02
        if moved is not None and place != moved % len(TINY_SHAPES):
            noise = torch.randn(shape, generator=generator(seed, moved, name))
            tensors[name] = tensors[name] + noise * 1e-2
    save_checkpoint(path, tensors, shards=1)
    config = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 24}
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return path


def make_tiny_family(root: Path) -> Family:
    """A tiny base and three experts."""
    experts = tuple(tiny_checkpoint(root / name, moved=place) for place, name in enumerate(EXPERTS))
    return Family(tiny_checkpoint(root / "base"), experts)
