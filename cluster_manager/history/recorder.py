"""Recorder of the history: samples hosts' latest reports, and holds the steps that are not in the store yet.

A report costs nothing more: it is looked at a few times a minute, and not at all where it is the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from cluster_manager.errors import StoreError
from cluster_manager.history.packs import Pack, joined
from cluster_manager.history.sampling import Sample, Step, Used, sample_of, used_by
from cluster_manager.inventory.hosts import LOOKS, Hosts
from ebbtide.messages.history import SAMPLED_EVERY_S, HostUsage
from ebbtide.messages.hosts import HostReport

log = structlog.get_logger()

#: The finest step, seconds, and how often hosts are looked at within it.
STEP_S: Final = 60
SAMPLE_S: Final = 15.0
#: What an agent said of its VMs' use counts for so long, seconds.
USED_FOR_S: Final = 2.5 * SAMPLED_EVERY_S


@dataclass(slots=True)
class _Host:
    """What is held of one host: its latest row, what that was made of, and the step under way."""

    report: HostReport | None = None
    used: dict[str, Used] | None = None
    names: tuple[str, ...] = ()
    sample: Sample | None = None
    step: Step | None = None


class Recorder:
    """Runs from `start` to `stop`.

    :param clock: seconds since the epoch.
    """

    def __init__(self, hosts: Hosts, clock: Callable[[], float]) -> None:
        self._registry = hosts
        self._clock = clock
        self._hosts: dict[str, _Host] = {}
        self._used: dict[str, tuple[float, dict[str, Used]]] = {}
        self._over: dict[str, list[Pack]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="recorder of the history")

    async def stop(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except StoreError as error:
                log.warning("the history was not kept", why=str(error))
            except Exception:
                log.exception("the history was not kept, by a defect of the manager")
            await asyncio.sleep(SAMPLE_S)

    def take(self, host: str, usage: HostUsage) -> None:
        """What an agent says of its VMs' use, in the place of what it said before."""
        self._used[host] = self._clock(), used_by(usage)

    async def look(self) -> None:
        """Add a sample of every host that reports."""
        now = self._clock()
        for number, (host_id, host) in enumerate(self._registry.items()):
            if number % LOOKS == LOOKS - 1:
                await asyncio.sleep(0)
            if not self._registry.is_silent(host_id):
                self._look_at(host_id, host.report, now)

    def _look_at(self, host_id: str, report: HostReport, now: float) -> None:
        known = self._hosts.setdefault(host_id, _Host())
        said_at, used = self._used.get(host_id, (0.0, None))
        used = used if now - said_at < USED_FOR_S else None
        if known.sample is None or known.report is not report or known.used is not used:
            known.names, known.sample = sample_of(report, used or {})
            known.report, known.used = report, used
        start = int(now // STEP_S) * STEP_S
        if known.step is None or (known.step.start, known.step.names) != (start, known.names):
            self._end(host_id, known)
            known.step = Step(start, known.names)
        known.step.add(known.sample, SAMPLE_S)

    def _end(self, host_id: str, known: _Host) -> None:
        """The step under way is over."""
        if known.step is not None:
            self._over.setdefault(host_id, []).append(_pack_of(known.step))

    def held(self, hosts: Collection[str]) -> dict[str, list[Pack]]:
        """What is not in the store yet, by host, the step under way included."""
        found = {}
        for host_id in hosts:
            known = self._hosts.get(host_id)
            under_way = [_pack_of(known.step)] if known is not None and known.step is not None else []
            found[host_id] = joined([*self._over.get(host_id, ()), *under_way])
        return found


def _pack_of(step: Step) -> Pack:
    return Pack(step.start, STEP_S, step.names, step.rows()[None])


def starts(packs: Iterable[Pack]) -> list[int]:
    """Where packs begin."""
    return [pack.start for pack in packs]
