"""LoRA adapters as PEFT saves them, made deterministically, and what they make of a base."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import generator

Tensors = dict[str, torch.Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (120, 48),
    "model.layers.0.self_attn.q_proj.weight": (48, 48),
    "model.layers.0.mlp.up_proj.weight": (11000, 48),
    "model.layers.0.input_layernorm.weight": (48,),
    "model.layers.1.self_attn.q_proj.weight": (48, 48),
    "model.layers.1.mlp.up_proj.weight": (600, 48),
    "model.layers.1.input_layernorm.weight": (48,),
    "model.norm.weight": (48,),
    "lm_head.weight": (120, 48),
}
"""A small Llama's; one of the tensors has two blocks."""

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def model_tensors() -> Tensors:
    """A base's weights in bf16."""
    return {
        name: (torch.randn(shape, generator=generator("base", name)) * 0.02).bfloat16()
        for name, shape in SHAPES.items()
    }


def tuned_tensors(expert: str) -> Tensors:
    """Weights of a fine-tune in bf16; those of layers' norms are the base's."""
    return {
        name: (
            tensor.float()
            + torch.randn(tensor.shape, generator=generator(expert, name))
            * (0.0 if "layernorm" in name else 2e-3)
        ).bfloat16()
        for name, tensor in model_tensors().items()
    }


def save_adapter(
    path: Path,
    base: Mapping[str, torch.Tensor],
    *,
    modules: Sequence[str] = ("q_proj", "up_proj"),
    saved: Collection[str] = (),
    rank: int = 4,
    alpha: float = 8.0,
    dora: bool = False,
    rslora: bool = False,
    inputs_first: bool = False,
    dtype: torch.dtype = torch.float32,
    saved_dtype: torch.dtype | None = None,
    base_name: str | None = "org/base",
    seed: object = 0,
    unchanged: Collection[str] = (),
    **settings: object,
) -> Path:
    """Write an adapter that changes the weights of ``modules``, by the last part of their names.

    Tensors in ``saved`` are held whole, those in ``unchanged`` too, as the base has them.
    ``inputs_first`` where weights are stored as Conv1D layers have them.
    """
    path.mkdir(parents=True)
    tensors: Tensors = {}
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 2 and name.endswith(".weight") and module.rpartition(".")[2] in modules:
            factors = _factors(name, tensor, rank, inputs_first, dora, seed)
            tensors |= {f"{PREFIX}{module}.{kind}": value for kind, value in factors.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    whole = saved_dtype or dtype
    for name in saved:
        noise = torch.randn(base[name].shape, generator=generator(seed, "saved", name))
        tensors[PREFIX + name] = (base[name].float() + 2e-3 * noise).to(whole)
    for name in unchanged:
        module, _, leaf = name.rpartition(".")
        tensors[f"{PREFIX}{module}.base_layer.{leaf}"] = base[name].clone()
    parts = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(parts, path / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
        "use_dora": dora,
        "use_rslora": rslora,
        "fan_in_fan_out": inputs_first,
        "bias": "none",
        **settings,
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2))
    (path / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    return path


def _factors(
    name: str, tensor: torch.Tensor, rank: int, inputs_first: bool, dora: bool, seed: object
) -> Tensors:
    """The factors of one weight by what PEFT calls them, so that it moves by about 1e-3."""
    rows, columns = tensor.shape
    is_embedding = "embed" in name or "wte" in name
    turned = inputs_first or is_embedding
    outputs, inputs = (columns, rows) if turned else (rows, columns)
    size = math.sqrt(1e-3 / math.sqrt(rank) / 2)
    a = torch.randn(rank, inputs, generator=generator(seed, "a", name)) * size
    b = torch.randn(outputs, rank, generator=generator(seed, "b", name)) * size
    if is_embedding:
        return {"lora_embedding_A": a, "lora_embedding_B": b}
    factors = {"lora_A.weight": a, "lora_B.weight": b}
    if dora:
        lengths = (tensor.T if turned else tensor).float().norm(dim=1)
        noise = torch.randn(outputs, generator=generator(seed, "m", name))
        factors["lora_magnitude_vector"] = lengths * (1 + 0.02 * noise)
    return factors


def adapted(path: Path, base: Mapping[str, torch.Tensor]) -> Tensors:
    """A base with an adapter on it, in float64, by the papers' equations."""
    config: dict[str, Any] = json.loads((path / CONFIG).read_text())
    tensors = {name: t.double() for name, t in load_file(path / WEIGHTS).items()}
    out = {name: tensor.double() for name, tensor in base.items()}
    for name, tensor in tensors.items():
        plain = name.removeprefix(PREFIX).replace(".base_layer", "")
        if "lora_" not in name:
            out[plain] = tensor
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    for name, a in tensors.items():
        for kind, other in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A",) * 2):
            if not name.endswith(kind):
                continue
            is_embedding = kind == other
            other = "lora_embedding_B" if is_embedding else other
            module = name.removesuffix(f".{kind}")
            delta = config["lora_alpha"] / root * (tensors[f"{module}.{other}"] @ a)
            turned = is_embedding or config["fan_in_fan_out"]
            target = f"{module.removeprefix(PREFIX)}.weight"
            weight = out[target].T if turned else out[target]
            changed = weight + delta
            magnitude = tensors.get(f"{module}.lora_magnitude_vector")
            if magnitude is not None:
                changed = magnitude[:, None] * changed / changed.norm(dim=1, keepdim=True)
            out[target] = changed.T if turned else changed
    return out
