"""A Llama-shaped language model, small enough to train on two cores while one waits.

Layers, names and arithmetic are those of `LlamaForCausalLM` in transformers, so that its
`from_pretrained` reads our checkpoints and computes the same logits: RMSNorm, rotary positions
on rotated halves, grouped-query attention, SwiGLU, and a head of its own beside the embedding.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EMBEDDING_DEVIATION = 0.5
"""Initial scale of embeddings: far above what the layers add at first, so that tokens differ."""

OUTPUT_DEVIATION = 0.01
"""Initial scale of matrices that add to the residual stream: every layer begins near identity."""


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the network, by their names in a Hugging Face `config.json`."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each of shape (length, head_dim), of the angles of the positions."""


class RMSNorm(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, config.hidden_size)
        self.k_proj = _linear(config.hidden_size, key_value_size)
        self.v_proj = _linear(config.hidden_size, key_value_size)
        self.o_proj = _linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        attended = functional.scaled_dot_product_attention(
            _rotate(self._heads(self.q_proj(x)), rotation),
            _rotate(self._heads(self.k_proj(x)), rotation),
            self._heads(self.v_proj(x)),
            is_causal=True,
            enable_gqa=True,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """From (batch, length, heads * head_dim) to (batch, heads, length, head_dim)."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        attended: Tensor = self.self_attn(self.input_layernorm(x), rotation)
        x = x + attended
        transformed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + transformed


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        rotation = _rotation(self.config, ids.shape[-1])
        for layer in self.layers:
            x = layer(x, rotation)
        normed: Tensor = self.norm(x)
        return normed


class Llama(nn.Module):
    """Logits, shape (batch, length, vocab_size), from token ids, shape (batch, length)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(ids))
        return logits


def initialise(model: Llama, seed: int) -> None:
    """Draw every matrix from a normal distribution; norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        if "embed_tokens" in name:
            deviation = EMBEDDING_DEVIATION
        elif "o_proj" in name or "down_proj" in name:
            deviation = OUTPUT_DEVIATION
        else:
            deviation = 1 / math.sqrt(model.config.hidden_size)
        nn.init.normal_(parameter, std=deviation, generator=generator)


def to_json(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def from_json(fields: dict[str, Any]) -> Config:
    """The sizes in a `config.json`; fields that this model has no use for are passed over."""
    return Config(**{name: fields[name] for name in Config.__dataclass_fields__})


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _rotation(config: Config, length: int) -> Rotation:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = torch.pow(config.rope_theta, -exponents)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines
