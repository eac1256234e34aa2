"""Errors that both REST servers share: a request that is refused, and settings that a server cannot start with."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.messages.common import Problem
from ebbtide.messages.problem_codes import ProblemCode


class RestError(Exception):
    """Base of all."""


class Refused(RestError):
    """A request that is answered with a Problem before any handler has seen it; nothing has been changed.

    :param status: the HTTP status.
    :param field: the field or header that is wrong, where there is one.
    :param headers: what the answer carries besides.
    """

    def __init__(
        self,
        status: int,
        sentence: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: ProblemCode | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.problem = Problem.of(status, sentence, field, code)
        self.headers = dict(headers or {})


class AccessError(RestError):
    """Tokens, certificates or an address that a server cannot start with. The sentence holds no secret."""


class OptionsError(AccessError):
    """Options that a daemon cannot start with; one sentence a line, each of which names where the option stands."""
