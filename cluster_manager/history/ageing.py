"""Ageing of the history: folds steps into coarser ones, and deletes what is read no more, while this manager leads."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from cluster_manager.history.packs import HOST, Pack, decoded, encoded, folded, fuller
from cluster_manager.history.tiers import DAY_S, LONGEST_S, TIERS, Tier, due, folded_by, outlived
from cluster_manager.store.caution import Caution
from cluster_manager.store.history import BATCH, HistoryRow, homes_left, outdated
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.store import Store

log = structlog.get_logger()

#: Under which the store keeps how far it is folded.
NAME: Final = "history"
#: Seconds between two looks, and between two transactions, so that plans have the store most of the time.
EVERY_S: Final = 600.0
PAUSE_S: Final = 0.05
#: See `Caution`. As much longer packs are kept than they are read (`outlived`).
LEAP_S: Final = LONGEST_S
#: Hosts that are folded in one transaction.
HOSTS: Final = 20


class Ageing:
    """Runs from `start` to `stop`.

    :param clock: seconds since the epoch.
    """

    def __init__(self, store: Store, clock: Callable[[], float], pause_s: float = PAUSE_S) -> None:
        self._store = store
        self._clock = clock
        # Minutes are deleted after a few hours: by a clock that is as far ahead, all of those that are still read.
        self._caution = Caution(store, "nothing of the history", LEAP_S)
        self._pause_s = pause_s
        #: By length of step: up to where it has been folded; None: not recalled yet.
        self._folded: dict[int, int] | None = None
        self._task = Periodic("ageing of the history", self.age, EVERY_S, "the history was not made coarser")
        self.start, self.stop = self._task.start, self._task.stop

    async def folded(self) -> Mapping[int, int]:
        """By length of step: up to where it has been folded."""
        if self._folded is None:
            body = await self._store.knowledge(NAME)
            try:
                self._folded = {int(step_s): int(until) for step_s, until in json.loads(body or "{}").items()}
            except (ValueError, AttributeError, TypeError) as error:
                log.warning("how far the history was folded is unknown: it is folded again", why=str(error))
                self._folded = {}
        return self._folded

    async def age(self) -> None:
        """Fold what is due, then delete what is read no more, if the clock is believed."""
        known, now = await self.folded(), self._clock()
        done = folded_by(known, now)
        if done != known:
            await self._keep(done)
        for before, tier in itertools.pairwise(TIERS):
            oldest = await self._store.oldest_history(before.step_s)
            for begin, end in due(tier, before, done, oldest, now):
                await self._fold(before, tier, begin, end)
                done[tier.step_s] = end
                await self._keep(done)
        if not await self._caution.allows(now):
            return
        for tier, coarser in zip(TIERS, (*TIERS[1:], None), strict=True):
            statement = outdated(tier.step_s, outlived(tier, coarser, done, now), BATCH)
            gone = 0
            while count := await self._store.prune(statement):
                gone += count
                await asyncio.sleep(self._pause_s)
            if gone:
                log.info("old history was pruned", step_s=tier.step_s, packs=gone)
        await self._store.prune(homes_left(now - TIERS[-1].kept_s - 2 * DAY_S))

    async def _keep(self, done: dict[int, int]) -> None:
        await self._store.save_knowledge(NAME, json.dumps(done))
        self._folded = done

    async def _fold(self, before: Tier, tier: Tier, begin: int, end: int) -> None:
        """One span of all hosts. Done again it comes to the same, also where some of the steps are gone by then."""
        # A pack that begins earlier may reach into the span.
        since = begin - before.longest_s
        known = await self._store.hosts_with_history(before.step_s, since, end)
        for first in range(0, len(known), HOSTS):
            hosts = known[first : first + HOSTS]
            rows = await self._store.history(hosts, before.step_s, since, end)
            there = await self._store.history(hosts, tier.step_s, begin, end)
            packs = await asyncio.to_thread(_folded, rows, there, tier, begin, end)
            await self._store.replace_history(hosts, tier.step_s, begin, end, packs)
            await asyncio.sleep(self._pause_s)


def _folded(rows: list[HistoryRow], there: list[HistoryRow], tier: Tier, begin: int, end: int) -> list[HistoryRow]:
    """The packs of a span, one for each host that has figures in it, with what is there already and knows more."""
    before = _by_host(there)
    found = []
    for host, packs in _by_host(rows).items():
        older = before.get(host, [])
        names = (HOST, *sorted({name for pack in (*packs, *older) for name in pack.names} - {HOST}))
        steps = (end - begin) // tier.step_s
        whole, had = (folded(some, names, begin, tier.step_s, steps) for some in (packs, older))
        whole = fuller(whole, had)
        if whole.known:
            found.append(HistoryRow(host, tier.step_s, begin, encoded(whole)))
    return found


def _by_host(rows: list[HistoryRow]) -> dict[str, list[Pack]]:
    """Without those that cannot be read."""
    by_host: dict[str, list[Pack]] = {}
    for row in rows:
        try:
            pack = decoded(row.at, row.step_s, row.body)
        except ValueError as error:
            log.warning("a pack is left out", host=row.host, why=str(error))
            continue
        by_host.setdefault(row.host, []).append(pack)
    return by_host
