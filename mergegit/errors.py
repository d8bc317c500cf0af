"""Every error that a user can meet.

    MergegitError              exit code 1: one line of what failed, one of what to do
    ├── NotARepository         no .mergegit here or above
    ├── UnusableRepository     newer format, unfit file system, no permission
    ├── UnknownRef             no branch, tag or commit of that name
    ├── AmbiguousRef           a prefix that several objects share
    ├── InvalidName            a branch, tag or path that may not be called so
    ├── RefConflict            a ref moved meanwhile, exists already, or would not move forward
    ├── Busy                   another command is at work that this one would disturb
    ├── NotStarted             a command that goes on with what was not begun
    ├── BadCommand             a program to be called that can't be run, or fails to do its part
    ├── BadCheckpoint          a checkpoint on disk that can't be read as one
    ├── Mismatch               models that can't be merged as they are
    ├── BadRecipe              an unknown method, parameter or value in what was asked
    ├── BadBudget              a budget that can't be parsed or kept
    ├── NoBase                 no base, or more than one, could be inferred
    ├── NotFinite              NaN or infinity among the weights of an expert
    ├── BadTarget              a directory that checkout can't write to
    ├── Damaged                bytes in the store that are not what their id says
    ├── NoSpace                the disk is full
    └── Unconfirmed            a change was made, but the disk did not confirm it

A hint is mandatory: an error that can't say what to do next is not finished. Anything else that
escapes a command is a bug and keeps its traceback.
"""

from __future__ import annotations


class MergegitError(Exception):
    """An error that a user can understand and mend.

    ``message`` says what failed, on which tensor, file or ref; ``hint`` says what to do. Both are
    single lines without a final full stop.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NotARepository(MergegitError):
    """No ``.mergegit`` in the directory or in any above it."""


class UnusableRepository(MergegitError):
    """A repository that this program, user or file system can't work with."""


class UnknownRef(MergegitError):
    """No branch, tag or commit answers to the name."""


class AmbiguousRef(MergegitError):
    """Several objects answer to the prefix."""


class InvalidName(MergegitError):
    """A name that a branch, tag or path may not have."""


class RefConflict(MergegitError):
    """A ref that is not where the command expected it, or may not go where it was sent."""


class Busy(MergegitError):
    """Another command is at work that this one would disturb."""


class NotStarted(MergegitError):
    """A command that goes on with what was not begun."""


class BadCommand(MergegitError):
    """A program of the user's that can't be run, or that does not do its part."""


class BadCheckpoint(MergegitError):
    """A checkpoint on disk that can't be read as one."""


class Mismatch(MergegitError):
    """Models whose tensors don't fit together."""


class BadRecipe(MergegitError):
    """An unknown method, parameter or value in what was asked."""


class BadBudget(MergegitError):
    """A budget that can't be parsed or kept."""


class NoBase(MergegitError):
    """No base, or more than one, could be inferred."""


class NotFinite(MergegitError):
    """NaN or infinity among the weights of a model."""


class BadTarget(MergegitError):
    """A place on disk that can't be written to as asked."""


class Damaged(MergegitError):
    """Stored bytes that are not what their id or checksum says."""


class NoSpace(MergegitError):
    """The disk or a quota is full."""


class Unconfirmed(MergegitError):
    """A change that was made, though the disk did not say that it will outlive a power cut."""
