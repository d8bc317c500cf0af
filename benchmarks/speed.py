"""How fast blocks are encoded and decoded, and how fast the commands are, beside physical limits
measured in the same run: a copy in memory, a pass of zstd, and `cp` of the same bytes."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import zstandard

from benchmarks import families
from mergegit import Repository
from mergegit.cli.allocator import keep_freed_memory
from mergegit.kernels.floats import from_float32, to_float32
from mergegit.objects import BLOCK_ELEMENTS
from mergegit.pipeline import default_threads
from mergegit.storage import delta
from mergegit.storage.pack import Compression

RUNS: Final = 5
BLOCKS: Final = 24


def run(family: Path | None) -> dict[str, object]:
    """Measure and print; medians of ``RUNS`` runs, in bytes of raw blocks a second."""
    numbers: dict[str, object] = {"encoder": _encoder(), "startup": _startup()}
    with tempfile.TemporaryDirectory() as scratch:
        root = family or families.make(Path(scratch) / "family")
        numbers["commands"] = _commands(Path(scratch), root)
    return numbers


def _encoder() -> dict[str, float]:
    """Rates of the encoder and decoder on all cores, and ratios to the limits.

    With the allocator as the commands have it, for the limits too.
    """
    keep_freed_memory()
    rng = np.random.default_rng(0)
    pairs = [_pair(rng) for _ in range(4)]
    encoded = [_encoded(*pair) for pair in pairs]
    threads = default_threads()
    rates = {
        "memory copy": _rate(lambda i: bytearray(pairs[i % 4][0]), threads),
        "zstd level 1": _rate(
            lambda i: zstandard.ZstdCompressor(level=1).compress(pairs[i % 4][0]), threads
        ),
        "encode": _rate(lambda i: _encoded(*pairs[i % 4]), threads),
        "decode": _rate(lambda i: _decoded(encoded[i % 4], pairs[i % 4][1]), threads),
        "decode 2 planes": _rate(
            lambda i: delta.decode_planes(_planes(encoded[i % 4])[:2], BLOCK_ELEMENTS), threads
        ),
    }
    print(f"\nencoder, {threads} threads, bf16, update 1e-3 (MB of raw blocks a second)")
    for name, rate in rates.items():
        print(f"  {name:16}{rate / 1e6:10.0f}   {rate / rates['memory copy']:.3f} of a copy")
    return rates


def _pair(rng: np.random.Generator) -> tuple[bytes, bytes]:
    base = from_float32(rng.standard_normal(BLOCK_ELEMENTS, np.float32) * np.float32(0.02), "BF16")
    update = rng.standard_normal(BLOCK_ELEMENTS, np.float32) * np.float32(1e-3)
    return from_float32(to_float32(base, "BF16") + update, "BF16"), base


def _encoded(expert: bytes, base: bytes) -> delta.Delta:
    encoded = delta.encode(expert, base, "BF16")
    assert encoded is not None
    return encoded


def _planes(encoded: delta.Delta) -> list[bytes]:
    return [
        zstandard.ZstdDecompressor().decompress(segment.payload)
        if segment.compression is Compression.ZSTD
        else bytes(segment.payload)
        for segment in encoded.segments
    ]


def _decoded(encoded: delta.Delta, base: bytes) -> bytes:
    *planes, residual = _planes(encoded)
    return delta.decode(planes, residual, base, "BF16")


def _rate(work: Callable[[int], object], threads: int) -> float:
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(RUNS + 1):
            started = time.perf_counter()
            list(pool.map(work, range(BLOCKS)))
            times.append(time.perf_counter() - started)
    return BLOCKS * BLOCK_ELEMENTS * 2 / statistics.median(times[1:])


def _startup() -> dict[str, float]:
    """Milliseconds from the shell to the prompt for commands that read no weights."""
    with tempfile.TemporaryDirectory() as scratch:
        Repository.init(scratch).close()
        commands = {
            "python": [sys.executable, "-c", "pass"],
            "--help": [sys.executable, "-m", "mergegit", "--help"],
            "log": [sys.executable, "-m", "mergegit", "-C", scratch, "log"],
            "status": [sys.executable, "-m", "mergegit", "-C", scratch, "status"],
        }
        print("\nstart-up (ms)")
        out = {}
        for name, command in commands.items():
            out[name] = 1e3 * _median(lambda c=command: _quiet(c))  # type: ignore[misc]
            print(f"  {name:16}{out[name]:10.0f}")
    return out


def _commands(scratch: Path, family: Path) -> dict[str, dict[str, float]]:
    """Seconds of the main job, and of copying the bytes that it must move."""
    names = sorted(path.name for path in family.iterdir() if (path / "config.json").exists())
    experts = [name for name in names if name != "base"]
    size = sum(file.stat().st_size for file in (family / experts[0]).iterdir())
    repository = scratch / "repository"
    Repository.init(repository).close()
    base = [sys.executable, "-m", "mergegit", "-C", str(repository)]
    out: dict[str, dict[str, float]] = {}

    def record(what: str, seconds: float, moved: int) -> None:
        copy = _copy_seconds(scratch, family, moved, size)
        out[what] = {"seconds": seconds, "cp_seconds": copy, "ratio": seconds / copy}
        print(f"  {what:32}{seconds:8.2f} s   {seconds / copy:7.1f} x cp of the bytes moved")

    print(f"\ncommands, {len(experts)} experts of {size / 1e6:.0f} MB")
    _quiet([*base, "add", str(family / "base")])
    started = time.perf_counter()
    for name in experts:
        _quiet([*base, "add", str(family / name)])
    record("add, per expert", (time.perf_counter() - started) / len(experts), size)
    for budget in ("10%", "100%"):
        for encoding in ("delta", "raw"):
            runs = []
            for number in range(3):
                # Another lambda each time: a merge that exists already would do nothing.
                branch = f"merged-{budget[:-1]}-{encoding}-{number}"
                command = ["merge", *experts, "--method", "ties", "-p", "density=0.5", "--budget",
                           budget, "-b", branch, "--encoding", encoding, "-p",
                           f"lambda={1 - number / 64 - len(out) / 16}"]  # fmt: skip
                started = time.perf_counter()
                _quiet([*base, *command])
                runs.append(time.perf_counter() - started)
            moved = size * 2 + round(size * len(experts) * (0.1 if budget == "10%" else 0.44))
            record(f"ties, {budget}, output {encoding}", statistics.median(runs), moved)
    runs = []
    for number in range(3):
        target = scratch / f"out-{number}"
        started = time.perf_counter()
        _quiet([*base, "checkout", experts[0], str(target)])
        runs.append(time.perf_counter() - started)
        shutil.rmtree(target)
    record("checkout of an expert", statistics.median(runs), size)
    return out


def _copy_seconds(scratch: Path, family: Path, moved: int, size: int) -> float:
    """Seconds that `cp` takes for so many bytes, from copies of the base."""

    def copy() -> None:
        target = scratch / "copy"
        subprocess.run(["cp", "-r", str(family / "base"), str(target)], check=True)
        shutil.rmtree(target)

    return _median(copy, 3) * moved / size


def _median(work: Callable[[], object], runs: int = RUNS) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _quiet(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
