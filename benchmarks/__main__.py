"""`python -m benchmarks`: the small suite, in a few minutes. `--help` tells of the rest."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import fidelity, machine, peers, speed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suite", nargs="?", choices=["all", "fidelity", "speed", "peers"], default="all"
    )
    parser.add_argument(
        "--family", type=Path, help="directories base and experts; by default one is made"
    )
    parser.add_argument(
        "--experts", type=int, nargs="+", default=[2, 4], help="numbers of experts beside peers"
    )
    parser.add_argument(
        "--cold", action="store_true", help="beside peers, drop the files' pages before each run"
    )
    parser.add_argument("--out", type=Path, help="write the numbers there, as JSON")
    args = parser.parse_args()
    numbers: dict[str, object] = {"machine": machine.describe()}
    print(machine.as_text())
    if args.suite in ("all", "speed"):
        numbers["speed"] = speed.run(args.family)
    if args.suite in ("all", "peers"):
        numbers["peers"] = peers.measure(args.family, tuple(args.experts), args.cold)
    if args.suite in ("all", "fidelity"):
        numbers["fidelity"] = fidelity.run(args.family)
    if args.out:
        args.out.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
