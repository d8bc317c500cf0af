"""`mergegit bisect`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mergegit import Repository
from tests.cli.conftest import AUTHOR, CommandLine
from tests.layered import STEPS, make_family

Of = Callable[[str], str]

SCRIPT = """
import sys
from pathlib import Path
from safetensors import safe_open
with safe_open(Path(sys.argv[1], "model.safetensors"), "np") as file:
    step = int(file.get_tensor("model.norm.weight")[0]) % 1024
print("tested", step)
sys.exit(1 if step & {step} else 0)
"""
EXPERTS = ("math", "code", "prose")


@pytest.fixture(scope="module")
def three_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bisect")
    with Repository.init(root / "place", author=AUTHOR) as repository:
        for checkpoint in make_family(root / "models"):
            repository.add(checkpoint)
        repository.merge(repository.plan(repository.recipe(EXPERTS)), branch="three")
    return root / "place"


@pytest.fixture
def three(three_template: Path, tmp_path: Path) -> CommandLine:
    """Commands where ``three`` is a merge whose weights tell which experts are in it."""
    shutil.copytree(three_template, tmp_path / "three")
    return CommandLine(tmp_path / "three")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """A script that fails where a checkpoint has the change of an expert."""

    def write(expert: str) -> str:
        path = tmp_path / "test model.py"
        path.write_text(SCRIPT.replace("{step}", str(int(STEPS[expert]))))
        return str(path)

    return write


def test_the_expert_that_breaks_a_test(three: CommandLine, script: Callable[[str], str]) -> None:
    lines = three("bisect", "start", "three", "--experts").lines
    assert lines == [
        "bisecting: 3 experts may be to blame, about 4 tests to go",
        "next: three, the whole merge",
    ]
    result = three("bisect", "run", sys.executable, script("code"))
    assert result.code == 0
    assert result.lines[:4] == [
        "testing three, the whole merge ...", "  bad", "testing the base alone ...", "  good",
    ]  # fmt: skip
    assert result.lines[-1] == "code breaks the test by itself"
    assert three.ok("bisect", "status").lines == result.lines[-1:]
    three.ok("bisect", "reset")
    assert three("bisect", "status").failed() == (
        "no bisection is under way", "begin one with `mergegit bisect start REF`",
    )  # fmt: skip


def test_json(three: CommandLine, script: Callable[[str], str], commit_id: Of) -> None:
    begun = three.ok("bisect", "start", "three", "--experts", "--json").json
    assert begun["experts"] == list(EXPERTS)
    assert (begun["found"], begun["left"], begun["answers"]) == (False, 3, [])
    facts = three("bisect", "run", "--json", sys.executable, script("prose")).json
    assert (facts["found"], facts["certain"], facts["groundless"]) == (True, True, False)
    assert facts["experts"] == ["prose"]
    assert facts["tests"] == facts["answers"]
    assert facts["tests"][:2] == [
        {"experts": list(EXPERTS), "verdict": "bad"}, {"experts": [], "verdict": "good"},
    ]  # fmt: skip
    three.ok("bisect", "reset")
    begun = three.ok("bisect", "start", "three", "--good", "base", "--json").json
    assert (begun["mode"], begun["bad"], begun["left"]) == ("commits", commit_id("three"), 4)
    facts = three("bisect", "run", "--json", sys.executable, script("prose")).json
    assert facts["commits"] == [commit_id("prose")]


@pytest.fixture
def commit_id(three: CommandLine) -> Of:
    def of(ref: str) -> str:
        with Repository.open(three.directory) as repository:
            return repository.resolve(ref).hex()

    return of


def test_by_hand(three: CommandLine, tmp_path: Path, commit_id: Of) -> None:
    result = three("bisect", "start", "three", "--good", "base")
    assert result.lines[0] == "bisecting: 4 commits may be to blame, about 2 tests to go"
    assert "mergegit bisect checkout DIR" in result.err
    written = three.ok("bisect", "checkout", tmp_path / "first").out
    assert f"written to {tmp_path / 'first'}" in written
    assert (tmp_path / "first" / "model.safetensors").is_file()
    for _ in range(3):
        result = three.ok("bisect", "good")
    assert result.lines == [
        f"the first bad commit is {commit_id('three')[:10]} merge math, code, prose by "
        "task_arithmetic"
    ]
    message, hint = three("bisect", "bad").failed()
    assert message == "the bisection has found what it looked for"
    assert "reset" in hint


def test_what_can_not_be_tested_is_named(three: CommandLine, commit_id: Of) -> None:
    three("bisect", "start", "three", "--good", "base")
    for ref in ("math", "code"):
        three.ok("bisect", "skip", ref)
    lines = three.ok("bisect", "good", "prose").lines
    assert lines[0] == "the first bad commit is one of these, as the others can't be tested:"
    assert [line.split()[0] for line in lines[1:]] == [
        commit_id(ref)[:10] for ref in ("three", "code", "math")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "-c", 'test ! -e "{}/model.safetensors"'],
        ['test ! -e "$1/model.safetensors"'],
        ["sh", "-c", 'test ! -e "$0/model.safetensors"'],
    ],
)
def test_a_command_gets_the_directory_as_it_wants_it(three: CommandLine, words: list[str]) -> None:
    three("bisect", "start", "three", "--experts")
    result = three("bisect", "run", *words)
    assert result.lines[-1] == "the base fails the test by itself: no expert is to blame"


def test_a_test_that_passes_everything(three: CommandLine) -> None:
    three("bisect", "start", "three", "--experts")
    result = three("bisect", "run", "true")
    assert result.lines[-1] == "three passes the test: no expert is to blame"


def test_a_code_of_125_skips(three: CommandLine) -> None:
    three("bisect", "start", "three", "--good", "base")
    result = three("bisect", "run", 'exit 125 # "$1"')
    assert result.code == 0
    assert result.lines[1::2][:3] == ["  skip"] * 3
    assert "is one of these" in result.out


@pytest.mark.parametrize(
    ("words", "code"), [(['exit 127 # "$1"'], 127), (['exit 200 # "$1"'], 200),
                        (['kill -9 $$ # "$1"'], -9)],
)  # fmt: skip
def test_what_tests_nothing_ends_the_run_and_loses_nothing(
    three: CommandLine, words: list[str], code: int
) -> None:
    three("bisect", "start", "three")
    three.ok("bisect", "good", "math")
    before = three.ok("bisect", "status", "--json").json
    result = three("bisect", "run", *words)
    assert result.code == 1
    assert f"ended with {code}: it did not test anything" in result.err
    assert three.ok("bisect", "status", "--json").json == before


def test_a_command_that_is_not_there(three: CommandLine) -> None:
    three("bisect", "start", "three")
    result = three("bisect", "run", "no-such-command")
    assert result.code == 1
    assert "no-such-command can't be run" in result.err


def test_options_behind_the_command_are_its_own(three: CommandLine) -> None:
    three("bisect", "start", "three", "--experts")
    result = three("bisect", "run", "sh", "-c", "exit 1", "--json", "-h")
    assert result.lines[-1] == "the base fails the test by itself: no expert is to blame"


def test_wrong_usage(three: CommandLine) -> None:
    message, _ = three("bisect", "start", "three", "--experts", "--good", "base").failed(2)
    assert "--good goes with commits" in message
    three("bisect", "run").failed(2)
    three("bisect", "perhaps").failed(2)
    three("bisect", "start", "nothing").failed()
    message, _ = three("bisect", "start", "math", "--experts").failed()
    assert message == "math is no merge"
    three("bisect", "start", "three")
    message, hint = three("bisect", "start", "three").failed()
    assert message == "a bisection is under way"
    assert hint == "end it with `mergegit bisect reset` first"
    three.ok("bisect", "reset")
    assert "no bisection was under way" in three("bisect", "reset").err


@pytest.mark.parametrize(
    "name", ["start", "good", "bad", "skip", "status", "checkout", "run", "reset"]
)
def test_every_part_explains_itself(three: CommandLine, name: str) -> None:
    assert three.ok("bisect", name, "--help").out.startswith(f"Usage: mergegit bisect {name} ")


def test_every_part_takes_a_directory(three: CommandLine, nowhere: CommandLine) -> None:
    nowhere("bisect", "start", "three", "-C", three.directory)
    assert (
        three.ok("bisect", "status").lines
        == nowhere.ok("bisect", "status", "-C", three.directory).lines
    )
    nowhere.ok("bisect", "reset", "-C", three.directory)
