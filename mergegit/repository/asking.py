"""From refs to answers about weights: what `diff` and `similarity` look at, and where their numbers
come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mergegit.errors import BadRecipe, NoBase
from mergegit.objects import Manifest
from mergegit.repository import lineage
from mergegit.repository.comparing import DiffReport, NumberSource, TensorChange, compare_weights
from mergegit.repository.file_changes import FileChange, compare_files
from mergegit.repository.naming import ResolvedRef
from mergegit.repository.seen import Seen, see
from mergegit.repository.similarity_report import SimilarityReport
from mergegit.repository.spots import require_some
from mergegit.storage.store import Store

Progress = Callable[[int, int], None]


def diff(
    store: Store,
    old: ResolvedRef,
    new: ResolvedRef,
    third: ResolvedRef | None,
    *,
    patterns: Sequence[str],
    weights: bool,
    files: bool,
    exact: bool,
    threads: int,
    progress: Progress,
) -> DiffReport:
    """What differs between two commits. Raises ``UnknownTensor`` and ``NoBase``."""
    ours, theirs = see(store, old), see(store, new)
    beside = see(store, third) if third is not None else None
    called = set[str]()
    if weights:
        called |= ours.ids.keys() | theirs.ids.keys()
    if files:
        called |= ours.manifest.files.keys() | theirs.manifest.files.keys()
    require_some(patterns, called, "tensor or file" if weights and files else
                 "tensor" if weights else "file")  # fmt: skip
    read = 0
    tensors: tuple[TensorChange, ...] = ()
    if weights:
        models = [model for model in (ours, theirs, beside) if model is not None]
        source = _Source(store, models, exact, threads, progress)
        tensors = compare_weights(store, ours, theirs, beside, patterns, source.open)
        read = source.read_bytes
    differing: tuple[FileChange, ...] = ()
    if files:
        differing = tuple(
            compare_files(store, ours.manifest.files, theirs.manifest.files, patterns)
        )
    return DiffReport(
        old,
        new,
        third,
        exact,
        tensors,
        differing,
        (_shards(ours.manifest), _shards(theirs.manifest)),
        read,
        tuple(_notes([ours, theirs, *([beside] if beside is not None else [])])),
    )


def _shards(manifest: Manifest) -> tuple[str, ...]:
    return tuple(shard.path for shard in manifest.shards)


def _notes(models: Sequence[Seen]) -> list[str]:
    adapters = dict.fromkeys(model.ref for model in models if model.is_adapter)
    return [f"{ref} is an adapter, seen as its base with the adapter on it" for ref in adapters]


class _Source:
    """Where a diff's numbers come from, loaded when they are asked for."""

    def __init__(
        self, store: Store, models: Sequence[Seen], exact: bool, threads: int, progress: Progress
    ) -> None:
        self._store = store
        self._models = models
        self._exact = exact
        self._threads = threads
        self._progress = progress
        self._read: Callable[[], int] = lambda: 0

    @property
    def read_bytes(self) -> int:
        return self._read()

    def open(self) -> NumberSource:
        from mergegit.repository.change_estimates import Estimates
        from mergegit.repository.known import Knowledge
        from mergegit.repository.steps import steps_of_merges

        commits = [model.commit for model in self._models]
        estimates = Estimates(Knowledge(self._store, steps_of_merges(self._store, commits)))
        if not self._exact:
            return estimates
        from mergegit.repository.change_reading import Readings

        computed = {block: made for model in self._models for block, made in model.computed.items()}
        readings = Readings(
            self._store, computed, estimates, threads=self._threads, progress=self._progress
        )
        self._read = lambda: readings.read_bytes
        return readings


def similarity(
    store: Store,
    experts: Sequence[ResolvedRef],
    base: ResolvedRef | None,
    *,
    patterns: Sequence[str],
    exact: bool,
    threads: int,
    progress: Progress,
) -> SimilarityReport:
    """How alike experts are. Raises ``BadRecipe``, ``NoBase`` and ``UnknownTensor``."""
    from mergegit.repository.known import Knowledge
    from mergegit.repository.similarity import comparable, estimate
    from mergegit.repository.steps import steps_of_merges

    if not experts:
        base, experts = siblings(store, base)
    if len(experts) < 2:
        raise BadRecipe(
            f"{experts[0].name} alone is similar to nothing",
            hint="name two or more refs, or none for all experts that were added on one base",
        )
    below = base or _common_base(store, experts)
    seen = [see(store, expert) for expert in experts]
    model = see(store, below)
    require_some(patterns, model.ids, "tensor")
    compared, left_out = comparable(store, model, seen, patterns)
    steps = steps_of_merges(store, [below.commit, *(expert.commit for expert in experts)])
    knowledge = Knowledge(store, steps)
    read = 0
    if exact:
        from mergegit.repository.similarity_reading import read_sums

        sums, read = read_sums(
            store, knowledge, compared, model, seen, threads=threads, progress=progress
        )
    else:
        sums = estimate(knowledge, compared, len(experts))
    return sums.report(below, experts, exact, len(compared), left_out, read)


def siblings(store: Store, base: ResolvedRef | None) -> tuple[ResolvedRef, tuple[ResolvedRef, ...]]:
    """A base and the experts that were added on it, merges left out: by default the base that most
    branches stand on.

    Raises ``NoBase`` where two bases have as many, or where there are no two branches of any.
    """
    parents = {
        ResolvedRef(name, commit): store.commit(commit).parents[0]
        for name, commit in sorted(store.refs.all("heads").items())
        if store.commit(commit).parents and store.commit(commit).recipe is None
    }
    counts = Counter(parents.values())
    if base is None:
        most = [parent for parent, count in counts.items() if count == max(counts.values())]
        if len(most) > 1 and max(counts.values()) > 1:
            names = ", ".join(lineage.name_of(store, parent) for parent in most)
            raise NoBase(
                f"as many branches stand on each of {names}",
                hint="say which of them with --base REF, or name the refs to compare",
            )
        if len(most) == 1:
            base = ResolvedRef(lineage.name_of(store, most[0]), most[0])
    if base is None or counts[base.commit] < 2:
        on = f" on {base.name}" if base is not None else " on one base"
        raise NoBase(
            f"there are no two branches{on}",
            hint="add two experts of one base, or name the refs to compare",
        )
    return base, tuple(ref for ref, parent in parents.items() if parent == base.commit)


def _common_base(store: Store, experts: Sequence[ResolvedRef]) -> ResolvedRef:
    """The base that all experts stand on, else their merge base. Raises ``NoBase``.

    A merge beside one of its own experts is compared on the base of both, of which it is a change
    as well.
    """
    first = {(store.commit(expert.commit).parents or (None,))[0] for expert in experts}
    if len(first) == 1:
        (parent,) = first
        if parent is not None:
            return ResolvedRef(lineage.name_of(store, parent), parent)
    return lineage.merge_base(store, experts)
