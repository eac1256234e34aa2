"""The manager as a whole: store, hosts, plans, core changes and tasks, put together for each term in which it leads."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Final, cast

import aiohttp
import numpy as np
import structlog

from cluster_manager.acquiring import AcquirerService
from cluster_manager.agents import Agents
from cluster_manager.core_changes import CoreChanges
from cluster_manager.dry_runs import DryRuns
from cluster_manager.event_feed import EventFeed
from cluster_manager.forgetting import Forgetting
from cluster_manager.harvest_machines import HarvestMachines
from cluster_manager.hosts import Hosts
from cluster_manager.housekeeping import Housekeeping
from cluster_manager.knowledge import Knowledge
from cluster_manager.leadership import Leadership
from cluster_manager.lifecycle import sold_as
from cluster_manager.lifecycle_requests import Lifecycle
from cluster_manager.lists import Lists
from cluster_manager.locks import lock_of
from cluster_manager.operations import Operations
from cluster_manager.performer import Performer
from cluster_manager.plans import VMPhase
from cluster_manager.questions import Questions
from cluster_manager.rows import StoredVM
from cluster_manager.settings import Settings
from cluster_manager.store import Store
from cluster_manager.task_machines import TaskMachines
from cluster_manager.tasks import TaskService
from cluster_manager.versions import vm_version
from deflation.errors import InvalidField
from deflation.messages import HostReport, ManagedState, ManagedVM, ReportReply, Vector, VMState
from deflation.resources import ZERO
from rest.settings import is_protected

log = structlog.get_logger()

#: Why a VM is shown in another phase than its row's.
_SAID: Final = {
    VMPhase.STOPPED: "{host} says that it is off; {sentence}",
    VMPhase.FAILED: "{host} reports no VM named {name} any more",
    VMPhase.RUNNING: "{host} says that it runs; {sentence}",
}


class Manager:
    """One manager on one store.

    :param clock: seconds since the epoch.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        times = settings.leadership
        self.leadership = Leadership(lock_of(settings.database, times.limit_s, times.release_s), self, times)
        #: How often a manager has begun to lead on this store; every command carries it.
        self.epoch = 0
        self._session: aiohttp.ClientSession | None = None
        #: Whether the parts have been in a term.
        self._used = False
        #: Set by :meth:`begin_term`.
        self.questions: Questions
        self.dry_runs: DryRuns
        self._put_together()

    def _put_together(self) -> None:
        """The parts of one term; nothing of an earlier one stays, since others may have led meanwhile."""
        settings, clock = self.settings, self._clock
        self.store = Store(settings.database, clock, self.leadership.fail)
        self.hosts = Hosts(self.store, settings.silent_after_s, clock)
        self.core_changes = CoreChanges(self.store, self.hosts, clock, settings.engine.prediction)
        self._knowledge = Knowledge(self.store, self.core_changes)
        self.operations = Operations(self.store, self.hosts, settings.policy, clock)
        self.forgetting = Forgetting(self.operations, self.store, self.hosts)
        self.lists = Lists(self.store, self._managed, self._shown_phase, self.operations.view)
        self.feed = EventFeed(self.store)
        self.lifecycle = Lifecycle(self.operations, self.store, self.hosts, settings.policy, settings.gone_s)
        self.tasks = TaskService(
            self.store,
            TaskMachines(self.store, self.hosts, self.core_changes, settings.engine.matching),
            settings.make_engine(settings.engine),
            settings.engine,
            self.leadership.check,
            clock,
        )
        self.acquirer = AcquirerService(
            settings.engine.acquirer,
            self.tasks,
            TaskMachines(self.store, self.hosts, self.core_changes),
            self.store,
            self.leadership.check,
            clock,
        )
        self._housekeeping = Housekeeping(self.store, settings.retention, clock)

    async def start(self) -> None:
        """Lead, or stand by where another manager leads.

        :raises StoreError: the store cannot be used.
        """
        await self.leadership.start()

    async def stop(self) -> None:
        """End the term, and give the leadership up."""
        await self.leadership.stop()

    async def begin_term(self) -> int:
        """Open the store, raise the epoch, recall the hosts, resume the plans. Returns the epoch.

        :raises StoreError: the store cannot be used.
        """
        if self._used:
            self._put_together()
        self._used = True
        self.epoch = await self.store.open(self.settings.url)
        with _loading():
            await self.hosts.load()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.settings.agent_tls or True))
        await self._knowledge.recall()
        agents = Agents(
            self._session,
            self._url_of,
            self.settings.agent_token,
            self.settings.agents,
            self.leadership.check,
            self.epoch,
        )
        self.questions = Questions(agents, self.hosts, self.store, self.epoch)
        generator = np.random.default_rng(self.settings.seed)
        limits = self.settings.agents
        performer = Performer(agents, self.hosts, limits, generator, self.epoch)
        chooser = Performer(agents, self.hosts, limits, np.random.default_rng(self.settings.seed), self.epoch)
        self.dry_runs = DryRuns(self.hosts, self.operations, chooser, self.settings.policy)
        if settings_ := self.settings.engine.acquirer:
            await self.acquirer.recall(HarvestMachines(settings_, self.operations, self.store, self.epoch))
        await self.tasks.start()
        # Last: what is under way goes on from this moment.
        await self.operations.start(performer)
        self.acquirer.start()
        self.feed.start()
        self._housekeeping.start()
        self._knowledge.start()
        log.info("term begun", epoch=self.epoch, hosts=len(self.hosts))
        return self.epoch

    async def end_term(self) -> None:
        """Stop the plans where they are, close the store; the next term, of whatever manager, goes on from there."""
        session, self._session = self._session, None
        gc.unfreeze()
        # In the opposite order; whatever one of them fails with, the others are stopped.
        async with contextlib.AsyncExitStack() as parts:
            parts.push_async_callback(self.store.close)
            if session is not None:
                parts.push_async_callback(session.close)
            inner_first = (self._knowledge, self._housekeeping, self.operations, self.tasks, self.acquirer, self.feed)
            for part in inner_first:
                parts.push_async_callback(part.stop)
        log.info("term ended", epoch=self.epoch)

    async def repeat_report(self, host: str, raw: bytes) -> ReportReply | None:
        """The answer to a body that is the host's last report once more, unread; None for any other."""
        if not self.hosts.repeat(host, raw):
            return None
        await self.operations.settle_debts(host)
        return ReportReply(epoch=self.epoch, acknowledged=self.core_changes.acknowledged(host))

    async def take_report(self, report: HostReport, raw: bytes) -> ReportReply:
        """What a host agent tells of itself, and the body in which it came."""
        if self.hosts.get(report.id) is None:
            log.info("host registered", host=report.id, url=report.url)
        await self.hosts.take(report)
        acknowledged = await self.core_changes.take(report)
        self.hosts.remember(report, raw)
        if report.core_changes:
            self.tasks.wake()
        await self.operations.settle_debts(report.id)
        return ReportReply(epoch=self.epoch, acknowledged=acknowledged)

    async def vms(self, name: str | None = None) -> list[ManagedVM]:
        """The VMs whose names are taken, or the one that has this name."""
        return [self._managed(row) for row in await self.store.vms(name)]

    def _url_of(self, host_id: str) -> str | None:
        """Where a host's agent listens; None also where our token would be sent in the clear."""
        host = self.hosts.get(host_id)
        if host is None or not (self.settings.insecure or is_protected(host.report.url)):
            return None
        return host.report.url

    def _shown_phase(self, phase: VMPhase, host: str | None, name: str) -> VMPhase:
        """The phase of a VM's row as clients see it: of one that runs or is off its host's last report says more."""
        if host is None or phase not in (VMPhase.RUNNING, VMPhase.STOPPED):
            return phase
        if phase is VMPhase.RUNNING and not self.hosts.is_ready(host):
            return phase
        reported = self.hosts.vm(host, name)
        if reported is None:
            return VMPhase.FAILED if phase is VMPhase.RUNNING else phase
        return VMPhase.STOPPED if reported.state is VMState.STOPPED else VMPhase.RUNNING

    def _managed(self, row: StoredVM) -> ManagedVM:
        """The store knows what should be, the host's last report what is."""
        reported = self.hosts.vm(row.host, row.name)
        phase, sentence = self._shown_phase(row.phase, row.host, row.name), row.sentence
        if phase is not row.phase:
            sentence = _SAID[phase].format(host=row.host, name=row.name, sentence=sentence)
        elif phase is VMPhase.RUNNING and row.host is not None and not self.hosts.is_ready(row.host):
            sentence = f"{row.host} is silent; as it last reported: {sentence}"
        sold = sold_as(row.spec, reported)
        try:
            allocation = sold.allocation(reported.current.vector() if reported is not None else ZERO)
        except InvalidField as error:
            # One host must not spoil the list of all VMs.
            allocation = sold.allocation(ZERO)
            sentence = f"{row.host} says of it what cannot be ({error}); {sentence}"
        return ManagedVM(
            name=row.name,
            host=row.host,
            state=cast(ManagedState, phase.value),
            priority=sold.priority,
            nominal=sold.nominal,
            minimum=reported.minimum if reported is not None else Vector.of(allocation.minimum),
            ceiling=sold.ceiling,
            current=Vector.of(allocation.current),
            generation=max(row.generation, reported.generation if reported is not None else 0),
            guest_connected=reported.guest_connected if reported is not None else False,
            sentence=sentence,
            version=vm_version(row),
            at_next_start=reported.at_next_start if reported is not None else None,
        )


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Python's collector would look through all that is loaded again and again: seconds in which nothing else runs.

    With 10,000 hosts of 20 VMs one look took 2 s, near the limit in which the leader has to prove its lock.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
