"""Recipes: what was asked of a merge, complete and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergegit.dtypes import DTYPES
from mergegit.errors import BadRecipe
from mergegit.merge.methods import Method, Value, method
from mergegit.objects import CommitId


@dataclass(frozen=True, slots=True)
class Expert:
    """An expert of a recipe: the ref as it was given, its commit, its own parameters in full."""

    ref: str
    commit: CommitId
    parameters: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a merge is asked to do. Every parameter has a value.

    ``dtype`` is the output's, or None for each tensor's own in the base. ``ignore_extra`` leaves
    out tensors that an expert has and the base has not; ``allow_nonfinite`` merges experts with
    NaN or infinity in them.
    """

    method: Method
    base_ref: str
    base: CommitId
    experts: tuple[Expert, ...]
    parameters: Mapping[str, Value]
    seed: int = 0
    dtype: str | None = None
    ignore_extra: bool = False
    allow_nonfinite: bool = False

    def to_json(self) -> dict[str, Any]:
        """The recipe as commits and plans carry it."""
        return {
            "method": self.method.name,
            "base": {"ref": self.base_ref, "commit": self.base.hex()},
            "experts": [
                {
                    "ref": expert.ref,
                    "commit": expert.commit.hex(),
                    "parameters": dict(expert.parameters),
                }
                for expert in self.experts
            ],
            "parameters": dict(self.parameters),
            "seed": self.seed,
            "dtype": self.dtype,
            "ignore_extra": self.ignore_extra,
            "allow_nonfinite": self.allow_nonfinite,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recipe:
        """The inverse of ``to_json``. Raises ``BadRecipe``."""
        try:
            if type(value["seed"]) is not int:
                raise TypeError("seed is no integer")
            for switch in ("ignore_extra", "allow_nonfinite"):
                if not isinstance(value[switch], bool):
                    raise TypeError(f"{switch} is neither true nor false")
            return make_recipe(
                method_name=value["method"],
                base=(value["base"]["ref"], CommitId(bytes.fromhex(value["base"]["commit"]))),
                experts=[
                    (expert["ref"], CommitId(bytes.fromhex(expert["commit"])))
                    for expert in value["experts"]
                ],
                parameters=value["parameters"],
                expert_parameters=[expert["parameters"] for expert in value["experts"]],
                seed=value["seed"],
                dtype=value["dtype"],
                ignore_extra=value["ignore_extra"],
                allow_nonfinite=value["allow_nonfinite"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadRecipe(
                f"the recipe can't be read ({type(error).__name__}: {error})",
                hint="make the plan again",
            ) from error


def make_recipe(
    *,
    method_name: str,
    base: tuple[str, CommitId],
    experts: Sequence[tuple[str, CommitId]],
    parameters: Mapping[str, Value],
    expert_parameters: Sequence[Mapping[str, Value]],
    seed: int = 0,
    dtype: str | None = None,
    ignore_extra: bool = False,
    allow_nonfinite: bool = False,
) -> Recipe:
    """A recipe with every value filled in and checked. Raises ``BadRecipe``.

    ``parameters`` hold for all; a parameter that each expert has its own of may be given there
    for all of them, and in ``expert_parameters`` for one.
    """
    chosen = method(method_name)
    if not experts:
        raise BadRecipe("a merge needs at least one expert", hint="name one or more refs")
    if dtype is not None and not (dtype in DTYPES and DTYPES[dtype].is_float):
        floats = ", ".join(name for name, d in DTYPES.items() if d.is_float)
        raise BadRecipe(f"{dtype!r} is no dtype to merge to", hint=f"choose one of {floats}")
    for name in parameters:
        chosen.parameter(name)
    shared = {p.name: p.check(parameters.get(p.name, p.default), p.name) for p in chosen.parameters}
    filled = []
    for (ref, commit), own in zip(experts, expert_parameters, strict=True):
        for name in own:
            if not chosen.parameter(name).per_expert:
                raise BadRecipe(
                    f"{ref}.{name}: an expert can't have a {name} of its own",
                    hint=f"give it for all, as {name}",
                )
        values = {
            p.name: p.check(own.get(p.name, shared[p.name]), f"{ref}.{p.name}")
            for p in chosen.parameters
            if p.per_expert
        }
        filled.append(Expert(ref, commit, values))
    return Recipe(
        method=chosen,
        base_ref=base[0],
        base=base[1],
        experts=tuple(filled),
        parameters={p.name: shared[p.name] for p in chosen.parameters if not p.per_expert},
        seed=seed,
        dtype=dtype,
        ignore_extra=ignore_extra,
        allow_nonfinite=allow_nonfinite,
    )
