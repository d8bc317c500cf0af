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
    """A plan, its id, and the budget as it was given."""

    id: PlanId
    plan: Plan
    budget: str | None


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
    """What `checkout` wrote, and in ``notes`` what it left out."""

    commit: CommitId
    files: int
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()


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
