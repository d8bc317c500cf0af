"""The same recipe of models with other tokens, by mergekit and by mergegit, from YAML to a model
that transformers loads.

Runs where MERGEKIT_PYTHON names an interpreter that has mergekit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergegit.checkpoint.vocabulary import read_vocabulary
from tests.cli.conftest import CommandLine
from tests.merge.reference import ulps
from tests.mergekit.test_vocabulary import (
    EMBEDDINGS,
    MODELS,
    TOKENIZERS,
    files_of,
    pytestmark,
    run,
    save_weights,
)

__all__ = ["pytestmark"]

MERGEKIT = Path(__file__).with_name("recipes_driver.py")
WEIGHTS = {"base": 0.4, "chat": 0.9, "code": -0.3, "long": 0.5}
TEXT = "the model <|im_start|>merged <tool>"


@dataclass(frozen=True, slots=True)
class Case:
    """One recipe, of MODELS but the base where ``has_base``; ``rest`` are more of its keys."""

    method: str
    source: str
    has_base: bool = True
    rest: Mapping[str, Any] = field(default_factory=dict)

    def recipe(self) -> str:
        """As both read it, in the directory of the models; JSON is YAML."""
        more = {"density": 1} if self.method == "ties" else {}
        tokenizer = self.rest or {"tokenizer_source": self.source}
        return json.dumps(
            {
                "merge_method": self.method,
                **({"base_model": "base"} if self.has_base else {}),
                "models": [
                    {"model": name, "parameters": {"weight": WEIGHTS[name], **more}}
                    for name in MODELS
                    if name != "base" or self.method == "linear"
                ],
                **tokenizer,
                "dtype": "float32",
                "out_dtype": "bfloat16",
            }
        )


TOKENS = {
    "<|im_end|>": {"source": "code", "force": True},
    "<tool>": {"source": {"kind": "model_token", "model": "chat", "token": "<think>"}},
    "<|new|>": {"source": {"kind": "model_token", "model": "base", "token_id": 17}},
}
CASES = {
    f"{method}, {source}": Case(method, source)
    for method in ("linear", "task_arithmetic", "ties")
    for source in ("union", "base", "long")
} | {
    "linear without a base": Case("linear", "union", has_base=False),
    "task_arithmetic, tokens": Case(
        "task_arithmetic", "union", rest={"tokenizer": {"source": "union", "tokens": TOKENS}}
    ),
    "ties, padded": Case(
        "ties", "union", rest={"tokenizer": {"source": "union", "pad_to_multiple_of": 64}}
    ),
}


@dataclass(frozen=True, slots=True)
class Results:
    """Directories of what both made, by case."""

    root: Path
    ours: dict[str, Path]
    theirs: dict[str, Path]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("vocabulary-merges")
    run(TOKENIZERS, "make", root)
    for name in MODELS:
        save_weights(root / name, len(read_vocabulary(files_of(root / name), name).tokens))
    asked: list[str] = []
    mergegit = CommandLine(root)
    mergegit.ok("init")
    mergegit.ok("add", "base")
    for name in MODELS[1:]:
        mergegit.ok("add", name, "--base", "base")
    for number, case in enumerate(CASES.values()):
        (root / f"{number}.yml").write_text(case.recipe())
        asked += [f"{number}.yml", f"theirs-{number}"]
        mergegit.ok("merge", "-c", f"{number}.yml", "-b", f"merged-{number}")
        mergegit.ok("checkout", f"merged-{number}", f"ours-{number}")
    run(MERGEKIT, *asked, cwd=root)
    places = range(len(CASES))
    return Results(
        root,
        {name: root / f"ours-{n}" for name, n in zip(CASES, places, strict=True)},
        {name: root / f"theirs-{n}" for name, n in zip(CASES, places, strict=True)},
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def rounding_of_means(root: Path, case: Case, tokens: Sequence[str], key: str) -> torch.Tensor:
    """How far apart rows may be for which the mean of several models' stands in somewhere: there
    mergekit goes on with float32, and an aligned tensor has its model's dtype."""
    models = MODELS if case.has_base else MODELS[1:]
    ids = {name: read_vocabulary(files_of(root / name), name).tokens for name in models}
    rows = {name: read(root / name)[key].float() for name in models}
    allowed = torch.zeros(len(tokens), rows[models[0]].shape[1])
    for place, token in enumerate(tokens):
        have = [name for name in models if token in ids[name]]
        if len(models) > len(have) > 1 and not (case.has_base and "base" in have):
            terms = torch.stack([rows[name][ids[name][token]] for name in have]).abs()
            allowed[place] = 2.0**-9 * terms.amax(dim=0)
    return allowed


@pytest.mark.parametrize("name", CASES)
def test_both_make_the_same_of_each_token(results: Results, name: str) -> None:
    case, ours, theirs = CASES[name], read(results.ours[name]), read(results.theirs[name])
    assert ours.keys() == theirs.keys()
    vocabularies = [
        read_vocabulary(files_of(path[name]), "merged").tokens
        for path in (results.ours, results.theirs)
    ]
    assert vocabularies[0].keys() == vocabularies[1].keys()
    tokens = list(vocabularies[0])
    at = [torch.tensor([own[token] for token in tokens]) for own in vocabularies]
    for key in ours:
        one, other = ours[key], theirs[key]
        assert one.shape == other.shape
        # Where terms cancel, a unit is finer than the last bits of float32's sums.
        allowed = torch.tensor(2.0**-20)
        if key in EMBEDDINGS:
            one, other = one[at[0]], other[at[1]]
            allowed = allowed + rounding_of_means(results.root, case, tokens, key)
        near = (one.double() - other.double()).abs() <= allowed
        units = ulps(one, other).masked_fill(near, 0)
        assert int(units.max()) <= 1, key
        # Results half way between two values are rounded by float32's last bit.
        apart = float((units > 0).double().mean())
        assert apart <= (0.04 if case.method == "linear" else 1e-3), key


def test_transformers_goes_on_after_a_text_with_the_new_tokens(results: Results) -> None:
    names = [name for name in CASES if name != "ties, padded"]
    directories = [str(made[name]) for name in names for made in (results.ours, results.theirs)]
    told = json.loads(run(TOKENIZERS, "generate", TEXT, *directories))
    for name, ours, theirs in zip(names, told[::2], told[1::2], strict=True):
        assert ours["wrong"] == [], name
        assert ours["rows"] == theirs["rows"], name
        assert ours["tokens"] == theirs["tokens"], name
        assert len(ours["ids"]) == len(ours["tokens"]) + 8
        assert ours["text"] == theirs["text"], name
    union = told[0]
    assert [token for token in union["tokens"] if token.startswith("<")] == [
        "<|im_start|>", "<tool>",
    ]  # fmt: skip


def test_the_padded_model_has_as_many_rows(results: Results) -> None:
    rows = {
        len(read(made["ties, padded"])[EMBEDDINGS[0]]) for made in (results.ours, results.theirs)
    }
    assert len(rows) == 1
    assert rows.pop() % 64 == 0
