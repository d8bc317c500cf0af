"""Runs verbs in forked processes and kills them at the n-th system call that writes.

The driver is a process of its own that has loaded everything and opened nothing. For each request,
a line of JSON on standard input, it forks; the child performs the verb and the driver answers with
a line of JSON. With a ``point``, the child kills itself with SIGKILL when it reaches that call:

    calls      os.open for writing, os.write, os.writev, os.fsync, os.fchmod, os.rename, os.replace,
               os.mkdir, os.rmdir, os.unlink, os.truncate, os.ftruncate, writes to open files, and
               LMDB: opening it, opening a table, the commit of a write transaction
    variants   ``before`` the call, or ``torn``: in the middle of a write, half of it done

The state after a call is the state before the next, so that both together leave out nothing.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb

from mergegit import Repository
from mergegit.storage.refs import SPACES
from tests.memory import directory_in_memory

AUTHOR = "Ada <ada@example.org>"
TIME = 1_700_000_000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class KillPoints:
    """Counts the calls that write, and kills the process at one of them."""

    def __init__(self, root: str, point: int | None, torn: bool) -> None:
        self.calls: list[str] = []
        self._root = root
        self._point = point
        self._torn = torn

    def reached(self, name: str, tear: Callable[[], object] | None = None) -> None:
        """A call is about to happen; ``tear`` does half of it."""
        if len(self.calls) == self._point:
            if self._torn and tear is not None:
                tear()
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(name)

    def _named(self, name: str, *targets: object) -> str:
        """A call with the paths, below the root, of the files that it is about."""
        return " ".join([name, *filter(None, map(self._path_of, targets))])

    def _path_of(self, target: object) -> str:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        if not isinstance(target, str | os.PathLike):
            return ""
        return os.fspath(target).removeprefix(self._root) or "/"

    def install(self) -> None:
        """Put everything that writes behind the counter."""
        for name in (
            "rename", "replace", "mkdir", "rmdir", "unlink", "truncate", "ftruncate", "fsync",
            "fchmod",
        ):  # fmt: skip
            setattr(os, name, self._counted(name, getattr(os, name)))
        self._install_open()
        self._install_writes()
        self._install_files()
        self._install_lmdb()

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        targets = 2 if name in ("rename", "replace") else 1

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.reached(self._named(name, *args[:targets]))
            return call(*args, **kwargs)

        return counted

    def _install_open(self) -> None:
        call = os.open

        def counted(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & _WRITES:
                self.reached(self._named("open", path))
            return call(path, flags, *args, **kwargs)

        os.open = counted

    def _install_writes(self) -> None:
        write, writev = os.write, os.writev

        def counted_write(fd: int, data: Any) -> int:
            self.reached(self._named("write", fd), lambda: write(fd, bytes(data)[: len(data) // 2]))
            return write(fd, data)

        def counted_writev(fd: int, buffers: Any) -> int:
            whole = b"".join(buffers)
            self.reached(self._named("writev", fd), lambda: write(fd, whole[: len(whole) // 2]))
            return writev(fd, buffers)

        os.write, os.writev = counted_write, counted_writev

    def _install_files(self) -> None:
        """Files that are opened by ``open`` and ``os.fdopen``, unbuffered or not."""
        points, call, fdopen = self, builtins.open, os.fdopen

        class CountedFile(io.FileIO):
            def write(self, data: Any) -> int:
                half = bytes(data)[: len(data) // 2]
                call = points._named("write", self.fileno())
                points.reached(call, lambda: super(CountedFile, self).write(half))
                return super().write(data)

        def counted_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return call(file, mode, *args, **kwargs)
            self.reached(self._named("open", file))
            return CountedFile(file, mode.replace("b", ""))

        def counted_fdopen(fd: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return fdopen(fd, mode, *args, **kwargs)
            return CountedFile(fd, mode.replace("b", ""))

        builtins.open, os.fdopen = counted_open, counted_fdopen  # type: ignore[assignment]

    def _install_lmdb(self) -> None:
        points, call = self, lmdb.open

        class CountedEnvironment:
            def __init__(self, environment: Any) -> None:
                self._environment = environment

            def __getattr__(self, name: str) -> Any:
                return getattr(self._environment, name)

            def open_db(self, *args: Any, **kwargs: Any) -> Any:
                points.reached("lmdb.open_db")
                return self._environment.open_db(*args, **kwargs)

            def begin(self, *args: Any, write: bool = False, **kwargs: Any) -> Any:
                transaction = self._environment.begin(*args, write=write, **kwargs)
                return CountedTransaction(transaction) if write else transaction

        class CountedTransaction:
            def __init__(self, transaction: Any) -> None:
                self._transaction = transaction

            def __getattr__(self, name: str) -> Any:
                return getattr(self._transaction, name)

            def __enter__(self) -> Any:
                self._transaction.__enter__()
                return self

            def __exit__(self, kind: Any, *rest: Any) -> Any:
                if kind is None:
                    points.reached("lmdb.commit")
                return self._transaction.__exit__(kind, *rest)

        def counted_open(*args: Any, **kwargs: Any) -> Any:
            points.reached("lmdb.open")
            return CountedEnvironment(call(*args, **kwargs))

        lmdb.open = counted_open


# -- verbs -----------------------------------------------------------------------------------------


def opened(path: str) -> Repository:
    repository = Repository.open(path, author=AUTHOR, threads=1)
    repository._clock = lambda: TIME
    return repository


def init(path: str) -> dict[str, Any]:
    Repository.init(path, author=AUTHOR, threads=1).close()
    return {}


def add(path: str, checkpoint: str) -> dict[str, Any]:
    with opened(path) as repository:
        report = repository.add(checkpoint)
        return {"commit": report.commit.hex()}


def merge(path: str, experts: list[str], branch: str) -> dict[str, Any]:
    with opened(path) as repository:
        recipe = repository.recipe(experts, method="ties", parameters={"density": 0.5})
        report = repository.merge(repository.plan(recipe, budget="60%"), branch=branch)
        return {"commit": report.commit.hex()}


def checkout(path: str, ref: str, target: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.checkout(ref, target).commit.hex()}


def branch(path: str, name: str, ref: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.create_branch(name, ref).hex()}


def tag(path: str, name: str, ref: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.create_tag(name, ref).hex()}


def delete(path: str, name: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.delete_branch(name).hex()}


def rename(path: str, old: str, new: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.rename_branch(old, new).hex()}


def repack(path: str, encoding: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"blocks": repository.repack(encoding=encoding).blocks}  # type: ignore[arg-type]


def reset(path: str, name: str, ref: str) -> dict[str, Any]:
    with opened(path) as repository:
        return {"commit": repository.reset_branch(name, ref)[1].hex()}


def gc(path: str, grace: float) -> dict[str, Any]:
    with opened(path) as repository:
        return {"removed": repository.gc(expire=0, grace=grace).removed}


def rebuild(path: str) -> dict[str, Any]:
    return {"packs": Repository.rebuild_catalog(path)}


def inspect(path: str) -> dict[str, Any]:
    """What a repository holds, whether it is sound, and what lies about in it."""
    with opened(path) as repository:
        refs = {**repository.branches(), **{f"tag {n}": c for n, c in repository.tags().items()}}
        location = repository.store.location
        report = repository.fsck()
        return {
            "refs": {name: commit.hex() for name, commit in refs.items()},
            "manifests": {
                name: repository.store.commit(commit).manifest.hex()
                for name, commit in refs.items()
            },
            "problems": [problem.what for problem in report.problems],
            "notes": report.notes,
            "packs": sorted(path.stem for path in location.packs.iterdir()),
            "trash": sorted(path.stem for path in location.trash.glob("*")),
            "temporary": sorted(
                path.relative_to(location.root).as_posix()
                for path in location.root.rglob("*")
                if path.parent == location.temporary or path.name.startswith(".")
            ),
            "logged": all(
                any(
                    entry.new == repository.store.refs.read(space, name)
                    for entry in repository.store.refs.log(space, name)
                )
                for space in SPACES
                for name in repository.store.refs.names(space)
            ),
        }


VERBS: dict[str, Callable[..., dict[str, Any]]] = {
    verb.__name__: verb
    for verb in (
        init, add, merge, checkout, branch, tag, delete, rename, reset, repack, gc,
        rebuild, inspect,
    )
}  # fmt: skip


# -- serving ---------------------------------------------------------------------------------------


def warm_up(base: str, expert: str) -> None:
    """Do everything once, so that all is loaded and compiled before anything is forked.

    What this opens is closed again: no environment of LMDB lives on in a forked process.
    """
    with directory_in_memory() as place:
        path = str(place / "repository")
        init(path)
        add(path, base)
        add(path, expert)
        merge(path, [Path(expert).name, Path(base).name], "merged")
        checkout(path, "merged", str(place / "out"))
        branch(path, "other", "merged")
        rename(path, "other", "another")
        delete(path, "another")
        tag(path, "v1", "merged")
        repack(path, "raw")
        repack(path, "delta")
        reset(path, "merged", "merged~1")
        gc(path, 0)
        rebuild(path)
        inspect(path)


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """One request in a forked child: what the verb reports, or that it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = _in_child(request)
        except BaseException:  # noqa: BLE001 (it is told to who asked)
            answer = {"failed": traceback.format_exc()}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    answer: dict[str, Any] = json.loads(data)
    return answer


def _in_child(request: dict[str, Any]) -> dict[str, Any]:
    verb = VERBS[request["verb"]]
    arguments = request["arguments"]
    if "root" not in request:
        return verb(**arguments)
    points = KillPoints(request["root"], request.get("point"), request.get("torn", False))
    fdopen = os.fdopen
    points.install()
    report = verb(**arguments)
    os.fdopen = fdopen
    return {**report, "calls": points.calls}


def main() -> None:
    warm_up(*sys.argv[1:])
    for line in sys.stdin:
        print(json.dumps(perform(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
