"""Where things lie below the directory that the layer watches."""

from typing import Final

REPOSITORY: Final = "repository"
TARGET: Final = "out"
"""Where a checkout goes."""
