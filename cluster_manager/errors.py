"""Errors of the manager: what a client did wrong, what an agent answered, and what keeps the manager from starting."""

from __future__ import annotations

from functools import partial
from typing import Final

from ebbtide.messages.common import Problem
from ebbtide.messages.problem_codes import ProblemCode, ReasonCode


class ManagerError(Exception):
    """Base of all."""


class RequestError(ManagerError):
    """A request that is answered with a Problem; nothing has been changed.

    :param status: the HTTP status.
    :param sentence: what is wrong.
    :param field: the field that is wrong, where there is one.
    :param code: what it is about; default by the status.
    """

    def __init__(self, status: int, sentence: str, field: str | None = None, code: ProblemCode | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.problem = Problem.of(status, sentence, field, code)


# What 409 is said with most often: the sentence, and the field where there is one.
already_exists: Final = partial(RequestError, 409, code=ProblemCode.ALREADY_EXISTS)
busy: Final = partial(RequestError, 409, code=ProblemCode.BUSY)
not_configured: Final = partial(RequestError, 409, code=ProblemCode.NOT_CONFIGURED)
wrong_state: Final = partial(RequestError, 409, code=ProblemCode.WRONG_STATE)


class InvalidBody(RequestError):
    """A body that does not fit its form, with all its fields that are wrong."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.status, problem.detail, problem.field)
        self.problem = problem


class AgentError(ManagerError):
    """A host agent that could not be used."""

    @property
    def reason(self) -> ReasonCode:
        """Of an operation that ends by it."""
        return ReasonCode.HOST_UNAVAILABLE


class AgentUnreachable(AgentError):
    """No answer in time: whether a command arrived is unknown.

    :param sent: whether it may have left this machine; not where no connection came about.
    """

    def __init__(self, sentence: str, sent: bool = True) -> None:
        super().__init__(sentence)
        self.sent = sent


class AgentFailed(AgentError):
    """An answer of 500: the agent is there, and could not deal with this; whether it did some of it is unknown."""


class AgentRefused(AgentError):
    """An answer of 4xx: the command was not taken on.

    :param status: the HTTP status.
    :param problem: as the agent put it, where it did.
    """

    def __init__(self, status: int, sentence: str, problem: Problem | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.problem = problem
        #: Whether it may have been sent before without an answer: that one may still arrive, and be taken on.
        self.sent_before = False

    @property
    def reason(self) -> ReasonCode:
        no_room = self.problem is not None and self.problem.code is ProblemCode.NO_ROOM
        return ReasonCode.NO_ROOM if no_room else ReasonCode.FAILED


class StoreError(ManagerError):
    """The database cannot be used."""


#: What clients may know of it, with no path in it.
DISK_FULL: Final = "the disk under the store is full: nothing can be stored until there is room"


class SettingsError(ManagerError):
    """A setting or a token file that the manager cannot start with."""


class LostLeadership(StoreError):
    """This manager does not lead (any more): nothing was stored, nothing sent."""
