"""One HTTP call to an application's hook: a limit on its whole time and on its size, and no redirects.

Apart from hooks.py so that a guest without applications never loads an HTTP client.
"""

from __future__ import annotations

import http.client
import socket
import time
from typing import Any

from guestagent.errors import HookError, HookTimeout


class _Timed(socket.socket):
    """Every read has only the time that is left of the whole call: one byte a second does not keep it alive."""

    end = 0.0

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise socket.timeout("timed out")
        self.settimeout(left_s)
        return super().recv_into(*args, **kwargs)


def call(
    address: tuple[str, int],
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
    connection = http.client.HTTPConnection(*address)
    response: http.client.HTTPResponse | None = None
    try:
        connected = socket.create_connection(address, limit_s)
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
