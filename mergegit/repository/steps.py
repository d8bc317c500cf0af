"""Changes that no statistics were taken of, and that a merge's recipe tells of all the same."""

from __future__ import annotations

from collections.abc import Iterable

from mergegit.objects import CommitId, TensorId
from mergegit.repository.known import Knowledge, Known, Step
from mergegit.storage.store import Store


def steps_of_merges(
    store: Store, commits: Iterable[CommitId]
) -> dict[TensorId, tuple[TensorId, Step]]:
    """The steps from bases to merged tensors, of the commits that are merges and of their bases
    that are merges themselves. Nothing is read for it, nor are vocabularies aligned anew."""
    steps: dict[TensorId, tuple[TensorId, Step]] = {}
    seen: set[CommitId] = set()
    for start in commits:
        at: CommitId | None = start
        while at is not None and at not in seen:
            seen.add(at)
            commit = store.commit(at)
            if commit.recipe is None or commit.plan is None:
                break
            if not commit.recipe.get("vocabulary"):
                steps.update(_steps_of(store, at))
            at = commit.parents[0] if commit.parents else None
    return steps


def _steps_of(store: Store, commit_id: CommitId) -> dict[TensorId, tuple[TensorId, Step]]:
    from mergegit.repository.merge_record import MergeRecord
    from mergegit.repository.planning import gather

    record = MergeRecord.of(store, commit_id, lambda recipe: gather(store, recipe))
    knowledge = Knowledge(store)
    assert record is not None, "it is a merge"

    def step(name: str) -> Step:
        told: list[Known | None] = []

        def tell() -> Known | None:
            if not told:
                told.append(record.change(name, knowledge))
            return told[0]

        return tell

    merged = store.manifest(store.commit(commit_id).manifest).tensors
    return {
        merged[name]: (record.inputs.base.ids[name], step(name))
        for name in record.plan.tensors
        if merged.get(name) not in (None, record.inputs.base.ids[name])
    }
