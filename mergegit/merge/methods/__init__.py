"""The methods by which experts are merged: one module for each family, and the list of them all.

A method of your own is a module here that makes a ``Method``, and its name in ``METHODS``.
"""

from __future__ import annotations

from typing import Final

from mergegit.errors import BadRecipe
from mergegit.merge.method import Method
from mergegit.merge.methods import (
    averaging,
    breadcrumbs,
    consensus,
    dare,
    della,
    model_stock,
    pairs,
    passthrough,
    ram,
    sce,
    spectral,
    spherical,
    ties,
    wudi,
)

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        averaging.LINEAR,
        averaging.TASK_ARITHMETIC,
        ties.TIES,
        dare.DARE_LINEAR,
        dare.DARE_TIES,
        della.DELLA_LINEAR,
        della.DELLA,
        breadcrumbs.BREADCRUMBS,
        breadcrumbs.BREADCRUMBS_TIES,
        sce.SCE,
        consensus.CONSENSUS,
        spherical.SLERP,
        spherical.NUSLERP,
        spherical.MULTISLERP,
        spherical.KARCHER,
        model_stock.MODEL_STOCK,
        pairs.NEARSWAP,
        pairs.ARCEE_FUSION,
        ram.RAM,
        ram.RAMPLUS_TL,
        wudi.WUDI,
        spectral.TSV,
        spectral.ISO_C,
        passthrough.PASSTHROUGH,
    )
}


def method(name: str) -> Method:
    """The method of a name. Raises ``BadRecipe``."""
    try:
        return METHODS[name]
    except KeyError:
        raise BadRecipe(
            f"there is no method {name!r}", hint=f"methods are {', '.join(METHODS)}"
        ) from None
