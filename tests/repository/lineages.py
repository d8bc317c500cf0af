"""A family whose members stand in many relations, for questions about weights."""

from __future__ import annotations

from pathlib import Path

import torch

from mergegit import Repository
from mergegit.storage.catalog import Place
from mergegit.storage.reader import PackReader
from tests.families import base_tensors, expert_tensors, generator, save_checkpoint

Tensors = dict[str, torch.Tensor]

MOVED = "model.layers.0.mlp.up_proj.weight"
"""The one tensor that ``sparse`` moved; it has two blocks, and ``sparse`` moved the first."""


def make_lineages(path: Path, checkpoints: Path) -> Path:
    """A repository at ``path`` with a base and

    - ``math``, ``code`` and ``prose``, which moved everywhere but in the layers' norms,
    - ``kin``, which moved as ``math`` did, and then a third as far on its own,
    - ``twin``, which has every other tensor from ``math``,
    - ``sparse``, which moved in one block alone,
    - ``wide``, in float32,
    - ``later``, trained further from ``math``,
    - ``grown``, added without a base: other shapes, one tensor less and one more, and layer 1
      that of ``math``,
    - ``both`` of math and code at 10% of the bytes, ``all`` of both and prose, ``lean`` of math and
      prose at 6%, ``dropped`` of them at random, and ``voted`` by TIES of code and prose.
    """
    base = base_tensors()
    math, twin = expert_tensors(base, "math"), expert_tensors(base, "twin")
    kin = {n: t + (expert_tensors(base, "kin")[n] - base[n]) / 3 for n, t in math.items()}
    names = list(base)
    sparse = dict(base)
    sparse[MOVED] = base[MOVED].clone()
    sparse[MOVED][:5000] = expert_tensors(base, "sparse")[MOVED][:5000]
    own = expert_tensors(base, "grown")
    grown = {name: (math if "layers.1" in name else own)[name] for name in names}
    del grown["model.norm.weight"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.randn((40, 96), generator=generator("grown", name)) * 0.02
        grown[name] = torch.cat([grown[name], rows])
    grown["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    members = {
        "base": base,
        "math": math,
        "code": expert_tensors(base, "code"),
        "prose": expert_tensors(base, "prose"),
        "kin": kin,
        "twin": {name: (math if at % 2 else twin)[name] for at, name in enumerate(names)},
        "sparse": sparse,
        "later": expert_tensors(math, "later"),
    }
    with Repository.init(path, author="Ada <ada@example.org>") as repository:
        for name, tensors in members.items():
            below = {"base": None, "later": "math"}.get(name, "base")
            checkpoint = save_checkpoint(checkpoints / name, tensors)
            repository.add(checkpoint, base=below, no_base=below is None)
        wide = expert_tensors({n: t.bfloat16().float() for n, t in base.items()}, "wide")
        repository.add(save_checkpoint(checkpoints / "wide", wide, torch.float32), base="base")
        repository.add(save_checkpoint(checkpoints / "grown", grown), no_base=True)
        recipe = repository.recipe(["math", "code"], parameters={"weight": 0.5, "lambda": 0.8})
        repository.merge(repository.plan(recipe, budget="10%"), branch="both")
        recipe = repository.recipe(
            ["both", "prose"], base="base", parameters={"both.weight": 0.7, "prose.weight": 0.25}
        )
        repository.merge(repository.plan(recipe), branch="all")
        recipe = repository.recipe(["math", "prose"], parameters={"prose.weight": 0.6})
        repository.merge(repository.plan(recipe, budget="6%"), branch="lean")
        recipe = repository.recipe(
            ["math", "prose"], method="dare_linear", parameters={"density": 0.5, "weight": 0.7}
        )
        repository.merge(repository.plan(recipe), branch="dropped")
        recipe = repository.recipe(
            ["code", "prose"], method="ties", parameters={"density": 0.3, "prose.weight": 0.5}
        )
        repository.merge(repository.plan(recipe), branch="voted")
    return path


class ReadPlaces:
    """Where the payloads lay that were read, seen where packs are read."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def record(self, read):  # type: ignore[no-untyped-def]
        def recording(reader: PackReader, place: Place, count=None):  # type: ignore[no-untyped-def]
            self.places.append(place)
            return read(reader, place, count)

        return recording

    def blocks(self, repository: Repository) -> list[bytes]:
        """The ids of the blocks that were read, once for each payload."""
        catalog = repository.store.catalog
        where = {
            (place.pack, place.offset): block
            for block, forms in catalog.blocks()
            for form in forms
            for place in form.places
        }
        return [
            where[place.pack, place.offset]
            for place in self.places
            if (place.pack, place.offset) in where
        ]
