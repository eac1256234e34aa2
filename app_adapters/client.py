"""A small client of a hook, on a Unix socket or on loopback, as the guest agent is one."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import Any
from urllib.parse import quote

from app_adapters.errors import AdapterError
from app_adapters.hook import BODY_BYTES, TARGETS, Reply, require_loopback
from app_adapters.messages import reject_constant

_URL = re.compile(r"http://(\[[0-9a-f:]+\]|[^/:]+):([0-9]{1,5})/?")


class NoAnswer(AdapterError):
    """A hook did not answer, or not with a JSON object."""


class NotListening(NoAnswer):
    """Nothing listens where a hook should be."""


class HookClient:
    """Asks the hook at `url`, as a drop-in file names it: `unix:/PATH`, or `http://HOST:PORT` on loopback.

    Raises: ValueError for another url.
    """

    def __init__(self, url: str, token: str = "", limit_s: float = 5.0) -> None:
        self._path = url[5:] if url.startswith("unix:/") else ""
        match = _URL.fullmatch(url)
        if not self._path and match is None:
            raise ValueError(f"url: {url} is neither unix:/PATH nor http://HOST:PORT")
        self._host, self._port = (match.group(1).strip("[]"), int(match.group(2))) if match else ("localhost", 0)
        require_loopback(self._host)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._limit_s = limit_s

    def ask(
        self, method: str, path: str, body: bytes | dict[str, Any] | None = None, limit_s: float | None = None
    ) -> Reply:
        """Status and JSON object of an answer. Raises: NoAnswer."""
        data = json.dumps(body).encode("ascii") if isinstance(body, dict) else body
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s or self._limit_s)
        try:
            if self._path:
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(limit_s or self._limit_s)
                connection.sock.connect(self._path)
            connection.request(method, path, data, self._headers)
            response = connection.getresponse()
            answer = json.loads(response.read(BODY_BYTES + 1).decode("utf-8"), parse_constant=reject_constant)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise NotListening(f"nothing listens: {error}") from None
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise NoAnswer(f"{method} {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise NoAnswer(f"{method} {path}: no JSON object")
        return response.status, answer

    def target(self, body: dict[str, Any], limit_s: float | None = None) -> Reply:
        """Ask for a size. Raises: NoAnswer."""
        return self.ask("POST", TARGETS, body, limit_s)

    def progress(self, request_id: str) -> Reply:
        """How far a request is. Raises: NoAnswer."""
        return self.ask("GET", f"{TARGETS}/{quote(request_id, safe='')}")


def read_token(path: str) -> str:
    """The token in a file. Raises: AdapterError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"the token cannot be read: {error}") from None
