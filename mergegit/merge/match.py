"""Which tensors of a base and its experts are merged, and why the others are not.

Works on names, dtypes, shapes and ids alone: every mismatch is found before a weight is read, and
every input tensor is accounted for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mergegit.dtypes import DTYPES
from mergegit.errors import Mismatch
from mergegit.objects import Tensor, TensorId


@dataclass(frozen=True, slots=True)
class Model:
    """A model's tensors: ``tensors`` gives each name its object, ``ids`` its id.

    ``stored_bytes`` is what its own tensors take where they are not these, as an adapter's.
    ``own_names`` are what the model itself calls those that slices have moved to other layers.
    """

    ref: str
    tensors: Mapping[str, Tensor]
    ids: Mapping[str, TensorId]
    stored_bytes: int | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)

    def own_name(self, name: str) -> str:
        return self.own_names.get(name, name)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in its own checkpoint: what reading all of them reads."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Matching:
    """``merged`` are the names of tensors that are merged, in order; ``kept`` gives every other
    input tensor the reason why it is taken from the base, or left out."""

    merged: tuple[str, ...]
    kept: Mapping[str, str]


def match(
    base: Model,
    experts: Sequence[Model],
    *,
    ignore_extra: bool,
    converts: bool = False,
    participants: Callable[[str], Sequence[int]] | None = None,
) -> Matching:
    """Match experts' tensors with the base's by name. Raises ``Mismatch``.

    With ``converts`` the output has another dtype: then tensors that no expert has are merged too,
    of nothing but the base. ``participants`` are the places of the experts that are merged into a
    tensor, by default all.
    """
    kept: dict[str, str] = {}
    merged = []
    for name in sorted(base.tensors):
        tensor = base.tensors[name]
        here = experts if participants is None else [experts[k] for k in participants(name)]
        lacking = [expert.ref for expert in here if name not in expert.tensors]
        for expert in here:
            if name in expert.tensors:
                _check_shape(name, base, expert)
        differing = [
            expert.ref
            for expert in here
            if name in expert.ids and expert.ids[name] != base.ids[name]
        ]
        if not DTYPES[tensor.dtype].is_float:
            kept[name] = _why_kept(tensor.dtype, differing)
        elif len(lacking) == len(here):
            kept[name] = "no expert has it: the base's"
            if converts:
                merged.append(name)
        else:
            merged.append(name)
            for expert in here:
                if name in expert.tensors:
                    _check_dtype(name, expert)
            if lacking:
                kept[name] = f"{', '.join(lacking)} lack it and count with the base's"
    extra: dict[str, list[str]] = {}
    for expert in experts:
        for name in sorted(expert.tensors.keys() - base.tensors.keys()):
            extra.setdefault(name, []).append(expert.ref)
    if extra and not ignore_extra:
        name, refs = next(iter(extra.items()))
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise Mismatch(
            f"expert {refs[0]} has tensor {name}{more}, which base {base.ref} lacks",
            hint="leave such tensors out with --ignore-extra, or choose another --base",
        )
    for name, refs in extra.items():
        have = "has" if len(refs) == 1 else "have"
        kept[name] = f"only {', '.join(refs)} {have} it: left out"
    return Matching(tuple(merged), kept)


def _why_kept(dtype: str, differing: Sequence[str]) -> str:
    if differing:
        return f"{dtype} can't be merged: the base's, though {', '.join(differing)} differ"
    return f"{dtype} can't be merged: the base's"


def _check_shape(name: str, base: Model, expert: Model) -> None:
    ours, theirs = base.tensors[name].shape, expert.tensors[name].shape
    if ours != theirs:
        raise Mismatch(
            f"tensor {name} is {list(ours)} in {base.ref} but {list(theirs)} in {expert.ref}",
            hint="if these are rows of tokens, bring the models to one vocabulary with "
            "--tokenizer-source union (in a recipe tokenizer_source: union)"
            if ours[1:] == theirs[1:]
            else "choose the base that the expert was trained from with --base",
        )


def _check_dtype(name: str, expert: Model) -> None:
    dtype = expert.tensors[name].dtype
    if not DTYPES[dtype].is_float:
        raise Mismatch(
            f"tensor {name} is {dtype} in {expert.ref}, which can't be merged",
            hint="add the expert in an unquantised dtype",
        )
