"""A small Llama that mergekit accepts, with experts of it, all in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.families import generator

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 256, 688, 2, 2048
EXPERTS = ("math", "code", "prose")
SIGMA = 1e-3

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        out[f"{prefix}self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        out[f"{prefix}self_attn.k_proj.weight"] = (HIDDEN // 2, HIDDEN)
        out[f"{prefix}self_attn.v_proj.weight"] = (HIDDEN // 2, HIDDEN)
        out[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        out[f"{prefix}mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[f"{prefix}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        out[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        out[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    out["model.norm.weight"] = (HIDDEN,)
    out["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return out


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2))
    typed = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(typed, path / "model.safetensors", metadata={"format": "pt"})


def make_llama_family(root: Path) -> None:
    """``root/base`` and one directory for each of ``EXPERTS``."""
    base = {
        name: torch.randn(shape, generator=generator("llama", name)) * 0.02
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes().items()
    }
    _save(root / "base", base)
    for expert in EXPERTS:
        moved = {
            name: tensor + torch.randn(tensor.shape, generator=generator(expert, name)) * SIGMA
            for name, tensor in base.items()
        }
        _save(root / expert, moved)
