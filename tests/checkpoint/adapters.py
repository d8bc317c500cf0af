"""Adapters made by hand: their configs, and the names and shapes of their tensors."""

from __future__ import annotations

import json

Shapes = dict[str, tuple[int, ...]]

BASE: Shapes = {
    "model.embed_tokens.weight": (50, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.self_attn.q_proj.bias": (8,),
    "model.layers.1.self_attn.k_proj.weight": (4, 8),
    "model.layers.1.mlp.up_proj.weight": (12, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (50, 8),
}
"""A small Llama's tensors."""

GPT2: Shapes = {
    "h.0.attn.c_attn.weight": (8, 24),
    "h.0.attn.c_attn.bias": (24,),
    "h.0.attn.c_proj.weight": (8, 8),
    "h.0.attn.c_proj.bias": (8,),
    "h.0.mlp.c_fc.weight": (8, 32),
    "h.0.mlp.c_fc.bias": (32,),
    "h.0.mlp.c_proj.weight": (32, 8),
    "h.0.mlp.c_proj.bias": (8,),
    "wte.weight": (50, 8),
}
"""A small GPT-2's by the names of its first release; weights are stored with inputs first."""

K_PROJ = "model.layers.0.self_attn.k_proj"
Q_PROJ = "model.layers.0.self_attn.q_proj"
UP_PROJ = "model.layers.0.mlp.up_proj"


def config(**settings: object) -> bytes:
    """The text of an adapter's config, of rank 2."""
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/base"}
    return json.dumps(usual | settings).encode()


def pair(module: str, outputs: int, inputs: int, rank: int = 2) -> Shapes:
    """The factors of a linear layer."""
    return {
        f"base_model.model.{module}.lora_A.weight": (rank, inputs),
        f"base_model.model.{module}.lora_B.weight": (outputs, rank),
    }


def embedding_pair(module: str, tokens: int, width: int, rank: int = 2) -> Shapes:
    return {
        f"base_model.model.{module}.lora_embedding_A": (rank, tokens),
        f"base_model.model.{module}.lora_embedding_B": (width, rank),
    }


def magnitude(module: str, outputs: int) -> Shapes:
    return {f"base_model.model.{module}.lora_magnitude_vector": (outputs,)}
