"""Commits whose ids begin alike."""

from __future__ import annotations

from mergegit import Repository
from mergegit.encoding import encode, hash_object
from mergegit.objects import Commit, CommitId
from mergegit.storage.refs import RefUpdate

DIGITS = 4


def two_commits_that_share_a_prefix(repository: Repository) -> tuple[CommitId, CommitId]:
    """Make branches ``c0`` and ``c1`` at commits of base's manifest, found by trying times."""
    manifest = repository.commit("base").manifest
    seen: dict[str, int] = {}
    for time in range(100_000):
        commit = Commit(manifest, (), "a", time, "m")
        prefix = hash_object(encode(commit)).hex()[:DIGITS]
        if prefix in seen:
            break
        seen[prefix] = time
    times = (seen[prefix], time)
    with repository.store.transaction() as transaction:
        ids = [transaction.write_commit(Commit(manifest, (), "a", when, "m")) for when in times]
        transaction.publish()
    for number, commit_id in enumerate(ids):
        repository.store.refs.update(
            RefUpdate("heads", f"c{number}", None, commit_id, "a", 0, "made for a test")
        )
    return ids[0], ids[1]
