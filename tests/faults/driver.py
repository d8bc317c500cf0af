"""Runs commands in forked processes under the layer that counts and breaks system calls.

A process of its own that has loaded everything and opened nothing. A request is a line of JSON on
standard input, a list of jobs. For each it forks; the children run at the same time, each takes the
steps of its job one after the other, and the driver answers with a line of JSON: for every job what
its steps gave, or the signal that ended it. Steps are

    command    the command line as a person calls it: exit code, output, errors
    insist     a command again and again, until it succeeds: what each time gave
    fault      arm the layer for the steps that follow, in a driver that was started under it
    inspect    what a repository holds, whether it is sound, and what lies about in it
    look       as inspect, with what lies beside a repository; one that is not there holds nothing
    refs       where the refs stand
    contents   every file below a directory

A job is ``{"steps": [...]}``; with ``kill_after`` its process is killed after so many seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mergegit.cli
from mergegit import Repository
from mergegit.cli.main import main as command_line
from mergegit.errors import UnusableRepository
from mergegit.storage.refs import SPACES
from tests.crash.driver import AUTHOR, warm_up
from tests.faults.contents import contents
from tests.faults.places import REPOSITORY, TARGET
from tests.faults.shim import Fault, Kind, arm
from tests.memory import directory_in_memory


def command(arguments: list[str], directory: str) -> dict[str, Any]:
    """A command as a person calls it, in a directory."""
    started = time.monotonic()
    os.chdir(directory)
    sys.argv = ["mergegit", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line()
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 (what Python itself does with it)
            traceback.print_exc()
            code = 1
    seconds = time.monotonic() - started
    return {
        "line": " ".join(arguments),
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": seconds,
    }


def insist(arguments: list[str], directory: str, tries: int) -> list[dict[str, Any]]:
    """A command until it succeeds, as one does who was refused because others were faster."""
    done = [command(arguments, directory)]
    while done[-1]["code"] == 1 and len(done) < tries:
        time.sleep(0.01)
        done.append(command(arguments, directory))
    return done


def fault(root: str, log: str, kind: int, point: int, errno: int) -> None:
    # One core, one thread: the calls come in the same order every time.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    arm(root, log, Fault(Kind(kind), point, errno))


def inspect(path: str) -> dict[str, Any]:
    """What a repository holds, by the checkouts of its refs, and what it would do without."""
    try:
        repository = Repository.open(path, author=AUTHOR)
    except UnusableRepository as error:
        return {"unusable": error.message, "hint": error.hint}
    with repository, directory_in_memory() as memory:
        refs = {
            (space, name): commit
            for space in SPACES
            for name, commit in repository.store.refs.all(space).items()
        }
        trees = {}
        for number, commit in enumerate(set(refs.values())):
            repository.checkout(commit.hex(), memory / str(number))
            trees[commit] = contents(str(memory / str(number)))
        report = repository.fsck()
        collected = repository.gc(expire=0, grace=0, dry_run=True)
        return {
            "refs": {f"{space}/{name}": trees[commit] for (space, name), commit in refs.items()},
            "problems": [problem.what for problem in report.problems],
            "notes": report.notes,
            "collectable": collected.trashed + collected.removed + collected.forgotten_moves,
            "unlogged": [
                name
                for (space, name), commit in refs.items()
                if all(move.new != commit for move in repository.store.refs.log(space, name))
            ],
            "strays": sorted(_strays(repository)),
        }


def look(root: str) -> dict[str, Any]:
    """A repository, and the target of checkouts beside it."""
    path = Path(root, REPOSITORY)
    found: dict[str, Any] = {"refs": None}
    if (path / ".mergegit" / "format").exists():
        found = inspect(os.fspath(path))
    found["out"] = contents(os.path.join(root, TARGET))
    found["packs"] = sorted(pack.name for pack in path.glob(".mergegit/packs/*"))
    found["beside"] = os.listdir(root)
    return found


def _strays(repository: Repository) -> set[str]:
    """Files and directories that no part of the format accounts for."""
    location = repository.store.location
    found = {p.relative_to(location.root).as_posix() for p in location.root.rglob("*")}
    known = {"format", "lock", "lease", "packs", "trash", "refs", "logs", "tmp", "catalog"}
    known |= {"catalog/data.mdb", "catalog/lock.mdb"}
    known |= {f"packs/{file.name}.pack" for file in repository.store.catalog.packs().values()}
    for space in SPACES:
        known |= {f"refs/{space}", f"logs/{space}"}
        for name in repository.store.refs.names(space):
            at = Path("refs", space, name)
            known |= {at.as_posix(), *(p.as_posix() for p in at.parents)}
        known |= {f"logs/{space}/{path.name}" for path in (location.logs / space).glob("*.log")}
    return found - known


def refs(path: str) -> dict[str, str]:
    with Repository.open(path, author=AUTHOR) as repository:
        return {
            f"{space}/{name}": commit.hex()
            for space in SPACES
            for name, commit in repository.store.refs.all(space).items()
        }


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step for step in (command, insist, fault, inspect, look, refs, contents)
}


class Child:
    """A forked process that takes the steps of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            try:
                answer: dict[str, Any] = {"done": [_step(step) for step in job["steps"]]}
            except BaseException:  # noqa: BLE001 (it is told to who asked)
                answer = {"failed": traceback.format_exc()}
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        after = job.get("kill_after")
        self.deadline = None if after is None else time.monotonic() + after
        self._data = b""

    def read(self) -> bool:
        """Take what it says; false when it has ended."""
        data = os.read(self.pipe, 1 << 16)
        self._data += data
        return bool(data)

    def kill_in_time(self, now: float) -> None:
        if self.deadline is not None and now >= self.deadline:
            os.kill(self.pid, signal.SIGKILL)
            self.deadline = None

    def answer(self) -> dict[str, Any]:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return {"killed": os.WTERMSIG(status)}
        done: dict[str, Any] = json.loads(self._data)
        return done


def perform(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Jobs at the same time, each in a forked child."""
    children = [Child(job) for job in jobs]
    running = {child.pipe: child for child in children}
    while running:
        now = time.monotonic()
        deadlines = [child.deadline for child in running.values() if child.deadline is not None]
        wait = max(0.0, min(deadlines) - now) if deadlines else None
        ready, _, _ = select.select(list(running), [], [], wait)
        for pipe in ready:
            if not running[pipe].read():
                del running[pipe]
        for child in running.values():
            child.kill_in_time(time.monotonic())
    return [child.answer() for child in children]


def _step(step: dict[str, Any]) -> Any:
    arguments = dict(step)
    return STEPS[arguments.pop("step")](**arguments)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["MERGEGIT_AUTHOR"] = AUTHOR
    warm_up(*sys.argv[1:])
    for module in pkgutil.iter_modules(mergegit.cli.__path__):
        importlib.import_module(f"mergegit.cli.{module.name}")
    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
