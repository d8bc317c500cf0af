"""Merged models as transformers loads them, of several architectures, beside merges by hand.

Runs where MERGEKIT_PYTHON names an interpreter that has transformers and peft.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.cli.conftest import CommandLine

PYTHON = os.environ.get("MERGEKIT_PYTHON")

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has transformers and peft",
    ),
]

DRIVER = Path(__file__).with_name("transformers_driver.py")
LAYERS = 3


@dataclass(frozen=True, slots=True)
class Family:
    """A base and experts math and code near it. ``dtypes`` are those of experts that have another;
    of ``inside`` alone the weights are saved, under its names; ``adapter`` are PEFT's settings."""

    model: str
    config: str
    sizes: Mapping[str, Any]
    dtype: str = "bfloat16"
    auto: str = "AutoModelForCausalLM"
    prefix: str = "model.layers."
    tied: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    inside: str | None = None
    adapter: Mapping[str, Any] | None = None

    def told(self, root: Path, name: str) -> dict[str, Any]:
        """As the driver wants it."""
        told = asdict(self) | {"root": str(root), "name": name}
        return {key: value for key, value in told.items() if key not in ("prefix", "tied")}


def llama_like(width: int, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    """Sizes; every family has its own, so that none is taken for another's fine-tune."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width - 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "tie_word_embeddings": tied,
        **more,
    }


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        llama_like(64),
        adapter={"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
    ),
    # A window on some layers only: the config lists what each layer is.
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        llama_like(48, use_sliding_window=True, sliding_window=3, max_window_layers=2),
    ),
    # Experts lie apart in files and together in memory, and one layer has none.
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        llama_like(
            72,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[1],
        ),
    ),
    "mistral": Family(
        "MistralForCausalLM", "MistralConfig", llama_like(56), dtypes={"code": "float32"}
    ),
    "gemma": Family(
        "GemmaForCausalLM", "GemmaConfig", llama_like(40, tied=True, head_dim=16), tied=True
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "vocab_size": 160},
        dtype="float32",
        prefix="transformer.h.",
        tied=True,
        inside="transformer",
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "vocab_size": 160,
        },
        dtype="float32",
        auto="AutoModelForMaskedLM",
        prefix="bert.encoder.layer.",
        tied=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A merge of a family's models, as both sides are told of it.

    Where ``exact``, every bit must be that of the merge by hand. ``merged_as`` and ``written_as``
    are dtypes other than the base's; ``shard_bytes`` is given to `checkout`, which merges an
    adapter by itself where ``unmerged``.
    """

    family: str
    method: str = "task_arithmetic"
    experts: Sequence[str] = ("math", "code")
    weights: Sequence[float] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    slices: Sequence[tuple[str, int, int]] = ()
    merged_as: str | None = None
    written_as: str | None = None
    shard_bytes: int | None = None
    exact: bool = True
    unmerged: bool = False

    @property
    def dtypes(self) -> list[str]:
        """Those that the merge is rounded to, one after the other."""
        asked = [self.merged_as or FAMILIES[self.family].dtype, self.written_as]
        return [dtype for dtype in asked if dtype is not None]

    @property
    def layers(self) -> int:
        return sum(stop - start for _, start, stop in self.slices) or LAYERS

    def merge_arguments(self) -> list[str]:
        names = [f"{self.family}-{expert}" for expert in self.experts]
        weights = zip(names, self.weights, strict=bool(self.weights))
        settings = [f"{name}.weight={weight}" for name, weight in weights]
        settings += [f"{key}={value}" for key, value in self.parameters.items()]
        out = [*names, "--method", self.method]
        out += [word for setting in settings for word in ("-p", setting)]
        return [*out, "--dtype", self.merged_as] if self.merged_as else out

    def checkout_options(self) -> list[str]:
        options = {
            "--dtype": self.written_as,
            "--shard-size": self.shard_bytes and f"{self.shard_bytes}B",
        }
        words = [word for key, value in options.items() if value for word in (key, value)]
        return [*words, "--merged"] if self.unmerged else words

    def recipe(self) -> str:
        """The slices, as a recipe file; JSON is YAML."""
        slices = [
            {"sources": [{"model": f"{self.family}-{model}", "layer_range": [start, stop]}]}
            for model, start, stop in self.slices
        ]
        return json.dumps({"merge_method": "passthrough", "slices": slices})

    def told(self) -> dict[str, Any]:
        """As the driver wants it."""
        told: dict[str, Any] = {"dtypes": self.dtypes}
        if self.slices:
            prefix = FAMILIES[self.family].prefix
            return told | {"method": "stack", "slices": self.slices, "prefix": prefix}
        told |= {"method": self.method, "experts": self.experts, **self.parameters}
        return told | ({"weights": self.weights} if self.weights else {})


STACK = (("base", 0, 2), ("math", 1, 3), ("code", 2, 3))
CASES = {
    "llama, task arithmetic": Case("llama", weights=(0.7, -0.4)),
    "llama, linear": Case("llama", "linear", weights=(0.7, 0.4), exact=False),
    "llama, ties": Case("llama", "ties", weights=(0.9, 0.6), parameters={"density": 0.4}),
    "llama, slerp": Case("llama", "slerp", parameters={"t": 0.3}, exact=False),
    "llama, a stack": Case("llama", slices=STACK),
    "llama, an adapter": Case("llama", experts=("lora", "code"), weights=(0.8, 0.5), exact=False),
    "llama, an adapter in its base": Case(
        "llama", experts=("lora",), weights=(1.0,), exact=False, unmerged=True
    ),
    "qwen2, task arithmetic": Case("qwen2", weights=(0.3, 0.8)),
    "qwen2, a stack": Case("qwen2", slices=STACK),
    "qwen2moe, task arithmetic": Case("qwen2moe", weights=(0.6, -0.2)),
    "qwen2moe, a stack": Case("qwen2moe", slices=STACK),
    "mistral, slerp": Case("mistral", "slerp", parameters={"t": 0.6}, exact=False),
    "mistral, to float32": Case("mistral", weights=(0.5, 0.5), merged_as="float32"),
    "gemma, task arithmetic": Case("gemma", weights=(0.6, 0.6)),
    "gemma, a stack": Case("gemma", slices=STACK),
    "gemma, in float16 and shards": Case(
        "gemma", weights=(1.0, 0.5), written_as="float16", shard_bytes=20_000
    ),
    "gpt2, task arithmetic": Case("gpt2", weights=(0.7, 0.7)),
    "gpt2, linear": Case("gpt2", "linear", weights=(0.2, 0.6), exact=False),
    "gpt2, a stack": Case("gpt2", slices=STACK),
    "bert, task arithmetic": Case("bert", weights=(-0.3, 0.9)),
    "bert, slerp": Case("bert", "slerp", parameters={"t": 0.5}, exact=False),
}


class Transformers:
    """The process that has transformers, asked one thing after the other."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, todo: str, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"todo": todo, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-4000:]
        return json.loads(answer)


@dataclass(frozen=True, slots=True)
class Place:
    """A repository with all models in it, where the models are, and who loads them."""

    root: Path
    mergegit: CommandLine
    transformers: Transformers


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("transformers")
    log = root / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert PYTHON is not None
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [PYTHON, "-W", "ignore", str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        ) as process,
    ):
        transformers = Transformers(process, log)
        mergegit = CommandLine(root)
        mergegit.ok("init")
        for name, family in FAMILIES.items():
            transformers.ask("make", family=family.told(root, name))
            mergegit.ok("add", f"{name}-base", "--no-base")
            for expert in ("math", "code", "lora")[: 3 if family.adapter else 2]:
                mergegit.ok("add", f"{name}-{expert}", "--base", f"{name}-base")
        yield Place(root, mergegit, transformers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case, the directory that was checked out, and what transformers told of it."""

    case: Case
    family: Family
    path: Path
    told: Mapping[str, Any]

    @property
    def config(self) -> Any:
        return json.loads((self.path / "config.json").read_text())


@pytest.fixture(scope="module", params=CASES)
def outcome(request: pytest.FixtureRequest, place: Place) -> Outcome:
    case = CASES[request.param]
    family = FAMILIES[case.family]
    branch = request.param.replace(", ", "-").replace(" ", "-")
    ref = branch
    if case.unmerged:
        ref = f"{case.family}-{case.experts[0]}"
    elif case.slices:
        (place.root / f"{branch}.yml").write_text(case.recipe())
        place.mergegit.ok("merge", "-c", f"{branch}.yml", "-b", branch)
    else:
        place.mergegit.ok("merge", *case.merge_arguments(), "-b", branch)
    path = place.root / "out" / branch
    place.mergegit.ok("checkout", ref, path, *case.checkout_options())
    told = place.transformers.ask(
        "compare",
        family=family.told(place.root, case.family),
        path=str(path),
        merge=case.told(),
    )
    return Outcome(case, family, path, told)


def names_in(path: Path) -> list[str]:
    """The names of all tensors in a directory, as often as they are there."""
    names: list[str] = []
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return names


def test_transformers_finds_every_weight_and_no_other(outcome: Outcome) -> None:
    assert outcome.told["wrong"] == []
    assert outcome.told["without a pair"] == []
    assert outcome.told["class"] == outcome.family.model


def test_the_config_says_how_many_layers_there_are_and_their_dtype(outcome: Outcome) -> None:
    config, case = outcome.config, outcome.case
    counts = {config[key] for key in ("num_hidden_layers", "n_layer") if key in config}
    assert counts == {case.layers} == {outcome.told["layers"]}
    assert config["dtype"] == case.dtypes[-1]
    assert "torch_dtype" not in config
    assert outcome.told["dtypes"] == [case.dtypes[-1]]
    if "layer_types" in config:
        assert len(config["layer_types"]) == case.layers


def test_a_tied_head_stays_tied_and_is_written_once(outcome: Outcome) -> None:
    assert outcome.told["tied"] is outcome.family.tied
    names = names_in(outcome.path)
    assert len(set(names)) == len(names)
    own = set(names_in(outcome.path.parents[1] / f"{outcome.case.family}-base"))
    if outcome.case.slices:
        inner = outcome.family.prefix.removeprefix(f"{outcome.family.inside}.")
        own = {name for name in own if not name.startswith(inner)}
        names = [name for name in names if not name.startswith(inner)]
    assert set(names) == own
    heads = [name for name in names if name in ("lm_head.weight", "cls.predictions.decoder.weight")]
    assert len(heads) == (0 if outcome.family.tied else 1)


def test_weights_are_those_of_the_merge_by_hand(outcome: Outcome) -> None:
    dtype = outcome.case.dtypes[-1]
    elements = differ = 0
    for key, told in outcome.told["apart"].items():
        assert told["units"] <= (0 if outcome.case.exact or dtype == "float32" else 1), key
        elements += told["elements"]
        differ += told["differ"]
    if outcome.case.exact:
        assert differ == 0
    elif dtype != "float32":
        # What lies half way between two values is rounded by float32's last bit.
        assert differ <= 0.003 * elements


def test_logits_are_those_of_the_merge_by_hand(outcome: Outcome) -> None:
    logits = outcome.told["logits"]
    assert logits["finite"]
    assert logits["moved"] > 0
    if outcome.case.exact:
        assert logits["equal"]
    assert logits["off"] <= 0.003 * logits["moved"]


def test_shards_are_of_the_size_that_was_asked_for(outcome: Outcome) -> None:
    index = outcome.path / "model.safetensors.index.json"
    shards = sorted(outcome.path.glob("*.safetensors"))
    if outcome.case.shard_bytes is None:
        assert [shard.name for shard in shards] == ["model.safetensors"]
        assert not index.exists()
        return
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= outcome.case.shard_bytes or len(sizes) == 1
    assert len(shards) > 2
    written = json.loads(index.read_text())
    assert sorted(written["weight_map"]) == sorted(names_in(outcome.path))
    assert {path.name for path in shards} == set(written["weight_map"].values())
