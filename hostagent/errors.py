"""Errors of the host agent. Those of the API carry the HTTP status that they answer with."""

from __future__ import annotations

from functools import partial
from typing import Final

from ebbtide.messages.problem_codes import ProblemCode

#: So begins what systemd is told of an agent that libvirt keeps from starting, and of which `join` tells.
WAITS: Final = "waits for libvirt"


class HostAgentError(Exception):
    """Base of all errors of the host agent."""


class HypervisorError(HostAgentError):
    """libvirt refused or failed; the text is libvirt's."""


class HypervisorTimeout(HypervisorError):
    """A call did not return in time. Its thread and its domain's lock stay taken until it does."""


class DomainGone(HypervisorError):
    """The domain does not exist any more."""


class AdoptedUnknown(HypervisorError):
    """The file that names the adopted domains cannot be read: it is not known which domains are ours."""


class TrafficControlError(HypervisorError):
    """``tc`` or ``ip`` refused or failed, or another program limits the device; the text says which."""


class GuestUnreachable(HostAgentError):
    """The guest agent is not connected, does not answer or breaks the protocol."""


class GuestSilent(GuestUnreachable):
    """What the guest agent was sent has not been answered: it may have heard it."""


class GuestRefused(HostAgentError):
    """The guest agent answered with an error.

    :param code: of JSON-RPC, where it gave one.
    """

    def __init__(self, sentence: str, code: int | None = None) -> None:
        super().__init__(sentence)
        self.code = code


class NoticeWithdrawn(HostAgentError):
    """A VM that was told that it goes stays: its preemption was called off. The text says what became of its notice."""


class JournalError(HostAgentError):
    """The agent's own state could not be written."""


class RequestRefused(HostAgentError):
    """A request that cannot be carried out; nothing has been changed.

    :param status: the HTTP status to answer with.
    :param field: the field that is wrong, where there is one.
    :param code: what it is about; default by the status.
    """

    def __init__(self, status: int, sentence: str, field: str | None = None, code: ProblemCode | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.field = field
        self.code = code


# What 409 is said with most often: the sentence, and the field where there is one.
already_exists: Final = partial(RequestRefused, 409, code=ProblemCode.ALREADY_EXISTS)
busy: Final = partial(RequestRefused, 409, code=ProblemCode.BUSY)
no_room: Final = partial(RequestRefused, 409, code=ProblemCode.NO_ROOM)
superseded: Final = partial(RequestRefused, 409, code=ProblemCode.SUPERSEDED)
wrong_state: Final = partial(RequestRefused, 409, code=ProblemCode.WRONG_STATE)
