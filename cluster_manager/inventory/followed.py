"""Watch over whom the hosts follow: a manager may lead on a store that is not the one which they know.

The lock and the epoch of a store keep apart the managers on that store. Where a database was put back, or there are two
of it, a manager leads alone on one that is behind: hosts refuse all that it says, since they follow a higher epoch. It
is their word against its store's, so that of one host counts for that host only (`Hosts.state`). The term ends where
more than half of those that answer say so. Where they go on to report here, nobody else leads, and the next epoch is
above theirs; else they follow another manager, and this one waits.

A single host is more than half where no other one answers. Its word ends one term in the life of this process, and the
epoch rises by a bounded step: a compromised host can neither keep managers from leading nor use the epochs up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from cluster_manager.errors import AgentError, StoreError
from cluster_manager.inventory.hosts import Hosts
from ebbtide.deflation.fencing import outvoted
from ebbtide.messages.hosts import HostReport

#: So many of the silent hosts are asked at a time.
ASKED: Final = 8
#: For how long others of them are asked before a term, where too few answer, seconds.
CHECKED_S: Final = 60.0

#: Asks a host's agent for its report. Raises AgentError.
Ask = Callable[[str], Awaitable[HostReport]]


class Followed:
    """What hosts have said of the epochs that they follow, for as long as this process runs.

    :param end: is told why the term is over.
    :param silent_after_s: when a host counts as silent, seconds.
    :param monotonic: seconds that never go back.
    """

    def __init__(
        self, end: Callable[[str], None], silent_after_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._end = end
        self._silent_after_s = silent_after_s
        self._monotonic = monotonic
        #: The next epoch is above this one.
        self.above = 0
        #: Whether the last term ended since the hosts follow another manager.
        self.elsewhere = False
        #: Whether the word of a single host has ended a term.
        self._single = False
        #: Since when the hosts that report say that they follow a higher epoch.
        self._since: float | None = None
        self._begun_at = 0.0
        #: Since when hosts have had their reports refused here, and until when, by id: no other manager takes them.
        self._refused: dict[str, tuple[float, float]] = {}
        #: The last one of the silent hosts that was asked.
        self._asked = ""

    def begin(self) -> None:
        """A term begins."""
        self._refused.clear()
        self.above, self.elsewhere, self._since, self._begun_at = 0, False, None, self._monotonic()

    def refused(self, host_id: str) -> None:
        """A host wanted to report here while this manager stands by."""
        if self.elsewhere:
            now = self._monotonic()
            since, until = self._refused.get(host_id, (now, now))
            self._refused[host_id] = (since if now - until <= self._silent_after_s else now, now)

    async def look(self, hosts: Hosts, ask: Ask, epoch: int) -> None:
        """End the term if it has to.

        :param epoch: of this manager.
        """
        now = self._monotonic()
        reported = [host.report.epoch for host in hosts.reporting().values()]
        if (agreed := self._outvoted(epoch, reported)) is not None:
            self._since = now if self._since is None else self._since
            # One that has another manager reports here once, on its way there.
            if now - self._since > 2 * self._silent_after_s:
                self._single |= len(reported) == 1
                self.above = agreed
                self._end(f"its hosts follow epoch {agreed}, and its store has {epoch}: the store was put back")
            return
        self._since = None
        if 2 * len(reported) >= len(hosts) or now - self._begun_at <= self._silent_after_s:
            return
        said = reported + list((await self._answers(hosts, ask)).values())
        if (agreed := self._outvoted(epoch, said)) is not None:
            self._single |= len(said) == 1
            self.elsewhere = True
            self._end(_elsewhere(agreed, epoch))

    async def check(self, hosts: Hosts, ask: Ask, epoch: int) -> None:
        """Before a term after one that ended since the hosts follow another manager: it would raise the epoch.

        Those that have wanted to report here for a while have no other manager any more, whomever they followed.

        :param epoch: that of the store.
        :raises StoreError: they do so still.
        """
        begun_at, said = self._monotonic(), dict[str, int]()
        # The first of them may all be off: each term that begins without an answer comes nearer to the other epoch.
        for _ in range(0, len(hosts), ASKED):
            said |= await self._answers(hosts, ask)
            if len(said) >= ASKED or self._monotonic() - begun_at > CHECKED_S:
                break
        words = [0 if self._waits(host_id) else followed for host_id, followed in said.items()]
        if (agreed := self._outvoted(epoch + 1, words)) is not None:
            raise StoreError(_elsewhere(agreed, epoch))

    def _waits(self, host_id: str) -> bool:
        now = self._monotonic()
        since, until = self._refused.get(host_id, (now, now))
        return now - until <= self._silent_after_s and now - since > 2 * self._silent_after_s

    def _outvoted(self, epoch: int, said: list[int]) -> int | None:
        return None if len(said) == 1 and self._single else outvoted(epoch, said)

    async def _answers(self, hosts: Hosts, ask: Ask) -> dict[str, int]:
        """What a few of the silent hosts say, by id, others each time."""
        silent = sorted(hosts.ids() - hosts.reporting().keys())
        later = [host_id for host_id in silent if host_id > self._asked]
        asked = (later + silent)[: min(ASKED, len(silent))]
        self._asked = asked[-1] if asked else ""

        async def one(host_id: str) -> int | None:
            try:
                return (await ask(host_id)).epoch
            except AgentError:
                return None

        answers = await asyncio.gather(*map(one, asked))
        return {host_id: epoch for host_id, epoch in zip(asked, answers, strict=True) if epoch is not None}


def _elsewhere(agreed: int, epoch: int) -> str:
    return f"its hosts follow another manager, of epoch {agreed}, on another store than this one of epoch {epoch}"
