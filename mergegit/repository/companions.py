"""The files around a merged model's weights: config, index and model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mergegit.dtypes import TORCH_NAMES
from mergegit.merge.settings import Setting
from mergegit.objects import ManifestId, Plan

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
CARD: Final = "README.md"
WEIGHT_SUFFIXES: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx",
)  # fmt: skip
"""Files that hold weights: a merged commit does not take them over from its base."""


def config_with_dtype(data: bytes, dtype: str) -> bytes:
    """A config.json that states the dtype, under the key that it used before."""
    config = json.loads(data)
    key = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
    config[key] = TORCH_NAMES[dtype]
    return _json(config)


_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_PER_LAYER: Final = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")


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
    return _json(config)


def index_with_size(data: bytes, total_bytes: int) -> bytes:
    """An index that states the size of the tensors that it names."""
    index = json.loads(data)
    metadata = index.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    index["metadata"] = {**known, "total_size": total_bytes}
    return _json(index)


def model_card(
    plan: Plan, base: ManifestId, experts: Sequence[ManifestId], license_line: str | None
) -> bytes:
    """The README.md of a merged model, with the tags that the Hub shows merges by.

    Models are named by the ids of their contents and not of their commits: the same merge has the
    same card in every repository.
    """
    recipe = plan.recipe
    names = [expert.ref for expert in plan.experts]
    front = ["---", "tags:", "- merge", "- mergegit"]
    if license_line:
        front.append(license_line)
    lines = [
        *front,
        "---",
        "",
        f"# {' + '.join(names)}",
        "",
        f"A merge of {_listed(names)} on the base {recipe['base']['ref']}, made with mergegit "
        f"by the method `{recipe['method']}`.",
        "",
        "| model | contents | parameters | read of its bytes | relative error |",
        "|---|---|---|---|---|",
        f"| {recipe['base']['ref']} (base) | `{base.hex()[:16]}` | | | |",
    ]
    for expert, contents, asked in zip(plan.experts, experts, recipe["experts"], strict=True):
        share = expert.planned_bytes / expert.raw_bytes if expert.raw_bytes else 0.0
        lines.append(
            f"| {expert.ref} | `{contents.hex()[:16]}` | {_parameters(asked['parameters'])} "
            f"| {share:.1%} | {expert.predicted_error:.3g} |"
        )
    lines += [
        "",
        f"For all: {_parameters(recipe['parameters'])}; seed {recipe['seed']}. Of "
        f"{plan.raw_bytes:,} bytes of experts {plan.planned_bytes:,} were read; the predicted "
        f"error of the merged delta is {plan.predicted_error:.3g}.",
        "",
    ]
    return "\n".join(lines).encode()


def license_line(card: bytes) -> str | None:
    """The ``license:`` line of a card's front matter, if there is one."""
    lines = card.decode("utf-8", "replace").splitlines()
    if not lines or lines[0] != "---":
        return None
    for line in lines[1:]:
        if line == "---":
            return None
        if line.startswith("license:"):
            return line
    return None


def _parameters(parameters: Mapping[str, Any]) -> str:
    """In one order, whether the plan was just made or read from a file."""
    listed = ", ".join(f"{key} {_value(parameters[key])}" for key in sorted(parameters))
    return listed or "no parameters"


def _value(value: object) -> str:
    return Setting.parse(value, "").text()


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
