"""`mergegit methods`."""

from __future__ import annotations

from mergegit.merge.methods import METHODS
from tests.cli.conftest import CommandLine


def test_every_method_with_its_parameters(nowhere: CommandLine) -> None:
    lines = nowhere.ok("methods").lines
    for method in METHODS.values():
        at = lines.index(f"{method.name}: {method.summary}")
        assert method.paper in lines[at + 1]
        for place, parameter in enumerate(method.parameters):
            assert f"-p {parameter.name}=" in lines[at + 2 + place]
            assert parameter.help in lines[at + 2 + place]


def test_json(nowhere: CommandLine) -> None:
    methods = nowhere.ok("methods", "--json").json
    assert [method["name"] for method in methods] == list(METHODS)
    for method in methods:
        assert list(method) == ["name", "summary", "paper", "additive", "parameters"]
        for parameter in method["parameters"]:
            assert list(parameter) == ["name", "default", "per_expert", "help"]
