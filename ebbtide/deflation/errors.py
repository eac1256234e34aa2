"""Errors of the pure core. Each names the field that is wrong, so that a daemon can answer with it."""

from __future__ import annotations


class DeflationError(ValueError):
    """A request that no policy can carry out; nothing has been changed."""


class InvalidField(DeflationError):
    """A value that cannot be what its field says.

    :param field: the field's name as it stands on the wire, for example ``target.cpu_cores``.
    :param problem: what is wrong with it, without the field's name.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class ProtocolViolation(DeflationError):
    """An event that cannot follow on what a state machine has instructed."""
