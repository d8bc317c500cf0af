"""`bisect` on real commits and merges, and what is kept of it between commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mergegit import Repository
from mergegit.errors import BadRecipe, Busy, Damaged, NotStarted, UnknownRef
from mergegit.objects import Commit, CommitId
from mergegit.repository.bisecting import Answer, BisectStatus
from mergegit.repository.bisection import Verdict
from mergegit.storage.refs import RefUpdate
from tests.layered import STEPS, make_family
from tests.repository.conftest import AUTHOR

EXPERTS = ("math", "code", "prose")
NAME = "model.norm.weight"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bisecting")
    path = root / "repository"
    with Repository.init(path, author=AUTHOR) as repository:
        for checkpoint in make_family(root / "models"):
            repository.add(checkpoint)
        repository.merge(repository.plan(repository.recipe(EXPERTS)), branch="three")
    return path


@pytest.fixture
def zoo(template: Path, tmp_path: Path) -> Iterator[Repository]:
    """Experts whose merges tell which of them are in it, and ``three``, the merge of all."""
    shutil.copytree(template, tmp_path / "zoo")
    with Repository.open(tmp_path / "zoo", author=AUTHOR) as repository:
        yield repository


def experts_in(directory: Path) -> set[str]:
    """Whose change a checkpoint has: every step is a bit of its own."""
    step = int(load_file(directory / "model.safetensors")[NAME][0]) % 1024
    return {name for name in EXPERTS if step & int(STEPS[name])}


def breaking(*experts: str, seen: list[set[str]] | None = None):  # type: ignore[no-untyped-def]
    """A test that models with all of these experts in them do not pass."""

    def test(directory: Path) -> Verdict:
        found = experts_in(directory)
        if seen is not None:
            seen.append(found)
        return "bad" if set(experts) <= found else "good"

    return test


def silent(status: BisectStatus, answer: Answer | None) -> None:
    pass


def line_of(repository: Repository, length: int) -> list[CommitId]:
    """A branch ``line`` with so many commits, the oldest first."""
    manifest = repository.commit("base").manifest
    made: list[CommitId] = []
    with repository.store.transaction() as transaction:
        for number in range(length):
            commit = Commit(manifest, tuple(made[-1:]), "a", number, f"step {number}")
            made.append(transaction.write_commit(commit))
        transaction.publish(RefUpdate("heads", "line", None, made[-1], "a", 0, "for a test"))
    return made


# -- experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", EXPERTS)
def test_the_expert_that_breaks_a_test_is_found(zoo: Repository, culprit: str) -> None:
    bisection = zoo.bisection()
    bisection.start("three", experts=True)
    refs = zoo.branches()
    seen: list[set[str]] = []
    found = bisection.run(breaking(culprit, seen=seen), told=silent)
    assert found.is_found
    assert found.experts is not None
    assert found.names_of(found.experts) == culprit
    assert (found.is_certain, found.is_groundless) == (True, False)
    assert seen[:2] == [set(EXPERTS), set()]
    assert zoo.branches() == refs
    assert not zoo.store.location.temporary.joinpath("model").exists()


def test_experts_that_break_it_together_are_found(zoo: Repository) -> None:
    bisection = zoo.bisection()
    bisection.start("three", experts=True)
    found = bisection.run(breaking("math", "prose"), told=silent)
    assert found.experts == (0, 2)


def test_no_expert_is_to_blame_where_the_base_breaks_it(zoo: Repository) -> None:
    bisection = zoo.bisection()
    bisection.start("three", experts=True)
    found = bisection.run(lambda _: "bad", told=silent)
    assert (found.is_groundless, found.experts) == (True, ())
    bisection.reset()
    bisection.start("three", experts=True)
    found = bisection.run(lambda _: "good", told=silent)
    assert (found.is_groundless, found.experts) == (True, None)


def test_of_each_expert_the_same_is_read(zoo: Repository) -> None:
    """Half-read experts are half read in merges of fewer of them, too."""
    zoo.merge(zoo.plan(zoo.recipe(EXPERTS), budget="40%"), branch="less")
    bisection = zoo.bisection()
    bisection.start("less", experts=True)
    made: list[str] = []

    def test(directory: Path) -> Verdict:
        if experts_in(directory):
            made.append((directory / "README.md").read_text())
        return "bad" if "code" in experts_in(directory) else "good"

    bisection.run(test, told=silent)
    whole = zoo.saved_plan("less").plan
    share = whole.experts[1].planned_bytes / whole.experts[1].raw_bytes
    alone = next(card for card in made if "# code\n" in card)
    assert f"| {share:.1%} |" in alone


def test_trials_are_collected(zoo: Repository) -> None:
    bisection = zoo.bisection()
    before = zoo.status()
    bisection.start("three", experts=True)
    bisection.run(breaking("code"), told=silent)
    assert zoo.status().blocks > before.blocks
    zoo.gc(expire=0, grace=0)
    assert zoo.status().blocks == before.blocks
    assert zoo.fsck().is_clean


def test_by_hand_it_goes_the_same_way(zoo: Repository, tmp_path: Path) -> None:
    bisection = zoo.bisection()
    status = bisection.start("three", experts=True)
    number = 0
    while not status.is_found:
        target = tmp_path / str(number)
        assert zoo.bisection().checkout(target) == status
        verdict: Verdict = "bad" if "prose" in experts_in(target) else "good"
        status = zoo.bisection().answer(verdict)
        number += 1
    assert status.experts == (2,)
    with pytest.raises(BadRecipe, match="has found"):
        bisection.answer("good")
    with pytest.raises(BadRecipe, match="has found"):
        bisection.checkout(tmp_path / "more")


def test_among_experts_no_commit_is_named(zoo: Repository) -> None:
    bisection = zoo.bisection()
    bisection.start("three", experts=True)
    with pytest.raises(BadRecipe, match="no commit is asked for"):
        bisection.answer("good", "math")


def test_merges_that_the_method_does_not_make_are_skipped(zoo: Repository) -> None:
    recipe = zoo.recipe(EXPERTS, method="model_stock")
    if recipe.method.models[0] < 2:
        pytest.skip("the method makes merges of one")
    zoo.merge(zoo.plan(recipe), branch="stock")
    bisection = zoo.bisection()
    bisection.start("stock", experts=True)
    seen: list[int] = []

    def test(directory: Path) -> Verdict:
        seen.append(1)
        return "bad" if len(seen) != 2 else "good"

    found = bisection.run(test, told=silent)
    assert found.experts is not None
    assert len(found.experts) == 2
    assert not found.is_certain


@pytest.mark.parametrize(
    ("ref", "why"),
    [("math", "math is no merge"), ("slerped", "no expert of slerped can be left out"),
     ("one", "one is a merge of math alone")],
)  # fmt: skip
def test_what_has_no_experts_to_look_among(zoo: Repository, ref: str, why: str) -> None:
    slerp = zoo.recipe(["math", "code"], method="slerp", parameters={"t": 0.5})
    zoo.merge(zoo.plan(slerp), branch="slerped")
    zoo.merge(zoo.plan(zoo.recipe(["math"])), branch="one")
    with pytest.raises(BadRecipe, match=why):
        zoo.bisection().start(ref, experts=True)
    with pytest.raises(NotStarted):
        zoo.bisection().status()


# -- commits ---------------------------------------------------------------------------------------


def test_the_first_bad_commit_is_found(zoo: Repository) -> None:
    """Among the ancestors of a merge are the experts, each a commit."""
    zoo.cherry_pick("code", onto="three")
    bisection = zoo.bisection()
    bisection.start("three", good=["base"])
    found = bisection.run(breaking("code"), told=silent)
    assert found.found == (zoo.resolve("code"),)
    assert found.is_certain


def test_a_line_is_halved_and_remembered(zoo: Repository) -> None:
    made = line_of(zoo, 9)
    status = zoo.bisection().start("line", good=[made[0].hex()])
    assert (status.left, status.steps, status.commit) == (8, 3, made[4])
    status = zoo.bisection().answer("bad")
    assert status.left == 4
    status = zoo.bisection().answer("good")
    assert status.left == 2
    status = zoo.bisection().answer("good")
    assert (status.is_found, status.found) == (True, (made[4],))
    assert zoo.bisection().status() == status
    assert [answer.verdict for answer in status.answers] == ["bad", "good", "good"]


def test_what_is_known_may_be_said_of_any_commit(zoo: Repository) -> None:
    made = line_of(zoo, 9)
    bisection = zoo.bisection()
    bisection.start("line")
    bisection.answer("good", made[6].hex())
    status = bisection.answer("skip", made[7].hex())
    assert (status.is_found, status.found, status.is_certain) == (True, (made[8], made[7]), False)
    with pytest.raises(BadRecipe, match="a good commit descends from a bad one"):
        bisection.answer("bad", made[2].hex())
    assert bisection.status() == status
    with pytest.raises(BadRecipe, match="is no ancestor of line"):
        bisection.answer("bad", "math")
    with pytest.raises(UnknownRef):
        bisection.answer("bad", "nothing")


def test_a_good_commit_need_not_be_an_ancestor(zoo: Repository) -> None:
    status = zoo.bisection().start("three", good=["code"])
    assert status.left == 3  # neither code nor base
    zoo.bisection().reset()
    zoo.bisection().start("three")
    assert zoo.bisection().answer("good", "code").left == 3
    with pytest.raises(BadRecipe, match="descends from a bad one"):
        zoo.bisection().answer("good", "three")


# -- between commands ------------------------------------------------------------------------------


def test_there_is_one_at_a_time(zoo: Repository) -> None:
    bisection = zoo.bisection()
    for verb in (bisection.status, lambda: bisection.answer("good")):
        with pytest.raises(NotStarted):
            verb()
    bisection.start("three")
    with pytest.raises(Busy):
        bisection.start("math")
    assert bisection.reset()
    assert not bisection.reset()
    bisection.start("math")


def test_a_test_that_fails_to_test_leaves_it_as_it_was(zoo: Repository) -> None:
    bisection = zoo.bisection()
    bisection.start("three", experts=True)

    def test(directory: Path) -> Verdict:
        if experts_in(directory):
            return "bad"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bisection.run(test, told=silent)
    status = bisection.status()
    assert [answer.verdict for answer in status.answers] == ["bad"]
    assert bisection.run(breaking("math"), told=silent).experts == (0,)


def test_what_was_kept_is_checked_when_it_is_read(zoo: Repository) -> None:
    zoo.bisection().start("three")
    path = zoo.store.location.root / "bisect"
    kept = json.loads(path.read_text())
    for wrong in ("{", json.dumps({**kept, "version": 9}), json.dumps({**kept, "bad": "zz"}),
                  json.dumps({**kept, "answers": [{"verdict": "perhaps"}]})):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(Damaged):
            zoo.bisection().status()
    path.write_text(json.dumps({**kept, "bad": "01" * 32}))
    with pytest.raises(UnknownRef, match="not in the repository any more"):
        zoo.bisection().status()
    assert zoo.bisection().reset()
