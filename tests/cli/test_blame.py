"""`mergegit blame`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from mergegit import Repository
from mergegit.merge.mergekit_yaml import read_documents
from tests.cli.conftest import CommandLine

KEYS = ["ref", "commit", "method", "base", "experts", "tensors"]
TENSOR = [
    "name", "kind", "layer", "origin", "base_tensor", "parameters", "blocks", "blocks_at_base",
    "note", "contributions",
]  # fmt: skip
CONTRIBUTION = [
    "ref", "commit", "tensor", "weight", "share", "energy", "exact", "caveats", "ways",
]  # fmt: skip


def test_a_line_for_each_expert_and_for_each_kind(layers: CommandLine) -> None:
    assert layers.ok("blame", "merged").lines == [
        "merged: merged by task_arithmetic of math, code on base base",
        "  expert  weight  share  by way of  read",
        "  code         1  99.9%             all of 15 blocks",
        "  math       0.5   0.1%             all of 15 blocks",
        "  0 of 15 blocks as in the base",
        "  kind                             tensors  as in the base  made of",
        "  lm_head                                1            0.0%  code 99.9%, math 0.1%",
        "  model.embed_tokens                     1            0.0%  code 99.9%, math 0.1%",
        "  model.layers.*.input_layernorm         4            0.0%  code 99.9%, math 0.1%",
        "  model.layers.*.mlp.up_proj             4            0.0%  code 99.9%, math 0.1%",
        "  model.layers.*.self_attn.q_proj        4            0.0%  code 99.9%, math 0.1%",
        "  model.norm                             1            0.0%  code 99.9%, math 0.1%",
    ]


def test_one_tensor_in_detail(layers: CommandLine) -> None:
    lines = layers.ok("blame", "merged", "layers.2.mlp").lines
    name = "model.layers.2.mlp.up_proj.weight"
    assert [re.sub(r" [0-9a-f]{10}:", ":", line) for line in lines[1:]] == [
        f"  {name}: merged by task_arithmetic on base; 0 of 1 block as in the base",
        "  normalize=false, lambda=1, lines=0",
        "  code: weight 1, share 99.9%",
        "    weight=1",
        "    read: all of 1 block",
        "  math: weight 0.5, share 0.1%",
        "    weight=0.5",
        "    read: all of 1 block",
    ]


def test_copies_name_the_tensor_and_the_layer_that_they_are_from(layers: CommandLine) -> None:
    text = """
merge_method: passthrough
slices:
  - sources: [{model: math, layer_range: [0, 2]}]
  - sources: [{model: code, layer_range: [1, 4]}]
"""
    (document,) = read_documents(text)
    with Repository.open(layers.directory) as repository:
        recipe = repository.recipe_of(document)
        repository.merge(repository.plan(recipe), branch="stacked")
    lines = layers.ok("blame", "stacked", "layers.3.mlp").lines
    assert "  model.layers.3.mlp.up_proj.weight: copied from code, unread; " in lines[1]
    assert lines[-1] == "    its model.layers.2.mlp.up_proj.weight"
    kinds = layers.ok("blame", "stacked").lines
    assert any(line.endswith("copied from math, copied from code") for line in kinds)


def test_a_merge_of_a_merge_says_the_way(mergegit: CommandLine) -> None:
    mergegit.ok(
        "merge", "merged", "prose", "--base", "base", "-p", "merged.weight=0.5", "-b", "all"
    )
    lines = mergegit.ok("blame", "all").lines
    math = next(line for line in lines if line.startswith("  math"))
    assert math.split()[1] == "0.25"
    assert math.split()[3] == "merged"
    detail = mergegit.ok("blame", "all", "model.norm").out
    assert "by way of merged, weight 0.25" in detail
    assert "read by merged: " in detail


def test_weights_that_are_not_exact_are_marked_and_explained(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "math", "code", "--method", "ties", "-p", "density=0.5", "-b", "voted")
    lines = mergegit.ok("blame", "voted").lines
    assert any(line.startswith("  math") and "~" in line for line in lines)
    assert "  ~: weights of math are not exact: ties is more than a weighted sum" in lines


def test_a_heat_map_of_shares(layers: CommandLine) -> None:
    lines = layers.ok("blame", "merged", "--map").lines
    at = lines.index("  share of code in model.layers.N:")
    assert lines[at + 1 : at + 5] == [
        "                    0 1 2 3",
        "  input_layernorm   ████████",
        "  mlp.up_proj       ████████",
        "  self_attn.q_proj  ████████",
    ]
    at = lines.index("  share of math in model.layers.N:")
    assert lines[at + 2] == "  input_layernorm   ░░░░░░░░"
    assert lines[-1] == "  share: · none  ░ to 25%  ▒ to 50%  ▓ to 75%  █ to 100%"


def test_a_commit_that_is_no_merge(mergegit: CommandLine) -> None:
    lines = mergegit.ok("blame", "math").lines
    assert lines[0] == "math: added on base base, and no merge"
    assert any(line.split()[-1] == "base" for line in lines[2:])
    assert any(line.split()[-1] == "math" for line in lines[2:])


def test_a_base_that_is_a_merge_is_named(mergegit: CommandLine) -> None:
    mergegit.ok("merge", "prose", "--base", "merged", "-b", "further")
    lines = mergegit.ok("blame", "further").lines
    assert lines[-1] == "  the base merged is a merge itself: `mergegit blame merged`"


def test_json(mergegit: CommandLine, commit_of: Callable[[str], str]) -> None:
    facts = mergegit.ok("blame", "merged", "--json").json
    assert list(facts) == KEYS
    assert facts["commit"] == commit_of("merged")
    assert facts["base"] == {"ref": "base", "commit": commit_of("base"), "is_merge": False}
    assert [expert["ref"] for expert in facts["experts"]] == ["math", "code"]
    assert all(list(tensor) == TENSOR for tensor in facts["tensors"])
    norm = next(tensor for tensor in facts["tensors"] if tensor["name"] == "model.norm.weight")
    assert norm["origin"] == "merged"
    assert norm["parameters"] == {"normalize": False, "lambda": 1.0, "lines": 0.0}
    for one in norm["contributions"]:
        assert list(one) == CONTRIBUTION
        assert one["exact"]
        (way,) = one["ways"]
        assert list(way) == ["merges", "weight", "parameters", "reads"]
        assert list(way["reads"][0]) == ["whole", "layers", "unread", "free"]
    assert {one["ref"]: one["weight"] for one in norm["contributions"]} == {"math": 0.5, "code": 1}


def test_json_of_a_commit_without_a_base(mergegit: CommandLine) -> None:
    facts = mergegit.ok("blame", "base", "--json").json
    assert (facts["method"], facts["base"], facts["experts"]) == (None, None, [])
    assert {tensor["origin"] for tensor in facts["tensors"]} == {"own"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("nothing",), "'nothing'"), (("merged", "zzz"), "no tensor is called like 'zzz'")],
)
def test_what_is_not_there(arguments: tuple[str, ...], words: str, mergegit: CommandLine) -> None:
    message, hint = mergegit("blame", *arguments).failed()
    assert words in message
    assert hint
