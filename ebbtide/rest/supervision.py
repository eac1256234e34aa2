"""What a daemon tells systemd: that it is ready, what it does, that its event loop turns (sd_notify(3)).

Without systemd (no ``NOTIFY_SOCKET``) nothing is sent. The three words need no library: a datagram each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

#: How often the status is told where nobody watches, seconds.
PERIOD_S: Final = 10.0


@contextlib.asynccontextmanager
async def supervised(status: Callable[[], str], environ: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Say READY at the beginning of the block and STOPPING at its end; meanwhile the status and signs of life.

    :param status: one sentence on what the daemon does; called in the event loop, so that one that hangs gives no sign.
    :param environ: ``NOTIFY_SOCKET``; ``WATCHDOG_USEC``, within which systemd expects a sign, and ``WATCHDOG_PID``.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)

        def tell(*words: str) -> None:
            # A full queue, or a systemd that restarts: the next sign comes soon.
            with contextlib.suppress(OSError):
                channel.sendto("\n".join(words).encode(), "\0" + address[1:] if address[0] == "@" else address)

        period_s = _period_s(environ)

        async def live() -> None:
            while True:
                await asyncio.sleep(period_s)
                tell("WATCHDOG=1", f"STATUS={status()}")

        tell("READY=1", f"STATUS={status()}")
        task = asyncio.create_task(live(), name="signs of life")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            tell("STOPPING=1", "STATUS=stopping")


def _period_s(environ: Mapping[str, str]) -> float:
    """A third of what systemd waits: two signs may be late."""
    text, meant = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if text.isdigit() and int(text) and meant in ("", str(os.getpid())):
        return min(int(text) / 3e6, PERIOD_S)
    return PERIOD_S
