"""JSON-RPC 2.0, one message a line: requests in, answers out, and the checks of parameters."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, Union

from guestagent.channel import LINE_BYTES
from guestagent.errors import BadParams, BadRequest, GuestFailure, ParseError, RpcError
from guestagent.tracing import Trace, trace_of

COMPONENTS = ("cpu_cores", "memory_mib", "disk_mib_s", "network_mib_s")
ID_LENGTH = 256
TEXT_LENGTH = 1000

RequestId = Union[str, int, None]
Params = Dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A checked envelope. A notification expects no answer."""

    id: RequestId
    method: str
    params: Params
    notification: bool
    trace: Trace | None = None


class InvalidRequest(Exception):
    """An envelope that must be answered with an error, under the id that could be read."""

    def __init__(self, id: RequestId, error: RpcError) -> None:
        super().__init__(str(error))
        self.id = id
        self.error = error


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: bytes) -> Any:
    """Strict JSON: no NaN, no Infinity, no nesting that exhausts the stack.

    Raises: ParseError.
    """
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"not JSON: {error}") from None


def cleaned(value: Any) -> Any:
    """What an application said, with texts that can be told: printable, and cut at `TEXT_LENGTH` characters.

    The host does the same with our lines (ebbtide.messages.guest): it trusts no guest.

    Raises: RecursionError where it is nested too deeply.
    """
    if isinstance(value, str):
        return _cleaned_text(value)
    if isinstance(value, list):
        return [cleaned(part) for part in value]
    if isinstance(value, dict):
        return {_cleaned_text(key): cleaned(part) for key, part in value.items()}
    return value


def _cleaned_text(text: str) -> str:
    text = text[:TEXT_LENGTH]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def parse_request(line: bytes | None) -> Request:
    """The request in a line; None stands for a line that was too long.

    Raises: InvalidRequest.
    """
    if line is None:
        raise InvalidRequest(None, BadRequest(f"line longer than {LINE_BYTES} bytes"))
    try:
        message = parse_json(line)
    except ParseError as error:
        raise InvalidRequest(None, error) from None
    if not isinstance(message, dict):
        raise InvalidRequest(None, BadRequest("a request is a JSON object; batches are not taken"))
    id_ = message.get("id")
    if isinstance(id_, bool) or not (id_ is None or isinstance(id_, (str, int))):
        raise InvalidRequest(None, BadRequest("id: must be a string, an integer or null"))
    if message.get("jsonrpc") != "2.0":
        raise InvalidRequest(id_, BadRequest('jsonrpc: must be "2.0"'))
    method = message.get("method")
    if not isinstance(method, str):
        raise InvalidRequest(id_, BadRequest("method: must be a string"))
    params = message.get("params", {})
    if not isinstance(params, dict):
        raise InvalidRequest(id_, BadParams("params", "must be an object"))
    return Request(id_, method, params, "id" not in message, trace_of(message.get("traceparent")))


def answer_line(id: RequestId, result: Params, trace: Trace | None = None) -> bytes:
    """A result as a line without newline, with what is told of its trace; one that is too long becomes an error."""
    message = {"jsonrpc": "2.0", "id": id, "result": result}
    line = _encode(message)
    if trace is not None:
        traced = _encode(dict(message, trace=asdict(trace.told())))
        line = traced if len(traced) < LINE_BYTES else line
    if len(line) >= LINE_BYTES:
        return error_line(id, GuestFailure("the answer is longer than a line may be"))
    return line


def error_line(id: RequestId, error: RpcError) -> bytes:
    """An error as a line without newline."""
    return _encode({"jsonrpc": "2.0", "id": id, "error": {"code": error.code, "message": str(error)[:1000]}})


def notification_line(method: str, params: Params) -> bytes:
    """A message that expects no answer, as a line without newline."""
    return _encode({"jsonrpc": "2.0", "method": method, "params": params})


def _encode(message: Params) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")


def text_param(params: Params, field: str, length: int = ID_LENGTH) -> str:
    """A string of 1 to `length` printable characters without spaces.

    Raises: BadParams.
    """
    value = params.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= length:
        raise BadParams(field, f"must be a string of 1 to {length} characters")
    if not value.isprintable() or " " in value:
        raise BadParams(field, "must hold printable characters only, and no spaces")
    return value


def sentence_param(params: Params, field: str, length: int) -> str:
    """At most `length` printable characters, spaces included; empty where it is missing.

    Raises: BadParams.
    """
    value = params.get(field, "")
    if not isinstance(value, str) or len(value) > length or not value.isprintable():
        raise BadParams(field, f"must be a string of at most {length} printable characters")
    return value


def flag_param(params: Params, field: str) -> bool:
    """True or false; false where it is missing.

    Raises: BadParams.
    """
    value = params.get(field, False)
    if not isinstance(value, bool):
        raise BadParams(field, "must be true or false")
    return value


def choice_param(params: Params, field: str, choices: tuple[str, ...]) -> str:
    """One of the given words.

    Raises: BadParams.
    """
    value = params.get(field)
    if not isinstance(value, str) or value not in choices:
        raise BadParams(field, "must be one of {}".format(", ".join(choices)))
    return value


def is_amount(value: Any) -> bool:
    """A finite number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value >= 0
    except OverflowError:  # an integer beyond every float
        return False


def amount_param(params: Params, field: str) -> float:
    """A finite number >= 0.

    Raises: BadParams.
    """
    value = params.get(field)
    if not is_amount(value):
        raise BadParams(field, "must be a finite number >= 0")
    return float(params[field])


def vector_param(params: Params, field: str) -> dict[str, float]:
    """Component names to amounts; missing components are not concerned.

    Raises: BadParams.
    """
    value = params.get(field)
    if not isinstance(value, dict):
        raise BadParams(field, "must be an object")
    for name, amount in value.items():
        if name not in COMPONENTS:
            raise BadParams(f"{field}.{name}", "no such component; there are {}".format(", ".join(COMPONENTS)))
        if not is_amount(amount):
            raise BadParams(f"{field}.{name}", "must be a finite number >= 0")
    return {name: float(amount) for name, amount in value.items()}
