"""Slices: models seen as their layers will be numbered in the merged model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mergegit.errors import BadRecipe, Mismatch
from mergegit.merge.layers import Stack, is_input, stacks
from mergegit.merge.match import Model
from mergegit.merge.recipe import Range, Recipe
from mergegit.objects import Tensor, TensorId


@dataclass(frozen=True, slots=True)
class Sliced:
    """The base and the experts of a recipe of slices, by the merged model's names of tensors;
    ``stack`` are the merged model's layers."""

    base: Model
    experts: tuple[Model, ...]
    stack: Stack


def slice_models(recipe: Recipe, base: Model, experts: Sequence[Model]) -> Sliced:
    """The models of a recipe with their layers renumbered. Raises ``BadRecipe`` and ``Mismatch``.

    What lies before the layers is taken from the first slice, what lies after from the last.
    """
    stack = main_stack(base)
    layers = [part.base_layers for part in recipe.slices]
    lengths = [stop - start for start, stop in layers]
    views = []
    for place, expert in enumerate(experts):
        ranges = [
            next((s.layers for s in part.sources if s.expert == place), None)
            for part in recipe.slices
        ]
        views.append(_view(expert, main_stack(expert), ranges, lengths, stack.prefix))
    if recipe.method.copies is not None:
        # What is copied is matched with nothing, and must fit the config all the same.
        described = base if recipe.files_from is None else experts[recipe.files_from]
        for view in views:
            _check_shapes(view, described)
    whole = _view(base, stack, layers, lengths, stack.prefix)
    return Sliced(whole, tuple(views), Stack(stack.prefix, sum(lengths)))


def main_stack(model: Model) -> Stack:
    """The layers of a model; of several stacks, such as a vision tower beside a language model,
    the one of most weights. Raises ``BadRecipe`` where there are none, or an encoder's and a
    decoder's, which slices can't tell apart."""
    found = stacks(model.tensors)
    if not found:
        raise BadRecipe(
            f"no layers are to be found in the tensor names of {model.ref}",
            hint="slices need names like model.layers.0.mlp.weight; merge whole models instead",
        )
    prefixes = {stack.prefix for stack in found}
    for prefix in sorted(prefixes):
        encoder = prefix.replace("decoder", "encoder")
        if encoder != prefix and encoder in prefixes:
            raise BadRecipe(
                f"{model.ref} has two stacks of layers, {encoder}N and {prefix}N",
                hint="slices are for models of one stack; merge whole models instead",
            )
    return max(found, key=lambda stack: _weights(model, stack))


def _weights(model: Model, stack: Stack) -> int:
    return sum(
        tensor.elements
        for name, tensor in model.tensors.items()
        if stack.layer_of(name) is not None
    )


def _check_shapes(view: Model, described: Model) -> None:
    """Refuse what is not shaped as in the model whose config the merged one takes."""
    stack = main_stack(described)
    for name, tensor in view.tensors.items():
        own = view.own_name(name)
        theirs = described.tensors.get(own)
        if theirs is None and own.startswith(stack.prefix):
            theirs = described.tensors.get(stack.renamed(own, stack.layers - 1))
        if theirs is not None and theirs.shape != tensor.shape:
            raise Mismatch(
                f"tensor {own} is {list(tensor.shape)} in {view.ref} but {list(theirs.shape)} in "
                f"{described.ref}",
                hint="stack layers of models of one shape",
            )


def _view(
    model: Model,
    stack: Stack,
    ranges: Sequence[Range | None],
    lengths: Sequence[int],
    prefix: str,
) -> Model:
    """A model's tensors by their names in the merged model.

    ``ranges`` are its layers in each slice, None where it takes no part; ``lengths`` are the
    slices'. Layers that several slices take are there several times.
    """
    if stack.prefix != prefix:
        raise BadRecipe(
            f"the layers of {model.ref} are called {stack.prefix}N and those of the base {prefix}N",
            hint="merge models of one architecture",
        )
    for layers in ranges:
        if layers is not None and layers[1] > stack.layers:
            raise BadRecipe(
                f"a slice takes layers [{layers[0]}, {layers[1]}] of {model.ref}, which has "
                f"{stack.layers}",
                hint=f"a layer_range lies within [0, {stack.layers}]",
            )
    by_layer: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    ids: dict[str, TensorId] = {}
    own_names: dict[str, str] = {}

    def take(name: str, called: str) -> None:
        tensors[called], ids[called] = model.tensors[name], model.ids[name]
        if called != name:
            own_names[called] = name

    for name in model.tensors:
        layer = stack.layer_of(name)
        if layer is not None:
            by_layer.setdefault(layer, []).append(name)
        elif (ranges[0] if is_input(name) else ranges[-1]) is not None:
            take(name, name)
    first = 0
    for layers, length in zip(ranges, lengths, strict=True):
        start, stop = layers or (0, 0)
        for layer in range(start, stop):
            for name in by_layer.get(layer, ()):
                take(name, stack.renamed(name, first + layer - start))
        first += length
    return replace(model, tensors=tensors, ids=ids, own_names=own_names)
