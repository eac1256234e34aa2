"""The local way to ask for more, and how the VM is: a unix socket that takes one JSON-RPC request per connection."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Any, Callable

from guestagent.errors import BadParams, BadRequest, GuestFailure, RpcError, UnknownMethod
from guestagent.messages import RequestNotice
from guestagent.rpc import (
    InvalidRequest,
    Params,
    amount_param,
    answer_line,
    error_line,
    parse_json,
    parse_request,
    sentence_param,
)
from guestagent.telling import log

SOCKET_NAME = "request.sock"
REASON_LENGTH = 200
LINE_BYTES = 4096
# Connections are served one after another; none may hold up the next for longer.
CONNECTION_LIMIT_S = 1.0
# Before the next attempt where no connection can be taken: descriptors or memory have run out.
AGAIN_S = 0.5
CPU_CORES_LIMIT = 4096.0
MEMORY_MIB_LIMIT = 1e9


def parse_more(params: Params) -> RequestNotice:
    """What is asked for, checked.

    Raises: BadParams, which names the field.
    """
    amounts = {}
    for field, limit in (("cpu_cores", CPU_CORES_LIMIT), ("memory_mib", MEMORY_MIB_LIMIT)):
        amounts[field] = amount_param(params, field) if field in params else 0.0
        if amounts[field] > limit:
            raise BadParams(field, f"must be at most {limit:g}")
    if not any(amounts.values()):
        raise BadParams("memory_mib", "or cpu_cores must be more than 0")
    return RequestNotice(amounts["cpu_cores"], amounts["memory_mib"], sentence_param(params, "reason", REASON_LENGTH))


class RequestSocket:
    """Listens for root and one group; `pass_on` sends a request to the host or raises RpcError with the reason why not.

    `status` tells how the VM is.

    Raises: OSError where the socket cannot be made, or another guest agent listens there.
    """

    def __init__(
        self,
        run_dir: str,
        group_id: int,
        pass_on: Callable[[RequestNotice], None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._pass_on = pass_on
        self._status = status
        self._closed = threading.Event()
        self._path = os.path.join(run_dir, SOCKET_NAME)
        if _is_served(self._path):
            raise OSError(errno.EADDRINUSE, "another guest agent listens there", self._path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Made under another name, so that it never is there with wrong permissions; an old one is replaced.
            new = self._path + ".new"
            if os.path.lexists(new):
                os.unlink(new)
            self._listener.bind(new)
            os.chown(new, -1, group_id)
            os.chmod(new, 0o660)
            self._listener.listen(4)
            self._made = os.stat(new)
            os.rename(new, self._path)
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * CONNECTION_LIMIT_S)
        self._listener.close()
        with contextlib.suppress(OSError):  # another process has removed it
            if os.path.samestat(self._made, os.stat(self._path)):
                os.unlink(self._path)

    def _serve(self) -> None:
        complaint = ""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closed.is_set() and str(error) != complaint:
                    complaint = str(error)
                    log("local requests wait: " + complaint, "warning")
                if self._closed.wait(AGAIN_S):
                    return
                continue
            complaint = ""
            with connection:
                try:
                    connection.sendall(self._answer(_read_line(connection)) + b"\n")
                except OSError:
                    continue  # the client has gone, or is too slow

    def _answer(self, line: bytes) -> bytes:
        try:
            request = parse_request(line)
        except InvalidRequest as invalid:
            return error_line(invalid.id, invalid.error)
        try:
            if request.method == "status":
                return answer_line(request.id, self._status())
            if request.method != "request":
                raise UnknownMethod(f"no method {request.method:.100}")
            self._pass_on(parse_more(request.params))
        except RpcError as error:
            return error_line(request.id, error)
        return answer_line(request.id, {"passed_on": True})


def _is_served(path: str) -> bool:
    """Whether a process takes connections there: what a killed one has left refuses them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECTION_LIMIT_S)
        return probe.connect_ex(path) in (0, errno.EAGAIN)


def _read_line(connection: socket.socket) -> bytes:
    """One line without its newline. Raises: OSError where it does not come in time."""
    end = time.monotonic() + CONNECTION_LIMIT_S
    text = b""
    while b"\n" not in text and len(text) <= LINE_BYTES:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        data = connection.recv(LINE_BYTES)
        if not data:
            break
        text += data
    return text.split(b"\n", 1)[0]


def ask_for_more(run_dir: str, memory_mib: float, cpu_cores: float, reason: str, limit_s: float = 5.0) -> None:
    """Ask the agent of this guest to ask the host.

    Raises: GuestFailure with the reason why it was not passed on.
    """
    _ask(run_dir, "request", {"memory_mib": memory_mib, "cpu_cores": cpu_cores, "reason": reason}, limit_s)


def ask_status(run_dir: str, limit_s: float = 5.0) -> dict[str, Any]:
    """How the VM is, as the agent of this guest knows it.

    Raises: GuestFailure where it cannot be asked.
    """
    return _ask(run_dir, "status", {}, limit_s)


def _ask(run_dir: str, method: str, params: dict[str, Any], limit_s: float) -> dict[str, Any]:
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode("ascii") + b"\n"
    path = os.path.join(run_dir, SOCKET_NAME)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(limit_s)
            connection.connect(path)
            connection.sendall(line)
            answer = parse_json(_all(connection))
    except (OSError, RpcError) as error:
        raise GuestFailure(f"the guest agent cannot be asked through {path}: {error}") from None
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, dict):
        refusal = answer.get("error") if isinstance(answer, dict) else None
        raise GuestFailure(
            str(refusal.get("message")) if isinstance(refusal, dict) else "the guest agent gave no answer"
        )
    return result


def _all(connection: socket.socket) -> bytes:
    text = b""
    while len(text) <= LINE_BYTES:
        data = connection.recv(LINE_BYTES)
        if not data:
            return text
        text += data
    raise BadRequest("the answer is too long")
