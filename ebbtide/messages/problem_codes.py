"""Codes of what goes wrong: of refused requests (RFC 9457 problem details), and of operations that did not do all."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class ProblemCode(StrEnum):
    """What a refusal is about; stable, while sentences may change."""

    INVALID = "invalid"
    AHEAD_OF_LOG = "ahead-of-log"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    NO_SUCH_ROUTE = "no-such-route"
    NO_OUTPUT = "no-output"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    TOO_SLOW = "too-slow"
    #: Of 409, where none of those after it fits.
    CONFLICT = "conflict"
    ALREADY_EXISTS = "already-exists"
    REQUEST_ID_REUSED = "request-id-reused"
    SUPERSEDED = "superseded"
    BUSY = "busy"
    WRONG_STATE = "wrong-state"
    NO_ROOM = "no-room"
    NEVER_FITS = "never-fits"
    MODE_FORBIDS = "mode-forbids"
    NOT_CONFIGURED = "not-configured"
    CHANGED = "changed"
    TOO_LARGE = "too-large"
    TOO_MANY_REQUESTS = "too-many-requests"
    INTERNAL = "internal"
    #: Of 503, where none of those after it fits.
    UNAVAILABLE = "unavailable"
    STANDBY = "standby"
    HOST_UNAVAILABLE = "host-unavailable"
    HYPERVISOR_UNAVAILABLE = "hypervisor-unavailable"


#: The title of each, and the status that it comes with: the table of docs/reference/rest.md.
PROBLEMS: Final[Mapping[ProblemCode, tuple[int, str]]] = {
    ProblemCode.INVALID: (400, "A parameter or a field is wrong"),
    ProblemCode.AHEAD_OF_LOG: (400, "The event is none of this log"),
    ProblemCode.UNAUTHENTICATED: (401, "The token is missing or wrong"),
    ProblemCode.FORBIDDEN: (403, "The caller may not do this"),
    ProblemCode.NOT_FOUND: (404, "There is no such thing"),
    ProblemCode.NO_SUCH_ROUTE: (404, "There is no such path"),
    ProblemCode.NO_OUTPUT: (404, "The task has no output that can be shown"),
    ProblemCode.METHOD_NOT_ALLOWED: (405, "The path takes other methods"),
    ProblemCode.TOO_SLOW: (408, "The request did not arrive in time"),
    ProblemCode.CONFLICT: (409, "It cannot be done as things stand"),
    ProblemCode.ALREADY_EXISTS: (409, "There is one of that name already"),
    ProblemCode.REQUEST_ID_REUSED: (409, "The request id was used for another request"),
    ProblemCode.SUPERSEDED: (409, "A later command came before it"),
    ProblemCode.BUSY: (409, "Something else is at work on it"),
    ProblemCode.WRONG_STATE: (409, "It is in a state that does not allow this"),
    ProblemCode.NO_ROOM: (409, "There is too little room"),
    ProblemCode.NEVER_FITS: (409, "It is larger than anything there is"),
    ProblemCode.MODE_FORBIDS: (409, "The host's mode does not allow this"),
    ProblemCode.NOT_CONFIGURED: (409, "The daemon is not set up for this"),
    ProblemCode.CHANGED: (412, "It has changed meanwhile"),
    ProblemCode.TOO_LARGE: (413, "The body is too large"),
    ProblemCode.TOO_MANY_REQUESTS: (429, "Too many requests"),
    ProblemCode.INTERNAL: (500, "A defect of the server"),
    ProblemCode.UNAVAILABLE: (503, "Not now"),
    ProblemCode.STANDBY: (503, "This manager does not lead"),
    ProblemCode.HOST_UNAVAILABLE: (503, "The host does not answer"),
    ProblemCode.HYPERVISOR_UNAVAILABLE: (503, "The hypervisor does not answer"),
}


def code_of(status: int) -> ProblemCode:
    """The code of a status where nothing more is known: the first that comes with it."""
    return next((code for code, (its, _) in PROBLEMS.items() if its == status), ProblemCode.INTERNAL)


class ReasonCode(StrEnum):
    """Why an operation did not do all that it was asked for; stable, while sentences may change."""

    #: None of those after it.
    FAILED = "failed"
    NO_HOST_READY = "no-host-ready"
    NO_ROOM = "no-room"
    #: A part of it was done: what layers verified is less than what was asked for.
    SHORTFALL = "shortfall"
    HOST_UNAVAILABLE = "host-unavailable"
    CALLED_OFF = "called-off"
    INTERNAL = "internal"
