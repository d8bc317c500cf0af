"""LoRA adapters beside PEFT: what we make of PEFT's files, and what PEFT makes of ours.

Runs where MERGEKIT_PYTHON names an interpreter that has transformers and peft beside mergekit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit.checkpoint.adapter import WEIGHTS_FILE, Adapter, LowRank, is_adapter, read_adapter
from mergegit.checkpoint.adapter_files import WEIGHTS_METADATA, adapter_files, whole_modules
from mergegit.checkpoint.adapter_settings import CONFIG_FILE
from mergegit.kernels.lowrank import add_square_sums, dora_delta, dora_gain, low_rank_delta
from mergegit.merge.extract_lora import factor
from tests.families import generator

PYTHON = os.environ.get("MERGEKIT_PYTHON")

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has transformers and peft",
    ),
]

DRIVER = Path(__file__).with_name("peft_driver.py")
RUN = 777
"""Elements that are computed at a time: no row ends where a run does."""
Tensors = dict[str, torch.Tensor]

LLAMA: dict[str, Any] = {
    "config": "LlamaConfig",
    "model": "LlamaForCausalLM",
    "sizes": {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "tie_word_embeddings": False,
    },
}
GPT2: dict[str, Any] = {
    "config": "GPT2Config",
    "model": "GPT2LMHeadModel",
    "sizes": {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 96,
        "tie_word_embeddings": False,
    },
}
QWEN2 = LLAMA | {"config": "Qwen2Config", "model": "Qwen2ForCausalLM"}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONV1D = ["c_attn", "c_proj", "c_fc"]


def tied(model: Mapping[str, Any]) -> dict[str, Any]:
    return {**model, "sizes": model["sizes"] | {"tie_word_embeddings": True}}


def case(model: Mapping[str, Any], targets: object, **adapter: object) -> dict[str, Any]:
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": targets}
    return {**model, "adapter": settings | adapter}


PATTERNS = {
    "rank_pattern": {"layers.1.self_attn.q_proj": 7, "q_proj": 2, r".*\.1\.mlp\.(up|gate)_proj": 9},
    "alpha_pattern": {"^model.layers.0.mlp.down_proj": 11, "o_proj": 0.5},
}
CASES = {
    "plain": case(LLAMA, LINEAR),
    "all-linear": case(LLAMA, "all-linear"),
    "rslora": case(LLAMA, LINEAR, use_rslora=True),
    "dora": case(LLAMA, LINEAR, use_dora=True),
    "patterns": case(LLAMA, LINEAR, **PATTERNS),
    "patterns, rslora": case(LLAMA, LINEAR, use_rslora=True, **PATTERNS),
    "saved": case(LLAMA, LINEAR, modules_to_save=["lm_head", "norm", "embed_tokens"]),
    "embedding": case(LLAMA, ["q_proj", "embed_tokens", "lm_head"]),
    "embedding, dora": case(LLAMA, ["q_proj", "embed_tokens"], use_dora=True),
    "tied, saved": case(
        tied(LLAMA), LINEAR, modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "tied, embedding": case(tied(LLAMA), ["q_proj", "embed_tokens"], ensure_weight_tying=True),
    "bias": case(QWEN2, LINEAR, bias="lora_only"),
    "gpt2": case(GPT2, CONV1D, fan_in_fan_out=True),
    "gpt2, dora": case(GPT2, CONV1D, fan_in_fan_out=True, use_dora=True),
    "gpt2, embedding": case(GPT2, [*CONV1D, "wte"], fan_in_fan_out=True, bias="all"),
    # PEFT sets fan_in_fan_out as each module needs it, and saves what the last one needed.
    "gpt2, head": case(GPT2, [*CONV1D, "lm_head"], fan_in_fan_out=True),
    "gpt2, short names": case(GPT2, CONV1D, fan_in_fan_out=True) | {"inside": "transformer"},
}


def drive(todo: str, root: Path, cases: Mapping[str, object]) -> None:
    file = root / f"{todo}.json"
    file.write_text(json.dumps(cases))
    assert PYTHON
    done = subprocess.run(
        [PYTHON, "-W", "ignore", str(DRIVER), todo, str(root), str(file)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("peft")
    drive("make", root, CASES)
    return root


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read(path: Path, base: Tensors) -> tuple[Adapter, Tensors]:
    assert is_adapter([file.name for file in path.iterdir()])
    weights = load_file(path / WEIGHTS_FILE)
    config = (path / CONFIG_FILE).read_bytes()
    return read_adapter(config, shapes(weights), shapes(base)), weights


def changed(w: np.ndarray[Any, Any], how: LowRank, weights: Tensors) -> np.ndarray[Any, Any]:
    """A tensor of the base with its low-rank change, run by run."""
    a, b = weights[how.a].numpy(), weights[how.b].numpy()
    (rows, columns), flat = w.shape, w.ravel()
    runs = [(at, flat[at : at + RUN]) for at in range(0, flat.size, RUN)]
    deltas = [
        low_rank_delta(a, b, how.scale, how.transposed, (rows, columns), at, run.size)
        for at, run in runs
    ]
    if how.magnitude:
        sums = np.zeros(columns if how.transposed else rows)
        for (at, run), delta in zip(runs, deltas, strict=True):
            add_square_sums(run, delta, how.transposed, at, columns, sums)
        gain = dora_gain(weights[how.magnitude].numpy(), sums)
        deltas = [
            dora_delta(run, delta, gain, how.transposed, at, columns)
            for (at, run), delta in zip(runs, deltas, strict=True)
        ]
    return (flat + np.concatenate(deltas)).reshape(w.shape)


def merge(adapter: Adapter, weights: Tensors, base: Tensors) -> Tensors:
    merged = base | {name: weights[saved] for name, saved in adapter.saved.items()}
    for name, how in adapter.low_rank.items():
        merged[name] = torch.from_numpy(changed(merged[name].numpy(), how, weights))
    return merged


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, base: torch.Tensor, name: str) -> None:
    """Within 1e-5 of the change's length, and of the largest weight everywhere."""
    off = (ours.double() - theirs.double()).abs()
    whole = float((theirs.double() - base.double()).norm())
    assert float(off.norm()) <= 1e-5 * whole, name
    assert float(off.max()) <= 1e-5 * float(theirs.abs().max()), name


@pytest.mark.parametrize("name", CASES)
def test_the_base_with_our_deltas_is_what_peft_merges(made: Path, name: str) -> None:
    base = load_file(made / name / "base" / "model.safetensors")
    theirs = load_file(made / name / "merged.safetensors")
    adapter, weights = read(made / name / "adapter", base)
    ours = merge(adapter, weights, base)
    short = CASES[name].get("inside")
    for key, tensor in ours.items():
        assert_near(tensor, theirs[f"{short}.{key}" if short else key], base[key], key)
    moved = {key for key in base if not torch.equal(ours[key], base[key])}
    assert moved == adapter.low_rank.keys() | {
        key for key, saved in adapter.saved.items() if not torch.equal(weights[saved], base[key])
    }
    assert moved
    # Nothing that PEFT merged is missing: what the base lacks is a head, tied to the embedding.
    for key in theirs.keys() - {f"{short}.{key}" if short else key for key in ours}:
        assert key == "lm_head.weight"
        if not short:
            assert torch.equal(theirs[key], theirs["model.embed_tokens.weight"])


def tune(base: Tensors, kinds: Mapping[str, float], rank: int) -> Tensors:
    """Every tensor whose name has one of ``kinds`` in it moves by so much."""
    tuned = dict(base)
    for name, tensor in base.items():
        scale = next((scale for kind, scale in kinds.items() if kind in name), 0.0)
        if scale and tensor.ndim == 2 and "embed" not in name and "wte" not in name:
            b = torch.randn(len(tensor), rank, generator=generator("b", name))
            a = torch.randn(rank, tensor.shape[1], generator=generator("a", name))
            tuned[name] = tensor + scale * b @ a
        elif scale:
            tuned[name] = tensor + scale * torch.randn(tensor.shape, generator=generator(name))
    return tuned


EXTRACTED: dict[str, tuple[dict[str, Any], dict[str, float], dict[str, Any]]] = {
    "plain": (LLAMA, {"proj": 0.1}, {}),
    "norms and embeddings": (LLAMA, {"proj.weight": 0.1, "norm": 0.2, "embed": 0.1, "head": 1}, {}),
    "biases": (QWEN2, {"proj": 0.1}, {}),
    "gpt2": (GPT2, {"attn": 0.1, "mlp": 0.1, "ln_1.bias": 0.1}, {"conv1d": True}),
    "tied": (tied(LLAMA), {"proj": 0.1, "embed": 0.2}, {"tied": True}),
}


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that were factored out of fine-tunes, and what PEFT merges of them."""
    root = tmp_path_factory.mktemp("extracted")
    models = {name: case(model, ["q_proj", "c_attn"]) for name, (model, _, _) in EXTRACTED.items()}
    drive("make", root, models)
    for name, (_, kinds, how) in EXTRACTED.items():
        base = load_file(root / name / "base" / "model.safetensors")
        tuned = tune(base, kinds, rank=3)
        save_file(tuned, root / name / "tuned.safetensors")
        write_adapter(root / name / "adapter", base, tuned, how)
    drive("merge", root, models)
    return root


def write_adapter(path: Path, base: Tensors, tuned: Tensors, how: Mapping[str, Any]) -> None:
    differing = [name for name in base if not torch.equal(base[name], tuned[name])]
    matrices = [
        name for name in differing if base[name].ndim == 2 and "emb" not in name
    ]  # fmt: skip
    low_rank = {}
    for place, name in enumerate(matrices):
        # Ranks that differ, some of them far higher than they need be.
        made = factor((tuned[name] - base[name]).numpy(), (3, 5, 3, 32)[place % 4], name=name)
        assert made.error < 1e-5
        low_rank[name] = (made.b, made.a)
    files = adapter_files(
        low_rank,
        whole_modules(differing, low_rank, base),
        transposed=matrices if how.get("conv1d") else (),
        tied={"lm_head.weight": "model.embed_tokens.weight"} if how.get("tied") else {},
    )
    (path / CONFIG_FILE).write_bytes(files.config)
    factors = {name: torch.from_numpy(array) for name, array in files.factors.items()}
    whole = {name: tuned[key].clone() for name, key in files.saved.items()}
    save_file(factors | whole, path / WEIGHTS_FILE, metadata=WEIGHTS_METADATA)


@pytest.mark.parametrize("name", EXTRACTED)
def test_peft_merges_our_adapter_to_the_fine_tune(extracted: Path, name: str) -> None:
    base = load_file(extracted / name / "base" / "model.safetensors")
    tuned = load_file(extracted / name / "tuned.safetensors")
    merged = load_file(extracted / name / "merged.safetensors")
    for key, tensor in tuned.items():
        assert_near(merged[key], tensor, base[key], key)
    adapter, weights = read(extracted / name / "adapter", base)
    for key, tensor in merge(adapter, weights, base).items():
        assert_near(tensor, tuned[key], base[key], key)
