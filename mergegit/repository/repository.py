"""A repository of checkpoints, and its verbs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from mergegit._version import VERSION
from mergegit.encoding import FORMAT_VERSION, Object, decode, encode, hash_object
from mergegit.errors import (
    BadRecipe,
    Damaged,
    NoBase,
    RefConflict,
    UnknownRef,
    UnusableRepository,
)
from mergegit.history import walk
from mergegit.objects import Commit, CommitId, Manifest, Plan, PlanId, Tensor, TensorId
from mergegit.pipeline import default_threads
from mergegit.repository import lineage
from mergegit.repository.collecting import EXPIRE, GRACE
from mergegit.repository.naming import ResolvedRef, resolve, resolve_object, short
from mergegit.repository.reports import (
    AddReport,
    CheckoutReport,
    CollectReport,
    ExtractReport,
    MergeReport,
    PlanReport,
    RefMove,
    RepackReport,
    Status,
)
from mergegit.storage.lease import Lease
from mergegit.storage.location import Location, create, discover, disk_bytes
from mergegit.storage.refs import SPACES, RefUpdate, Space, check_name
from mergegit.storage.store import DamagedBlock, Store
from mergegit.storage.workspace import sweep

if TYPE_CHECKING:
    import torch

    from mergegit.merge.mergekit_yaml import Document
    from mergegit.merge.plan import Planner
    from mergegit.merge.recipe import Recipe
    from mergegit.repository.bisecting import Bisection
    from mergegit.repository.blaming import BlameReport
    from mergegit.repository.checking import CheckReport
    from mergegit.repository.comparing import DiffReport
    from mergegit.repository.picking import Errand, ErrandReport
    from mergegit.repository.planning import Inputs
    from mergegit.repository.replaying import DistanceReport, ReplayReport
    from mergegit.repository.similarity_report import SimilarityReport
    from mergegit.repository.verifying import VerifyReport

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are."""

Clock = Callable[[], float]

BlockEncoding = Literal["delta", "raw"]
"""How a command stores blocks that have a base: as progressive deltas, or as their plain bytes."""

_MAX_BRANCH: Final = 60

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _silent(what: str, done: int, total: int) -> None:
    """The progress of who does not ask."""


def _leased(
    verb: Callable[Concatenate[Repository, _Arguments], _Result],
) -> Callable[Concatenate[Repository, _Arguments], _Result]:
    """A verb during which nothing is collected, from the first look at the store to the last."""

    @functools.wraps(verb)
    def leased(
        repository: Repository, /, *arguments: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        with repository.store.lease.shared():
            return verb(repository, *arguments, **options)

    return leased


class Repository:
    """An open repository.

    ``author`` is who commits are by, ``threads`` how many threads work; by default as many as
    there are cores. Use it as a context manager, or ``close`` it.

        with Repository.open("models") as repository:
            repository.add("llama-math")
            recipe = repository.recipe(["llama-math", "llama-code"])
            report = repository.merge(repository.plan(recipe, budget="10%"))
            repository.checkout(report.branch, "merged")
    """

    def __init__(
        self,
        store: Store,
        *,
        author: str = "unknown",
        threads: int | None = None,
        clock: Clock = time.time,
    ) -> None:
        self.store = store
        self.author = author
        self.threads = threads or default_threads()
        self._clock = clock

    @classmethod
    def init(
        cls, directory: str | os.PathLike[str] = ".", *, author: str = "unknown",
        threads: int | None = None,
    ) -> Repository:  # fmt: skip
        """Make a repository in ``directory``, or open the one that is there."""
        location, _ = create(Path(directory))
        return cls(_open_store(location), author=author, threads=threads)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str] = ".", *, author: str = "unknown",
        threads: int | None = None,
    ) -> Repository:  # fmt: skip
        """The repository that ``path`` lies in. Raises ``NotARepository``."""
        return cls(_open_store(discover(Path(path))), author=author, threads=threads)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_writable(self) -> bool:
        """Whether commands that change the repository can be run on it."""
        return self.store.is_writable

    # -- looking ---------------------------------------------------------------------------------

    def resolve(self, ref: str) -> CommitId:
        """The commit that a ref names. Raises ``UnknownRef`` and ``AmbiguousRef``."""
        return resolve(self.store, ref).commit

    def commit(self, ref: str) -> Commit:
        return self.store.commit(self.resolve(ref))

    def manifest(self, ref: str) -> Manifest:
        return self.store.manifest(self.commit(ref).manifest)

    def tensor(self, tensor_id: TensorId) -> Tensor:
        return self.store.tensor(tensor_id)

    def object(self, text: str) -> tuple[bytes, Object]:
        """Any object by ref, id or prefix of an id, with its id."""
        object_id = resolve_object(self.store, text)
        return object_id, self.store.object(object_id)

    def log(self, ref: str | None = None) -> Iterator[tuple[CommitId, Commit]]:
        """Commits from a ref back, or all that refs reach; children before their parents."""
        if ref is None:
            return lineage.all_commits(self.store)
        return walk([self.resolve(ref)], self.store.commit)

    def branches(self) -> dict[str, CommitId]:
        return self.store.refs.all("heads")

    def tags(self) -> dict[str, CommitId]:
        return self.store.refs.all("tags")

    def reflog(self, ref: str | None = None) -> list[RefMove]:
        """Where a branch or tag stood, or all of them, newest first; deleted ones, too."""
        refs = self.store.refs
        moves = [
            RefMove(space, name, number, move.old, move.new, move.author, move.time, move.reason)
            for space in SPACES
            for name in refs.logged(space)
            if ref in (None, name)
            for number, move in enumerate(refs.moves(space, name))
        ]
        return moves if ref is not None else sorted(moves, key=lambda move: -move.time)

    def status(self) -> Status:
        counts = self.store.catalog.counts()
        commits = list(self.log())
        sizes: dict[bytes, int] = {}
        for _, commit in commits:
            if commit.manifest not in sizes:
                sizes[commit.manifest] = self._checkpoint_bytes(commit)
        return Status(
            root=str(self.store.location.root),
            format=FORMAT_VERSION,
            branches=len(self.branches()),
            tags=len(self.tags()),
            commits=len(commits),
            blocks=counts["blocks"],
            objects=counts["objects"],
            packs=counts["packs"],
            checkpoint_bytes=sum(sizes.values()),
            disk_bytes=disk_bytes(self.store.location.root),
        )

    def _checkpoint_bytes(self, commit: Commit) -> int:
        manifest = self.store.manifest(commit.manifest)
        ids = list(manifest.files.values())
        for shard in manifest.shards:
            ids += [shard.header, *(manifest.tensor_of(shard, name) for name in shard.names)]
        return sum(self.store.tensor(tensor_id).nbytes for tensor_id in ids)

    @_leased
    def fsck(self, progress: Progress = _silent) -> CheckReport:
        """Check everything: every object, every block's bytes, every ref."""
        from mergegit.repository.checking import check

        return check(
            self.store,
            threads=self.threads,
            progress=lambda done, total: progress("checking blocks", done, total),
        )

    @staticmethod
    def rebuild_catalog(path: str | os.PathLike[str] = ".") -> int:
        """Make the catalog of the repository at ``path`` anew from its packs; returns their number.

        No other process may use the repository meanwhile. Raises ``Busy`` where one writes.
        """
        from mergegit.repository.checking import rebuild_catalog

        location = discover(Path(path))
        with Lease(location).exclusive():
            return rebuild_catalog(location)

    # -- refs ------------------------------------------------------------------------------------

    def create_branch(self, name: str, ref: str) -> CommitId:
        return self._create_ref("heads", name, ref)

    def create_tag(self, name: str, ref: str) -> CommitId:
        return self._create_ref("tags", name, ref)

    def delete_branch(self, name: str) -> CommitId:
        """Delete a branch; returns where it stood.

        Its commits stay until they are collected, and its log tells where it stood.
        """
        return self._delete_ref("heads", name)

    def delete_tag(self, name: str) -> CommitId:
        return self._delete_ref("tags", name)

    @_leased
    def reset_branch(self, name: str, ref: str) -> tuple[CommitId, CommitId]:
        """Move a branch to any commit, not only forward; returns where it stood and stands.

        Where it stood, ``NAME@{1}`` names from then on. Raises ``UnknownRef`` and ``RefConflict``.
        """
        old = self.store.refs.require("heads", name)
        new = self.resolve(ref)
        if new != old:
            self.store.refs.update(self._ref_update("heads", name, old, new, f"reset to {ref}"))
        return old, new

    @_leased
    def rename_branch(self, old: str, new: str) -> CommitId:
        commit = self.store.refs.require("heads", old)
        self.store.refs.rename(
            self._ref_update("heads", old, commit, None, f"rename to {new}"),
            self._ref_update("heads", new, None, commit, f"rename from {old}"),
        )
        return commit

    @_leased
    def _create_ref(self, space: Space, name: str, ref: str) -> CommitId:
        commit = self.resolve(ref)
        self.store.refs.update(self._ref_update(space, name, None, commit, f"created from {ref}"))
        return commit

    def _delete_ref(self, space: Space, name: str) -> CommitId:
        commit = self.store.refs.require(space, name)
        self.store.refs.update(self._ref_update(space, name, commit, None, "deleted"))
        return commit

    def _ref_update(
        self, space: Space, name: str, old: CommitId | None, new: CommitId | None, reason: str
    ) -> RefUpdate:
        return RefUpdate(space, name, old, new, self.author, int(self._clock()), reason)

    # -- add -------------------------------------------------------------------------------------

    @_leased
    def add(
        self,
        checkpoint: str | os.PathLike[str],
        *,
        name: str | None = None,
        base: str | None = None,
        no_base: bool = False,
        message: str | None = None,
        encoding: BlockEncoding = "delta",
        progress: Progress = _silent,
    ) -> AddReport:
        """Store a checkpoint as a commit on a branch named after it.

        The commit's parent is ``base``: by default the base in the repository with the same
        tensor names and shapes. Blocks are stored as progressive deltas against the base's, or
        with the encoding ``raw`` plainly. Adding the same bytes again changes nothing, but where
        the repository had lost blocks of them. Raises ``BadCheckpoint``, ``NoBase`` and
        ``RefConflict``.

        A LoRA adapter, as PEFT saves it, is stored as it is. Its base is the one that its config
        names, where ``base`` does not say; as an expert it is the base with the adapter on it.
        """
        from mergegit.checkpoint.directory import inspect
        from mergegit.repository.adapters import AdapterOutline, tie_notes
        from mergegit.repository.adding import store_checkpoint

        started = time.perf_counter()
        inspected = inspect(Path(checkpoint))
        branch = check_name(name or inspected.name)
        shapes = {entry.name: entry.shape for entry in inspected.tensors().values()}
        notes = list(inspected.notes)
        tip = self.store.refs.read("heads", branch)
        adapter = AdapterOutline.of_checkpoint(inspected)
        if base is not None:
            chosen: ResolvedRef | None = resolve(self.store, base)
        elif adapter is not None:
            if no_base:
                raise NoBase(
                    f"{branch} is an adapter, which is nothing without its base",
                    hint="say which commit it was trained on with --base REF",
                )
            chosen = lineage.infer_adapter_base(self.store, branch, adapter.config, tip, notes)
        else:
            chosen = None if no_base else lineage.infer_base(self.store, shapes, notes)
        base_manifest = self._manifest_of(chosen.commit) if chosen else None
        if adapter is not None and base_manifest is not None:
            changes = adapter.check(self.store, branch, base_manifest)
            notes += tie_notes(self.store, branch, changes, base_manifest)
            base_manifest = None  # its tensors are none of the base's
        elif chosen is not None and base_manifest is not None:
            lineage.check_base(chosen.name, base_manifest)
        with self.store.transaction() as transaction:
            added = store_checkpoint(
                self.store,
                transaction,
                inspected,
                base_manifest,
                plainly=encoding == "raw",
                threads=self.threads,
                progress=lambda done, total: progress(f"adding {branch}", done, total),
            )
            for tensor, count in added.nonfinite.items():
                notes.append(f"tensor {tensor} holds {count} elements that are NaN or infinite")
            manifest_id = transaction.write_manifest(added.manifest)
            adapted = chosen.commit if adapter is not None and chosen else None
            commit_id = lineage.same_checkpoint(self.store, manifest_id, tip, adapted)
            is_new = commit_id is None or commit_id != tip
            if commit_id is not None and base is not None:
                notes.extend(lineage.other_base(self.store, commit_id, chosen))
            if commit_id is None:
                parents = lineage.parents_of_added(self.store, chosen, tip)
                commit_id = transaction.write_commit(
                    Commit(
                        manifest=manifest_id,
                        parents=parents,
                        author=self.author,
                        time=int(self._clock()),
                        message=message or f"add {branch}",
                    )
                )
            if is_new:
                update = self._ref_update("heads", branch, tip, commit_id, f"add: {checkpoint}")
                transaction.publish(update)
            elif added.new_blocks:
                transaction.publish()  # blocks that the repository had lost
        if adapter is not None:
            self._measure(branch, commit_id, progress)
        parents = self.store.commit(commit_id).parents
        parent = parents[0] if parents else None
        return AddReport(
            commit=commit_id,
            branch=branch,
            is_new=is_new,
            is_adapter=adapter is not None,
            base=parent,
            base_ref=lineage.name_of(self.store, parent) if parent else None,
            tensors=len(shapes),
            total_bytes=added.total_bytes,
            new_bytes=added.new_bytes,
            blocks=added.blocks,
            new_blocks=added.new_blocks,
            seconds=time.perf_counter() - started,
            notes=tuple(notes),
        )

    # -- plan and merge --------------------------------------------------------------------------

    def recipe(
        self,
        experts: Sequence[str],
        *,
        base: str | None = None,
        method: str = "task_arithmetic",
        parameters: Mapping[str, Any] | None = None,
        seed: int = 0,
        dtype: str | None = None,
        ignore_extra: bool = False,
        allow_nonfinite: bool = False,
        tokenizer_source: str | None = None,
        chat_template: str | None = None,
    ) -> Recipe:
        """A checked recipe. Keys of ``parameters`` are ``name`` or ``expert.name``; values are
        numbers, true or false, or gradients and rules as mergekit's recipes have them.
        ``tokenizer_source`` is ``base``, ``union`` or an expert: the vocabulary that the merged
        model gets, where the experts' differ. ``chat_template`` is ``auto``, the name of a
        built-in template, or one in Jinja.

        Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``.
        """
        from mergegit.repository.recipes import recipe_of_flags

        return recipe_of_flags(
            self.store,
            experts,
            base=base,
            method=method,
            parameters=parameters or {},
            seed=seed,
            dtype=dtype,
            ignore_extra=ignore_extra,
            allow_nonfinite=allow_nonfinite,
            tokenizer_source=tokenizer_source,
            chat_template=chat_template,
        )

    def recipe_of(
        self,
        document: Document,
        *,
        merged: Mapping[str, CommitId] | None = None,
        given: str | None = None,
        progress: Progress = _silent,
    ) -> Recipe:
        """The recipe of a document of mergekit's YAML (``mergegit.merge.mergekit_yaml``).

        ``merged`` are the commits of documents that it names, ``given`` the text that it was read
        from. Models that are paths are added. Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``.
        """
        from mergegit.repository.recipes import (
            check_models,
            check_words,
            models_of,
            recipe_of_document,
        )

        known = {name: ResolvedRef(name, commit) for name, commit in (merged or {}).items()}
        # Adding takes as long as its models are large: what is wrong is said before.
        check_words(document)
        check_models(self.store, document, known)
        for name in models_of(document):
            found = self._added(name, known, progress)
            if found is not None:
                known[name] = found
        return recipe_of_document(self.store, document, known, given)

    def _added(
        self, text: str, known: dict[str, ResolvedRef], progress: Progress
    ) -> ResolvedRef | None:
        """A model of a recipe that must be added first: a path, or an adapter's behind its base's
        and a plus. None where it is another thing."""
        if text in known or self._is_ref(text):
            return known.get(text)
        if Path(text).is_dir():
            added = self.add(text, progress=progress)
            return ResolvedRef(added.branch, added.commit)
        for plus in (at for at, letter in enumerate(text) if letter == "+"):
            base, adapter = text[:plus], text[plus + 1 :]
            is_ref = self._is_ref(adapter)
            if not is_ref and not lineage.is_adapter_directory(Path(adapter)):
                continue
            below = self._added(base, known, progress)
            if below is None and not is_ref and self._is_ref(base):
                below = ResolvedRef(base, self.resolve(base))
            if below is None:
                continue
            if is_ref:
                known[base] = below
                return None
            added = self.add(adapter, base=below.commit.hex(), progress=progress)
            return ResolvedRef(added.branch, added.commit)
        return None

    def _is_ref(self, text: str) -> bool:
        try:
            self.resolve(text)
        except UnknownRef:
            return False
        return True

    def plan(
        self,
        recipe: Recipe,
        *,
        budget: str | None = None,
        keep: bool = False,
        anew: bool = False,
        progress: Progress = _silent,
    ) -> PlanReport:
        """Plan a merge within a budget such as ``10%`` or ``2GiB``; None reads everything.

        With ``keep`` the plan is stored, so that ``saved_plan`` finds it by its id. With ``anew``
        what earlier merges made of the same is merged again. Raises
        ``BadBudget``, ``Mismatch`` and ``NotFinite``.
        """
        from mergegit.merge.budget import Budget

        parsed = Budget.parse(budget) if budget is not None else None
        planner, aligned_bytes = self._planner(recipe, progress)
        nbytes = parsed.bytes_of(planner.problem.raw_bytes) if parsed else None
        report = plan_report(planner.plan(nbytes), budget)
        report = replace(report, anew=True) if anew else self._spared(report)
        report = replace(report, aligned_bytes=aligned_bytes)
        if keep and not self.store.has_object(report.id):
            with self.store.transaction() as transaction:
                transaction.write_plan(report.plan)
                transaction.publish()
        return report

    def plan_curve(self, recipe: Recipe, *, progress: Progress = _silent) -> list[PlanReport]:
        """Plans at budgets from 1 to 100 per cent."""
        curve = self.planner(recipe, progress=progress).curve()
        return [plan_report(plan, f"{percent}%") for percent, plan in curve]

    def planner(self, recipe: Recipe, *, progress: Progress = _silent) -> Planner:
        """The planner of a recipe, for plans at many budgets. Aligns vocabularies and takes missing
        statistics first.

        Raises ``BadCheckpoint``, ``BadRecipe``, ``Mismatch`` and ``NotFinite``.
        """
        return self._planner(recipe, progress)[0]

    def _planner(self, recipe: Recipe, progress: Progress) -> tuple[Planner, int]:
        """The planner, and the expert bytes that were read to align vocabularies for it."""
        from mergegit.merge.plan import Planner
        from mergegit.repository import planning

        # No ref reaches aligned tensors: they must not be collected before all is known of them.
        held = nullcontext() if recipe.vocabulary is None else self.store.lease.shared()
        with held:
            inputs = self._gather(recipe, progress)
            self._take_statistics(inputs, progress)
            planner = Planner(planning.problem_of(self.store, inputs))
        return planner, inputs.aligned.read_bytes if inputs.aligned else 0

    def _gather(self, recipe: Recipe, progress: Progress) -> Inputs:
        from mergegit.repository import planning

        return planning.gather(
            self.store,
            recipe,
            threads=self.threads,
            progress=lambda done, total: progress("aligning vocabularies", done, total),
        )

    def _take_statistics(self, inputs: Inputs, progress: Progress) -> None:
        """Take what statistics were never taken of a recipe's models."""
        from mergegit.repository import planning

        pairs = planning.missing_statistics(self.store, inputs)
        if not pairs:
            return
        with self._explained(), self.store.transaction() as transaction:
            planning.take_statistics(
                self.store,
                transaction,
                pairs,
                inputs.computed,
                threads=self.threads,
                progress=lambda done, total: progress("taking statistics", done, total),
            )
            transaction.publish()

    def _measure(self, ref: str, commit: CommitId, progress: Progress) -> None:
        """Take an adapter's statistics beside its base, so that planning reads nothing of it."""
        from mergegit.merge.recipe import make_recipe
        from mergegit.repository import planning

        base = self.store.commit(commit).parents[0]
        recipe = make_recipe(
            method_name="task_arithmetic",
            base=(lineage.name_of(self.store, base), base),
            experts=[(ref, commit)],
            parameters={},
            expert_parameters=[{}],
            allow_nonfinite=True,
        )
        self._take_statistics(planning.gather(self.store, recipe), progress)

    def _spared(self, report: PlanReport) -> PlanReport:
        """A plan with what of it earlier merges have done already."""
        from mergegit.merge.recipe import Recipe
        from mergegit.repository import merging, planning

        inputs = planning.gather(self.store, Recipe.from_json(report.plan.recipe))
        spared = merging.spared_by_memory(self.store, inputs, report.plan)
        return replace(
            report, spared=tuple(map(tuple, spared.experts)), spared_base_bytes=spared.bases
        )

    def saved_plan(self, text: str) -> PlanReport:
        """A plan of the store by its id or a prefix of it, or by the ref of the merge that carried
        it out. Raises ``UnknownRef``, and ``BadRecipe`` where there is something else."""
        object_id, value = self.object(text)
        if isinstance(value, Commit) and value.plan is not None:
            object_id, value = value.plan, self.store.plan(value.plan)
        if not isinstance(value, Plan):
            raise BadRecipe(
                f"{text!r} is neither a plan nor a merge",
                hint="`mergegit show` names a merge's plan",
            )
        return self._still_fitting(PlanReport(PlanId(object_id), value, None))

    def read_plan(self, path: str | os.PathLike[str]) -> PlanReport:
        """A plan from a file that ``plan --save`` wrote. Raises ``BadRecipe``."""
        data = Path(path).read_bytes()
        try:
            value = decode(data)
        except Damaged as error:
            raise BadRecipe(
                f"{os.fspath(path)} is not a plan", hint="make it with `mergegit plan --save FILE`"
            ) from error
        if not isinstance(value, Plan):
            raise BadRecipe(
                f"{os.fspath(path)} is not a plan", hint="make it with `mergegit plan --save FILE`"
            )
        return self._still_fitting(PlanReport(PlanId(hash_object(data)), value, None))

    def _still_fitting(self, report: PlanReport) -> PlanReport:
        """A plan that was made before, if what it reads still costs what it says.

        Raises ``BadRecipe`` where its models are not here, or are stored in another way by now.
        """
        import numpy as np

        from mergegit.merge.recipe import Recipe

        plan = report.plan
        recipe = Recipe.from_json(plan.recipe)
        for commit_id in (recipe.base, *(expert.commit for expert in recipe.experts)):
            if not self.store.has_object(commit_id):
                raise BadRecipe(
                    f"the plan is about commit {short(commit_id)}, which is not in this repository",
                    hint="make the plan here",
                )
        planner, aligned_bytes = self._planner(recipe, _silent)
        sizes = {len(expert.layers) for expert in plan.experts}
        if sizes == {planner.problem.tiny.size} and plan.tensors == planner.problem.tensors:
            choice = np.stack([np.frombuffer(e.layers, np.uint8) for e in plan.experts])
            now = planner.state_if_possible(choice, plan.budget_bytes)
            if now is not None and now.experts == plan.experts:
                return replace(self._spared(report), aligned_bytes=aligned_bytes)
        raise BadRecipe("the plan does not fit what is stored by now", hint="make the plan again")

    def merge(
        self,
        plan: PlanReport,
        *,
        branch: str | None = None,
        message: str | None = None,
        encoding: BlockEncoding = "delta",
        progress: Progress = _silent,
    ) -> MergeReport:
        """Carry out a plan as a commit on ``branch``, by default one named after the experts.

        Reads the bytes that the plan lists, no more and no fewer. Raises ``RefConflict`` where the
        branch would not move forward, and ``Damaged`` where stored bytes are not what they should
        be; the repository is then as it was.
        """
        return self._merge(plan, branch, message, encoding, progress)

    @_leased
    def _merge(
        self,
        plan: PlanReport,
        branch: str | None,
        message: str | None,
        encoding: BlockEncoding,
        progress: Progress,
        *,
        reason: str | None = None,
        replaces: CommitId | None = None,
        is_named: bool = True,
    ) -> MergeReport:
        """``merge``, for a ``reason`` of its own; ``replaces`` is as for ``merge_branch``. What is
        not named is on no branch."""
        from mergegit.merge.mergekit_yaml import write_documents
        from mergegit.merge.recipe import Recipe
        from mergegit.repository import merging
        from mergegit.repository.manifests import merged_manifest
        from mergegit.repository.recipes import document_of
        from mergegit.repository.remembering import Spared
        from mergegit.repository.surroundings import surroundings
        from mergegit.repository.vocabularies import token_files

        started = time.perf_counter()
        recipe = Recipe.from_json(plan.plan.recipe)
        parents = recipe.parents
        for commit_id in parents:
            if not self.store.has_object(commit_id):
                raise BadRecipe(
                    f"the plan names commit {short(commit_id)}, which is not in the repository",
                    hint="make the plan again",
                )
        name, tip = "a merge on no branch", None
        if is_named:
            name, tip = lineage.merge_branch(self.store, branch, recipe, plan.id, parents, replaces)
        if tip is not None and lineage.is_this_merge(self.store, tip, plan.id, parents):
            sweep(self.store.location)  # where a killed run had no more than that left to do
            return MergeReport(tip, name, False, plan, 0, 0, 0, time.perf_counter() - started)
        inputs = self._gather(recipe, progress)
        if inputs.aligned is not None:
            plan = replace(plan, aligned_bytes=plan.aligned_bytes + inputs.aligned.read_bytes)
        # Before anything is read: here it may turn out that no tokenizer can have the tokens.
        vocabularies = inputs.aligned.vocabularies if inputs.aligned is not None else None
        told = token_files(self.store, recipe, vocabularies)
        counts, spared = merging.Counts(), Spared.none(len(recipe.experts))
        with self._explained(), self.store.transaction() as transaction:
            merged = merging.merge_blocks(
                self.store,
                transaction,
                inputs,
                plan.plan,
                plainly=encoding == "raw",
                threads=self.threads,
                counts=counts,
                spared=spared,
                anew=plan.anew,
                progress=lambda done, total: progress(f"merging {name}", done, total),
            )
            read = counts.experts.total
            if read + spared.total != plan.plan.planned_bytes:
                raise Damaged(
                    f"the merge read {read:,} bytes of experts and knew {spared.total:,}, where "
                    f"its plan lists {plan.plan.planned_bytes:,}",
                    hint="make the plan again; if it persists, run `mergegit fsck`",
                )
            manifest = merged_manifest(self.store, transaction, inputs, plan.plan, merged, told)
            seconds = time.perf_counter() - started
            commit_id = transaction.write_commit(
                Commit(
                    manifest=transaction.write_manifest(manifest),
                    parents=parents,
                    author=self.author,
                    time=int(self._clock()),
                    message=message or _merge_message(recipe, plan),
                    recipe=plan.plan.recipe,
                    plan=transaction.write_plan(plan.plan),
                    execution={
                        "mergegit": VERSION,
                        "recipe": write_documents([document_of(recipe)]),
                        "read_bytes": read,
                        "spared_bytes": spared.total,
                        "base_read_bytes": counts.bases.total,
                        "written_bytes": transaction.block_bytes,
                        "seconds": round(seconds, 3),
                        **surroundings(self.threads),
                    },
                )
            )
            reason = reason or f"merge: {', '.join(expert.ref for expert in recipe.experts)}"
            update = self._ref_update("heads", name, tip, commit_id, reason) if is_named else None
            transaction.publish(update)
        return MergeReport(
            commit=commit_id,
            branch=name,
            is_new=True,
            plan=plan,
            read_bytes=read,
            base_read_bytes=counts.bases.total,
            written_bytes=transaction.block_bytes,
            seconds=time.perf_counter() - started,
        )

    def merge_unnamed(
        self, plan: PlanReport, *, message: str | None = None, progress: Progress = _silent
    ) -> CommitId:
        """``merge`` to a commit that is on no branch: the next `gc` collects it."""
        return self._merge(plan, None, message, "delta", progress, is_named=False).commit

    # -- task vectors ----------------------------------------------------------------------------

    def cherry_pick(
        self,
        expert: str,
        *,
        onto: str,
        scale: float = 1.0,
        budget: str | None = None,
        branch: str | None = None,
        message: str | None = None,
        encoding: BlockEncoding = "delta",
        ignore_extra: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        progress: Progress = _silent,
    ) -> ErrandReport:
        """Add what an expert changed of its first parent, ``scale`` times, to the commit ``onto``.

        The result's parents are ``onto``, then the expert. It goes on ``branch``, by default the
        branch ``onto``. Raises ``NoBase``, ``Mismatch``, and what ``plan`` and ``merge`` raise.
        """
        from mergegit.repository import picking

        errand = picking.cherry_pick(
            self.store,
            resolve(self.store, expert),
            resolve(self.store, onto),
            scale,
            picking.Allowances(ignore_extra, allow_nonfinite),
        )
        return self._run(errand, budget, branch, message, encoding, dry_run, progress)

    def revert(
        self,
        expert: str,
        *,
        out_of: str,
        scale: float = 1.0,
        budget: str | None = None,
        branch: str | None = None,
        message: str | None = None,
        encoding: BlockEncoding = "delta",
        ignore_extra: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        progress: Progress = _silent,
    ) -> ErrandReport:
        """Take out of the commit ``out_of`` what an expert changed.

        Of a merge whose method adds experts up it is made again without the expert, reading the
        same of the others unless there is a ``budget``; that is exact. Out of anything else what
        the expert changed of its first parent is subtracted, ``scale`` times. The result goes on
        ``branch``, by default the branch ``out_of``, which then leaves the merge behind. Raises
        ``NoBase``, ``BadRecipe``, ``Mismatch``, and what ``plan`` and ``merge`` raise.
        """
        from mergegit.repository import picking

        errand = picking.revert(
            self.store,
            resolve(self.store, expert),
            resolve(self.store, out_of),
            scale,
            picking.Allowances(ignore_extra, allow_nonfinite),
        )
        return self._run(errand, budget, branch, message, encoding, dry_run, progress)

    def rebase(
        self,
        expert: str,
        *,
        onto: str,
        budget: str | None = None,
        branch: str | None = None,
        message: str | None = None,
        encoding: BlockEncoding = "delta",
        ignore_extra: bool = False,
        allow_nonfinite: bool = False,
        dry_run: bool = False,
        progress: Progress = _silent,
    ) -> ErrandReport:
        """Carry an expert to another base: to ``onto`` is added what it changed of its own base.

        The result's parents are ``onto``, then the expert as it was. It goes on ``branch``, by
        default the expert's own. Raises ``NoBase``, ``BadRecipe``, ``Mismatch``, and what ``plan``
        and ``merge`` raise.
        """
        from mergegit.repository import picking

        errand = picking.rebase(
            self.store,
            resolve(self.store, expert),
            resolve(self.store, onto),
            picking.Allowances(ignore_extra, allow_nonfinite),
        )
        return self._run(errand, budget, branch, message, encoding, dry_run, progress)

    @_leased
    def _run(
        self,
        errand: Errand,
        budget: str | None,
        branch: str | None,
        message: str | None,
        encoding: BlockEncoding,
        dry_run: bool,
        progress: Progress,
    ) -> ErrandReport:
        from mergegit.repository.picking import ErrandReport

        target = branch or errand.moves
        if branch is None and self.store.refs.read("heads", target) is None and not dry_run:
            raise RefConflict(
                f"{target} is no branch, and can't move to what comes out",
                hint="name the branch of the result with -b",
            )
        plan, notes = self._plan_without(errand, progress) if budget is None else (None, ())
        plan = plan or self.plan(errand.recipe, budget=budget, progress=progress)
        notes = (*errand.notes, *notes)
        if dry_run:
            return ErrandReport(errand.verb, plan, None, errand.is_exact, notes)
        share = f" under {budget}" if budget else ""
        merged = self._merge(
            plan,
            target,
            message or f"{errand.message}{share}",
            encoding,
            progress,
            reason=errand.message,
            replaces=errand.replaces,
        )
        return ErrandReport(errand.verb, plan, merged, errand.is_exact, notes)

    def _plan_without(
        self, errand: Errand, progress: Progress
    ) -> tuple[PlanReport | None, tuple[str, ...]]:
        """The plan of a merge without some experts that reads the same of the others."""
        from mergegit.merge.recipe import Recipe
        from mergegit.repository.subsets import plan_without

        if errand.of is None or errand.of.recipe is None or errand.of.plan is None:
            return None, ()
        planner = self.planner(Recipe.from_json(errand.of.recipe), progress=progress)
        others, aligned_bytes = self._planner(errand.recipe, progress)
        own = self.store.plan(errand.of.plan)
        plan = plan_without(own, planner, others, errand.without)
        if plan is None:
            return None, (
                "what was read of the other experts can't be read in the same way any more: they "
                "are read in full, unless there is a --budget",
            )
        return replace(self._spared(plan_report(plan)), aligned_bytes=aligned_bytes), ()

    # -- merging again ---------------------------------------------------------------------------

    @_leased
    def replay(self, ref: str, *, progress: Progress = _silent) -> ReplayReport:
        """Carry out a merge's plan again, from its parents and into nothing, and compare.

        Nothing that earlier merges made is taken for it. Raises ``BadRecipe`` where the commit is
        no merge, or the layers of its plan can't be read any more.
        """
        from mergegit.repository import replaying

        commit_id, inputs = self._inputs_of_merge(ref, progress)
        with self._explained():
            return replaying.replay(
                self.store,
                ref,
                commit_id,
                inputs,
                threads=self.threads,
                progress=lambda done, total: progress(f"replaying {ref}", done, total),
            )

    @_leased
    def distance(
        self, ref: str, *, budget: str | None = None, progress: Progress = _silent
    ) -> DistanceReport:
        """How far a merge is from the same one at another budget; None is a full read.

        Raises ``BadRecipe`` where the commit is no merge, and ``BadBudget``.
        """
        from mergegit.merge.budget import Budget
        from mergegit.merge.plan import Planner
        from mergegit.repository import planning, replaying

        parsed = Budget.parse(budget) if budget is not None else None
        commit_id, inputs = self._inputs_of_merge(ref, progress)
        planner = Planner(planning.problem_of(self.store, inputs))
        nbytes = parsed.bytes_of(planner.problem.raw_bytes) if parsed else None
        with self._explained():
            return replaying.distance(
                self.store,
                commit_id,
                plan_report(planner.plan(nbytes), budget),
                inputs,
                threads=self.threads,
                progress=lambda done, total: progress(f"merging {ref} again", done, total),
            )

    def _inputs_of_merge(self, ref: str, progress: Progress) -> tuple[CommitId, Inputs]:
        """A merge's commit, and all that its models' objects say, with their statistics."""
        from mergegit.merge.recipe import Recipe

        commit_id = self.resolve(ref)
        commit = self.store.commit(commit_id)
        if commit.recipe is None or commit.plan is None:
            raise BadRecipe(
                f"{ref} is no merge", hint="`mergegit log` shows which commits are merges"
            )
        inputs = self._gather(Recipe.from_json(commit.recipe), progress)
        self._take_statistics(inputs, progress)
        return commit_id, inputs

    def bisection(self) -> Bisection:
        """The bisection that is under way, or may be started."""
        from mergegit.repository.bisecting import Bisection

        return Bisection(self)

    @_leased
    def verify(
        self, ref: str, *, replay: bool = False, progress: Progress = _silent
    ) -> VerifyReport:
        """Check a commit and all that it descends from: objects, blocks, and what merges say.

        With ``replay`` every merge is carried out again as well.
        """
        from mergegit.repository.verifying import verify

        return verify(
            self.store,
            self.resolve(ref),
            replay=functools.partial(self.replay, progress=progress) if replay else None,
            threads=self.threads,
            progress=progress,
        )

    def repack(
        self,
        refs: Sequence[str] = (),
        *,
        base: str | None = None,
        encoding: BlockEncoding = "delta",
        progress: Progress = _silent,
    ) -> RepackReport:
        """Store commits' blocks in another encoding: those of ``refs``, or of all commits.

        Deltas are taken from each commit's first parent, or from ``base``. Ids and contents stay
        as they are. Interrupted, it has done some commits; run it again to go on. Raises ``Busy``
        where another command writes.
        """
        with self.store.lease.exclusive():
            return self._repack(refs, base, encoding, progress)

    def _repack(
        self, refs: Sequence[str], base: str | None, encoding: BlockEncoding, progress: Progress
    ) -> RepackReport:
        from mergegit.repository.repacking import repack_manifest

        started = time.perf_counter()
        sweep(self.store.location)  # where a killed run had no more than that left to do
        commits = [self.resolve(ref) for ref in refs] or [commit_id for commit_id, _ in self.log()]
        chosen = self.resolve(base) if base else None
        blocks = before = after = 0
        for commit_id in commits:
            commit = self.store.commit(commit_id)
            below = chosen or (commit.parents[0] if commit.parents else None)
            if below is None and encoding == "delta":
                continue
            what = f"repacking {lineage.name_of(self.store, commit_id)}"
            done = repack_manifest(
                self.store,
                self.store.manifest(commit.manifest),
                self._manifest_of(below) if below else None,
                plainly=encoding == "raw",
                threads=self.threads,
                progress=functools.partial(progress, what),
            )
            blocks += done.blocks
            before += done.before
            after += done.after
        return RepackReport(len(commits), blocks, before, after, time.perf_counter() - started)

    def gc(
        self,
        *,
        expire: float = EXPIRE,
        grace: float = GRACE,
        dry_run: bool = False,
        wait: bool = False,
        progress: Progress = _silent,
    ) -> CollectReport:
        """Collect what neither refs nor their logs reach.

        First the logs forget moves older than ``expire`` seconds; with 0, all but where refs
        stand. Packs that nothing needs go to the trash, and leave it when a later run finds that
        they were there for ``grace`` seconds; with 0, at once. With ``dry_run`` nothing is
        changed. Raises ``Busy`` where another command writes, unless it is to ``wait`` for its
        end, and ``Damaged`` where something is missing; nothing is changed then.
        """
        from mergegit.repository.collecting import collect

        started = time.perf_counter()
        with self.store.lease.exclusive(wait=wait):
            report = collect(
                self.store,
                expire=expire,
                grace=grace,
                now=self._clock(),
                dry_run=dry_run,
                progress=lambda done, total: progress("rewriting packs", done, total),
            )
        return replace(report, seconds=time.perf_counter() - started)

    # -- out -------------------------------------------------------------------------------------

    def checkout(
        self,
        ref: str,
        directory: str | os.PathLike[str],
        *,
        merged: bool = False,
        update: bool = False,
        dtype: str | None = None,
        shard_size: str | int | None = None,
        progress: Progress = _silent,
    ) -> CheckoutReport:
        """Write a commit's files into ``directory``, which must not exist or be empty.

        The directory appears whole or not at all; with ``update`` it is one that holds another
        checkout, of which files are rewritten, one by one, that differ. An added checkpoint comes
        back byte for byte, unless its floating tensors are to have another ``dtype`` or its shards
        another size, in bytes or like ``5GB``; then weights beside the model are left out. Of an
        adapter, ``merged`` writes the base's files with the adapter merged in. A merge's card ends
        with the commit's id. Raises
        ``BadTarget``, ``NoSpace``, ``Damaged``, ``BadRecipe``, ``Mismatch`` and ``NotFinite``.
        """
        from mergegit.repository.card import signature
        from mergegit.repository.checking_out import Contents, Form, check_out

        started = time.perf_counter()
        form = Form.parse(dtype, shard_size)
        commit_id = self.resolve(ref)
        contents: Contents = self.store
        manifest, notes = self._manifest_of(commit_id), []
        with self._explained():
            if merged:
                from mergegit.repository.applying import AppliedAdapter

                applied = AppliedAdapter.of(self.store, ref, commit_id)
                contents, manifest = applied, applied.manifest
                notes = [*applied.notes, *(f"left out: {path}" for path in applied.left_out)]
            written = check_out(
                contents,
                manifest,
                Path(directory),
                form,
                threads=self.threads,
                progress=functools.partial(progress, f"checking out {ref}"),
                update=self.store if update else None,
                signature=signature(commit_id) if self.store.commit(commit_id).recipe else b"",
            )
        notes += [*written.notes, *(f"left out: {path}" for path in written.left_out)]
        return CheckoutReport(
            commit=commit_id,
            files=written.files,
            nbytes=written.nbytes,
            seconds=time.perf_counter() - started,
            unchanged=written.unchanged,
            notes=tuple(notes),
        )

    @_leased
    def extract_lora(
        self,
        expert: str,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        base: str | None = None,
        dtype: str | None = None,
        progress: Progress = _silent,
    ) -> ExtractReport:
        """Write what an expert changed of its base as a LoRA adapter of a rank, as PEFT reads it.

        The base is the expert's first parent, where ``base`` does not say. Every changed matrix
        becomes two factors in ``dtype``, by default the expert's; other changed tensors are saved
        whole. The directory must not exist or be empty, and appears whole or not at all. Raises
        ``Mismatch``, ``NoBase``, ``BadRecipe``, ``BadCheckpoint``, ``BadTarget``, ``NotFinite``,
        ``NoSpace`` and ``Damaged``.
        """
        from mergegit.repository.extracting import Models, extract

        started = time.perf_counter()
        found = resolve(self.store, expert)
        below = resolve(self.store, base) if base else lineage.merge_base(self.store, [found])
        known = {**self.branches(), **self.tags()}
        base_ref = below.name if below.name in known else lineage.name_of(self.store, below.commit)
        models = Models(
            expert, self._manifest_of(found.commit), base_ref, self._manifest_of(below.commit)
        )
        with self._explained():
            made = extract(
                self.store,
                models,
                Path(directory),
                rank=rank,
                dtype=dtype,
                threads=self.threads,
                progress=functools.partial(progress, f"factoring {expert}"),
            )
        return ExtractReport(
            commit=found.commit,
            base=below.commit,
            base_ref=base_ref,
            rank=rank,
            matrices=made.matrices,
            whole=made.whole,
            nbytes=made.nbytes,
            error=made.error,
            kinds=made.kinds,
            seconds=time.perf_counter() - started,
        )

    def load(self, ref: str) -> dict[str, torch.Tensor]:
        """The tensors of a commit, by name, straight from the store."""
        from mergegit.repository.loading import load_tensor

        manifest = self.manifest(ref)
        return {
            name: load_tensor(self.store, self.store.tensor(tensor_id), self.threads)
            for name, tensor_id in manifest.tensors.items()
        }

    # -- questions about weights -----------------------------------------------------------------

    def diff(
        self,
        old: str,
        new: str,
        *,
        against: str | None = None,
        patterns: Sequence[str] = (),
        weights: bool = True,
        files: bool = True,
        exact: bool = False,
        progress: Progress = _silent,
    ) -> DiffReport:
        """What differs between two commits, in their ``weights`` and in the ``files`` around them.

        What is identical is known by ids. How large a change is comes from statistics, or with
        ``exact`` from the blocks that differ. ``against`` is a third commit, with whose change from
        ``old`` the change to ``new`` is compared. ``patterns`` restrict it to tensors and files
        whose names hold one of them. Raises ``UnknownRef`` and ``NoBase``.
        """
        from mergegit.repository import asking

        return asking.diff(
            self.store,
            resolve(self.store, old),
            resolve(self.store, new),
            resolve(self.store, against) if against is not None else None,
            patterns=patterns,
            weights=weights,
            files=files,
            exact=exact,
            threads=self.threads,
            progress=functools.partial(progress, f"comparing {old} and {new}"),
        )

    def similarity(
        self,
        refs: Sequence[str] = (),
        *,
        base: str | None = None,
        patterns: Sequence[str] = (),
        exact: bool = False,
        progress: Progress = _silent,
    ) -> SimilarityReport:
        """How alike the changes are that experts made to their common base: by default those of
        all branches that were added on one base.

        Estimated from statistics, or with ``exact`` read. ``patterns`` restrict it to tensors whose
        names hold one of them. Raises ``BadRecipe``, ``NoBase`` and ``UnknownRef``.
        """
        from mergegit.repository import asking

        return asking.similarity(
            self.store,
            [resolve(self.store, ref) for ref in refs],
            resolve(self.store, base) if base is not None else None,
            patterns=patterns,
            exact=exact,
            threads=self.threads,
            progress=functools.partial(progress, "comparing experts"),
        )

    @_leased
    def blame(
        self, ref: str, *, patterns: Sequence[str] = (), progress: Progress = _silent
    ) -> BlameReport:
        """What the tensors of a commit are made of, through chains of merges. Reads no weights.

        ``patterns`` restrict it to tensors whose names hold one of them. Raises ``UnknownRef``.
        """
        from mergegit.repository.blaming import blame

        return blame(
            self.store,
            resolve(self.store, ref),
            patterns,
            functools.partial(self._gather, progress=progress),
        )

    # -- inside ----------------------------------------------------------------------------------

    def _manifest_of(self, commit: CommitId) -> Manifest:
        return self.store.manifest(self.store.commit(commit).manifest)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Damaged blocks that are met are named by what needs them."""
        try:
            yield
        except DamagedBlock as error:
            raise self._explain(error) from error

    def _explain(self, error: DamagedBlock) -> Damaged:
        """A damaged block's error with the tensors and commits that need it."""
        tensors: set[str] = set()
        commits: dict[str, None] = {}
        for commit_id, commit in self.log():
            for name, tensor_id in self.store.manifest(commit.manifest).tensors.items():
                if error.block in set(self.store.tensor(tensor_id).blocks()):
                    tensors.add(name)
                    commits[lineage.name_of(self.store, commit_id)] = None
        where = f"; tensor {', '.join(sorted(tensors))} of {', '.join(commits)}" if tensors else ""
        return Damaged(error.message + where, hint=error.hint)


def _open_store(location: Location) -> Store:
    """The store, for reading alone where nothing can be written.

    Raises ``UnusableRepository`` where there are refs and the catalog knows no pack: it was lost,
    and LMDB made an empty one.
    """
    store = Store(location, read_only=not os.access(location.root, os.W_OK))
    try:
        lost = not store.catalog.counts()["packs"] and any(map(store.refs.all, SPACES))
    except BaseException:
        store.close()
        raise
    if lost:
        store.close()
        raise UnusableRepository(
            f"the catalog of {location.root} is empty, though there are branches or tags",
            hint="make it anew from the packs with `mergegit fsck --rebuild-catalog`",
        )
    return store


def plan_report(plan: Plan, budget: str | None = None) -> PlanReport:
    """A plan with its id, ready to be merged."""
    return PlanReport(PlanId(hash_object(encode(plan))), plan, budget)


def _merge_message(recipe: Recipe, plan: PlanReport) -> str:
    names = ", ".join(expert.ref for expert in recipe.experts)
    share = f" under {plan.budget}" if plan.budget else ""
    return f"merge {names} by {recipe.method.name}{share}"
