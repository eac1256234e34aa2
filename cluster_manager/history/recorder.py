"""Recorder of the history: samples hosts' latest reports, and writes the steps that are over in batches.

A report costs nothing more: it is looked at a few times a minute, and not taken apart where it is the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from cluster_manager.history.packs import Pack, encoded, joined
from cluster_manager.history.sampling import Sample, Step, Used, sample_of, used_by
from cluster_manager.history.tiers import DAY_S, LONGEST_S, TIERS
from cluster_manager.inventory.hosts import LOOKS, Hosts
from cluster_manager.store.history import BATCH, HistoryRow
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.store import Store
from ebbtide.messages.history import SAMPLED_EVERY_S, HostUsage
from ebbtide.messages.hosts import HostReport

#: The finest step, seconds, and how often hosts are looked at within it.
STEP_S: Final = TIERS[0].step_s
SAMPLE_S: Final = 15.0
#: Between two writes, seconds: what a manager that is killed loses of the history.
WRITTEN_S: Final = 300
#: Between two transactions, seconds, so that plans have the store most of the time.
PAUSE_S: Final = 0.05
#: What an agent said of its VMs' use counts for so long, seconds.
USED_FOR_S: Final = 2.5 * SAMPLED_EVERY_S
#: Steps of a host that are held where the store does not take them.
MOST_STEPS: Final = LONGEST_S // STEP_S


@dataclass(slots=True)
class _Host:
    """What is held of one host: its latest row, what that was made of, and the step under way.

    ``report`` is the one whose VMs the record was asked for: a later one counts from the next look on.
    """

    report: HostReport | None = None
    reported: frozenset[str] = frozenset()
    used: Mapping[str, Used] | None = None
    names: tuple[str, ...] = ()
    sample: Sample | None = None
    step: Step | None = None


class Recorder:
    """Runs from `start` to `stop`.

    :param clock: seconds since the epoch.
    """

    def __init__(self, hosts: Hosts, store: Store, clock: Callable[[], float], pause_s: float = PAUSE_S) -> None:
        self._registry = hosts
        self._store = store
        self._clock = clock
        self._pause_s = pause_s
        self._hosts: dict[str, _Host] = {}
        self._used: dict[str, tuple[float, dict[str, Used]]] = {}
        #: Steps that are over and not in the store, by host.
        self._over: dict[str, list[Pack]] = {}
        #: Where VMs are by the manager's record, and what of that is not in the store.
        self._homes: dict[str, str] = {}
        self._new_homes: set[tuple[str, str]] = set()
        #: VMs of which the record is to be asked, and up to which of the changes they are in it.
        self._unasked: set[str] = set()
        self._asked_at = 0
        self._written_at = clock()
        #: For as long as steps go over into the store, or what is held and what is stored are read: nothing twice.
        self.lock = asyncio.Lock()
        #: The write under way, or the last one: it goes on where the turn that waits for it is broken off.
        self._storing: asyncio.Task[None] | None = None
        last = partial(self.write, under_way=True)
        why = "the history was not kept"
        # A sample stands for that time.
        self._task = Periodic("recorder of the history", self.turn, SAMPLE_S, why, at_end=last, on_the_beat=True)
        self.start, self.stop = self._task.start, self._task.stop

    async def turn(self) -> None:
        """Add a sample of every host, and write what is over if it is time for that. Raises StoreError."""
        await self.look()
        # Also where the clock was set back.
        if not 0 <= self._clock() - self._written_at < WRITTEN_S:
            await self.write()

    # --- samples ---------------------------------------------------------------------------------------------------

    def take(self, host: str, usage: HostUsage) -> None:
        """What an agent says of its VMs' use, in the place of what it said before."""
        self._used[host] = self._clock(), used_by(usage)

    async def look(self) -> None:
        """Add a sample of every host that reports. Raises StoreError: whose VMs they are is unknown."""
        now = self._clock()
        await self._find_homes()
        for number, (host_id, known) in enumerate(list(self._hosts.items())):
            if number % LOOKS == LOOKS - 1:
                await asyncio.sleep(0)
            if known.report is not None and not self._registry.is_silent(host_id):
                self._look_at(host_id, known, known.report, now)

    async def _find_homes(self) -> None:
        """Ask the record for the VMs that hosts report anew, or no longer, and for those whose rows have changed: a
        host tells of its own only.
        """
        changes = self._registry.changes
        self._unasked |= changes.since("VM", self._asked_at)
        self._asked_at = changes.latest
        for host_id, host in self._registry.items():
            known = self._hosts.setdefault(host_id, _Host())
            if self._registry.is_silent(host_id) or known.report is host.report:
                continue
            reported = frozenset(vm.name for vm in host.report.vms)
            self._unasked |= reported ^ known.reported
            known.report, known.reported, known.sample = host.report, reported, None
        if not self._unasked:
            return
        asked = frozenset(self._unasked)
        found = await self._store.recorded_homes(asked)
        self._unasked -= asked
        for name in asked:
            home = found.get(name)
            if home is None:
                self._homes.pop(name, None)
            elif self._homes.get(name) != home:
                # Of one that moves on before that is stored, each.
                self._homes[name] = home
                self._new_homes.add((name, home))
        for known in self._hosts.values():
            if not known.reported.isdisjoint(asked):
                known.sample = None

    def _look_at(self, host_id: str, known: _Host, report: HostReport, now: float) -> None:
        said_at, used = self._used.get(host_id, (0.0, None))
        used = used if now - said_at < USED_FOR_S else None
        if known.sample is None or known.used is not used:
            own = {name for name in known.reported if self._homes.get(name) == host_id}
            known.names, known.sample = sample_of(report, used or {}, own)
            known.used = used
        start = int(now // STEP_S) * STEP_S
        if known.step is None or (known.step.start, known.step.names) != (start, known.names):
            self._end_step(host_id, known)
            known.step = Step(start, known.names)
        known.step.add(known.sample, SAMPLE_S)

    def _end_step(self, host_id: str, known: _Host) -> None:
        if known.step is not None:
            over = self._over.setdefault(host_id, [])
            over.append(_pack_of(known.step))
            del over[:-MOST_STEPS]
            known.step = None

    # --- what they come to -----------------------------------------------------------------------------------------

    def held(self, host: str) -> list[Pack]:
        """What of a host is not in the store yet, the step under way included."""
        known = self._hosts.get(host)
        under_way = [_pack_of(known.step)] if known is not None and known.step is not None else []
        return joined([*self._over.get(host, ()), *under_way])

    def home_of(self, vm: str) -> str | None:
        """Where a VM was at the last look."""
        return self._homes.get(vm)

    async def write(self, under_way: bool = False) -> None:
        """Store the steps that are over, some at a time. Raises StoreError: the rest stays.

        :param under_way: also those that are not over.
        """
        if self._storing is not None:
            # What it stores is not to be stored again: it would weigh double in coarser steps.
            await asyncio.wait({self._storing})
        now = self._clock()
        for gone in self._hosts.keys() - self._registry.ids():
            left = self._hosts.pop(gone)
            self._end_step(gone, left)
            self._used.pop(gone, None)
            for name in left.reported:
                if self._homes.get(name) == gone:
                    del self._homes[name]
        if now // DAY_S != self._written_at // DAY_S:
            # They are kept from when they were known last.
            self._new_homes.update(self._homes.items())
        self._written_at = now
        for host_id, known in self._hosts.items():
            if known.step is not None and (under_way or known.step.start + STEP_S <= now):
                self._end_step(host_id, known)
        hosts = list(self._over)
        for first in range(0, len(hosts), BATCH):
            await self._write_steps(hosts[first : first + BATCH])
            await asyncio.sleep(self._pause_s)
        homes = list(self._new_homes)
        for first in range(0, len(homes), BATCH):
            batch = homes[first : first + BATCH]
            await self._store.save_homes(batch)
            self._new_homes.difference_update(batch)
            await asyncio.sleep(self._pause_s)

    async def _write_steps(self, hosts: Collection[str]) -> None:
        taken = {host: list(self._over[host]) for host in hosts}
        rows = await asyncio.to_thread(_rows_of, taken)
        self._storing = asyncio.create_task(self._store_steps(taken, rows), name="write of the history")
        await asyncio.shield(self._storing)

    async def _store_steps(self, taken: Mapping[str, list[Pack]], rows: list[HistoryRow]) -> None:
        async with self.lock:
            await self._store.add_history(rows)
            for host, packs in taken.items():
                left = [pack for pack in self._over[host] if not any(pack is one for one in packs)]
                if left:
                    self._over[host] = left
                else:
                    del self._over[host]


def _pack_of(step: Step) -> Pack:
    return Pack(step.start, STEP_S, step.names, step.rows()[None])


def _rows_of(packs: Mapping[str, list[Pack]]) -> list[HistoryRow]:
    return [
        HistoryRow(host, pack.step_s, pack.start, encoded(pack))
        for host, steps in packs.items()
        for pack in joined(steps)
    ]
