"""Errors of the client; the text of each is one sentence for the user."""

from __future__ import annotations

from ebbtide.errors import EbbError
from ebbtide.messages.common import Problem
from ebbtide.messages.problem_codes import ProblemCode


class ClientError(EbbError):
    """Base of what a conversation with a manager can fail with."""

    #: For how long there was no answer, beyond what the manager might hold it back, seconds.
    silent_s: float = 0.0


class ManagerUnreachable(ClientError):
    """No answer from the manager's address, or what answers is no manager.

    :param was_sent: what was asked for may have been taken on.
    :param may_be_done: it may have been done, and is not harmless when repeated.
    """

    def __init__(self, sentence: str, *, was_sent: bool = False, may_be_done: bool = False) -> None:
        super().__init__(sentence)
        self.was_sent = was_sent
        self.may_be_done = may_be_done


class ManagerRefused(ClientError):
    """The manager answered with a problem.

    :param status: the HTTP status.
    :param field: the field that is wrong, where there is one.
    :param problem: all that it said.
    """

    def __init__(self, status: int, sentence: str, field: str | None = None, problem: Problem | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.field = field
        self.problem = problem or Problem.of(status, sentence, field)

    @property
    def code(self) -> ProblemCode:
        """What it is about: stable, while sentences may change."""
        return self.problem.code


class ManagerStandsBy(ManagerRefused):
    """A manager that does not lead (yet, or any more): another one may, and the same request again is harmless."""


class ManagerBusy(ManagerRefused):
    """Too many requests of this token (429): nothing was done, and the same request again is harmless.

    :param after_s: when to come again, as the manager says it, within bounds.
    """

    after_s: float = 1.0


#: What passes: the same question may be answered a while later.
PASSING = (ManagerUnreachable, ManagerStandsBy, ManagerBusy)


def passes(error: BaseException | None) -> bool:
    """Whether the same question may be answered a while later, also because the host that it is about does not answer
    now.
    """
    of_host = isinstance(error, ManagerRefused) and error.code is ProblemCode.HOST_UNAVAILABLE
    return of_host or isinstance(error, PASSING)
