"""Errors of the command line; the text of each is one sentence for the user."""

from __future__ import annotations


class EbbError(Exception):
    """Base of what `ebb` can fail with; ends the command with 1."""


class ManagerUnreachable(EbbError):
    """Nobody answers at the manager's address, or what answers is no manager."""


class ManagerRefused(EbbError):
    """The manager answered with a problem.

    :param status: the HTTP status.
    :param field: the field that is wrong, where there is one.
    """

    def __init__(self, status: int, sentence: str, field: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.field = field


class ManagerStandsBy(ManagerRefused):
    """A manager that does not lead (yet, or any more): another one may, and the same request again is harmless."""


class OperationFailed(EbbError):
    """An operation ended, but not with what was asked for."""


class ReadingError(EbbError):
    """A reading that does not go through the agents could not be taken."""


class DemoFailed(EbbError):
    """The demo could not go through its scenario."""


class BenchmarkFailed(EbbError):
    """A benchmark could not measure what it is there for."""
