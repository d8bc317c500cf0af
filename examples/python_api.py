"""The main job in Python: add a family, plan, merge under a budget, and load the result.

    python examples/python_api.py FAMILY REPOSITORY

FAMILY is a directory as make_family.py writes it: `base` and experts beside it.
"""

import argparse
from pathlib import Path

from mergegit import MergegitError, Repository


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("family", type=Path)
    parser.add_argument("repository", type=Path)
    arguments = parser.parse_args()
    experts = sorted(
        path.name
        for path in arguments.family.iterdir()
        if path.name != "base" and (path / "config.json").exists()
    )
    try:
        merge(arguments.family, arguments.repository, experts)
    except MergegitError as error:
        raise SystemExit(f"{error.message}\n{error.hint}") from error


def merge(family: Path, where: Path, experts: list[str]) -> None:
    with Repository.init(where, author="An Example <example@example.org>") as repository:
        for name in ("base", *experts):
            report = repository.add(family / name)
            print(f"{name}: {report.new_bytes:,} of {report.total_bytes:,} bytes are new")

        recipe = repository.recipe(experts, method="ties", parameters={"density": 0.5})
        for budget in ("5%", "10%", "25%", "100%"):
            plan = repository.plan(recipe, budget=budget).plan
            print(f"{budget:>4}: {plan.planned_bytes:,} bytes, error {plan.predicted_error:.3f}")

        merged = repository.merge(repository.plan(recipe, budget="10%"), branch="merged")
        print(f"merged into {merged.branch}, read {merged.read_bytes:,} bytes of experts")
        for commit_id, commit in repository.log("merged"):
            print(commit_id.hex()[:10], commit.title)
        tensors = repository.load("merged")
        print(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
