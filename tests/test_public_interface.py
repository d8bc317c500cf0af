"""The names that others may build on: adding, renaming or losing one is a decision."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mergegit
from mergegit import MergegitError, Repository, errors
from mergegit._version import VERSION
from tests.families import Family

ERRORS = [
    "NotARepository", "UnusableRepository", "UnknownRef", "AmbiguousRef", "InvalidName",
    "RefConflict", "Busy", "NotStarted", "BadCommand", "BadCheckpoint", "Mismatch", "BadRecipe",
    "BadBudget", "NoBase",
    "NotFinite", "BadTarget", "Damaged", "NoSpace", "Unconfirmed",
]  # fmt: skip

VERBS = {
    "init": ["directory", "author", "threads"],
    "open": ["path", "author", "threads"],
    "close": [],
    "resolve": ["ref"],
    "commit": ["ref"],
    "manifest": ["ref"],
    "tensor": ["tensor_id"],
    "object": ["text"],
    "log": ["ref"],
    "branches": [],
    "tags": [],
    "reflog": ["ref"],
    "status": [],
    "fsck": ["progress"],
    "rebuild_catalog": ["path"],
    "create_branch": ["name", "ref"],
    "create_tag": ["name", "ref"],
    "delete_branch": ["name"],
    "delete_tag": ["name"],
    "rename_branch": ["old", "new"],
    "reset_branch": ["name", "ref"],
    "add": ["checkpoint", "name", "base", "no_base", "message", "encoding", "progress"],
    "recipe": [
        "experts", "base", "method", "parameters", "seed", "dtype", "ignore_extra",
        "allow_nonfinite", "tokenizer_source", "chat_template",
    ],
    "recipe_of": ["document", "merged", "given", "progress"],
    "planner": ["recipe", "progress"],
    "plan": ["recipe", "budget", "keep", "anew", "progress"],
    "plan_curve": ["recipe", "progress"],
    "saved_plan": ["text"],
    "read_plan": ["path"],
    "merge": ["plan", "branch", "message", "encoding", "progress"],
    "checkout": [
        "ref", "directory", "merged", "update", "dtype", "shard_size", "progress",
    ],
    "extract_lora": ["expert", "directory", "rank", "base", "dtype", "progress"],
    "load": ["ref"],
    "diff": ["old", "new", "against", "patterns", "weights", "files", "exact", "progress"],
    "similarity": ["refs", "base", "patterns", "exact", "progress"],
    "blame": ["ref", "patterns", "progress"],
    "cherry_pick": [
        "expert", "onto", "scale", "budget", "branch", "message", "encoding", "ignore_extra",
        "allow_nonfinite", "dry_run", "progress",
    ],
    "revert": [
        "expert", "out_of", "scale", "budget", "branch", "message", "encoding", "ignore_extra",
        "allow_nonfinite", "dry_run", "progress",
    ],
    "rebase": [
        "expert", "onto", "budget", "branch", "message", "encoding", "ignore_extra",
        "allow_nonfinite", "dry_run", "progress",
    ],
    "merge_unnamed": ["plan", "message", "progress"],
    "bisection": [],
    "replay": ["ref", "progress"],
    "distance": ["ref", "budget", "progress"],
    "verify": ["ref", "replay", "progress"],
    "repack": ["refs", "base", "encoding", "progress"],
    "gc": ["expire", "grace", "dry_run", "wait", "progress"],
}  # fmt: skip


def test_the_package_exports_what_it_says() -> None:
    assert sorted(mergegit.__all__) == ["MergegitError", "Repository", "__version__"]
    for name in mergegit.__all__:
        assert hasattr(mergegit, name)
    assert mergegit.__version__ == VERSION


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+([ab.]\w+)?", VERSION)


def test_the_verbs_of_a_repository_and_what_they_take() -> None:
    found = {}
    for name, member in inspect.getmembers(Repository):
        if not name.startswith("_") and callable(member):
            found[name] = [p for p in inspect.signature(member).parameters if p != "self"]
    assert found == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_options_of_verbs_are_given_by_name(verb: str) -> None:
    """What may be left out and is no subject of the verb can't be mistaken by its place."""
    by_place = [
        p.name
        for p in inspect.signature(getattr(Repository, verb)).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    assert len(by_place) <= 2


def test_every_error_is_a_mergegit_error_with_a_hint() -> None:
    found = [
        name
        for name, member in vars(errors).items()
        if isinstance(member, type)
        and issubclass(member, MergegitError)
        and member is not MergegitError
    ]
    assert found == ERRORS
    for name in found:
        error = getattr(errors, name)("what failed", hint="what to do")
        assert (str(error), error.message, error.hint) == (
            "what failed",
            "what failed",
            "what to do",
        )
        assert error.exit_code == 1
        with pytest.raises(TypeError):
            getattr(errors, name)("what failed")


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"[├└]── (\w+) ", errors.__doc__ or "")
    assert drawn == ERRORS


def test_errors_are_raised_where_they_are_known_and_nowhere_else() -> None:
    """Every kind of error has a use."""
    package = Path(mergegit.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "errors.py")
    for name in ERRORS:
        assert re.search(rf"\b{name}\(", code), f"nothing raises {name}"


def test_the_package_says_what_it_is_typed() -> None:
    assert (Path(mergegit.__file__).parent / "py.typed").exists()


def test_importing_the_package_is_light() -> None:
    script = "import sys, mergegit; print(*sorted({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("text", [mergegit.__doc__, Repository.__doc__])
def test_the_examples_run(
    text: str, tmp_path: Path, tiny_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, path in zip(("llama", "llama-math", "llama-code"), (
        tiny_family.base, *tiny_family.experts
    ), strict=False):  # fmt: skip
        shutil.copytree(path, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with Repository.init("models") as repository:
        repository.add("llama")
        repository.add("llama-code")
    lines = [line for line in inspect.cleandoc(text).splitlines() if line[:4] in ("    ", "")]
    exec(textwrap.dedent("\n".join(lines)), {"mergegit": mergegit, "Repository": Repository})
    assert (tmp_path / "merged" / "model.safetensors").is_file()
