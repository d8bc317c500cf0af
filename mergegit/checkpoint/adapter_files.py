"""Writing a LoRA adapter as PEFT reads it: its config, and the names of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from mergegit.checkpoint.adapter import PREFIX
from mergegit.checkpoint.json_files import write_object
from mergegit.errors import BadCheckpoint

WEIGHTS_METADATA: Final = {"format": "pt"}
"""The ``__metadata__`` that PEFT gives ``adapter_model.safetensors``."""

Floats = npt.NDArray[np.float32]

_WEIGHT: Final = ".weight"


Side = Literal["a", "b"]
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """How an adapter is written.

    ``config`` is the text of ``adapter_config.json``. ``factors`` are tensors by name: of which
    tensor of the base each is a factor, and which of the two; those of one target follow on each
    other. ``shapes`` are theirs. ``saved`` gives other tensors the names of those of the changed
    model that they are.
    """

    config: bytes
    factors: Mapping[str, tuple[str, Side]]
    shapes: Mapping[str, Shape]
    saved: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What an adapter's two files hold.

    ``config`` is the text of ``adapter_config.json``. ``adapter_model.safetensors`` has the
    ``factors``, by name, and the ``saved``: names of tensors, each with the name of the tensor of
    the changed model that it is.
    """

    config: bytes
    factors: Mapping[str, Floats]
    saved: Mapping[str, str]


def adapter_files(
    low_rank: Mapping[str, tuple[Floats, Floats]],
    saved: Collection[str],
    *,
    base_name: str | None = None,
    task: str | None = None,
    prefix: str = "",
    transposed: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
) -> AdapterFiles:
    """An adapter that adds ``b @ a`` to tensors of its base and replaces others.

    ``low_rank`` gives weights of linear layers their factors ``b``, (rows, r), and ``a``, (r,
    columns), float32, as the base stores them. The rest is as in ``adapter_layout``. Raises
    ``ValueError`` without factors, or where they don't fit one another.
    """
    for target, (b, a) in low_rank.items():
        if b.ndim != 2 or a.ndim != 2 or b.shape[1] != a.shape[0]:
            raise ValueError(f"{target}: {b.shape} and {a.shape} are no factors of a weight")
    layout = adapter_layout(
        {target: (b.shape[0], b.shape[1], a.shape[1]) for target, (b, a) in low_rank.items()},
        saved,
        base_name=base_name,
        task=task,
        prefix=prefix,
        transposed=transposed,
        tied=tied,
    )
    factors = {
        name: written_factor(*low_rank[target], side, target in transposed)
        for name, (target, side) in layout.factors.items()
    }
    return AdapterFiles(layout.config, factors, layout.saved)


def written_factor(b: Floats, a: Floats, side: Side, transposed: bool) -> Floats:
    """One of the factors of a tensor as an adapter holds it."""
    if transposed:
        b, a = a.T, b.T
    return np.ascontiguousarray(a if side == "a" else b)


def adapter_layout(
    low_rank: Mapping[str, tuple[int, int, int]],
    saved: Collection[str],
    *,
    base_name: str | None = None,
    task: str | None = None,
    prefix: str = "",
    transposed: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
) -> AdapterLayout:
    """How an adapter is written that adds low-rank matrices to tensors and replaces others.

    ``low_rank`` gives weights of linear layers their rows, the rank of the change, and their
    columns, as the base stores them; ``transposed`` are those of Conv1D layers, which are stored
    with inputs first. Embeddings can't be among them. ``saved`` are tensors that the adapter holds
    whole; ``whole_modules`` says which must be. All are names of the base's tensors, to which
    ``prefix`` is put where the model's class calls them by a longer name than the checkpoint does.
    ``tied`` gives heads that share an embedding's weights, by the class's names, the embedding's
    name. ``base_name`` and ``task`` (as ``CAUSAL_LM``) are noted in the config.

    Each factor's scale is 1: ``lora_alpha`` is the rank. Raises ``ValueError`` without factors.
    """
    if not low_rank:
        raise ValueError("an adapter needs a factored tensor")
    modules = {target: prefix + _module_of(target) for target in sorted(low_rank)}
    factors: dict[str, tuple[str, Side]] = {}
    shapes: dict[str, Shape] = {}
    ranks: dict[str, int] = {}
    for target, module in modules.items():
        if not target.endswith(_WEIGHT):
            raise ValueError(f"{target}: only weights of modules can be factored")
        outputs, rank, inputs = low_rank[target]
        if target in transposed:
            outputs, inputs = inputs, outputs
        a, b = f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"
        factors[a], factors[b] = (target, "a"), (target, "b")
        shapes[a], shapes[b] = (rank, inputs), (outputs, rank)
        ranks[module] = rank
    places = {f"{PREFIX}{_place(prefix + name, ranks)}": name for name in sorted(saved)}
    inside = {name for name in saved if prefix + _module_of(name) in ranks}
    heads = {head: source for head, source in (tied or {}).items() if source in saved}
    places |= {f"{PREFIX}{head}": source for head, source in sorted(heads.items())}
    settings = {
        "base_model_name_or_path": base_name,
        "bias": "lora_only" if inside else "none",
        "ensure_weight_tying": bool(heads),
        "fan_in_fan_out": any(target in transposed for target in low_rank),
        "inference_mode": True,
        "modules_to_save": sorted({prefix + _module_of(name) for name in set(saved) - inside})
        or None,
        "peft_type": "LORA",
        "target_modules": list(modules.values()),
        "task_type": task,
        **_rank_settings(ranks),
    }
    return AdapterLayout(write_object(dict(sorted(settings.items()))), factors, shapes, places)


def whole_modules(
    changed: Collection[str], low_rank: Collection[str], base: Collection[str]
) -> set[str]:
    """The tensors that an adapter must hold whole so that it holds those in ``changed``.

    PEFT replaces whole modules, so the other tensors of a module come along, changed or not; but a
    bias beside a factored weight comes alone. All are names of the base's tensors. Raises
    ``BadCheckpoint`` where a module has factored tensors inside, beside a changed one.
    """
    factored = {_module_of(target) for target in low_rank}
    loose = {name for name in changed if _module_of(name) in factored and name not in low_rank}
    modules = {_module_of(name): name for name in changed if _module_of(name) not in factored}
    if "" in modules:
        _refuse(modules[""], "belongs to no module, which an adapter could replace")
    needed = set(loose)
    for name in base:
        module = _module_of(name)
        while module and module not in modules:
            module = _module_of(module)
        if not module:
            continue
        if _module_of(name) in factored:
            _refuse(modules[module], f"stands in one module with {name}, which is factored")
        needed.add(name)
    return needed


def _refuse(name: str, why: str) -> NoReturn:
    raise BadCheckpoint(
        f"tensor {name} can't be part of an adapter: it {why}",
        hint="write a whole checkpoint instead",
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _place(name: str, ranks: Mapping[str, int]) -> str:
    """Where PEFT looks for a tensor that is saved whole: factored modules are wrapped."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.base_layer.{leaf}" if module in ranks else name


def _rank_settings(ranks: Mapping[str, int]) -> dict[str, Any]:
    """The commonest rank, and the modules that have another."""
    ((usual, _),) = Counter(sorted(ranks.values())).most_common(1)
    # PEFT takes the first pattern that a name ends with, so the longer come first.
    others = {
        module: ranks[module]
        for module in sorted(ranks, key=lambda module: (-len(module), module))
        if ranks[module] != usual
    }
    return {"r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others}
