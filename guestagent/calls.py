"""One HTTP call to an application's hook: a limit on its whole time and on its size, and no redirects.

Apart from hooks.py so that a guest without applications never loads an HTTP client.
"""

from __future__ import annotations

import http.client
import socket
import struct
import time
from typing import Any, NamedTuple

from guestagent.errors import HookError, HookTimeout

#: unix(7), SO_PEERCRED: pid, uid and gid of the process that listens.
_CREDENTIALS = struct.Struct("3i")


class _Timed(socket.socket):
    """Every read has only the time that is left of the whole call: one byte a second does not keep it alive."""

    end = 0.0

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise socket.timeout("timed out")
        self.settimeout(left_s)
        return super().recv_into(*args, **kwargs)


class Listener(NamedTuple):
    """A Unix socket, and the user whose process must listen on it."""

    path: str
    uid: int


def _connected(address: Listener | tuple[str, int], limit_s: float) -> socket.socket:
    """Raises: OSError, HookError where another user's process listens: it must not get the token."""
    if not isinstance(address, Listener):
        return socket.create_connection(address, limit_s)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(limit_s)
        connected.connect(address.path)
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid = _CREDENTIALS.unpack(credentials)[1]
        if uid not in (0, address.uid):
            raise HookError(f"a process of user {uid} listens on {address.path}, not one of user {address.uid}")
    except BaseException:
        connected.close()
        raise
    return connected


def call(
    address: Listener | tuple[str, int],
    request: tuple[str, str],
    headers: dict[str, str],
    body: bytes | None,
    limit_s: float,
    longest: int,
) -> tuple[int, bytes]:
    """Status and body of the answer to `request`, a method and a path. All of it takes at most `limit_s` seconds.

    Raises: HookTimeout, HookError where there is no answer, or one of more than `longest` bytes.
    """
    end = time.monotonic() + limit_s
    connection = http.client.HTTPConnection(*(("localhost", 80) if isinstance(address, Listener) else address))
    response: http.client.HTTPResponse | None = None
    try:
        connected = _connected(address, limit_s)
        timed = _Timed(connected.family, connected.type, connected.proto, connected.detach())
        timed.end = end
        timed.settimeout(max(end - time.monotonic(), 0.001))  # of `sendall`, for which it counts as a whole
        connection.sock = timed
        connection.request(request[0], request[1], body, headers)
        response = connection.getresponse()
        text = response.read(longest + 1)
    except socket.timeout:
        raise HookTimeout(f"no answer within {limit_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise HookError(f"cannot be reached: {error or type(error).__name__}") from None
    finally:
        # An answer that only the end of the connection ends is the response's own by now.
        if response is not None:
            response.close()
        connection.close()
    if len(text) > longest:
        raise HookError(f"answered {response.status} with more than {longest} bytes")
    return response.status, text
