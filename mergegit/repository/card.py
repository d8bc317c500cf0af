"""The README.md of a merged model: what it is made of, and how to make it again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from mergegit.merge.mergekit_yaml import write_documents
from mergegit.merge.recipe import Recipe
from mergegit.merge.settings import Setting
from mergegit.objects import CommitId, ManifestId, Plan
from mergegit.repository.recipes import document_of

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")


def model_card(
    plan: Plan, base: ManifestId, experts: Sequence[ManifestId], license_line: str | None
) -> bytes:
    """The card of a merged model, with the metadata by which the Hub shows merges.

    ``base`` and ``experts`` are the contents of the models. They are named by the ids of those and
    not of their commits: the same merge has the same card in every repository.
    """
    recipe = Recipe.from_json(plan.recipe)
    names = list(dict.fromkeys(expert.ref for expert in recipe.experts))
    models = list(dict.fromkeys([recipe.base_ref, *names]))
    front = ["---", "base_model:", *(f"- {_quoted(name)}" for name in models)]
    front += ["library_name: transformers", "tags:", "- mergegit", "- merge"]
    if license_line:
        front.append(license_line)
    method = recipe.method
    lines = [
        *front,
        "---",
        "",
        f"# {' + '.join(names)}",
        "",
        f"A merge of {_listed(names)} on the base {recipe.base_ref}, made with mergegit by the "
        f"method `{method.name}` ({method.paper}).",
        "",
        "| model | contents | parameters | read of its bytes | relative error |",
        "|---|---|---|---|---|",
        f"| {recipe.base_ref} (base) | `{base.hex()[:16]}` | | | |",
    ]
    for expert, contents, asked in zip(plan.experts, experts, recipe.experts, strict=True):
        share = expert.planned_bytes / expert.raw_bytes if expert.raw_bytes else 0.0
        of = f" (what it changed of {asked.base_ref})" if asked.base else ""
        lines.append(
            f"| {expert.ref}{of} | `{contents.hex()[:16]}` | {_parameters(asked.parameters)} "
            f"| {share:.1%} | {expert.predicted_error:.3g} |"
        )
    # At no error it is the same merge under any budget, and has the same card.
    limited = plan.budget_bytes is not None and plan.predicted_error > 0
    budget = f"Under a budget of {plan.budget_bytes:,} bytes, " if limited else ""
    lines += [
        "",
        f"{budget}{plan.planned_bytes:,} of {plan.raw_bytes:,} bytes of experts were read; the "
        f"predicted error of the merged delta is {plan.predicted_error:.3g}.",
        "",
        "## Recipe",
        "",
        "```yaml",
        write_documents([document_of(recipe, pinned=False)]).rstrip("\n"),
        "```",
        "",
    ]
    return "\n".join(lines).encode()


def signature(commit: CommitId) -> bytes:
    """The last line of a merged model's card where it is checked out: which commit it is."""
    return f"\nChecked out from mergegit commit `{commit.hex()}`.\n".encode()


def license_line(card: bytes) -> str | None:
    """The ``license:`` line of a card's front matter, if there is one."""
    lines = card.decode("utf-8", "replace").splitlines()
    if not lines or lines[0] != "---":
        return None
    for line in lines[1:]:
        if line == "---":
            return None
        if line.startswith("license:"):
            return line
    return None


def _parameters(parameters: Mapping[str, Setting]) -> str:
    """In one order, whether the plan was just made or read from a file."""
    listed = ", ".join(f"{key} {parameters[key].text()}" for key in sorted(parameters))
    return listed or "as in the recipe"


def _quoted(name: str) -> str:
    """A name as YAML has it."""
    return name if _PLAIN.fullmatch(name) else json.dumps(name)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
