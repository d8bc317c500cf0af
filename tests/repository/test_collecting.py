"""`gc`: what refs and their logs reach stays and the rest goes, wherever it is interrupted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mergegit import Repository
from mergegit.errors import BadRecipe, Busy, Damaged, UnknownRef
from mergegit.objects import Commit, CommitId
from mergegit.repository.collecting import EXPIRE, GRACE
from mergegit.repository.rewriting import copy_records, records_of
from mergegit.storage.lease import Lease
from mergegit.storage.pack import Encoding
from mergegit.storage.prepared import raw_block
from mergegit.storage.trash import Trash
from tests.families import Family
from tests.repository.damage import flip
from tests.trees import fingerprint, tree_of

NOW = 2_000_000_000.0
DAY = 24 * 60 * 60


def at(repository: Repository, seconds: float) -> None:
    repository._clock = lambda: seconds


def collect_all(repository: Repository) -> Any:
    return repository.gc(expire=0, grace=0)


def packs(repository: Repository) -> dict[str, int]:
    """The packs on disk, with what they take there."""
    return {
        path.stem: path.stat().st_blocks * 512
        for path in repository.store.location.packs.glob("*.pack")
    }


def trash(repository: Repository) -> set[str]:
    return {path.stem for path in repository.store.location.trash.glob("*.pack")}


def commits(repository: Repository) -> set[bytes]:
    store = repository.store
    return {i for i, _ in store.catalog.objects() if isinstance(store.object(i), Commit)}


def check(repository: Repository, family: Family, tmp_path: Path, *refs: str) -> None:
    """Everything is sound, and the checkpoints of these branches come back byte for byte."""
    assert repository.fsck().problems == []
    sources = {path.name: path for path in (family.base, *family.experts)}
    for ref in refs:
        target = tmp_path / f"out-{ref}"
        repository.checkout(ref, target)
        assert tree_of(target) == tree_of(sources[ref])
        shutil.rmtree(target)


def share_packs(repository: Repository) -> None:
    """Copy all records into as few packs as there are roles."""
    store = repository.store
    drop = {}
    with store.transaction() as transaction:
        for number in store.catalog.packs():
            records = records_of(store, number)
            for _ in copy_records(store, transaction, number, records, lambda *_: True):
                pass
            drop[number] = [header for header, _ in records]
        transaction.publish(drop=drop)
    store.forget()


# -- what goes, and when --------------------------------------------------------------------------


def test_where_everything_is_needed_nothing_changes(tiny: Repository) -> None:
    before = fingerprint(tiny.store.location.root)
    report = tiny.gc()
    assert (report.trashed, report.removed, report.forgotten_moves, report.freed_bytes) == (0,) * 4
    assert report.commits == 4
    assert fingerprint(tiny.store.location.root) == before


def test_a_deleted_branch_gives_its_space_back(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    before = packs(tiny)
    tiny.add(tiny_family.base, name="other", no_base=True)
    tiny.delete_branch("other")
    prose = tiny.resolve("prose")
    tiny.delete_branch("prose")
    taken = sum(packs(tiny).values())
    report = collect_all(tiny)
    assert report.freed_bytes == taken - sum(packs(tiny).values()) > 0
    assert report.removed_bytes - report.written_bytes == report.freed_bytes
    assert sum(packs(tiny).values()) < sum(before.values())
    assert trash(tiny) == set()
    assert prose not in commits(tiny)
    check(tiny, tiny_family, tmp_path, "base", "math", "code")


def test_a_checkpoint_is_added_again_after_it_was_collected(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    tiny.delete_branch("prose")
    collect_all(tiny)
    report = tiny.add(tiny_family.experts[2])
    assert report.is_new
    assert report.new_bytes > 0
    check(tiny, tiny_family, tmp_path, "base", "math", "code", "prose")


def test_a_deleted_branch_can_be_brought_back_until_its_log_expires(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    at(tiny, NOW)
    prose = tiny.resolve("prose")
    tiny.delete_branch("prose")
    at(tiny, NOW + EXPIRE - 1)
    tiny.gc(grace=0)
    assert tiny.create_branch("prose", "prose@{1}") == prose
    check(tiny, tiny_family, tmp_path, "prose")
    tiny.delete_branch("prose")
    at(tiny, NOW + 2 * EXPIRE)
    tiny.gc(grace=0)
    assert prose not in commits(tiny)
    with pytest.raises(UnknownRef, match="no log"):
        tiny.resolve("prose@{1}")


def test_where_a_branch_stood_stays_until_its_log_expires(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    at(tiny, NOW)
    math = tiny.resolve("math")
    tiny.reset_branch("math", "code")
    tiny.gc(grace=0)
    assert tiny.resolve("math@{1}") == math
    at(tiny, NOW + EXPIRE)
    report = tiny.gc(grace=0)
    assert report.forgotten_moves > 0
    assert math not in commits(tiny)
    assert tiny.reflog("math")[0].reason == "reset to code"
    check(tiny, tiny_family, tmp_path, "base", "code", "prose")


def test_packs_stay_in_the_trash_for_the_grace_period(tiny: Repository) -> None:
    at(tiny, NOW)
    tiny.delete_branch("prose")
    before = set(packs(tiny))
    report = tiny.gc(expire=0)
    gone = before - set(packs(tiny))
    assert gone
    assert trash(tiny) == gone
    assert (report.trashed, report.removed) == (len(gone), 0)
    at(tiny, NOW + GRACE - 1)
    report = tiny.gc()
    assert trash(tiny) == gone
    assert report.trash_bytes > 0
    at(tiny, NOW + GRACE)
    report = tiny.gc()
    assert trash(tiny) == set()
    assert (report.removed, report.trash_bytes) == (len(gone), 0)
    assert report.freed_bytes == report.removed_bytes > 0


def test_what_was_trashed_can_be_put_back_by_hand(tiny: Repository) -> None:
    prose = tiny.resolve("prose")
    tiny.delete_branch("prose")
    tiny.gc(expire=0)
    location = tiny.store.location
    tiny.close()
    for path in location.trash.glob("*.pack"):
        path.rename(location.packs / path.name)
    Repository.rebuild_catalog(location.root.parent)
    with Repository.open(location.root.parent) as again:
        again.create_branch("prose", prose.hex())
        assert again.fsck().problems == []


def test_a_tag_keeps_its_commit(tiny: Repository, tiny_family: Family, tmp_path: Path) -> None:
    tiny.create_tag("v1", "prose")
    tiny.delete_branch("prose")
    collect_all(tiny)
    assert tiny.resolve("v1") in commits(tiny)
    assert tiny.fsck().problems == []


def test_a_merge_keeps_its_parents_and_its_plan(
    merged: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    weights = merged.load("merged")
    parents = merged.commit("merged").parents
    for name in ("base", "math", "code", "prose"):
        merged.delete_branch(name)
    collect_all(merged)
    assert list(merged.branches()) == ["merged"]
    commit = merged.commit("merged")
    assert commit.plan is not None
    assert merged.store.plan(commit.plan).base == parents[0]
    assert {i for i, _ in merged.log()} <= commits(merged)
    assert merged.fsck().problems == []
    for name, tensor in merged.load("merged").items():
        assert tensor.equal(weights[name])
    merged.create_branch("math", "merged^2")
    plan = merged.plan(merged.recipe(["merged^2", "merged^3"]), budget="50%")
    assert merged.merge(plan, branch="again").is_new


def test_the_result_of_a_merge_survives_a_collection_right_after(tiny: Repository) -> None:
    report = tiny.merge(tiny.plan(tiny.recipe(["math", "code"])), branch="both")
    weights = tiny.load("both")
    collect_all(tiny)
    assert tiny.resolve("both") == report.commit
    assert all(tensor.equal(weights[name]) for name, tensor in tiny.load("both").items())
    assert tiny.fsck().problems == []


def test_a_plan_that_no_commit_names_stays_while_it_can_be_carried_out(tiny: Repository) -> None:
    plan = tiny.plan(tiny.recipe(["math", "prose"]))
    with tiny.store.transaction() as transaction:
        transaction.write_plan(plan.plan)
        transaction.publish()
    collect_all(tiny)
    assert tiny.saved_plan(plan.id.hex()).plan == plan.plan
    tiny.delete_branch("prose")
    collect_all(tiny)
    with pytest.raises(UnknownRef):
        tiny.saved_plan(plan.id.hex())


def test_statistics_go_with_either_tensor_and_stay_with_both(tiny: Repository) -> None:
    def pairs() -> set[tuple[bytes, bytes]]:
        return set(tiny.store.catalog.all_statistics())

    left = {t for ref in ("base", "math", "code") for t in tiny.manifest(ref).tensor_ids()}
    kept = {(tensor, base) for tensor, base in pairs() if {tensor, base} <= left | {bytes(32)}}
    assert kept < pairs()
    tiny.delete_branch("prose")
    collect_all(tiny)
    assert pairs() == kept


def test_what_deltas_are_relative_to_stays(repository: Repository, tiny_family: Family) -> None:
    """An expert stored as deltas from a base that no commit reaches any more."""
    base, expert = tiny_family.base, tiny_family.experts[0]
    repository.add(base)
    repository.add(expert, name="expert", no_base=True)
    repository.repack(["expert"], base="base")
    forms = [f for _, forms in repository.store.catalog.blocks() for f in forms]
    assert any(form.encoding is Encoding.DELTA for form in forms)
    repository.delete_branch("base")
    weights = repository.load("expert")
    collect_all(repository)
    assert len(commits(repository)) == 1
    assert repository.fsck().problems == []
    assert all(t.equal(weights[name]) for name, t in repository.load("expert").items())


def test_plain_copies_for_an_expert_that_is_gone_go_too(
    repository: Repository, family: Family, tmp_path: Path
) -> None:
    """A commit stored as deltas whose blocks were stored plainly when it served as a base."""
    repository.add(family.base)
    repository.add(family.experts[0], base="base")

    def stored() -> int:
        blocks = repository.store.catalog.blocks()
        return sum(form.nbytes for _, forms in blocks for form in forms)

    before = stored()
    repository.add(family.experts[1], base="math")
    repository.delete_branch("code")
    both = [b for b, forms in repository.store.catalog.blocks() if len(forms) > 1]
    assert both
    collect_all(repository)
    assert stored() == before
    check(repository, family, tmp_path, "base", "math")
    repository.add(family.experts[1], base="math")
    check(repository, family, tmp_path, "base", "math", "code")


def test_a_second_copy_of_a_block_goes(tiny: Repository, tiny_family: Family) -> None:
    """Two commands that ran at once may have stored the same twice."""
    block = tiny.store.tensor(next(iter(tiny.manifest("base").tensors.values()))).block(0)
    data = tiny.store.read_block(block)
    before = set(packs(tiny))
    with tiny.store.transaction() as transaction:
        transaction.write_block(raw_block(block, "BF16", data))
        transaction.publish()
    assert len(packs(tiny)) == len(before) + 1
    collect_all(tiny)
    assert set(packs(tiny)) == before
    assert tiny.store.read_block(block) == data


def test_a_pack_of_which_little_is_needed_is_rewritten(
    tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    location = tiny.store.location
    share_packs(tiny)
    assert len(packs(tiny)) < 9
    tiny.delete_branch("prose")
    tiny.delete_branch("code")
    before = {path.name: path.stat().st_size for path in location.packs.glob("*.pack")}
    report = collect_all(tiny)
    after = {path.name: path.stat().st_size for path in location.packs.glob("*.pack")}
    assert report.rewritten >= 5
    assert sum(after.values()) < 0.75 * sum(before.values())
    check(tiny, tiny_family, tmp_path, "base", "math")
    tiny.close()
    Repository.rebuild_catalog(location.root.parent)
    with Repository.open(location.root.parent) as again:
        check(again, tiny_family, tmp_path, "base", "math")


def test_packs_that_a_command_left_behind_are_trashed(tiny: Repository) -> None:
    left = tiny.store.location.packs / f"{'0' * 32}.pack"
    left.write_bytes(b"half a command's work")
    report = tiny.gc()
    assert report.trashed == 1
    assert trash(tiny) == {left.stem}
    assert tiny.fsck().notes == []


def test_collecting_again_finds_nothing(merged: Repository) -> None:
    merged.delete_branch("merged")
    merged.delete_branch("code")
    collect_all(merged)
    before = fingerprint(merged.store.location.root)
    report = collect_all(merged)
    assert (report.trashed, report.removed, report.forgotten_moves, report.freed_bytes) == (0,) * 4
    assert fingerprint(merged.store.location.root) == before


def test_a_pack_in_the_trash_that_the_catalog_knows_comes_back(tiny: Repository) -> None:
    """As where an old copy of the catalog was put back."""
    before = set(packs(tiny))
    name = min(before)
    Trash(tiny.store.location).put([name], NOW)
    collect_all(tiny)
    assert set(packs(tiny)) == before
    assert tiny.fsck().problems == []


# -- a dry run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expire", "grace"), [(0, 0), (0, GRACE), (EXPIRE, 0)])
def test_a_dry_run_changes_nothing_and_tells_what_would_be(
    expire: float, grace: float, merged: Repository
) -> None:
    merged.delete_branch("merged")
    merged.delete_branch("prose")
    merged.gc(expire=0)
    merged.delete_branch("code")
    before = fingerprint(merged.store.location.root)
    told = merged.gc(expire=expire, grace=grace, dry_run=True)
    assert fingerprint(merged.store.location.root) == before
    done = merged.gc(expire=expire, grace=grace)
    assert told.dry_run
    assert not done.dry_run
    for field in (
        "commits", "forgotten_moves", "trashed", "trashed_bytes", "rewritten", "removed",
        "removed_bytes", "trash_bytes",
    ):  # fmt: skip
        assert getattr(told, field) == getattr(done, field), field


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", ["base", "math"])
def test_where_a_block_is_missing_nothing_is_collected(ref: str, tiny: Repository) -> None:
    """One that others are relative to, or one that none is."""
    tiny.delete_branch("prose")
    location = tiny.store.location
    own = {block for tensor in tiny.manifest(ref).tensors.values()
           for block in tiny.store.tensor(tensor).blocks()}  # fmt: skip
    if ref != "base":
        for tensor in tiny.manifest("base").tensors.values():
            own -= set(tiny.store.tensor(tensor).blocks())
    place = tiny.store.catalog.forms(min(own))[0].places[0]
    pack = tiny.store.catalog.pack(place.pack)
    assert pack is not None
    lost = location.packs / f"{pack.name}.pack"
    root = location.root.parent
    tiny.close()
    lost.rename(root / "lost")
    Repository.rebuild_catalog(root)
    with Repository.open(root) as again:
        before = fingerprint(location.root)
        with pytest.raises(Damaged, match=r"nothing is collected: block .* is missing"):
            collect_all(again)
        assert fingerprint(location.root) == before


def test_what_only_a_log_names_and_is_lost_can_be_forgotten(tiny: Repository) -> None:
    missing = CommitId(b"\x07" * 32)
    tiny.store.refs.update(tiny._ref_update("heads", "gone", None, missing, "by hand"))
    tiny.store.refs.update(tiny._ref_update("heads", "gone", missing, None, "by hand"))
    with pytest.raises(Damaged, match="commit 0707070707 is missing") as caught:
        tiny.gc()
    assert "--expire 0" in caught.value.hint
    tiny.gc(expire=0)
    assert tiny.fsck().problems == []


def test_a_damaged_pack_is_not_rewritten(tiny: Repository) -> None:
    tiny.delete_branch("prose")
    tiny.delete_branch("code")
    share_packs(tiny)
    for path in tiny.store.location.packs.glob("*.pack"):
        flip(path, path.stat().st_size - 200)
    before = fingerprint(tiny.store.location.root)
    with pytest.raises(Damaged):
        collect_all(tiny)
    assert fingerprint(tiny.store.location.root) == before


def test_a_pack_that_is_gone_already_leaves_the_catalog_with_the_rest(tiny: Repository) -> None:
    """Nothing may be thought to be stored that is not: it would not be stored again."""
    before = set(tiny.store.catalog.packs())
    tiny.delete_branch("prose")
    report = tiny.gc(expire=0, dry_run=True)
    assert report.trashed > 1
    needed = {commit for commit, _ in tiny.log()}
    for number in before:
        pack = tiny.store.catalog.pack(number)
        assert pack is not None
        path = tiny.store.location.packs / f"{pack.name}.pack"
        keys = {i for i, place in tiny.store.catalog.objects() if place.pack == number}
        if keys & commits(tiny) and not keys & needed:
            tiny.store.forget()
            path.unlink()
            break
    else:
        raise AssertionError("no pack of objects that nothing needs")
    collect_all(tiny)
    numbers = set(tiny.store.catalog.packs())
    for _, place in tiny.store.catalog.objects():
        assert place.pack in numbers
    assert tiny.fsck().problems == []


# -- interrupted ----------------------------------------------------------------------------------


class Interrupted(Exception):
    """Stands for the end of the process."""


STEPS = ("open", "rename", "replace", "unlink", "fsync", "utime", "mkdir", "rmdir")


@contextmanager
def interrupted_at(point: int) -> Iterator[list[str]]:
    """Lets so many calls that write happen, and no more; the calls are listed."""
    calls: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return call(*args, **kwargs)
            if len(calls) >= point:
                raise Interrupted(name)
            calls.append(name)
            return call(*args, **kwargs)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield calls


def test_interrupted_at_any_step_it_loses_nothing(
    merged: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    """Each step in turn is where the process ends; the next run brings it to the same end."""
    start, work = tmp_path / "start", tmp_path / "work"
    for name in ("merged", "prose"):
        merged.delete_branch(name)
    merged.gc(expire=0)
    merged.reset_branch("math", "math~0^2")
    merged.close()
    shutil.copytree(merged.store.location.root.parent, start)
    expected = None
    point = 0
    while True:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)
        repository = Repository.open(work)
        try:
            with interrupted_at(point) as calls:
                collect_all(repository)
        except Interrupted:
            pass
        finished = len(calls) < point
        repository.close()
        with Repository.open(work) as again:
            assert again.fsck().problems == [], f"before call {point}"
            for ref, path in (("code", tiny_family.experts[1]), ("math", tiny_family.experts[0])):
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
                again.checkout(ref, tmp_path / "out")
                assert tree_of(tmp_path / "out") == tree_of(path)
            collect_all(again)
            assert again.fsck().problems == []
            end = (set(packs(again)), trash(again), commits(again), again.reflog())
            temporary = os.listdir(again.store.location.temporary)
        assert temporary == []
        expected = expected or end
        assert end == expected, f"before call {point}"
        if finished:
            break
        point += 1
    assert point > 20


# -- beside other commands ------------------------------------------------------------------------

WRITER = """
import sys
from mergegit import Repository
from mergegit.storage.transaction import Transaction

publish = Transaction.publish

def slow(*arguments, **options):
    print("about to publish", flush=True)
    sys.stdin.readline()
    publish(*arguments, **options)

Transaction.publish = slow
with Repository.open(sys.argv[1], threads=1) as repository:
    if sys.argv[2] == "add":
        repository.add(sys.argv[3], name="new")
    else:
        repository.merge(repository.plan(repository.recipe(["math", "code"])), branch="new")
"""


@contextmanager
def writing(root: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that adds or merges, and stops just before it publishes."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, root, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "about to publish\n"
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(60) == 0


@pytest.mark.parametrize("verb", ["add", "merge"])
def test_what_a_running_command_found_stored_is_not_collected(
    verb: str, tiny: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    """The command found the blocks of a deleted branch, and is about to name them again."""
    tiny.delete_branch("prose")
    root = tiny.store.location.root.parent
    before = set(packs(tiny))
    with writing(root, verb, tiny_family.experts[2]) as process:
        with pytest.raises(Busy, match=f"process {process.pid}"):
            collect_all(tiny)
        assert set(packs(tiny)) == before
        finish(process)
    collect_all(tiny)
    assert tiny.fsck().problems == []
    assert "new" in tiny.branches()
    if verb == "add":
        tiny.checkout("new", tmp_path / "out")
        assert tree_of(tmp_path / "out") == tree_of(tiny_family.experts[2])


def test_a_command_that_was_killed_is_in_nobodys_way(tiny: Repository, tiny_family: Family) -> None:
    tiny.delete_branch("prose")
    with writing(tiny.store.location.root.parent, "merge") as process:
        process.kill()
        process.wait()
    collect_all(tiny)
    assert os.listdir(tiny.store.location.temporary) == []
    assert tiny.fsck().problems == []


def test_a_command_that_starts_meanwhile_waits(tiny: Repository, tiny_family: Family) -> None:
    root = tiny.store.location.root.parent
    script = (
        "import sys, mergegit; mergegit.Repository.open(sys.argv[1]).create_branch('new', 'math')"
    )
    with Lease(tiny.store.location).exclusive():
        process = subprocess.Popen([sys.executable, "-c", script, root])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        assert "new" not in tiny.branches()
    assert process.wait(60) == 0
    assert tiny.resolve("new") == tiny.resolve("math")


@pytest.mark.parametrize("verb", ["repack", "rebuild"])
def test_what_replaces_packs_or_the_catalog_is_refused_while_a_command_writes(
    verb: str, tiny: Repository
) -> None:
    before = fingerprint(tiny.store.location.root)
    root = tiny.store.location.root.parent
    verbs: dict[str, Callable[[], object]] = {
        "repack": lambda: tiny.repack(encoding="raw"),
        "rebuild": lambda: Repository.rebuild_catalog(root),
    }
    with Lease(tiny.store.location).shared(), pytest.raises(Busy):
        verbs[verb]()
    assert fingerprint(tiny.store.location.root) == before


@pytest.mark.parametrize("verb", ["add", "merge"])
def test_the_lease_is_held_before_anything_is_looked_up(
    verb: str, tiny: Repository, tiny_family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny.plan(tiny.recipe(["math", "code"]))

    def refused(*_: object, **__: object) -> None:
        with pytest.raises(Busy), Lease(tiny.store.location).exclusive():
            pass
        raise Interrupted(verb)

    monkeypatch.setattr("mergegit.checkpoint.directory.inspect", refused)
    monkeypatch.setattr("mergegit.repository.planning.gather", refused)
    verbs: dict[str, Callable[[], object]] = {
        "add": lambda: tiny.add(tiny_family.experts[0]),
        "merge": lambda: tiny.merge(plan),
    }
    with pytest.raises(Interrupted):
        verbs[verb]()


def test_a_reader_goes_on_beside_a_collection(
    merged: Repository, tiny_family: Family, tmp_path: Path
) -> None:
    """A checkout has begun; then its packs are rewritten and moved to the trash."""
    root = merged.store.location.root.parent
    begun = []

    def collect_once(*_: object) -> None:
        if not begun:
            begun.append(True)
            with Repository.open(root) as other:
                other.repack(encoding="raw")
                for name in ("merged", "math", "prose"):
                    other.delete_branch(name)
                collect_all(other)

    merged.checkout("code", tmp_path / "out", progress=collect_once)
    assert begun
    assert tree_of(tmp_path / "out") == tree_of(tiny_family.experts[1])


def test_a_plan_whose_commits_were_collected_is_refused(tiny: Repository) -> None:
    plan = tiny.plan(tiny.recipe(["math", "prose"]))
    tiny.delete_branch("prose")
    collect_all(tiny)
    with pytest.raises(BadRecipe, match="which is not in the repository"):
        tiny.merge(plan)
