"""Running a command and measuring what it takes: time, CPU, memory, and bytes read and written."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a command.

    ``peak_mb`` is its largest resident set. ``read_mb`` and ``written_mb`` are what its system
    calls moved; reads of mapped files are not among them.
    """

    seconds: float
    cpu_seconds: float
    peak_mb: float
    read_mb: float
    written_mb: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """Run a command to its end. Raises ``CalledProcessError``, with what it said."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.read()
    # Before it is waited for, its counters can still be read.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    seconds = time.perf_counter() - started
    counters = _counters(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said)
    return Run(
        seconds,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss / 1000,
        counters.get("rchar", 0) / 1e6,
        counters.get("wchar", 0) / 1e6,
    )


def median(runs: Sequence[Run]) -> Run:
    """The median of each measure."""
    return Run(
        *(
            statistics.median(getattr(run, field) for run in runs)
            for field in Run.__dataclass_fields__
        )
    )


def evict(directories: Iterable[Path]) -> None:
    """Ask the kernel to drop the files' pages, so that the next read comes from the disk."""
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(fd)


def _counters(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
