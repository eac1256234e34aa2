"""Request of a service for more: through the guest agent, which passes it on to the host."""

from __future__ import annotations

import json
import socket

from app_adapters.errors import ApplicationError

REQUEST_SOCKET = "/run/ebbtide/request.sock"
ANSWER_BYTES = 65536


def ask_for_more(
    memory_mib: float = 0.0,
    cpu_cores: float = 0.0,
    reason: str = "",
    path: str = REQUEST_SOCKET,
    limit_s: float = 5.0,
) -> None:
    """Ask the host for so much more than the VM has now. It decides, and hears repeated requests less and less often.

    Raises: ApplicationError with the reason where the request was not passed on.
    """
    params = {"memory_mib": memory_mib, "cpu_cores": cpu_cores, "reason": reason}
    message = {"jsonrpc": "2.0", "id": 1, "method": "request", "params": params}
    text = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(limit_s)
            connection.connect(path)
            connection.sendall(json.dumps(message).encode("ascii") + b"\n")
            while len(text) < ANSWER_BYTES and not text.endswith(b"\n"):
                data = connection.recv(4096)
                if not data:
                    break
                text += data
        answer = json.loads(text.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ApplicationError(f"the guest agent cannot be asked through {path}: {error}") from None
    if not isinstance(answer, dict) or "result" not in answer:
        refusal = answer.get("error") if isinstance(answer, dict) else None
        raise ApplicationError(str(refusal.get("message")) if isinstance(refusal, dict) else "the answer is no answer")
