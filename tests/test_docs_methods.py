"""docs/methods.md says of every method what it is, and its example of a new one works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mergegit import Repository
from mergegit.merge.method import Method, Parameter
from mergegit.merge.methods import METHODS
from tests.families import EXPERTS, make_tiny_family

TEXT = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
every_method = pytest.mark.parametrize("name", METHODS)


def written(parameter: Parameter) -> str:
    """A parameter as the page writes it, with its default."""
    match parameter.default:
        case None:
            return f"`{parameter.name}` (required)"
        case bool(switch):
            return f"`{parameter.name}` = {str(switch).lower()}"
        case number:
            return f"`{parameter.name}` = {number:g}"


def row(method: Method) -> str:
    """The line of the table that a method has."""
    low, high = method.models
    models = f"{low} or more" if high is None else f"{low}" if low == high else f"{low} to {high}"
    cells = [
        f"`{method.name}`",
        method.merges.name.lower().replace("_", " "),
        models,
        ", ".join(map(written, method.parameters)) or "none",
        method.needs.name.lower(),
        method.paper,
    ]
    return f"| {' | '.join(cells)} |"


def section(name: str) -> str:
    """What stands below the heading that names a method, its lines joined."""
    sections = re.split(r"^#+ (.*)$", TEXT, flags=re.MULTILINE)
    for heading, body in zip(sections[1::2], sections[2::2], strict=True):
        if name in re.split(r",\s*", heading.replace("`", "")):
            return " ".join(body.split())
    pytest.fail(f"docs/methods.md has no section whose heading names {name}")


@every_method
def test_the_table_has_every_method_as_it_is(name: str) -> None:
    assert row(METHODS[name]) in TEXT.splitlines()


@every_method
def test_every_method_has_a_section_with_its_parameters_and_defaults(name: str) -> None:
    body = section(name)
    for parameter in METHODS[name].parameters:
        assert re.search(rf"{re.escape(written(parameter))}(?![\w])", body), written(parameter)


def test_the_table_names_no_other_methods() -> None:
    named = re.findall(r"^\| `(\w+)` \| ", TEXT, flags=re.MULTILINE)
    assert named == list(dict.fromkeys(named))
    assert set(named) <= set(METHODS)


# -- the example ---------------------------------------------------------------------------------


def example() -> tuple[str, str]:
    """The module and the test below "A method of your own"."""
    here = TEXT.partition("## A method of your own")[2].partition("\n## ")[0]
    module, test = re.findall(r"```python\n(.*?)```", here, flags=re.DOTALL)
    return module, test


def imported(path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Method:
    """The example's method, among all others."""
    module = imported(tmp_path / "median_of_the_docs.py", example()[0], monkeypatch)
    method = module.MEDIAN
    assert isinstance(method, Method)
    monkeypatch.setitem(METHODS, method.name, method)
    return method


def test_the_examples_test_passes(
    median: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = imported(tmp_path / "test_median_of_the_docs.py", example()[1], monkeypatch)
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_examples_method_merges_under_a_budget(median: Method, tmp_path: Path) -> None:
    family = make_tiny_family(tmp_path / "family")
    with Repository.init(tmp_path / "repository") as repository:
        repository.add(family.base)
        for expert in family.experts:
            repository.add(expert)
        recipe = repository.recipe(EXPERTS, method=median.name, parameters={"lambda": 0.5})
        full, half = repository.plan(recipe), repository.plan(recipe, budget="50%")
        assert half.plan.planned_bytes < full.plan.planned_bytes
        merged = [repository.merge(plan, branch=name) for plan, name in ((full, "f"), (half, "h"))]
        assert merged[0].commit != merged[1].commit
