"""The files around a merged model's weights: config and index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from mergegit.dtypes import TORCH_NAMES

CARD: Final = "README.md"
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
WEIGHT_SUFFIXES: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx",
)  # fmt: skip
"""Files that hold weights: a merged commit does not take them over from its base."""


def config_with_dtype(data: bytes, dtype: str) -> bytes:
    """A config.json that states the dtype, under the keys that it used before."""
    config = json.loads(data)
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]:
        config[key] = TORCH_NAMES[dtype]
    return _json(config)


_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_PER_LAYER: Final = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type", "attention_layers",
    "attention_window", "indexer_types", "layer_rope_theta", "activation_sparsity_pattern",
    "intermediate_size",
)  # fmt: skip
"""Where these are lists, they have an entry for each layer."""
_LAYER_NUMBERS: Final = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
"""These list the numbers of layers of one kind."""


def config_with_layers(data: bytes, layers: Sequence[int]) -> bytes:
    """A config.json of a model whose layers are ``layers`` of the one that it describes."""
    config = json.loads(data)
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in _LAYER_COUNTS:
            if key in part:
                part[key] = len(layers)
        for key in _PER_LAYER:
            if isinstance(part.get(key), list) and len(part[key]) > max(layers):
                part[key] = [part[key][layer] for layer in layers]
        for key in _LAYER_NUMBERS:
            if isinstance(part.get(key), list):
                part[key] = [at for at, layer in enumerate(layers) if layer in part[key]]
        if "attention_types" in part and isinstance(part.get("attention_layers"), list):
            # GPT-Neo reads attention_layers off patterns and how often each is repeated.
            part["attention_types"] = [[part["attention_layers"], 1]]
    return _json(config)


def index_with_size(data: bytes, total_bytes: int) -> bytes:
    """An index that states the size of the tensors that it names."""
    index = json.loads(data)
    metadata = index.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    index["metadata"] = {**known, "total_size": total_bytes}
    return _json(index)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
