"""The repository: the verbs, and the one place that joins the rest."""

from mergegit.repository.repository import Repository

__all__ = ["Repository"]
