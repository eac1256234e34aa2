"""Errors of the adapters."""

from __future__ import annotations


class AdapterError(Exception):
    """Root of this package's errors."""


class BadBody(AdapterError):
    """A request body is wrong; the message names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class BadAnswer(AdapterError):
    """A fault of an adapter: it answered with what cannot be told; the message names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


class Conflict(AdapterError):
    """A request_id came again with another body."""


class ApplicationError(AdapterError):
    """The application cannot be reached, or does not do what it said."""
