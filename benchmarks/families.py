"""A synthetic family for benchmarks: Llama-shaped, deltas uneven over layers and modules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 512, 1408, 6, 8000


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes, about 26 million parameters."""
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (HIDDEN,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out[f"{prefix}self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        out[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        out[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        out[prefix + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    out["model.norm.weight"] = (HIDDEN,)
    out["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return out


def make(
    root: Path,
    *,
    experts: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    sigma: float = 1e-3,
    uneven: float = 1.0,
) -> Path:
    """Write ``base`` and ``expert-1`` ... below ``root``; the same arguments, the same bytes.

    An expert's tensor moves by a normal update whose deviation is ``sigma`` times a log-normal
    factor of deviation ``uneven``.
    """
    base = {name: _normal("base", name, shape) * 0.02 for name, shape in shapes().items()}
    base = {n: t + 1.0 if n.endswith("norm.weight") else t for n, t in base.items()}
    _save(root / "base", base, dtype)
    for number in range(1, experts + 1):
        tensors = {}
        for name, tensor in base.items():
            factor = math.exp(uneven * float(_normal(f"scale {number}", name, ())))
            update = _normal(f"expert {number}", name, tuple(tensor.shape)) * sigma * factor
            tensors[name] = tensor.to(dtype).float() + update
        _save(root / f"expert-{number}", tensors, dtype)
    return root


def _normal(kind: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = int.from_bytes(f"{kind} {name}".encode()[-7:], "little") + sum(f"{kind} {name}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _save(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    path.mkdir(parents=True)
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
