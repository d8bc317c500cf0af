"""`verify`: a commit with all that it descends from. Is every byte there, and do merges add up?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from mergegit.dtypes import DTYPES
from mergegit.encoding import decode
from mergegit.errors import Damaged, MergegitError
from mergegit.history import walk
from mergegit.merge.recipe import Recipe
from mergegit.objects import (
    BlockId,
    Commit,
    CommitId,
    ExpertPlan,
    Manifest,
    ManifestId,
    Plan,
    Tensor,
    TensorId,
)
from mergegit.pipeline import ordered_map
from mergegit.repository.naming import short
from mergegit.repository.planning import gather
from mergegit.repository.replaying import ReplayReport
from mergegit.storage.store import Store

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are."""

_LISTED: Final = 20
"""Problems of a commit that are told one by one."""


@dataclass(frozen=True, slots=True)
class VerifiedCommit:
    """What was found of one commit.

    ``tensors`` are the model's; ``blocks`` and ``nbytes`` are of all that it holds, of which what
    is there twice counts once. ``checked_bytes`` are the stored bytes that were read for it, and
    not for a commit before. ``title`` is None where the commit
    itself can't be read; ``replay`` where it is no merge, or none was asked for.
    """

    commit: CommitId
    title: str | None
    is_merge: bool
    tensors: int
    blocks: int
    nbytes: int
    checked_bytes: int
    problems: tuple[str, ...]
    replay: ReplayReport | None = None

    @property
    def is_sound(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found: the commits, each before its parents."""

    commits: tuple[VerifiedCommit, ...]

    @property
    def is_sound(self) -> bool:
        return all(commit.is_sound for commit in self.commits)


def verify(
    store: Store,
    start: CommitId,
    *,
    replay: Callable[[str], ReplayReport] | None,
    threads: int,
    progress: Progress,
) -> VerifyReport:
    """Check a commit and all its ancestors; with ``replay`` every merge is made again."""
    verifier = _Verifier(store, threads, progress)
    lost: dict[CommitId, str] = {}

    def load(commit_id: CommitId) -> Commit:
        try:
            return store.commit(commit_id)
        except Damaged as error:
            lost[commit_id] = error.message
            # What can't be read has no known ancestors.
            return Commit(ManifestId(b""), (), "", 0, "")

    found = []
    for commit_id, commit in walk([start], load):
        if commit_id in lost:
            problem = (lost[commit_id],)
            found.append(VerifiedCommit(commit_id, None, False, 0, 0, 0, 0, problem))
        else:
            found.append(verifier.commit(commit_id, commit, replay))
    return VerifyReport(tuple(found))


@dataclass(slots=True)
class _Found:
    """What one commit comes to."""

    problems: list[str] = field(default_factory=list)
    tensors: int = 0
    blocks: int = 0
    nbytes: int = 0
    checked_bytes: int = 0


@dataclass(slots=True)
class _Verifier:
    """Checks commits, each object and each block once."""

    store: Store
    threads: int
    progress: Progress
    objects: dict[bytes, str | None] = field(default_factory=dict)
    """What was checked, with what is wrong with it."""
    blocks: dict[BlockId, str | None] = field(default_factory=dict)

    def commit(
        self, commit_id: CommitId, commit: Commit, replay: Callable[[str], ReplayReport] | None
    ) -> VerifiedCommit:
        found = _Found()
        self._object(commit_id, "commit", found)
        manifest = None
        if self._object(commit.manifest, "manifest", found):
            manifest = self._expect(commit.manifest, Manifest, found)
        if isinstance(manifest, Manifest):
            self._manifest(short(commit_id), manifest, found)
        is_merge = commit.recipe is not None or commit.plan is not None
        plan = None
        if commit.plan is not None and self._object(commit.plan, "plan", found):
            plan = self._expect(commit.plan, Plan, found)
        if is_merge and isinstance(manifest, Manifest):
            found.problems += _merge_problems(
                self.store, commit, plan if isinstance(plan, Plan) else None, manifest
            )
        replayed = None
        if is_merge and replay is not None and not found.problems:
            try:
                replayed = replay(commit_id.hex())
            except MergegitError as error:
                found.problems.append(f"it can't be replayed: {error.message}")
            else:
                if not replayed.is_same:
                    found.problems.append(_difference(replayed))
        return VerifiedCommit(
            commit_id,
            commit.title,
            is_merge,
            found.tensors,
            found.blocks,
            found.nbytes,
            found.checked_bytes,
            tuple(_cut(found.problems)),
            replayed,
        )

    def _object(self, object_id: bytes, word: str, found: _Found) -> bool:
        """Whether an object is there and of its id."""
        if object_id not in self.objects:
            try:
                data = self.store.object_bytes(object_id)
                decode(data)
            except Damaged as error:
                self.objects[object_id] = f"{word}: {error.message}"
            else:
                self.objects[object_id] = None
                found.checked_bytes += len(data)
        problem = self.objects[object_id]
        if problem is not None:
            found.problems.append(problem)
        return problem is None

    def _expect(self, object_id: bytes, kind: type, found: _Found) -> object:
        value = self.store.object(object_id)
        if not isinstance(value, kind):
            found.problems.append(
                f"object {short(object_id)} is a {type(value).__name__.lower()}, and no "
                f"{kind.__name__.lower()}"
            )
        return value

    def _manifest(self, of: str, manifest: Manifest, found: _Found) -> None:
        found.tensors = len(manifest.tensors)
        names: dict[TensorId, str] = {}
        for name, tensor_id in (*manifest.tensors.items(), *manifest.files.items()):
            names.setdefault(tensor_id, name)
        for shard in manifest.shards:
            names.setdefault(shard.header, f"{shard.path} (header)")
            for name, tensor_id in shard.strays.items():
                names.setdefault(tensor_id, f"{name} in {shard.path}")
        wanted: dict[BlockId, str] = {}
        for tensor_id, name in names.items():
            if not self._object(tensor_id, f"tensor {name}", found):
                continue
            tensor = self._expect(tensor_id, Tensor, found)
            if isinstance(tensor, Tensor):
                found.blocks += len(tensor)
                found.nbytes += tensor.nbytes
                for block in tensor.blocks():
                    wanted.setdefault(block, name)
        self._check_blocks(of, [block for block in wanted if block not in self.blocks], found)
        for block, name in wanted.items():
            problem = self.blocks[block]
            if problem is not None:
                found.problems.append(f"tensor {name}: {problem}")

    def _check_blocks(self, of: str, blocks: list[BlockId], found: _Found) -> None:
        """Read every form in which these blocks are stored."""
        forms = self.store.catalog.forms_of(blocks)
        total = sum(form.nbytes for stored in forms.values() for form in stored)
        done = 0

        def check(block: BlockId) -> tuple[BlockId, int, str | None]:
            stored = forms.get(block, [])
            complete = [form for form in stored if form.is_complete]
            if not complete:
                return block, 0, f"block {short(block)} is missing"
            try:
                for form in complete:
                    self.store.read_form(block, form)
            except Damaged as error:
                return block, 0, error.message
            return block, sum(form.nbytes for form in complete), None

        for block, nbytes, problem in ordered_map(check, blocks, threads=self.threads):
            self.blocks[block] = problem
            found.checked_bytes += nbytes
            done += nbytes
            self.progress(f"verifying {of}", done, total)


def _cut(problems: list[str]) -> Iterator[str]:
    yield from problems[:_LISTED]
    if len(problems) > _LISTED:
        yield f"and {len(problems) - _LISTED} more"


def _difference(replayed: ReplayReport) -> str:
    what = [tensor.name for tensor in replayed.tensors] or list(replayed.files)
    more = f" and {len(what) - 3} more" if len(what) > 3 else ""
    return f"replayed it comes out otherwise: {', '.join(what[:3])}{more}"


# -- what a merge says of itself -------------------------------------------------------------------


def _merge_problems(
    store: Store, commit: Commit, plan: Plan | None, manifest: Manifest
) -> Iterator[str]:
    """What does not add up in a merge's recipe, plan and parents."""
    if commit.recipe is None or commit.plan is None:
        yield f"it has a {'plan' if commit.recipe is None else 'recipe'} alone"
        return
    if plan is None:
        return
    try:
        recipe = Recipe.from_json(commit.recipe)
    except MergegitError as error:
        yield error.message
        return
    if plan.recipe != commit.recipe:
        yield "its plan is that of another recipe"
    if recipe.parents != commit.parents:
        yield "its parents are not the base and the experts of its recipe"
    if plan.base != recipe.base:
        yield "its plan is on another base than its recipe"
    if [e.commit for e in plan.experts] != [e.commit for e in recipe.experts]:
        yield "its plan reads other experts than its recipe names"
        return
    yield from _byte_problems(commit, plan)
    # Aligned vocabularies may have to be made again, which only a replay does.
    if recipe.vocabulary is None:
        try:
            yield from _tensor_problems(store, recipe, plan, manifest)
        except Damaged as error:
            yield f"what it was merged from can't be read: {error.message}"
        except MergegitError as error:
            yield f"its recipe does not fit its parents: {error.message}"


def _byte_problems(commit: Commit, plan: Plan) -> Iterator[str]:
    for expert in plan.experts:
        if sum(expert.layer_bytes) != expert.planned_bytes or _blocks(expert) != len(expert.layers):
            yield f"its plan does not add up for expert {expert.ref}"
    if sum(expert.planned_bytes for expert in plan.experts) != plan.planned_bytes:
        yield "its plan's bytes are not those of its experts"
    if plan.budget_bytes is not None and plan.planned_bytes > plan.budget_bytes:
        yield "its plan exceeds its budget"
    execution = commit.execution or {}
    if execution.get("read_bytes", 0) + execution.get("spared_bytes", 0) != plan.planned_bytes:
        yield "it did not read what its plan lists"


def _blocks(expert: ExpertPlan) -> int:
    return expert.blocks_read + expert.blocks_free + expert.blocks_skipped


def _tensor_problems(store: Store, recipe: Recipe, plan: Plan, manifest: Manifest) -> Iterator[str]:
    """What does not fit between the merged tensors and those of base and experts."""
    inputs = gather(store, recipe)
    if (plan.tensors, dict(plan.kept)) != (inputs.matching.merged, dict(inputs.matching.kept)):
        yield "its plan merges other tensors than its recipe does"
        return
    blocks = sum(len(inputs.base.tensors[name]) for name in plan.tensors)
    if any(len(expert.layers) != blocks for expert in plan.experts):
        yield "its plan is of another number of blocks"
    expected = {**inputs.base.ids, **inputs.copied}
    for name in sorted(expected.keys() ^ manifest.tensors.keys()):
        yield f"tensor {name} should {'' if name in expected else 'not '}be in it"
    for name in sorted(expected.keys() & manifest.tensors.keys()):
        if name not in plan.tensors:
            if manifest.tensors[name] != expected[name]:
                yield f"tensor {name} was not merged, and is another one"
            continue
        base, tensor = inputs.base.tensors[name], store.tensor(manifest.tensors[name])
        if (tensor.dtype, tensor.shape) != (recipe.dtype or base.dtype, base.shape):
            dtype = DTYPES[recipe.dtype or base.dtype].name
            yield f"tensor {name} should be {dtype} {list(base.shape)}"
