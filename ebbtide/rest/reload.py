"""What a daemon takes over while it runs, on SIGHUP: tokens, certificates, and of its options those of its logs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any, Final

import structlog

from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.logs import configure_logs
from ebbtide.rest.options import DaemonOptions, Given

log = structlog.get_logger()

#: Options that count at once. Of others that name a file of tokens or a certificate, what is in the file does.
AT_ONCE: Final = ("log_level", "log_json")


def changed(before: DaemonOptions, after: DaemonOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options that differ: those that count at once, and those that need a start."""
    differ = [name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)]
    return tuple(n for n in differ if n in AT_ONCE), tuple(n for n in differ if n not in AT_ONCE)


@contextlib.asynccontextmanager
async def reloading(gate: Gate, given: Given[Any] | None = None) -> AsyncIterator[None]:
    """On every SIGHUP until the end of the block, read options, tokens and certificates again, all of them or nothing.

    The log says what counts from then on, and which options would need a start. Before and after the block the signal
    does what it did.

    :param given: the options as they were at the start; None: there are none to be read.
    """
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    started = given.options if given is not None else None
    current = started

    async def reload() -> None:
        nonlocal current
        found = await asyncio.to_thread(given.again) if given is not None and given.again is not None else None
        (await asyncio.to_thread(gate.read_again))()
        what = ["tokens", "certificates"]
        later: tuple[str, ...] = ()
        if found is not None and started is not None and current is not None:
            at_once, _ = changed(current, found.options)
            _, later = changed(started, found.options)
            what += at_once
            current = found.options
            if at_once:
                configure_logs(current.log_level, current.log_json)
        log.info("reloaded", what=", ".join(what))
        if later:
            log.warning("some options count only after a start", options=", ".join(later))

    async def run() -> None:
        while True:
            await asked.wait()
            asked.clear()
            try:
                await reload()
            except AccessError as error:
                log.error("nothing was reloaded, all stays as it is", why=str(error))
            except Exception:
                # A defect; the next signal is still listened to.
                log.exception("nothing was reloaded, all stays as it is")

    before = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    task = asyncio.create_task(run(), name="reload")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
