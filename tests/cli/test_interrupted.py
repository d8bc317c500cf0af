"""Ctrl-C, a closed pipe, a killed process: what a command leaves, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, environment, run
from tests.families import Family, tiny_checkpoint
from tests.trees import fingerprint

# Runs a command that says so and waits so many seconds at the N-th call of a function.
PAUSING = """
import importlib, sys, time
module, owner, name, calls, seconds, *arguments = sys.argv[1:]
target = importlib.import_module(module)
target = getattr(target, owner) if owner else target
original, seen = getattr(target, name), 0
def pausing(*args, **kwargs):
    global seen
    seen += 1
    if seen == int(calls):
        print("paused", flush=True)
        time.sleep(float(seconds))
    return original(*args, **kwargs)
setattr(target, name, pausing)
from mergegit.cli import main
sys.argv = ["mergegit", *arguments]
main()
"""

WRITING = ("mergegit.storage.store", "Transaction", "write_block", "2")
PUBLISHING = ("mergegit.storage.store", "Transaction", "publish", "1")
CHECKING_OUT = ("mergegit.checkpoint.writer", "", "_sync_directory", "1")
CHECKING = ("mergegit.repository.checking", "", "_check_packs", "1")


@contextmanager
def paused(
    where: tuple[str, ...], *arguments: str | Path, cwd: Path, seconds: float = 60
) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs a command and has come to where it waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", PAUSING, *where, str(seconds), *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("where", "command"),
    [
        (WRITING, "add model"),
        (PUBLISHING, "add model"),
        (WRITING, "merge math prose --method ties"),
        (PUBLISHING, "merge math prose"),
        (WRITING, "repack --encoding raw"),
        (CHECKING, "fsck"),
        (CHECKING_OUT, "checkout math out"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[2],
)
def test_ctrl_c_leaves_everything_as_it_was(
    where: tuple[str, ...], command: str, place: Path
) -> None:
    tiny_checkpoint(place / "model", moved=9)
    before = fingerprint(place)
    with paused(where, *command.split(), cwd=place) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err.strip() == "interrupted; nothing is left half done"
    assert fingerprint(place) == before
    assert list((place / ".mergegit" / "tmp").iterdir()) == []
    assert [path.name for path in place.iterdir() if "mergegit" in path.name] == [".mergegit"]


def test_ctrl_c_waits_for_the_block_that_is_being_read_and_no_longer(place: Path) -> None:
    """Threads can't be stopped: the blocks in their hands are finished first."""
    before = fingerprint(place)
    reading = ("mergegit.storage.store", "Store", "read_layers", "1")
    command = ("merge", "math", "prose", "--threads", "1")
    with paused(reading, *command, cwd=place, seconds=2) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == "interrupted; nothing is left half done"
    assert fingerprint(place) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("where", "command"),
    [(WRITING, "add model"), (PUBLISHING, "merge math prose"), (CHECKING_OUT, "checkout math out")],
    ids=lambda value: value if isinstance(value, str) else value[2],
)
def test_what_a_killed_command_leaves_the_next_one_removes(
    where: tuple[str, ...], command: str, number: signal.Signals, place: Path
) -> None:
    tiny_checkpoint(place / "model", moved=9)
    before = fingerprint(place / ".mergegit" / "refs")
    with paused(where, *command.split(), cwd=place) as process:
        process.send_signal(number)
        process.wait(timeout=30)
    assert process.returncode == -number
    assert fingerprint(place / ".mergegit" / "refs") == before
    mergegit = CommandLine(place)
    mergegit.ok("fsck")
    mergegit.ok(*command.split())
    assert list((place / ".mergegit" / "tmp").iterdir()) == []
    assert [path.name for path in place.iterdir() if "mergegit" in path.name] == [".mergegit"]


def test_a_running_command_is_left_in_peace(place: Path, tmp_path: Path) -> None:
    """Another command does not remove what a running one has written so far."""
    tiny_checkpoint(place / "model", moved=9)
    other = tiny_checkpoint(tmp_path / "other", moved=10)
    with paused(WRITING, "add", "model", cwd=place):
        (workspace,) = (path for path in (place / ".mergegit" / "tmp").iterdir() if path.is_dir())
        files = fingerprint(workspace)
        assert files
        CommandLine(place).ok("add", other)
        assert fingerprint(workspace) == files


# -- pipes -----------------------------------------------------------------------------------------


@pytest.fixture
def long_history(place: Path) -> Path:
    """A repository whose log is longer than a pipe holds."""
    from mergegit import Repository
    from mergegit.objects import Commit
    from mergegit.storage.refs import RefUpdate

    with Repository.open(place) as repository:
        manifest = repository.commit("base").manifest
        tip = repository.resolve("base")
        with repository.store.transaction() as transaction:
            for number in range(800):
                tip = transaction.write_commit(Commit(manifest, (tip,), "a", number, "m" * 100))
            transaction.publish(RefUpdate("heads", "long", None, tip, "a", 0, "made for a test"))
    return place


@pytest.mark.parametrize("command", ["log", "log --graph --oneline", "log --json", "show math"])
def test_a_reader_that_goes_away_is_no_error(command: str, long_history: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mergegit", *command.split()],
        cwd=long_history,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_the_first_line_comes_through(long_history: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m mergegit log --oneline | head -1"],
        cwd=long_history,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_a_name_outside_the_encoding_of_the_terminal(place: Path) -> None:
    """With an ASCII terminal, the graph is drawn in ASCII and nothing fails."""
    result = run("log", "--graph", "--oneline", cwd=place, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.code == 0
    assert result.lines[0].startswith("*  ")
    assert result.out.isascii()


@pytest.mark.slow
def test_many_commands_at_once(place: Path, tiny_family: Family, tmp_path: Path) -> None:
    """Writers wait for one another where they must, and all of them succeed."""
    models = [tiny_checkpoint(tmp_path / f"m{number}", moved=20 + number) for number in range(3)]
    commands = [("add", os.fspath(model)) for model in models]
    commands += [("merge", "math", "prose", "-b", "joined"), ("log",), ("fsck",)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "mergegit", *command],
            cwd=place,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command in commands
    ]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    mergegit = CommandLine(place)
    branches = {line.split()[0] for line in mergegit.ok("branch").lines}
    assert {"m0", "m1", "m2", "joined"} <= branches
    mergegit.ok("fsck")
