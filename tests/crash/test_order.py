"""The order of writes: what a crash of the machine, and not of the process, may not undo.

A killed process leaves all that it wrote, whatever was synced; so the calls themselves are looked
at. What is published must be durable first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.conftest import Driver
from tests.crash.test_crash import two_experts, two_experts_too_many
from tests.families import Family


class Calls:
    """The calls of one verb, in order."""

    def __init__(self, calls: list[str]) -> None:
        self.all = calls

    def places(self, *words: str) -> list[int]:
        """Where the calls are that begin with these words."""
        wanted = list(words)
        return [n for n, call in enumerate(self.all) if call.split()[: len(wanted)] == wanted]

    def synced_between(self, path: str, low: int, high: int) -> bool:
        return any(low < place < high for place in self.places("fsync", path))

    def written(self) -> dict[str, int]:
        """The last write to each file."""
        return {
            call.split()[1]: place
            for place, call in enumerate(self.all)
            if call.startswith("write") and len(call.split()) > 1
        }


@pytest.fixture(params=["add", "merge", "repack"])
def publishing(
    request: pytest.FixtureRequest, driver: Driver, tiny_family: Family, memory: Path
) -> Calls:
    """The calls of a verb that writes packs."""
    two_experts(driver, tiny_family, memory)
    arguments = {
        "add": {"checkpoint": tiny_family.experts[2]},
        "merge": {"experts": ["math", "code"], "branch": "new"},
        "repack": {"encoding": "raw"},
    }
    verb = request.param
    return Calls(driver.calls(verb, memory, path=memory, **arguments[verb]))


def test_a_pack_is_synced_before_it_has_its_name(publishing: Calls) -> None:
    renames = publishing.places("rename")
    assert renames
    written = publishing.written()
    for place in renames:
        temporary = publishing.all[place].split()[1]
        assert publishing.synced_between(temporary, written[temporary], place)


def test_packs_have_durable_names_before_the_catalog_knows_them(publishing: Calls) -> None:
    for commit in publishing.places("lmdb.commit"):
        last = max(place for place in publishing.places("rename") if place < commit)
        assert publishing.synced_between("/.mergegit/packs", last, commit)


def test_a_pack_is_removed_only_when_the_catalog_has_forgotten_it(publishing: Calls) -> None:
    removed = [
        place
        for place in publishing.places("unlink")
        if "/packs/" in publishing.all[place] and "/tmp/" not in publishing.all[place]
    ]
    commits = publishing.places("lmdb.commit")
    for place in removed:
        assert any(commit < place for commit in commits)
        between = [p for p in publishing.places("rename") if commits[-1] < p < place]
        assert not between


def test_packs_go_to_the_trash_when_logs_and_catalog_have_forgotten_them(
    driver: Driver, tiny_family: Family, memory: Path
) -> None:
    two_experts_too_many(driver, tiny_family, memory)
    calls = Calls(driver.calls("gc", memory, path=memory, grace=0))
    (commit,) = calls.places("lmdb.commit")
    logs = [n for n in calls.places("replace") if "/logs/" in calls.all[n]]
    trashed = [n for n in calls.places("rename") if "/trash/" in calls.all[n]]
    removed = [n for n in calls.places("unlink") if "/trash/" in calls.all[n]]
    assert logs
    assert trashed
    assert max(logs) < commit < min(trashed) < max(trashed) < min(removed)
    for directory in ("/.mergegit/trash", "/.mergegit/packs"):
        assert calls.synced_between(directory, max(trashed), min(removed))
    for place in trashed:
        pack = calls.all[place].split()[1]
        assert calls.synced_between(pack, commit, place), "with the time from which it is there"


def test_a_ref_moves_last(driver: Driver, tiny_family: Family, memory: Path) -> None:
    two_experts(driver, tiny_family, memory)
    calls = Calls(
        driver.calls("merge", memory, path=memory, experts=["math", "code"], branch="new")
    )
    (moved,) = calls.places("replace", "/.mergegit/tmp/ref", "/.mergegit/refs/heads/new")
    written = calls.written()
    log, ref = "/.mergegit/logs/heads/new.log", "/.mergegit/tmp/ref"
    (commit,) = calls.places("lmdb.commit")
    assert commit < written[log] < moved
    assert calls.synced_between(log, written[log], moved)
    assert calls.synced_between("/.mergegit/logs/heads", written[log], moved)
    assert calls.synced_between(ref, written[ref], moved)
    assert calls.synced_between("/.mergegit/refs/heads", moved, len(calls.all))


def test_a_checkout_is_synced_before_it_has_its_name(
    driver: Driver, tiny_family: Family, memory: Path
) -> None:
    two_experts(driver, tiny_family, memory / "repository")
    calls = Calls(
        driver.calls(
            "checkout", memory, path=memory / "repository", ref="math", target=memory / "out"
        )
    )
    (named,) = calls.places("rename")
    temporary, target = calls.all[named].split()[1:]
    assert target == "/out"
    files = {path: place for path, place in calls.written().items() if path.startswith(temporary)}
    assert len(files) == 5
    for path, place in files.items():
        assert calls.synced_between(path, place, named)
        assert calls.synced_between(str(Path(path).parent), place, named)
    assert calls.synced_between("/", named, len(calls.all))


def test_a_repository_is_there_when_its_format_is(driver: Driver, memory: Path) -> None:
    calls = Calls(driver.calls("init", memory, path=memory))
    (named,) = calls.places("replace", "/.mergegit/tmp/format", "/.mergegit/format")
    made = [place for place in calls.places("mkdir") if place < named]
    assert len(made) >= 7
    assert calls.synced_between("/.mergegit/tmp/format", 0, named)
    assert calls.synced_between("/.mergegit", named, len(calls.all))
    assert calls.synced_between("/", made[0], named)
