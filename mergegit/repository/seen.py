"""Commits as they are compared: by their tensors' names, an adapter as the model that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mergegit.objects import BlockId, CommitId, Manifest, Tensor, TensorId
from mergegit.repository.lineage import is_adapter
from mergegit.repository.naming import ResolvedRef
from mergegit.storage.store import Store

if TYPE_CHECKING:
    from mergegit.repository.adapters import ComputedBlock


@dataclass(frozen=True, slots=True)
class Seen:
    """A commit's tensors: ``ids`` by name.

    Of an adapter these are the tensors of the model that it makes; ``made`` are those that are
    stored nowhere, and ``computed`` their blocks.
    """

    ref: str
    commit: CommitId
    manifest: Manifest
    ids: Mapping[str, TensorId]
    is_adapter: bool = False
    made: Mapping[str, Tensor] = field(default_factory=dict)
    computed: Mapping[BlockId, ComputedBlock] = field(default_factory=dict)

    def tensor(self, store: Store, name: str) -> Tensor:
        return self.made.get(name) or store.tensor(self.ids[name])


def see(store: Store, ref: ResolvedRef) -> Seen:
    """A commit as a model. Raises ``NoBase`` for an adapter whose base is no model."""
    manifest = store.manifest(store.commit(ref.commit).manifest)
    if not is_adapter(manifest):
        return Seen(ref.name, ref.commit, manifest, manifest.tensors)
    from mergegit.repository.adapters import adapted_model, placed

    adapted = adapted_model(store, ref.name, ref.commit)
    assert adapted is not None, "it is an adapter"
    model, computed = placed(adapted.model, adapted.made)
    made = {name: model.tensors[name] for name, i in model.ids.items() if i in adapted.made}
    return Seen(ref.name, ref.commit, manifest, model.ids, True, made, computed)
