"""Errors of the guest agent; those that reach the host carry their JSON-RPC code."""

from __future__ import annotations


class GuestAgentError(Exception):
    """Root of this package's errors."""


class RpcError(GuestAgentError):
    """An error that the host is told, as a JSON-RPC error object."""

    code = -32000


class ParseError(RpcError):
    """The line is not JSON."""

    code = -32700


class BadRequest(RpcError):
    """The line is JSON, but no request, or it is too long."""

    code = -32600


class UnknownMethod(RpcError):
    """No such method."""

    code = -32601


class BadParams(RpcError):
    """A parameter is missing or wrong; the message names the field."""

    code = -32602

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class GuestFailure(RpcError):
    """The guest could not do what was asked."""

    code = -32000


class WrongProtocol(RpcError):
    """The host speaks another version of the protocol."""

    code = -32001


class HelloFirst(RpcError):
    """A method came before `hello`."""

    code = -32002

    def __init__(self) -> None:
        super().__init__("hello first")


class DropInError(GuestAgentError):
    """A drop-in file cannot be trusted or read; the message names it."""


class HookError(GuestAgentError):
    """An application's hook gave no usable answer."""


class HookTimeout(HookError):
    """An application's hook did not answer in time."""
