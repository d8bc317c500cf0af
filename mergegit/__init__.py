"""A Git-like repository for model checkpoints.

    import mergegit

    with mergegit.Repository.open("models") as repository:
        repository.add("llama-math")
        recipe = repository.recipe(["llama-math", "llama-code"], method="ties")
        report = repository.merge(repository.plan(recipe, budget="10%"))
        repository.checkout(report.branch, "merged")

The verbs are those of the command line; every error that they raise is a ``MergegitError``.
"""

from mergegit._version import VERSION
from mergegit.errors import MergegitError
from mergegit.repository import Repository

__version__ = VERSION

__all__ = ["MergegitError", "Repository", "__version__"]
