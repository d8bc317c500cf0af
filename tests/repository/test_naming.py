"""From what a person types to a commit or another object."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mergegit import Repository
from mergegit.errors import AmbiguousRef, Damaged, UnknownRef
from mergegit.objects import Commit, Manifest, Plan, Tensor
from tests.repository.prefixes import two_commits_that_share_a_prefix


def test_a_branch_a_tag_and_an_id_name_a_commit(merged: Repository) -> None:
    commit = merged.resolve("math")
    assert merged.create_tag("v1", "math") == commit
    assert merged.resolve("v1") == commit
    assert merged.resolve(commit.hex()) == commit
    assert merged.resolve(commit.hex()[:8]) == commit


def test_a_branch_comes_before_a_tag_of_the_same_name(merged: Repository) -> None:
    merged.create_tag("math", "base")
    assert merged.resolve("math") == merged.branches()["math"]


def test_names_may_have_slashes(merged: Repository) -> None:
    commit = merged.create_branch("release/2024/best", "math")
    assert merged.resolve("release/2024/best") == commit
    assert merged.resolve("release/2024/best~1") == merged.resolve("base")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("merged", []),
        ("merged~0", []),
        ("merged^0", []),
        ("merged~", [0]),
        ("merged~1", [0]),
        ("merged^", [0]),
        ("merged^1", [0]),
        ("merged^2", [1]),
        ("merged^3", [2]),
        ("merged^2^", [1, 0]),
        ("merged^2~1", [1, 0]),
        ("merged^2^2", [1, 1]),
        ("merged^2^2~1", [1, 1, 0]),
        ("merged^3~1^0", [2, 0]),
    ],
)
def test_suffixes_walk_to_parents_as_in_git(
    text: str, path: Sequence[int], merged: Repository
) -> None:
    commit = merged.resolve("merged")
    for parent in path:
        commit = merged.store.commit(commit).parents[parent]
    assert merged.resolve(text) == commit


@pytest.mark.parametrize("text", ["merged~2", "merged^4", "base~1", "base^", "merged^2~9"])
def test_beyond_the_history_is_said_so(text: str, merged: Repository) -> None:
    with pytest.raises(UnknownRef, match=r"goes beyond the history: commit .* has"):
        merged.resolve(text)
    with pytest.raises(UnknownRef, match="goes beyond the history"):
        merged.object(text)


def test_where_a_branch_stood_some_moves_ago(merged: Repository) -> None:
    now, before = merged.resolve("math"), merged.reflog("math")[0].old
    assert before is not None
    assert merged.resolve("math@{0}") == now
    assert merged.resolve("math@{1}") == before
    merged.reset_branch("math", "base")
    assert [merged.resolve(f"math@{{{n}}}") for n in range(3)] == [
        merged.resolve("base"), now, before,
    ]  # fmt: skip


def test_suffixes_may_follow(merged: Repository) -> None:
    parents = merged.commit("math@{0}").parents
    assert merged.resolve("math@{0}^2") == parents[1]
    assert merged.resolve("math@{0}~1^0") == parents[0]


def test_a_deleted_branch_is_brought_back(merged: Repository) -> None:
    commit = merged.resolve("merged")
    merged.delete_branch("merged")
    assert merged.create_branch("merged", "merged@{1}") == commit
    assert merged.resolve("merged@{0}") == merged.resolve("merged@{2}") == commit


def test_where_a_branch_was_not_there_is_no_commit(merged: Repository) -> None:
    with pytest.raises(UnknownRef, match=r"merged@\{1\} is no commit: merged was not there then"):
        merged.resolve("merged@{1}")
    merged.delete_branch("merged")
    with pytest.raises(UnknownRef, match=r"merged@\{0\} is no commit"):
        merged.resolve("merged@{0}")


def test_beyond_a_log_is_said_so(merged: Repository) -> None:
    with pytest.raises(UnknownRef, match="beyond the log of math, which has 2 moves") as caught:
        merged.resolve("math@{3}")
    assert caught.value.hint == "`mergegit reflog math` shows them"
    with pytest.raises(UnknownRef, match=r"which has 1 move$"):
        merged.resolve("code@{2}")


def test_what_never_was_has_no_log(merged: Repository) -> None:
    with pytest.raises(UnknownRef, match="there is no log of a branch or tag 'mat'") as caught:
        merged.resolve("mat@{1}")
    assert "math" in caught.value.hint


def test_a_tag_has_a_log_too(merged: Repository) -> None:
    commit = merged.create_tag("v1", "math")
    merged.delete_tag("v1")
    assert merged.resolve("v1@{1}") == commit


@pytest.mark.parametrize(
    "text", ["math@", "math@{}", "math@{-1}", "math@{x}", "@{1}", "math@{1}@{1}"]
)
def test_what_only_looks_like_a_move_is_no_ref(text: str, merged: Repository) -> None:
    with pytest.raises(UnknownRef):
        merged.resolve(text)


@pytest.mark.parametrize(
    "text", ["", "~1", "^", "merged~x", "merged~1x", "merged^-1", "merged~99999999999999999999"]
)
def test_what_is_no_ref_at_all_is_said_so(text: str, merged: Repository) -> None:
    with pytest.raises(UnknownRef, match="is not a ref"):
        merged.resolve(text)


def test_a_long_way_back_ends_at_once(merged: Repository) -> None:
    with pytest.raises(UnknownRef, match="beyond"):
        merged.resolve("merged~999999999")


@pytest.mark.parametrize(
    "text", ["../heads/math", "/etc/passwd", "math/", "a\0b", ".", "..", "release", "math/x"]
)
def test_a_path_is_no_name(text: str, merged: Repository) -> None:
    merged.create_branch("release/best", "math")
    with pytest.raises(UnknownRef):
        merged.resolve(text)


def test_an_unknown_name_is_answered_with_a_close_one(merged: Repository) -> None:
    with pytest.raises(UnknownRef) as caught:
        merged.resolve("mathh")
    assert caught.value.message == "there is no branch, tag or commit 'mathh'"
    assert caught.value.hint == "did you mean math?"


def test_where_none_is_close_all_are_listed(merged: Repository) -> None:
    with pytest.raises(UnknownRef) as caught:
        merged.resolve("qqq")
    assert caught.value.hint == "there are base, code, math, merged, prose"


def test_in_an_empty_repository_the_hint_is_to_add(repository: Repository) -> None:
    with pytest.raises(UnknownRef) as caught:
        repository.resolve("llama")
    assert "mergegit add" in caught.value.hint


def test_a_prefix_has_four_characters_at_least(merged: Repository) -> None:
    commit = merged.resolve("math")
    with pytest.raises(UnknownRef):
        merged.resolve(commit.hex()[:3])
    with pytest.raises(UnknownRef):
        merged.resolve(commit.hex() + "0")


def test_a_prefix_that_commits_share_is_ambiguous(merged: Repository) -> None:
    first, second = two_commits_that_share_a_prefix(merged)
    with pytest.raises(AmbiguousRef, match="is the beginning of 2 commits") as caught:
        merged.resolve(first.hex()[:4])
    assert first.hex()[:8] in caught.value.message
    assert second.hex()[:8] in caught.value.message
    assert caught.value.hint == "give more characters"
    assert merged.resolve(first.hex()[:12]) == first


def test_any_object_has_an_id_that_names_it(merged: Repository) -> None:
    commit = merged.commit("merged")
    assert commit.plan is not None
    manifest = merged.store.manifest(commit.manifest)
    tensor_id = next(iter(manifest.tensors.values()))
    for object_id, kind in (
        (merged.resolve("merged"), Commit),
        (commit.manifest, Manifest),
        (commit.plan, Plan),
        (tensor_id, Tensor),
    ):
        assert merged.object(object_id.hex()[:16]) == (object_id, merged.store.object(object_id))
        assert isinstance(merged.store.object(object_id), kind)


def test_an_object_that_is_no_commit_is_no_ref(merged: Repository) -> None:
    with pytest.raises(UnknownRef):
        merged.resolve(merged.commit("math").manifest.hex())


def test_a_prefix_that_a_commit_and_other_objects_share_names_the_commit(
    merged: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = merged.resolve("base")
    found = [merged.commit("base").manifest, commit]
    monkeypatch.setattr(merged.store.catalog, "objects_with_prefix", lambda *_: found)
    assert merged.object("0123") == (commit, merged.commit("base"))


def test_a_prefix_that_other_objects_share_is_ambiguous(
    merged: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(merged.manifest("base").tensors.values())[:2]
    monkeypatch.setattr(merged.store.catalog, "objects_with_prefix", lambda *_: found)
    with pytest.raises(AmbiguousRef, match="2 objects"):
        merged.object("0123")


def test_a_ref_that_holds_no_id_is_damage(merged: Repository) -> None:
    (merged.store.location.refs / "heads" / "math").write_text("nonsense\n")
    with pytest.raises(Damaged, match="branch math does not hold a commit id"):
        merged.resolve("math")
