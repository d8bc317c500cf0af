"""Checkpoints of four layers whose weights tell where they are from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

LAYERS = 4
STEPS = {"base": 0.0, "math": 1.0, "code": 16.0, "prose": 256.0}
"""What each model's weights have more than the base's. What is merged of them can be told apart."""

_PARTS = {"self_attn.q_proj": (8, 8), "mlp.up_proj": (20, 8), "input_layernorm": (8,)}


def shapes(layers: int = LAYERS, *, tied: bool = False) -> dict[str, tuple[int, ...]]:
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (24, 8)}
    for layer in range(layers):
        out.update({f"model.layers.{layer}.{part}.weight": s for part, s in _PARTS.items()})
    out["model.norm.weight"] = (8,)
    return out if tied else {**out, "lm_head.weight": (24, 8)}


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if ".layers." in name else None


def weights(
    step: float = 0.0, layers: int = LAYERS, *, tied: bool = False, seed: int = 0
) -> Tensors:
    """Whole numbers that float32 holds exactly: thousands tell the layer, the rest the element."""
    out = {}
    for name, shape in shapes(layers, tied=tied).items():
        layer = layer_of(name)
        first = 1024.0 * (0 if layer is None else layer + 1) + 32768.0 * seed
        count = torch.Size(shape).numel()
        out[name] = (torch.arange(count) % 7 + first + step).reshape(shape).float()
    return out


def save(
    path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:  # fmt: skip
    """A checkpoint directory whose config is called like it."""
    path.mkdir(parents=True)
    typed = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(typed, path / "model.safetensors", metadata={"format": "pt"})
    layers = {layer for layer in map(layer_of, tensors) if layer is not None}
    settings = {
        "model_type": "llama",
        "called": path.name,
        "num_hidden_layers": len(layers),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **config,
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


def make_family(root: Path, models: Sequence[str] = tuple(STEPS)) -> list[Path]:
    """The base and the experts, each in a directory of its name."""
    return [save(root / name, weights(STEPS[name])) for name in models]
