"""Merges beside mergekit, a plain script, and `cp` of the bytes that must move.

All in one run, one after the other in turn, so that the machine's moods hit all of them. mergekit
runs where MERGEKIT_PYTHON names a Python that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks import families
from benchmarks.measured import Run, evict, median, run
from mergegit import Repository

RUNS: Final = 3
BUDGET: Final = "10%"
METHODS: Final = {
    "linear": "", "ties": "density: 0.5", "dare_ties": "density: 0.5", "slerp": "t: 0.5",
}  # fmt: skip
NAIVE: Final = Path(__file__).with_name("naive.py")


def measure(family: Path | None, counts: tuple[int, ...], cold: bool) -> list[dict[str, Any]]:
    """Medians of ``RUNS`` runs for each method and number of experts."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        root = family or families.make(Path(scratch) / "family")
        bench = _Bench(root, Path(scratch), cold)
        bench.add_all()
        for method in METHODS:
            for count in (2,) if method == "slerp" else counts:
                if count <= len(bench.experts):
                    rows += bench.method(method, count)
        rows += bench.repeated()
        rows += bench.stacked()
    return rows


class _Bench:
    def __init__(self, family: Path, scratch: Path, cold: bool) -> None:
        names = sorted(path.name for path in family.iterdir() if (path / "config.json").exists())
        self.family, self.scratch, self.cold = family, scratch, cold
        self.experts = [name for name in names if name != "base"]
        self.repository = scratch / "repository"
        self.size = _bytes_of(family / "base")
        self._number = 0

    def add_all(self) -> None:
        Repository.init(self.repository).close()
        for name in ("base", *self.experts):
            self._mergegit("add", str(self.family / name))

    def method(self, method: str, count: int) -> list[dict[str, Any]]:
        experts = self.experts[:count]
        ways: dict[str, Callable[[], Run]] = {
            "mergegit, all bytes": lambda: self._merge(method, experts, None, "delta"),
            "mergegit, all bytes, raw output": lambda: self._merge(method, experts, None, "raw"),
            f"mergegit, {BUDGET}": lambda: self._merge(method, experts, BUDGET, "delta"),
            "plain script": lambda: self._naive(method, experts),
            "cp of base and experts": lambda: self._copy(["base", *experts]),
            "cp of the merged model": lambda: self._copy(["base"]),
        }
        if os.environ.get("MERGEKIT_PYTHON"):
            ways["mergekit"] = lambda: self._mergekit(method, experts)
        return self._alternate(f"{method}, {count} experts", ways)

    def repeated(self) -> list[dict[str, Any]]:
        """A merge again, and with one layer's weight changed."""
        experts = self.experts[: min(4, len(self.experts))]
        self._merge("task_arithmetic", experts, None, "delta", "-p", "lambda=0.7")

        def changed() -> Run:
            self._number += 1
            rules = [{"filter": ".1.", "value": 0.5 + self._number / 64}, {"value": 1.0}]
            models = [{"model": name, "parameters": {"weight": rules}} for name in experts]
            return self._recipe(
                {"merge_method": "task_arithmetic", "base_model": "base", "models": models,
                 "parameters": {"lambda": 0.7}}
            )  # fmt: skip

        ways = {
            "the same merge again": lambda: self._merge(
                "task_arithmetic", experts, None, "delta", "-p", "lambda=0.7"
            ),
            "one layer's weight changed": changed,
            "everything anew": lambda: self._merge(
                "task_arithmetic", experts, None, "delta", "-p", "lambda=0.7", "--anew"
            ),
        }
        return self._alternate(f"repeated task_arithmetic, {len(experts)} experts", ways)

    def stacked(self) -> list[dict[str, Any]]:
        """A model stacked on itself, beside a command that does nothing."""
        layers = json.loads((self.family / "base" / "config.json").read_text())
        count = layers["num_hidden_layers"]
        source = [{"sources": [{"model": "base", "layer_range": [0, count]}]}] * 2
        ways = {
            "passthrough self-merge": lambda: self._recipe(
                {"merge_method": "passthrough", "slices": source}
            ),
            "mergegit log": lambda: self._mergegit("log"),
        }
        return self._alternate("passthrough", ways)

    def _alternate(self, what: str, ways: dict[str, Callable[[], Run]]) -> list[dict[str, Any]]:
        runs: dict[str, list[Run]] = {name: [] for name in ways}
        for _ in range(RUNS):
            for name, way in ways.items():
                if self.cold:
                    evict([self.family, self.repository])
                runs[name].append(way())
        print(f"\n{what}, medians of {RUNS}, {'cold' if self.cold else 'warm'}")
        print(f"  {'':34}{'s':>8}{'CPU s':>8}{'peak MB':>9}{'read MB':>9}{'written MB':>11}")
        rows = []
        for name, taken in runs.items():
            middle = median(taken)
            print(
                f"  {name:34}{middle.seconds:8.2f}{middle.cpu_seconds:8.2f}{middle.peak_mb:9.0f}"
                f"{middle.read_mb:9.0f}{middle.written_mb:11.0f}"
            )
            rows.append({"what": what, "way": name, "cold": self.cold, **middle.to_json()})
        return rows

    def _merge(
        self, method: str, experts: list[str], budget: str | None, encoding: str, *more: str
    ) -> Run:
        self._number += 1
        command = ["merge", *experts, "--method", method, "-b", f"m{self._number}"]
        command += ["--encoding", encoding, *more]
        if not more:
            command.append("--anew")
            for parameter in filter(None, [METHODS[method]]):
                command += ["-p", parameter.replace(": ", "=")]
        if budget:
            command += ["--budget", budget]
        return self._mergegit(*command)

    def _recipe(self, recipe: dict[str, Any]) -> Run:
        self._number += 1
        path = self.scratch / "recipe.yml"
        path.write_text(json.dumps(recipe))
        return self._mergegit("merge", "-c", str(path), "-b", f"m{self._number}")

    def _mergegit(self, *arguments: str) -> Run:
        return run([sys.executable, "-m", "mergegit", "-C", str(self.repository), *arguments])

    def _naive(self, method: str, experts: list[str]) -> Run:
        target = self.scratch / "naive"
        models = [str(self.family / name) for name in ("base", *experts)]
        try:
            return run([sys.executable, str(NAIVE), method, str(target), *models])
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _copy(self, names: list[str]) -> Run:
        target = self.scratch / "copies"
        target.mkdir()
        try:
            paths = [str(self.family / name) for name in names]
            return run(["cp", "-r", *paths, str(target)])
        finally:
            shutil.rmtree(target)

    def _mergekit(self, method: str, experts: list[str]) -> Run:
        recipe, target = self.scratch / "mergekit.yml", self.scratch / "mergekit"
        own = f", {METHODS[method]}" if "density" in METHODS[method] else ""
        lines = [f"merge_method: {method}", "dtype: float32", "out_dtype: bfloat16"]
        if method == "slerp":
            lines += [f"base_model: {self.family / experts[0]}", "parameters: {t: 0.5}"]
        elif method != "linear":
            lines.append(f"base_model: {self.family / 'base'}")
        lines.append("models:")
        for name in experts:
            lines.append(f"- model: {self.family / name}")
            if method != "slerp":
                lines.append(f"  parameters: {{weight: {1 / len(experts)}{own}}}")
        recipe.write_text("\n".join(lines) + "\n")
        script = Path(os.environ["MERGEKIT_PYTHON"]).with_name("mergekit-yaml")
        try:
            return run(
                [str(script), str(recipe), str(target), "--lazy-unpickle", "--random-seed", "42"],
                {"HF_HUB_OFFLINE": "1"},
            )
        except subprocess.CalledProcessError as error:
            print(error.stdout.decode(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            shutil.rmtree(target, ignore_errors=True)


def _bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
