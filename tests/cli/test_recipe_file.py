"""Recipe files on the command line: `merge -c`, `plan -c` and `show --recipe`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergegit import Repository
from mergegit.merge.methods import METHODS
from tests.cli.conftest import AUTHOR, CommandLine, Result, run
from tests.layered import STEPS, make_family
from tests.memory import directory_in_memory
from tests.merge.examples import experts_for, needed_parameters
from tests.trees import fingerprint

TIES = """\
# Both of them.
merge_method: ties
base_model: base
models:
  - model: math
    parameters:
      density: [1, 0.5]
  - model: code
"""
SEVERAL = """\
merge_method: passthrough
name: tall
slices:
  - sources: [{model: both, layer_range: [0, 4]}]
  - sources: [{model: soft, layer_range: [2, 4]}]
"""
BOTH = """\
name: both
merge_method: task_arithmetic
base_model: base
models: [{model: math, parameters: {weight: 0.5}}, {model: code, parameters: {weight: 0.5}}]
"""
SOFT = """\
name: soft
merge_method: linear
models: [{model: both}, {model: prose}]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_family(root)
    return root


@pytest.fixture(scope="module")
def template(models: Path) -> Iterator[Path]:
    with directory_in_memory() as path:
        with Repository.init(path, author=AUTHOR) as repository:
            for name in STEPS:
                repository.add(models / name)
        yield path


@pytest.fixture
def place(tmp_path: Path, template: Path) -> Path:
    """A directory with a repository of the family: base, math, code and prose."""
    shutil.copytree(template, tmp_path / "place")
    return tmp_path / "place"


@pytest.fixture
def write(place: Path) -> Writer:
    return Writer(place)


class Writer:
    """Writes recipe files into the directory where commands run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *documents: str, name: str = "recipe.yml") -> str:
        (self.directory / name).write_text("---\n".join(documents))
        return name


def branches(mergegit: CommandLine) -> set[str]:
    return set(mergegit.ok("branch", "--json").json)


def manifest_of(mergegit: CommandLine, ref: str) -> str:
    return str(mergegit.ok("show", ref, "--json").json["manifest"])


def with_input(mergegit: CommandLine, text: str, *arguments: str) -> Result:
    """A command that is handed ``text`` on its standard input."""
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(text.encode()))
    try:
        return mergegit(*arguments)
    finally:
        sys.stdin = before


# -- merge ---------------------------------------------------------------------------------------


def test_a_recipe_is_merged_on_a_branch_named_after_its_models(
    mergegit: CommandLine, write: Writer
) -> None:
    lines = mergegit.ok("merge", "-c", write(TIES)).lines
    assert lines[0].startswith("plan ")
    assert lines[-2].startswith("merged into math+code: ")
    commit = mergegit.ok("show", "math+code", "--json").json
    assert commit["recipe"]["method"] == "ties"
    assert commit["recipe"]["experts"][0]["parameters"]["density"] == [1.0, 0.5]


def test_branch_message_and_budget_go_with_a_recipe(mergegit: CommandLine, write: Writer) -> None:
    options = ("-b", "both", "-m", "by file", "--budget", "30%", "--json")
    report = mergegit.ok("merge", "-c", write(TIES), *options).json
    assert report["branch"] == "both"
    assert 0 < report["read_bytes"] <= report["budget_bytes"]
    assert mergegit.ok("show", "both", "--json").json["message"] == "by file"


def test_a_recipe_means_what_the_same_flags_mean(mergegit: CommandLine, write: Writer) -> None:
    mergegit.ok("merge", "-c", write(TIES), "-b", "by-file")
    flags = ("--method", "ties", "-p", "math.density=[1,0.5]", "-b", "by-flags")
    mergegit.ok("merge", "math", "code", *flags)
    assert manifest_of(mergegit, "by-file") == manifest_of(mergegit, "by-flags")


def test_the_same_recipe_again_does_nothing(mergegit: CommandLine, write: Writer) -> None:
    mergegit.ok("merge", "-c", write(TIES))
    before = fingerprint(mergegit.directory)
    assert mergegit.ok("merge", "-c", "recipe.yml").out.endswith("; nothing to do\n")
    assert fingerprint(mergegit.directory) == before


def test_models_that_are_directories_are_added_first(
    nowhere: CommandLine, models: Path, tmp_path: Path
) -> None:
    nowhere.ok("init")
    for name in ("base", "math", "code"):
        os.symlink(models / name, nowhere.directory / name)
    (nowhere.directory / "recipe.yml").write_text(TIES.replace("model: ", "model: ./"))
    text = (
        (nowhere.directory / "recipe.yml").read_text().replace("base_model: b", "base_model: ./b")
    )
    (nowhere.directory / "recipe.yml").write_text(text)
    nowhere.ok("merge", "-c", "recipe.yml", "-b", "merged")
    assert branches(nowhere) == {"base", "math", "code", "merged"}
    commits = {name: nowhere.ok("show", name, "--json").json for name in branches(nowhere)}
    parents = [commits[name]["commit"] for name in ("base", "math", "code")]
    assert commits["merged"]["parents"] == parents
    nowhere.ok("merge", "-c", "recipe.yml", "-b", "merged")
    assert branches(nowhere) == {"base", "math", "code", "merged"}


def test_a_recipe_may_come_from_standard_input(mergegit: CommandLine) -> None:
    result = with_input(mergegit, TIES, "merge", "-c", "-", "--json")
    assert (result.code, result.err) == (0, "")
    assert mergegit.ok("show", "math+code", "--recipe-given").out == TIES


def test_a_recipe_may_be_piped(place: Path, models: Path) -> None:
    """In a process of its own, where standard input is a real one."""
    (place / "recipe.yml").write_text(TIES)
    with (place / "recipe.yml").open() as stdin:
        done = subprocess.run(
            [sys.executable, "-m", "mergegit", "plan", "-c", "-", "--json"],
            cwd=place, stdin=stdin, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
    assert json.loads(done.stdout)["method"] == "ties"


# -- several recipes -----------------------------------------------------------------------------


def test_every_recipe_of_a_file_is_merged_on_a_branch_of_its_name(
    mergegit: CommandLine, write: Writer
) -> None:
    result = mergegit("merge", "-c", write(SOFT, BOTH, SEVERAL))
    assert result.code == 0
    assert [line.split(":")[0] for line in result.err.splitlines()] == [
        "merged both",
        "merged soft",
    ]
    assert result.lines[-2].startswith("merged into tall: ")
    assert branches(mergegit) == {*STEPS, "both", "soft", "tall"}
    commits = {name: mergegit.ok("show", name, "--json").json for name in branches(mergegit)}
    assert commits["soft"]["parents"][1:] == [commits[n]["commit"] for n in ("both", "prose")]
    assert {commits[n]["commit"] for n in ("both", "soft")} <= set(commits["tall"]["parents"])
    texts = {n: mergegit.ok("show", n, "--recipe-given").out for n in ("both", "soft", "tall")}
    whole = (mergegit.directory / "recipe.yml").read_text()
    assert texts == {"both": f"---\n{BOTH}", "soft": SOFT, "tall": whole}


def test_an_inner_recipe_can_be_merged_again_by_its_text(
    mergegit: CommandLine, write: Writer
) -> None:
    assert mergegit("merge", "-c", write("# To begin with.\n", SOFT, BOTH, SEVERAL)).code == 0
    for name in ("both", "soft"):
        write(mergegit.ok("show", name, "--recipe-given").out, name="again.yml")
        assert "; nothing to do" in mergegit.ok("merge", "-c", "again.yml").out


def test_the_last_recipe_goes_where_the_branch_option_says(
    mergegit: CommandLine, write: Writer
) -> None:
    assert mergegit("merge", "-c", write(BOTH, SOFT, SEVERAL), "-b", "release").code == 0
    assert branches(mergegit) == {*STEPS, "both", "soft", "release"}


def test_a_last_recipe_without_a_name_goes_where_its_models_say(
    mergegit: CommandLine, write: Writer
) -> None:
    last = SEVERAL.replace("name: tall\n", "")
    assert mergegit("merge", "-c", write(BOTH, SOFT, last)).code == 0
    assert branches(mergegit) == {*STEPS, "both", "soft", "both+soft"}


def test_the_budget_holds_for_each_recipe(mergegit: CommandLine, write: Writer) -> None:
    assert mergegit("merge", "-c", write(BOTH, SOFT, SEVERAL), "--budget", "25%").code == 0
    for name in ("both", "soft"):
        plan = mergegit.ok("show", mergegit.ok("show", name, "--json").json["plan"], "--json").json
        assert plan["budget_bytes"] == plan["raw_bytes"] // 4
        assert plan["planned_bytes"] <= plan["budget_bytes"]


def test_a_file_of_several_goes_on_where_it_was_stopped(
    mergegit: CommandLine, write: Writer
) -> None:
    broken = SEVERAL.replace("[2, 4]", "[2, 9]")
    result = mergegit("merge", "-c", write(BOTH, SOFT, broken))
    assert result.code == 1
    assert branches(mergegit) == {*STEPS, "both", "soft"}
    before = mergegit.ok("show", "soft", "--json").json["commit"]
    write(BOTH, SOFT, SEVERAL)
    assert mergegit("merge", "-c", "recipe.yml", "-b", "tall").code == 0
    assert mergegit.ok("show", "soft", "--json").json["commit"] == before


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            (BOTH, SOFT.replace("prose", "tall"), SEVERAL),
            "the recipes name one another in a circle: soft -> tall -> soft",
        ),
        ((BOTH.replace("math", "both"), SOFT), "in a circle: both -> both"),
        ((BOTH, BOTH), "line 6: the recipe is called 'both' like the one on line 1"),
        ((BOTH.replace("name: both\n", ""), SOFT), "line 1: the recipe has no name"),
        ((BOTH, SOFT.replace("prose", "prose, parameters: {wait: 1}")), "no parameter 'wait'"),
    ],
)
def test_files_of_several_that_make_no_sense_are_refused_before_anything_is_merged(
    mergegit: CommandLine, write: Writer, documents: tuple[str, ...], message: str
) -> None:
    before = fingerprint(mergegit.directory / ".mergegit")
    assert message in mergegit("merge", "-c", write(*documents)).failed()[0]
    assert fingerprint(mergegit.directory / ".mergegit") == before


# -- plan ----------------------------------------------------------------------------------------


def test_a_plan_of_a_recipe_merges_nothing(mergegit: CommandLine, write: Writer) -> None:
    report = mergegit.ok("plan", "-c", write(TIES), "--budget", "20%", "--json").json
    assert (report["method"], report["base"]) == ("ties", manifest_base(mergegit))
    assert report["planned_bytes"] <= report["budget_bytes"]
    dry = mergegit.ok("merge", "-c", "recipe.yml", "--budget", "20%", "--dry-run", "--json").json
    assert dry == report
    assert branches(mergegit) == set(STEPS)


def manifest_base(mergegit: CommandLine) -> str:
    return str(mergegit.ok("show", "base", "--json").json["commit"])


def test_a_plan_of_a_recipe_can_be_saved_and_carried_out(
    mergegit: CommandLine, write: Writer
) -> None:
    mergegit.ok("plan", "-c", write(TIES), "--budget", "20%", "--save", "plan.bin")
    mergegit.ok("merge", "--plan", "plan.bin", "-b", "by-plan")
    mergegit.ok("merge", "-c", "recipe.yml", "--budget", "20%", "-b", "by-recipe")
    assert manifest_of(mergegit, "by-plan") == manifest_of(mergegit, "by-recipe")
    assert mergegit.ok("show", "by-plan", "--recipe-given").out == TIES


def test_a_recipe_has_a_curve(mergegit: CommandLine, write: Writer) -> None:
    curve = mergegit.ok("plan", "-c", write(TIES), "--curve", "--json").json
    errors = [point["predicted_error"] for point in curve]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


@pytest.mark.parametrize("command", [("plan",), ("merge", "--dry-run")])
def test_the_last_of_several_is_planned_when_the_others_are_merged(
    mergegit: CommandLine, write: Writer, command: tuple[str, ...]
) -> None:
    write(BOTH, SOFT, SEVERAL)
    message, hint = mergegit(*command, "-c", "recipe.yml").failed()
    assert message == "the last recipe needs both, which is not merged yet"
    assert "merge the recipe both" in hint
    assert branches(mergegit) == set(STEPS)
    assert mergegit("merge", "-c", "recipe.yml").code == 0
    report = mergegit.ok(*command, "-c", "recipe.yml", "--json").json
    assert [expert["ref"] for expert in report["experts"]] == ["both", "soft"]


# -- what does not go together -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--base", "base"),
        ("--method", "ties"),
        ("-p", "weight=1"),
        ("--seed", "3"),
        ("--dtype", "float16"),
        ("--ignore-extra",),
        ("--allow-nonfinite",),
    ],
)
@pytest.mark.parametrize("command", ["merge", "plan"])
def test_flags_that_a_recipe_says_can_not_be_given_beside_it(
    mergegit: CommandLine, write: Writer, command: str, options: tuple[str, ...]
) -> None:
    message, _ = mergegit(command, "-c", write(TIES), *options).failed(2)
    assert message == f"-c says it all; {options[0]} can't change it"


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "-c", "recipe.yml", "math"),
        ("merge", "-c", "recipe.yml", "--plan", "1234"),
        ("plan", "-c", "recipe.yml", "math"),
        ("merge", "-c", "nowhere.yml"),
        ("merge", "-c", "."),
    ],
)
def test_a_recipe_goes_alone_and_is_a_file(
    mergegit: CommandLine, write: Writer, arguments: tuple[str, ...]
) -> None:
    write(TIES)
    mergegit(*arguments).failed(2)
    assert branches(mergegit) == set(STEPS)


BAD = {
    "empty": ("", "the recipe is empty"),
    "no yaml": ("merge_method: [ties", "the recipe is not YAML"),
    "unknown key": (TIES + "densty: 1\n", "line 9: the recipe has an unknown key 'densty'"),
    "unknown key of a model": (
        TIES.replace("  - model: code", "  - model: code\n    weight: 1"),
        "line 9: models[1] has an unknown key 'weight'",
    ),
    "unknown parameter": (
        TIES.replace("density", "densty"), "method ties has no parameter 'densty'",
    ),
    "unknown method": (TIES.replace("ties", "tie"), "there is no method 'tie'"),
    "value out of bounds": (TIES.replace("0.5", "1.5"), "math.density is 1.5; it must be"),
    "gradient over a switch": (
        TIES + "parameters: {normalize: [0, 1]}\n", "normalize is 0.0, not true or false",
    ),
    "too many models": (
        BOTH.replace("task_arithmetic", "slerp").replace("weight: 0.5", "") + "parameters: {t: 1}",
        "slerp merges 2 models, and 3 are named: base, math, code",
    ),
    "unknown model": (TIES.replace("code", "cod"), "there is no branch, tag or commit 'cod'"),
    "hub id": (TIES.replace("code", "meta/code"), "'meta/code' is not in the repository"),
    "layers out of range": (SEVERAL.replace("both", "math").replace("soft", "code").replace(
        "2, 4", "2, 5"), "a slice takes layers [2, 5] of code, which has 4"),
    "layers that are none": (
        SEVERAL.replace("2, 4", "4, 2"), "layer_range is [4, 2], which holds no layer",
    ),
    "layers of different number": (
        "merge_method: linear\nslices:\n  - sources:\n      - {model: math, layer_range: [0, 2]}\n"
        "      - {model: code, layer_range: [0, 3]}\n",
        "has 3 layers in its layer_range, the first source of its slice 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["merge", "plan"])
def test_a_bad_recipe_is_refused_in_one_line_and_changes_nothing(
    mergegit: CommandLine, write: Writer, command: str, name: str
) -> None:
    text, message = BAD[name]
    before = fingerprint(mergegit.directory / ".mergegit")
    said, hint = mergegit(command, "-c", write(text)).failed()
    assert message in said
    assert hint
    assert fingerprint(mergegit.directory / ".mergegit") == before


def test_a_file_that_is_not_text_is_refused(mergegit: CommandLine) -> None:
    (mergegit.directory / "recipe.yml").write_bytes(b"\xff\xfe\x00merge")
    assert mergegit("merge", "-c", "recipe.yml").failed()[0] == "recipe.yml is not text"


def test_parameters_of_one_who_is_no_expert_are_refused(mergegit: CommandLine) -> None:
    message, hint = mergegit("merge", "math", "code", "-p", "prose.weight=1").failed()
    assert message == "parameter 'prose.weight' names 'prose', which is no expert of this merge"
    assert hint == "the experts are math, code"


# -- show ----------------------------------------------------------------------------------------


def test_the_recipe_of_a_merge_is_shown_as_it_was_understood(
    mergegit: CommandLine, write: Writer
) -> None:
    mergegit.ok("merge", "-c", write(TIES), "-b", "both")
    commits = {n: mergegit.ok("show", n, "--json").json["commit"][:16] for n in STEPS}
    assert mergegit.ok("show", "both", "--recipe").out == (
        f"""\
merge_method: ties
base_model: base@{commits["base"]}
models:
  - model: math@{commits["math"]}
    parameters:
      weight: 1
      density: [1, 0.5]
  - model: code@{commits["code"]}
    parameters:
      weight: 1
      density: 1
parameters:
  normalize: true
  lambda: 1
  lines: 0
  rescale: false
"""
    )


def test_a_plan_has_a_recipe_too(mergegit: CommandLine, write: Writer) -> None:
    plan = mergegit.ok("plan", "-c", write(TIES), "--json").json["plan"]
    mergegit.ok("merge", "-c", "recipe.yml", "-b", "both")
    assert mergegit.ok("show", plan, "--recipe").out == mergegit.ok("show", "both", "--recipe").out


def test_a_recipe_file_is_kept_to_the_letter(mergegit: CommandLine, write: Writer) -> None:
    text = f"# Für später: ÄÖÜ, {chr(0x1F600)}\n\n{TIES}\n\n# end\n"
    mergegit.ok("merge", "-c", write(text), "-b", "both")
    assert mergegit.ok("show", "both", "--recipe-given").out == text


def test_there_is_no_recipe_but_of_merges(mergegit: CommandLine) -> None:
    for option in ("--recipe", "--recipe-given"):
        assert mergegit("show", "math", option).failed()[0] == "math is no merge"
    mergegit.ok("merge", "math", "code", "-b", "both")
    message, hint = mergegit("show", "both", "--recipe-given").failed()
    assert message == "both was not made from a recipe file"
    assert "--recipe" in hint


@pytest.mark.parametrize("method", METHODS)
def test_a_shown_recipe_makes_the_same_model_again(mergegit: CommandLine, method: str) -> None:
    experts = experts_for(method, ["math", "code"])
    flags = [f"-p{name}={value}" for name, value in needed_parameters(method).items()]
    options = ("--method", method, "--seed", "5", "--budget", "60%")
    mergegit.ok("merge", *experts, *flags, *options, "-b", "first")
    shown = mergegit.ok("show", "first", "--recipe").out
    result = with_input(
        mergegit, shown, "merge", "-c", "-", "--budget", "60%", "-b", "second", "--json"
    )
    assert (result.code, result.err) == (0, "")
    assert manifest_of(mergegit, "first") == manifest_of(mergegit, "second")
    assert mergegit.ok("show", "second", "--recipe").out == shown


def test_a_shown_recipe_of_slices_makes_the_same_model_again(
    mergegit: CommandLine, write: Writer
) -> None:
    assert mergegit("merge", "-c", write(BOTH, SOFT, SEVERAL)).code == 0
    write(mergegit.ok("show", "tall", "--recipe").out, name="again.yml")
    mergegit.ok("merge", "-c", "again.yml", "-b", "again")
    assert manifest_of(mergegit, "tall") == manifest_of(mergegit, "again")


def test_the_log_shows_slices(mergegit: CommandLine, write: Writer) -> None:
    text = """
merge_method: linear
slices:
  - sources: [{model: math, layer_range: [0, 2]}, {model: code, layer_range: [1, 3]}]
  - sources: [{model: prose, layer_range: [3, 4]}]
"""
    mergegit.ok("merge", "-c", write(text), "-b", "both")
    lines = mergegit.ok("log", "both", "-n", "1").lines
    assert "Recipe:   linear (math[0, 2] + code[1, 3]) prose[3, 4]" in lines


def test_help_tells_of_recipe_files(place: Path) -> None:
    for command in ("merge", "plan"):
        assert "-c, --config FILE.yml" in run(command, "--help", cwd=place).out
