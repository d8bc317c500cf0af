"""What the verbs report."""

from __future__ import annotations

from dataclasses import dataclass

from mergegit.objects import CommitId, Plan, PlanId
from mergegit.storage.refs import Space


@dataclass(frozen=True, slots=True)
class AddReport:
    """What `add` did. Bytes are of all files; ``new_bytes`` are those of blocks that were new.

    ``is_new`` is false where the branch held this very checkpoint already. ``base_ref`` names the
    base as people know it.
    """

    commit: CommitId
    branch: str
    is_new: bool
    is_adapter: bool
    base: CommitId | None
    base_ref: str | None
    tensors: int
    total_bytes: int
    new_bytes: int
    blocks: int
    new_blocks: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, its id, and the budget as it was given.

    ``spared`` are the stored bytes of each expert's layers that the plan lists and that need not be
    read, because earlier merges made the same of them; ``spared_base_bytes`` those of bases. With
    ``anew`` nothing is spared, and everything is merged again.
    ``aligned_bytes`` were read of experts just now to bring their vocabularies into one: once, and
    beside the budget.
    """

    id: PlanId
    plan: Plan
    budget: str | None
    spared: tuple[tuple[int, ...], ...] = ()
    spared_base_bytes: int = 0
    anew: bool = False
    aligned_bytes: int = 0

    @property
    def spared_bytes(self) -> int:
        return sum(map(sum, self.spared))

    @property
    def read_bytes(self) -> int:
        """Expert bytes that the merge will read."""
        return self.plan.planned_bytes - self.spared_bytes

    @property
    def base_read_bytes(self) -> int:
        return self.plan.base_bytes - self.spared_base_bytes

    def layer_bytes(self, expert: int) -> tuple[int, ...]:
        """Bytes that will be read of each layer of an expert."""
        planned = self.plan.experts[expert].layer_bytes
        spared = self.spared[expert] if self.spared else ()
        return tuple(
            nbytes - (spared[layer] if layer < len(spared) else 0)
            for layer, nbytes in enumerate(planned)
        )


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What `merge` did. Byte counts are those of the files that were read and written.

    ``is_new`` is false where the branch held this very merge already; nothing was read then.
    """

    commit: CommitId
    branch: str
    is_new: bool
    plan: PlanReport
    read_bytes: int
    base_read_bytes: int
    written_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RepackReport:
    """What `repack` did: how many commits it looked at, how many blocks it stored anew, and the
    stored bytes of those before and after."""

    commits: int
    blocks: int
    before_bytes: int
    after_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RefMove:
    """A move of a ref, ``number`` moves ago: from ``old`` to ``new``, None where it was not there.

    ``reason`` is the command that moved it.
    """

    space: Space
    ref: str
    number: int
    old: CommitId | None
    new: CommitId | None
    author: str
    time: int
    reason: str

    @property
    def selector(self) -> str:
        """What names the commit that the ref stood at after the move."""
        return f"{self.ref}@{{{self.number}}}"


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What `gc` did or, after a dry run, would do. All bytes are bytes on disk.

    ``trashed`` packs went to the trash, ``trashed_bytes`` in all; ``rewritten`` of them because
    little in them was needed, which was copied into new packs of ``written_bytes``. ``removed``
    packs and ``removed_bytes`` left the trash for good. ``trash_bytes`` stay in it.
    ``freed_bytes`` is by how much the packs take less than before, the trash included.
    """

    dry_run: bool
    commits: int
    forgotten_moves: int
    trashed: int
    trashed_bytes: int
    rewritten: int
    written_bytes: int
    removed: int
    removed_bytes: int
    trash_bytes: int
    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckoutReport:
    """What `checkout` wrote, and in ``notes`` what it left out.

    Of an update, ``unchanged`` files were the commit's already.
    """

    commit: CommitId
    files: int
    nbytes: int
    seconds: float
    unchanged: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindError:
    """How far the factors of one kind of matrix, as ``self_attn.q_proj``, are off: |delta - b a| /
    |delta| of the median and of the worst of them."""

    kind: str
    count: int
    median: float
    worst: float


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """What `extract-lora` wrote: so many matrices as factors, and tensors whole, in ``nbytes``.

    ``error`` is |delta - adapter| / |delta| over the whole model, with all that is saved whole.
    """

    commit: CommitId
    base: CommitId
    base_ref: str
    rank: int
    matrices: int
    whole: int
    nbytes: int
    error: float
    kinds: tuple[KindError, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Status:
    """What a repository holds.

    ``checkpoint_bytes`` is what all commits would take as directories of files; ``disk_bytes``
    what the repository takes. ``format`` is the version of its files.
    """

    root: str
    format: int
    branches: int
    tags: int
    commits: int
    blocks: int
    objects: int
    packs: int
    checkpoint_bytes: int
    disk_bytes: int

    @property
    def ratio(self) -> float | None:
        """Bytes of checkpoints for each byte on disk."""
        return self.checkpoint_bytes / self.disk_bytes if self.disk_bytes else None
