"""A model and its tokenizer as a directory that Hugging Face tools read and write."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from family import model as llama
from family import tokenizer as bpe
from family.model import Llama
from family.tokenizer import END_OF_TEXT_ID, Tokenizer

INDEX = "model.safetensors.index.json"

DTYPE = torch.bfloat16
"""What weights are rounded to in a file."""

SHARD_BYTES = 3_000_000
"""Small, so that even a small model comes in several shards, as large ones do."""


def save(folder: Path, model: Llama, tokenizer: Tokenizer, readme: str) -> None:
    """Write a checkpoint into a new directory, its weights rounded to `DTYPE`."""
    folder.mkdir(parents=True)
    tensors = {name: tensor.to(DTYPE) for name, tensor in model.state_dict().items()}
    _save_shards(folder, tensors)
    _write_json(folder / "config.json", llama.to_json(model.config, DTYPE))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": END_OF_TEXT_ID, "do_sample": True, "eos_token_id": END_OF_TEXT_ID},
    )
    bpe.save(tokenizer, folder, max_length=model.config.max_position_embeddings)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def load(folder: Path) -> tuple[Llama, Tokenizer]:
    """Read a checkpoint, in however many shards, its weights as float32.

    Raises FileNotFoundError where a JSON file is missing, and RuntimeError where the tensors are
    not those of the model that `config.json` describes.
    """
    model = Llama(llama.from_json(_read_json(folder / "config.json")))
    tensors = {
        name: tensor.float()
        for shard in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    model.load_state_dict(tensors)
    return model, bpe.load(folder)


def _save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    shards = _shards(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, shard))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of the tensors of each shard, in the model's order, a new one where one is full."""
    shards: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
