"""The command line: each command parses, calls one verb of the repository, and prints."""

from mergegit.cli.main import main

__all__ = ["main"]
