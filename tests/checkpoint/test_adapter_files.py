"""Adapters that are written: what PEFT will find, and that they are read back as they were."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mergegit.checkpoint.adapter import Adapter, read_adapter
from mergegit.checkpoint.adapter_files import AdapterFiles, adapter_files, whole_modules
from mergegit.errors import BadCheckpoint
from mergegit.kernels.lowrank import low_rank_delta
from tests.checkpoint.adapters import BASE, GPT2, K_PROJ, Q_PROJ, UP_PROJ, Shapes

Floats = npt.NDArray[np.float32]
PREFIX = "base_model.model."


def factors(shape: tuple[int, ...], rank: int) -> tuple[Floats, Floats]:
    """``b`` and ``a`` of a tensor of this shape."""
    draws = np.random.default_rng((*shape, rank))
    rows, columns = shape
    b, a = draws.standard_normal((rows, rank)), draws.standard_normal((rank, columns))
    return b.astype(np.float32), a.astype(np.float32)


def low_rank(ranks: dict[str, int], base: Shapes = BASE) -> dict[str, tuple[Floats, Floats]]:
    """Factors for the weights of modules."""
    return {
        f"{module}.weight": factors(base[f"{module}.weight"], rank)
        for module, rank in ranks.items()
    }


def settings(files: AdapterFiles) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(files.config)
    return values


def read_back(files: AdapterFiles, base: Shapes) -> Adapter:
    shapes: Shapes = {name: array.shape for name, array in files.factors.items()}
    shapes |= {name: base[source] for name, source in files.saved.items()}
    return read_adapter(files.config, shapes, base)


def deltas(files: AdapterFiles, adapter: Adapter, base: Shapes) -> dict[str, Floats]:
    out = {}
    for name, how in adapter.low_rank.items():
        rows, columns = base[name]
        a, b = files.factors[how.a], files.factors[how.b]
        flat = low_rank_delta(a, b, how.scale, how.transposed, (rows, columns), 0, rows * columns)
        out[name] = flat.reshape(rows, columns)
    return out


@pytest.mark.parametrize(
    "ranks",
    [
        {K_PROJ: 2},
        {K_PROJ: 3, Q_PROJ: 3, UP_PROJ: 1},
        {K_PROJ: 1, "model.layers.1.self_attn.k_proj": 2, UP_PROJ: 4, "lm_head": 3},
    ],
)
def test_what_is_written_adds_the_products_of_its_factors(ranks: dict[str, int]) -> None:
    made = low_rank(ranks)
    files = adapter_files(made, [])
    found = deltas(files, read_back(files, BASE), BASE)
    assert found.keys() == made.keys()
    for name, (b, a) in made.items():
        np.testing.assert_allclose(found[name], b @ a, atol=1e-5)


def test_conv1d_weights_get_the_factors_of_their_transpose() -> None:
    made = low_rank({"h.0.attn.c_attn": 3, "h.0.attn.c_proj": 2, "h.0.mlp.c_proj": 3}, GPT2)
    files = adapter_files(made, [], transposed=list(made))
    assert files.factors[f"{PREFIX}h.0.attn.c_attn.lora_A.weight"].shape == (3, 8)
    assert all(array.flags.c_contiguous for array in files.factors.values())
    assert settings(files)["fan_in_fan_out"] is True
    for name, found in deltas(files, read_back(files, GPT2), GPT2).items():
        b, a = made[name]
        np.testing.assert_allclose(found, b @ a, atol=1e-5)


def test_the_config_is_one_that_peft_knows() -> None:
    files = adapter_files(
        low_rank({K_PROJ: 2, UP_PROJ: 2}), [], base_name="org/base", task="CAUSAL_LM"
    )
    assert settings(files) == {
        "alpha_pattern": {},
        "base_model_name_or_path": "org/base",
        "bias": "none",
        "ensure_weight_tying": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 2,
        "rank_pattern": {},
        "target_modules": [UP_PROJ, K_PROJ],
        "task_type": "CAUSAL_LM",
    }


def test_a_rank_that_is_not_the_commonest_is_named_with_the_longest_names_first() -> None:
    base = {f"{module}.weight": (6, 6) for module in ("a.proj", "proj", "b", "c", "b.a.proj")}
    ranks = {"b": 4, "c": 4, "proj": 1, "a.proj": 2, "b.a.proj": 3}
    files = adapter_files(low_rank(ranks, base), [])
    found = settings(files)
    assert (found["r"], found["lora_alpha"]) == (4, 4)
    assert list(found["rank_pattern"].items()) == [("b.a.proj", 3), ("a.proj", 2), ("proj", 1)]
    assert found["alpha_pattern"] == found["rank_pattern"]
    read = read_back(files, base).low_rank
    assert {name: (how.rank, how.scale) for name, how in read.items()} == {
        f"{module}.weight": (rank, 1.0) for module, rank in ranks.items()
    }


def test_modules_that_are_no_matrices_are_saved_whole() -> None:
    saved = ["model.norm.weight", "model.embed_tokens.weight"]
    files = adapter_files(low_rank({K_PROJ: 2}), saved)
    assert settings(files)["modules_to_save"] == ["model.embed_tokens", "model.norm"]
    assert files.saved == {PREFIX + name: name for name in saved}
    assert read_back(files, BASE).saved.keys() == set(saved)


def test_a_bias_beside_a_factored_weight_goes_into_its_wrapped_layer() -> None:
    files = adapter_files(low_rank({Q_PROJ: 2}), [f"{Q_PROJ}.bias"])
    assert files.saved == {f"{PREFIX}{Q_PROJ}.base_layer.bias": f"{Q_PROJ}.bias"}
    assert settings(files)["modules_to_save"] is None
    assert settings(files)["bias"] == "lora_only"
    assert read_back(files, BASE).saved.keys() == {f"{Q_PROJ}.bias"}


def test_a_head_that_shares_a_saved_embeddings_weights_is_written_too() -> None:
    base = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    files = adapter_files(low_rank({K_PROJ: 2}), ["model.embed_tokens.weight"], tied=tied)
    assert files.saved[f"{PREFIX}lm_head.weight"] == "model.embed_tokens.weight"
    assert settings(files)["ensure_weight_tying"] is True
    assert read_back(files, base).saved.keys() == {"model.embed_tokens.weight"}
    untouched = adapter_files(low_rank({K_PROJ: 2}), ["model.norm.weight"], tied=tied)
    assert settings(untouched)["ensure_weight_tying"] is False
    assert untouched.saved.keys() == {f"{PREFIX}model.norm.weight"}


def test_names_get_the_prefix_that_the_models_class_has() -> None:
    made = low_rank({"h.0.mlp.c_fc": 2}, GPT2)
    saved = ["wte.weight", "h.0.mlp.c_fc.bias"]
    files = adapter_files(made, saved, transposed=list(made), prefix="transformer.")
    assert set(files.factors) == {
        f"{PREFIX}transformer.h.0.mlp.c_fc.lora_{side}.weight" for side in "AB"
    }
    assert files.saved == {
        f"{PREFIX}transformer.wte.weight": "wte.weight",
        f"{PREFIX}transformer.h.0.mlp.c_fc.base_layer.bias": "h.0.mlp.c_fc.bias",
    }
    assert settings(files)["target_modules"] == ["transformer.h.0.mlp.c_fc"]
    assert settings(files)["modules_to_save"] == ["transformer.wte"]
    adapter = read_back(files, GPT2)
    assert adapter.low_rank.keys() == {"h.0.mlp.c_fc.weight"}
    assert adapter.saved.keys() == set(saved)


def test_the_same_factors_give_the_same_files() -> None:
    made = low_rank({K_PROJ: 2, UP_PROJ: 3})
    saved = ["model.norm.weight", "lm_head.weight"]
    reversed_saved = list(reversed(saved))
    first = adapter_files(made, saved)
    second = adapter_files(dict(reversed(made.items())), reversed_saved)
    assert first.config == second.config
    assert list(first.factors) == list(second.factors)
    assert list(first.saved.items()) == list(second.saved.items())


def test_without_factors_there_is_no_adapter() -> None:
    with pytest.raises(ValueError, match="factored"):
        adapter_files({}, ["model.norm.weight"])


@pytest.mark.parametrize(
    ("target", "b", "a"),
    [
        ("x.weight", (4, 2), (3, 8)),
        ("x.weight", (4,), (2, 8)),
        ("x.bias", (4, 2), (2, 8)),
    ],
)
def test_what_is_no_pair_of_factors_is_refused(
    target: str, b: tuple[int, ...], a: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="x"):
        adapter_files({target: (np.zeros(b, np.float32), np.zeros(a, np.float32))}, [])


# -- which tensors must come along ----------------------------------------------------------------

MODULES = {
    "ln.weight": (4,),
    "ln.bias": (4,),
    "attn.sinks": (4,),
    "attn.q.weight": (4, 4),
    "attn.q.bias": (4,),
    "attention.q.weight": (4, 4),
    "root": (4,),
}


def test_a_module_is_saved_with_all_that_it_has() -> None:
    assert whole_modules(["ln.bias"], ["attn.q.weight"], MODULES) == {"ln.weight", "ln.bias"}
    inside = {"attn.sinks", "attn.q.weight", "attn.q.bias"}
    assert whole_modules(["attn.sinks"], ["attention.q.weight"], MODULES) == inside


def test_a_bias_beside_a_factored_weight_comes_alone() -> None:
    changed = ["attn.q.bias", "attn.q.weight"]
    assert whole_modules(changed, ["attn.q.weight"], MODULES) == {"attn.q.bias"}


def test_nothing_changed_needs_nothing() -> None:
    assert whole_modules([], ["attn.q.weight"], MODULES) == set()


@pytest.mark.parametrize(("changed", "why"), [("attn.sinks", "attn.q.weight"), ("root", "module")])
def test_what_can_be_no_part_of_an_adapter_is_refused_by_name(changed: str, why: str) -> None:
    with pytest.raises(BadCheckpoint, match=changed) as caught:
        whole_modules([changed], ["attn.q.weight"], MODULES)
    assert why in caught.value.message
