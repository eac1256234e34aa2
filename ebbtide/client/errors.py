"""Errors of the client; the text of each is one sentence for the user."""

from __future__ import annotations

from ebbtide.errors import EbbError


class ClientError(EbbError):
    """Base of what a conversation with a manager can fail with."""


class ManagerUnreachable(ClientError):
    """No answer from the manager's address, or what answers is no manager."""


class ManagerRefused(ClientError):
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
