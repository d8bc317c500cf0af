"""`mergegit methods`."""

from __future__ import annotations

import pytest

from mergegit.merge.methods import METHODS
from tests.cli.conftest import CommandLine


def entry(lines: list[str], name: str) -> list[str]:
    """What is printed of one method."""
    method = METHODS[name]
    at = lines.index(f"{name}: {method.summary}")
    return lines[at : at + 4 + len(method.parameters)]


def test_every_method_with_its_parameters(nowhere: CommandLine) -> None:
    lines = nowhere.ok("methods").lines
    for method in METHODS.values():
        _, paper, merges, needs, *parameters = entry(lines, method.name)
        assert method.paper in paper
        assert merges.endswith(method.merges.value)
        assert needs == f"  needs {method.needs.value}"
        for line, parameter in zip(parameters, method.parameters, strict=True):
            assert f"-p {parameter.name}=" in line
            assert parameter.help in line
            assert ("each expert may have its own" in line) == parameter.per_expert
    assert len(lines) == sum(4 + len(method.parameters) for method in METHODS.values())


@pytest.mark.parametrize(
    ("name", "models"), [("slerp", "2"), ("ties", "1 or more"), ("model_stock", "2 or more")]
)
def test_how_many_models_it_merges(nowhere: CommandLine, name: str, models: str) -> None:
    assert f"  merges {models}: " in entry(nowhere.ok("methods").lines, name)[2]


def test_a_parameter_without_a_default_is_required(nowhere: CommandLine) -> None:
    lines = nowhere.ok("methods").lines
    (t,) = entry(lines, "slerp")[4:]
    assert t.startswith("  -p t=...  ")
    assert t.endswith("; required")
    assert entry(lines, "ties")[4].startswith("  -p weight=1.0  ")
    assert not any("required" in line for line in entry(lines, "ties"))


def test_json(nowhere: CommandLine) -> None:
    methods = nowhere.ok("methods", "--json").json
    assert [method["name"] for method in methods] == list(METHODS)
    for method in methods:
        assert list(method) == [
            "name", "summary", "paper", "additive", "needs", "merges", "models", "parameters",
        ]  # fmt: skip
        for parameter in method["parameters"]:
            assert list(parameter) == ["name", "default", "per_expert", "help"]


def test_json_says_what_a_method_merges_and_needs(nowhere: CommandLine) -> None:
    methods = {method["name"]: method for method in nowhere.ok("methods", "--json").json}
    slerp = methods["slerp"]
    assert (slerp["needs"], slerp["merges"], slerp["models"]) == ("survey", "from_first", [2, 2])
    assert slerp["parameters"][0]["default"] is None
    ties = methods["ties"]
    assert (ties["needs"], ties["merges"], ties["models"]) == ("statistics", "deltas", [1, None])
