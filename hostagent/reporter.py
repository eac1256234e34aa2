"""Tells the manager what this host has: regularly, and at once after every change. Works on when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

import aiohttp
import structlog

from deflation.messages import ReportReply
from hostagent.host import Host

EVERY_S: Final = 2.0
#: A change is reported after this, so that a burst of changes is one report.
BURST_S: Final = 0.05
LIMIT_S: Final = 5.0

log = structlog.get_logger()


class Reporter:
    """Sends reports until cancelled.

    :param manager: base URL of the manager.
    :param tls: for an HTTPS URL; default: whom this machine trusts, and no certificate of our own.
    """

    def __init__(self, host: Host, manager: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._tls = tls
        self._url = f"{manager.rstrip('/')}/v1/hosts/{host.slice.host_id}/report"
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._acknowledged = 0
        self._silent = False

    async def run(self) -> None:
        """Report for ever. A manager that does not answer is said once, not every two seconds."""
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector) as session:
            while True:
                self._host.changed.clear()
                try:
                    await self._send(session)
                    if self._silent:
                        log.info("the manager answers again", manager=self._url)
                    self._silent = False
                except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
                    if not self._silent:
                        log.warning("the manager does not take our report; we go on", manager=self._url, why=str(error))
                    self._silent = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._host.changed.wait()
                await asyncio.sleep(BURST_S)

    async def _send(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self._url, data=self._host.report().model_dump_json()) as response:
            if response.status >= 400:
                sentence = (await response.content.read(500)).decode(errors="replace")
                raise ValueError(f"it answers {response.status}: {sentence}")
            reply = ReportReply.model_validate_json(await response.read())
        if reply.acknowledged != self._acknowledged:
            await asyncio.to_thread(self._host.journal.acknowledge, reply.acknowledged)
            self._acknowledged = reply.acknowledged
