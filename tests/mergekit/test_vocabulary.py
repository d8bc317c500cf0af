"""Models of different vocabularies, merged by mergekit and aligned here: token by token.

Runs where MERGEKIT_PYTHON names an interpreter that has mergekit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergegit.checkpoint.alignment import Alignment, TokenOption, TokenRow, align
from mergegit.checkpoint.embeddings import Rows, embedding_names, gather_rows
from mergegit.checkpoint.tokenizer_files import config_with_vocabulary, output_files
from mergegit.checkpoint.vocabulary import Vocabulary, read_vocabulary
from tests.families import generator
from tests.merge.reference import ulps

PYTHON = os.environ.get("MERGEKIT_PYTHON")

pytestmark = [
    pytest.mark.mergekit,
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON,
        reason="MERGEKIT_PYTHON is not set; let it name a Python that has mergekit installed",
    ),
]

MERGEKIT = Path(__file__).with_name("mergekit_driver.py")
TOKENIZERS = Path(__file__).with_name("vocabulary_driver.py")
MODELS = ("base", "chat", "code", "long")
WIDTH = 64
WEIGHTS = (0.4, 0.9, -0.3, 0.5)
EMBEDDINGS = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Case:
    """One merge of ``MODELS``, of which the first is the base, with a choice of tokenizer."""

    method: Literal["linear", "task_arithmetic"]
    source: str
    tokens: Mapping[str, TokenOption] = field(default_factory=dict)
    multiple: int | None = None

    def align(self, vocabularies: Sequence[Vocabulary], rows: Sequence[int]) -> Alignment:
        source: Any = self.source
        return align(
            list(zip(MODELS, vocabularies, rows, strict=True)),
            base=0,
            source=source if source in ("base", "union") else MODELS.index(source),
            tokens=self.tokens,
            pad_to_multiple_of=self.multiple,
        )

    def recipe(self, root: Path) -> str:
        """As mergekit reads it; JSON is YAML."""

        def source(option: TokenOption) -> Any:
            if not isinstance(option.source, TokenRow):
                return {"kind": "zero"}
            model, token = str(root / MODELS[option.source.model]), option.source.token
            if token is None:
                return model
            key = "token" if isinstance(token, str) else "token_id"
            return {"kind": "model_token", "model": model, key: token}

        named = self.source if self.source in ("base", "union") else str(root / self.source)
        return json.dumps(
            {
                "merge_method": self.method,
                "base_model": str(root / "base"),
                "models": [
                    {"model": str(root / name), "parameters": {"weight": weight}}
                    for name, weight in zip(MODELS, WEIGHTS, strict=True)
                    if name != "base" or self.method == "linear"
                ],
                "dtype": "float32",
                "out_dtype": "bfloat16",
                "tokenizer": {
                    "source": named,
                    "tokens": {
                        token: {"source": source(option), "force": option.force}
                        for token, option in self.tokens.items()
                    },
                    "pad_to_multiple_of": self.multiple,
                },
            }
        )

    def merge(self, models: Sequence[torch.Tensor]) -> torch.Tensor:
        """The models' aligned rows, in float32, merged."""
        if self.method == "linear":
            total = sum(w * model for w, model in zip(WEIGHTS, models, strict=True))
            return torch.as_tensor(total / sum(WEIGHTS))
        base, *experts = models
        deltas = (w * (model - base) for w, model in zip(WEIGHTS[1:], experts, strict=True))
        return base + torch.as_tensor(sum(deltas))


OPTIONS = {
    "<|im_start|>": TokenOption(TokenRow(1)),
    "<|im_end|>": TokenOption(TokenRow(2), force=True),
    "<|pad|>": TokenOption(TokenRow(3, "</s>"), force=True),
    "<tool>": TokenOption(TokenRow(1, "<think>")),
    "<|new|>": TokenOption(TokenRow(0, 17)),
    "<|newer|>": TokenOption(TokenRow(1, "<|im_end|>"), force=True),
}
CASES = {
    "linear, union": Case("linear", "union"),
    "task arithmetic, union": Case("task_arithmetic", "union"),
    "task arithmetic, base": Case("task_arithmetic", "base"),
    "linear, a model": Case("linear", "code"),
    "task arithmetic, a model": Case("task_arithmetic", "long"),
    "linear, union, tokens": Case("linear", "union", OPTIONS),
    "task arithmetic, union, tokens": Case("task_arithmetic", "union", OPTIONS),
    # mergekit can't add tokens to the base's: it fails over the row that it has no place for.
    "task arithmetic, base, tokens": Case(
        "task_arithmetic", "base", {"<|pad|>": OPTIONS["<|pad|>"]}
    ),
    "task arithmetic, union, padded": Case("task_arithmetic", "union", multiple=64),
    "task arithmetic, union, zero": Case(
        "task_arithmetic", "union", {"<tool>": TokenOption("zero"), "<|0|>": TokenOption("zero")}
    ),
}


def run(driver: Path, *arguments: object, given: str = "", cwd: Path | None = None) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert PYTHON is not None
    command = [PYTHON, str(driver), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, input=given, capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def config(rows: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": rows,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def save_weights(path: Path, rows: int) -> None:
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(EMBEDDINGS, (rows, WIDTH)),
        **{f"{layer}self_attn.{n}_proj.weight": (WIDTH, WIDTH) for n in "qkvo"},
        **{f"{layer}mlp.{n}_proj.weight": (96, WIDTH) for n in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": (WIDTH, 96),
        f"{layer}input_layernorm.weight": (WIDTH,),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
        "model.norm.weight": (WIDTH,),
    }
    tensors = {
        name: torch.randn(shape, generator=generator(path.name, name)).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config(rows)))


def files_of(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.suffix in (".json", ".txt", ".jinja")
    }


@dataclass(frozen=True, slots=True)
class Family:
    root: Path
    files: list[dict[str, bytes]]
    vocabularies: list[Vocabulary]
    weights: list[dict[str, torch.Tensor]]

    def alignment(self, case: Case) -> Alignment:
        return case.align(
            self.vocabularies, [model[EMBEDDINGS[0]].shape[0] for model in self.weights]
        )

    def aligned(self, alignment: Alignment, name: str) -> list[torch.Tensor]:
        """A tensor of all models as the output has its rows, in float32."""

        def read_rows(model: int, rows: Rows) -> Any:
            return self.weights[model][name][torch.from_numpy(rows)].view(torch.uint8).numpy()

        out = []
        for model in range(len(MODELS)):
            runs = [
                gather_rows(
                    alignment, model, start, min(start + 100, alignment.rows), elements=WIDTH,
                    dtypes=["BF16"] * len(MODELS), read_rows=read_rows, dtype="F32",
                )
                for start in range(0, alignment.rows, 100)
            ]  # fmt: skip
            out.append(torch.from_numpy(np.concatenate(runs)).view(torch.float32))
        return out


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    root = tmp_path_factory.mktemp("vocabulary")
    run(TOKENIZERS, "make", root)
    for name in MODELS:
        save_weights(root / name, len(read_vocabulary(files_of(root / name), name).tokens))
    files = [files_of(root / name) for name in MODELS]
    return Family(
        root,
        files,
        [read_vocabulary(own, name) for own, name in zip(files, MODELS, strict=True)],
        [load_file(root / name / "model.safetensors") for name in MODELS],
    )


@pytest.fixture(scope="module")
def theirs(family: Family) -> dict[str, Path]:
    """What mergekit makes of each case."""
    outs, asked = {}, []
    for number, (name, case) in enumerate(CASES.items()):
        recipe, outs[name] = family.root / f"{number}.yml", family.root / f"theirs-{number}"
        recipe.write_text(case.recipe(family.root))
        asked += [recipe, outs[name]]
    run(MERGEKIT, *asked)
    return outs


@pytest.mark.parametrize("name", CASES)
def test_each_token_has_the_row_that_mergekit_gives_it(
    family: Family, theirs: dict[str, Path], name: str
) -> None:
    case = CASES[name]
    alignment = family.alignment(case)
    vocabulary = read_vocabulary(files_of(theirs[name]), "mergekit's")
    weights = load_file(theirs[name] / "model.safetensors")
    assert vocabulary.tokens.keys() == alignment.tokens.keys()
    tokens = list(alignment.tokens)
    ours_at = torch.tensor([alignment.tokens[token] for token in tokens])
    theirs_at = torch.tensor([vocabulary.tokens[token] for token in tokens])
    for tensor in EMBEDDINGS:
        ours = case.merge(family.aligned(alignment, tensor)).bfloat16()
        assert len(ours) == len(weights[tensor])
        units = ulps(ours[ours_at], weights[tensor][theirs_at])
        assert int(units.max()) <= 1
        # An average that lies half way between two values is rounded by float32's last bit.
        apart = float((units > 0).double().mean())
        assert apart <= (1e-3 if case.method == "linear" else 0)


def test_their_embeddings_are_the_tensors_with_a_row_per_token(family: Family) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in family.weights[0].items()}
    assert embedding_names(shapes, config(shapes[EMBEDDINGS[0]][0]), "base") == EMBEDDINGS


GROUPS = {
    "byte-level BPE": MODELS,
    "BPE of Llama": ("llama-base", "llama-long"),
    "BPE of GPT-2": ("gpt2-base", "gpt2-long"),
    "WordPiece": ("bert-base", "bert-long"),
    "Unigram": ("unigram-base", "unigram-long"),
    "WordLevel": ("words-base", "words-long"),
}
"""The last of each has a larger vocabulary than the first, and tokens added after it."""
TEXTS = (
    "the model that was merged",
    "return base + sum(expert) for new tokens follow",
    "merging mergers ing the tokenss",
    "a <|im_start|>user said <|pad|>",
)


@dataclass(frozen=True, slots=True)
class Union:
    """A union of tokenizers, and what transformers makes of it and of those it came from."""

    alignment: Alignment
    told: dict[str, Any]
    told_of_last: dict[str, Any]


@pytest.fixture(scope="module")
def unions(family: Family) -> dict[str, Union]:
    alignments, directories = {}, []
    for group, names in GROUPS.items():
        files = [files_of(family.root / name) for name in names]
        vocabularies = [read_vocabulary(own, name) for own, name in zip(files, names, strict=True)]
        models = [(n, v, len(v.tokens)) for n, v in zip(names, vocabularies, strict=True)]
        alignments[group] = alignment = align(models, base=0, source="union")
        out = family.root / f"union-{names[0]}"
        out.mkdir()
        for path, data in output_files(alignment, files).items():
            (out / path).write_bytes(data)
        directories += [str(out), str(family.root / names[-1])]
    request = json.dumps({"directories": directories, "texts": TEXTS})
    told = json.loads(run(TOKENIZERS, "encode", given=request))
    pairs = zip(directories[::2], directories[1::2], strict=True)
    return {
        group: Union(alignments[group], told[out], told[last])
        for group, (out, last) in zip(GROUPS, pairs, strict=True)
    }


@pytest.mark.parametrize("group", GROUPS)
def test_transformers_gives_each_token_of_a_union_its_id(
    unions: dict[str, Union], group: str
) -> None:
    union = unions[group]
    assert union.told["vocabulary"] == union.alignment.tokens


@pytest.mark.parametrize("group", GROUPS)
def test_a_union_writes_texts_in_the_tokens_of_the_larger_vocabulary(
    unions: dict[str, Union], group: str
) -> None:
    union = unions[group]
    assert union.told["tokens"] == union.told_of_last["tokens"]
    assert union.told["ids"] != union.told_of_last["ids"]


def test_added_tokens_of_a_union_are_matched_as_their_models_match_them(
    family: Family, unions: dict[str, Union]
) -> None:
    directory = str(family.root / "union-base")
    texts = ["a <think> b", "x<|im_start|>y<|im_end|>z<tool><fim>"]
    request = json.dumps({"directories": [directory], "texts": texts})
    told = json.loads(run(TOKENIZERS, "encode", given=request))[directory]
    tokens = unions["byte-level BPE"].alignment.tokens
    # <think> takes the space before it; the tokens that are special are left out in decoding.
    assert told["tokens"][0] == ["a", "<think>", "Ġb"]
    assert told["ids"][0][1] == tokens["<think>"]
    added = ["<|im_start|>", "<|im_end|>", "<tool>", "<fim>"]
    assert [row for row in told["ids"][1] if row >= tokens["<|pad|>"]] == [tokens[t] for t in added]
    assert told["without special"][1] == "xyz<fim>"


def test_transformers_loads_the_merged_model_with_its_tokenizer(family: Family) -> None:
    case = CASES["task arithmetic, union, tokens"]
    alignment = family.alignment(case)
    out = family.root / "whole"
    out.mkdir()
    files: dict[str, bytes] = output_files(alignment, family.files)
    files["config.json"] = config_with_vocabulary(family.files[0]["config.json"], alignment)
    for path, data in files.items():
        (out / path).write_bytes(data)
    weights = dict(family.weights[0])
    for name in EMBEDDINGS:
        weights[name] = case.merge(family.aligned(alignment, name)).bfloat16()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    told = json.loads(run(TOKENIZERS, "load", out))
    assert told == {"rows": alignment.rows, "missing": [], "unexpected": [], "mismatched": []}
