"""Reporter of this host to the manager: regularly, and at once after every change. A silent manager stops nothing.

Of several managers one leads; the others refuse reports, so the next one is tried until one takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Sequence
from typing import Final

import aiohttp
import structlog

from ebbtide.deflation.fencing import Fence
from ebbtide.messages.common import Vector, problem_in
from ebbtide.messages.history import SAMPLED_EVERY_S, UsageReply
from ebbtide.messages.hosts import HostReport, ReportReply
from hostagent.control.usage import usage_of
from hostagent.errors import JournalError
from hostagent.vm.earlier_manager import unknown_field, without
from hostagent.vm.host import Host

#: Bytes of a refusal that are read.
_LONGEST: Final = 2**14
EVERY_S: Final = 2.0
#: A change is reported after this, so that a burst of changes is one report.
BURST_S: Final = 0.05
LIMIT_S: Final = 5.0
#: For telling it, seconds: the next report is not to wait for that.
USAGE_LIMIT_S: Final = 2.0
#: Between two looks at what VMs use, where their sizes change all the time, seconds.
USAGE_S: Final = 10.0
#: A manager that does not know of it, or does not want it, is told again after so long, seconds.
UNWANTED_S: Final = 3600.0

log = structlog.get_logger()


class Reporter:
    """Sends reports until cancelled.

    :param manager: base URL of the manager, or of each of several.
    :param tls: for an HTTPS URL; default: whom this machine trusts, and no certificate of our own.
    """

    def __init__(self, host: Host, manager: str | Sequence[str], token: str, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._tls = tls
        #: The one that took the last report is in front.
        self._managers = [url.rstrip("/") for url in ([manager] if isinstance(manager, str) else manager)]
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._acknowledged = 0
        #: The last body, and what it was made of: as long as nothing changes it is the same.
        self._body: tuple[HostReport | None, frozenset[tuple[str, ...]], str] = None, frozenset(), ""
        self._silent = False
        #: Whether the journal did not take what was last answered.
        self._unwritten = False
        #: Whether its connections are of another certificate than the one that counts.
        self._stale = False
        #: When what VMs use is told next, by the loop's clock, and when at the soonest; with which sizes it was last.
        self._usage_due = self._usage_soonest = 0.0
        self._told_sizes: list[Vector] = []

    def reconnect(self) -> None:
        """Make the next report over a new connection: the certificate that this host shows is another one."""
        self._stale = True

    async def run(self) -> None:
        """Report for ever. A manager that does not answer is said once, not every two seconds."""
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        while True:
            self._stale = False
            connector = aiohttp.TCPConnector(ssl=self._tls or True)
            async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector) as session:
                while not self._stale:
                    await self._turn(session)

    async def _turn(self, session: aiohttp.ClientSession) -> None:
        """One report, and the pause behind it."""
        self._host.changed.clear()
        try:
            await self._send_to_leader(session)
            self._host.reports.taken += 1
            self._host.reports.taken_at = time.time()
            if self._silent:
                log.info("the manager answers again", manager=self._managers[0])
            self._silent = False
            await self._tell_usage(session)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            self._host.reports.failed += 1
            if not self._silent:
                log.warning(
                    "the manager does not take our report; we go on",
                    manager=", ".join(self._managers),
                    why=str(error) or type(error).__name__,
                )
            self._silent = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await self._host.changed.wait()
        await asyncio.sleep(BURST_S)

    async def _send_to_leader(self, session: aiohttp.ClientSession) -> None:
        """Try each manager once."""
        for left in range(len(self._managers) - 1, -1, -1):
            try:
                return await self._send(session, self._managers[0])
            except (aiohttp.ClientError, TimeoutError, ValueError):
                self._managers.append(self._managers.pop(0))
                self._usage_due = self._usage_soonest = 0.0
                if not left:
                    raise

    async def _send(self, session: aiohttp.ClientSession, manager: str) -> None:
        url = f"{manager}/v1/hosts/{self._host.slice.host_id}/report"
        report, unknown = self._host.report(), frozenset(self._host.unknown_fields)
        if self._body[0] is not report or self._body[1] != unknown:
            self._body = report, unknown, without(report, unknown)
        async with session.post(url, data=self._body[2]) as response:
            if response.status >= 400:
                sentence = (await response.content.read(_LONGEST)).decode(errors="replace")
                field = unknown_field(sentence) if response.status == 400 else None
                if field is None or field in self._host.unknown_fields:
                    said = problem.detail if (problem := problem_in(response.status, sentence)) else sentence[:500]
                    raise ValueError(f"it answers {response.status}: {said}")
                self._host.unknown_fields.add(field)
                log.info("the manager does not know a field of our reports", manager=manager, field=".".join(field))
                return await self._send(session, manager)
            reply = ReportReply.model_validate_json(await response.read(), extra="ignore")
        await self._take(reply, manager)

    async def _take(self, reply: ReportReply, manager: str) -> None:
        """What a manager that has taken a report says; what cannot be written of it comes with the next answer again.

        :raises ValueError: it leads no more.
        """
        epoch = self._host.journal.epoch
        why, _ = Fence(epoch).refusal(reply.epoch, 0)
        if why:
            raise ValueError(f"the manager at {manager}: {why}")
        try:
            if reply.epoch > epoch:
                # From now on no command of an earlier leader is taken, even if the new one commands nothing yet.
                await asyncio.to_thread(self._host.journal.raise_epoch, reply.epoch)
                # It may be of another version.
                self._host.unknown_fields.clear()
                self._usage_due = self._usage_soonest = 0.0
            if reply.acknowledged != self._acknowledged:
                await asyncio.to_thread(self._host.journal.acknowledge, reply.acknowledged)
                self._acknowledged = reply.acknowledged
            self._unwritten = False
        except JournalError as error:
            if not self._unwritten:
                log.warning("what the manager answers to reports cannot be kept; we go on", why=str(error))
            self._unwritten = True

    async def _tell_usage(self, session: aiohttp.ClientSession) -> None:
        """Tell the manager that took the report what VMs use: every two minutes, soon after their sizes have changed.

        Only the history is made of it, so nothing depends on whether it arrives.
        """
        now = asyncio.get_running_loop().time()
        sizes = [vm.intent.committed for vm in self._host.vms.values()]
        if now < (self._usage_due if sizes == self._told_sizes else self._usage_soonest):
            return
        every_s, least_s = SAMPLED_EVERY_S, USAGE_S
        url = f"{self._managers[0]}/v1/hosts/{self._host.slice.host_id}/usage"
        try:
            body = usage_of(self._host).model_dump_json()
            async with session.post(url, data=body, timeout=aiohttp.ClientTimeout(total=USAGE_LIMIT_S)) as response:
                if response.status == 200:
                    every_s = UsageReply.model_validate_json(await response.read(), extra="ignore").every_s
                # An earlier version knows no such path, which may look like a wrong token to it.
                if response.status in (401, 403, 404, 405) or every_s >= UNWANTED_S:
                    every_s = least_s = UNWANTED_S
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            log.debug("the manager was not told what VMs use", why=str(error) or type(error).__name__)
        self._told_sizes, self._usage_due, self._usage_soonest = sizes, now + every_s, now + least_s
