"""The manager as a whole: store, hosts, plans, core changes and tasks, put together for each term in which it leads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Final, cast
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import aiohttp
import numpy as np
import structlog

from cluster_manager.alerts.sender import Alerts
from cluster_manager.errors import RequestError
from cluster_manager.execution.agent_proxy import AgentProxy
from cluster_manager.execution.dry_runs import DryRuns
from cluster_manager.execution.host_removal import HostRemoval
from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.execution.lifecycle_requests import Lifecycle
from cluster_manager.execution.operations import Operations
from cluster_manager.execution.rebalancer import Rebalancing
from cluster_manager.history.ageing import Ageing
from cluster_manager.history.reading import Histories
from cluster_manager.history.recorder import Recorder
from cluster_manager.inventory.agents import Agents, connector_to_hosts, telling_what_was_sent
from cluster_manager.inventory.certificate_end import CertificateEnd
from cluster_manager.inventory.enrolment import Enrolments
from cluster_manager.inventory.event_feed import EventFeed
from cluster_manager.inventory.followed import Followed
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.inventory.housekeeping import Housekeeping
from cluster_manager.inventory.intake import REPEATED_PAUSE_S
from cluster_manager.inventory.lists import Lists
from cluster_manager.inventory.silence import Silence
from cluster_manager.inventory.versions import vm_version
from cluster_manager.leadership.leadership import Leadership
from cluster_manager.leadership.locks import lock_of
from cluster_manager.plans.lifecycle import sold_as
from cluster_manager.plans.plans import OFF, VMPhase
from cluster_manager.settings import Settings
from cluster_manager.store.backup import remove_left
from cluster_manager.store.database import PostgreSQL
from cluster_manager.store.periodic import Periodic
from cluster_manager.store.postgresql import turn_to_next
from cluster_manager.store.rows import StoredChange, StoredVM
from cluster_manager.store.store import Store
from cluster_manager.tasks.acquiring import AcquirerService
from cluster_manager.tasks.core_changes import CoreChanges
from cluster_manager.tasks.harvest_machines import HarvestMachines
from cluster_manager.tasks.knowledge import Knowledge
from cluster_manager.tasks.machines import TaskMachines
from cluster_manager.tasks.old_records import OldRecords
from cluster_manager.tasks.tasks import TaskService
from ebbtide.deflation.cascade.instructions import GuestKind
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.resources import ZERO
from ebbtide.messages.common import Vector
from ebbtide.messages.history import HostUsage
from ebbtide.messages.hosts import HostReport, ReportReply
from ebbtide.messages.vms import ClusterVM, ManagedState, Preempted, VMState
from ebbtide.rest.tls import is_loopback

log = structlog.get_logger()

#: Of one host: its reports of the largest size may have a fifth of the loop's time, not all of it.
REPORTED_BYTES_PER_S: Final = 2**21
#: Between two times that it is stored when the hosts were last seen, seconds.
SEEN_S: Final = 60.0
#: Why a VM is shown in another state than its row's.
_SAID: Final = {
    "stopped": "{host} says that it is off; {sentence}",
    "paused": "{host} says that it is paused; {sentence}",
    "failed": "{host} reports no VM named {name} any more",
    "running": "{host} says that it runs; {sentence}",
}


class Manager:
    """One manager on one store.

    :param clock: seconds since the epoch.
    :param freezes_memory: whether what a term loads is kept from Python's collector; for a process of its own.
    """

    def __init__(
        self, settings: Settings, clock: Callable[[], float] = time.time, *, freezes_memory: bool = False
    ) -> None:
        self.settings = settings
        self._freezes_memory = freezes_memory
        self._clock = clock
        times = settings.leadership
        self._lock = lock_of(settings.database, times.limit_s, times.release_s)
        self.leadership = Leadership(self._lock, self, times)
        #: How often a manager has begun to lead on this store; every command carries it.
        self.epoch = 0
        self._session: aiohttp.ClientSession | None = None
        self._followed = Followed(self._end_followed, settings.silent_after_s)
        #: Whether the parts have been in a term.
        self._used = False
        self._looks: Periodic | None = None
        self._silence: Periodic | None = None
        #: Hosts whose first report is being taken.
        self._registering: set[str] = set()
        #: One backup at a time.
        self.backing_up = asyncio.Lock()
        #: Held while a report of a host is read and taken; gone when none is.
        #: Reports that were taken, and those that were the last one once more.
        self.reports: Counter[str] = Counter()
        self._reporting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Set by `begin_term`.
        self.agent_proxy: AgentProxy
        self.dry_runs: DryRuns
        self._put_together()

    def _put_together(self) -> None:
        """The parts of one term; nothing of an earlier one stays, since others may have led meanwhile."""
        settings, clock = self.settings, self._clock
        self.store = Store(settings.database, clock, self.leadership.fail, lambda: self._lock.server)
        self.hosts = Hosts(self.store, settings.silent_after_s, clock, revoked=self.revoked)
        self.store.on_vms = lambda names: self.hosts.changes.note("VM", names)
        self.enrolments = Enrolments(
            self.store,
            settings.hosts_key,
            settings.authority,
            settings.url,
            settings.certificate_days,
            lambda host: self.hosts.get(host) is not None,
            clock,
            settings.revoked,
            settings.certificates,
        )
        self.core_changes = CoreChanges(self.store, self.hosts, clock, settings.engine.prediction)
        self._knowledge = Knowledge(self.store, self.core_changes)
        save, failed = self.hosts.save_seen, "when hosts were last seen was not saved"
        self._seen = Periodic("saves when hosts were last seen", save, SEEN_S, failed, SEEN_S, at_end=save)
        self.operations = Operations(self.store, self.hosts, settings.policy, clock, settings.gone_s)
        self.host_removal = HostRemoval(self.operations, self.store, self.hosts, self.enrolments, self._lost)
        self.lists = Lists(self.store, self.hosts, self._managed, self._shown_state, self.operations.view)
        self.feed = EventFeed(self.store)
        self.lifecycle = Lifecycle(self.operations, self.store, self.hosts, settings.policy, settings.gone_s)
        self.rebalancing = Rebalancing(
            self.hosts, self.operations, self.lifecycle, self.store, settings.rebalancing, clock
        )
        self.tasks = TaskService(
            self.store,
            TaskMachines(self.store, self.hosts, self.core_changes, settings.engine.matching),
            settings.make_engine(settings.engine),
            settings.engine,
            self.leadership.check,
            clock,
        )
        self.tasks.notices, self.operations.on_notice = self.operations.notices, self.tasks.wake
        self.acquirer = AcquirerService(
            settings.engine.acquirer,
            self.tasks,
            TaskMachines(self.store, self.hosts, self.core_changes),
            self.store,
            self.leadership.check,
            clock,
        )
        self.alerts = Alerts(settings.webhooks, self.store, self.leadership.check, clock)
        self.recorder = Recorder(self.hosts, self.store, clock)
        self.ageing = Ageing(self.store, clock)
        self.histories = Histories(self.recorder, self.ageing, self.store, self.hosts, clock)
        self._housekeeping = Housekeeping(self.store, settings.retention, clock)
        self._certificate_end = CertificateEnd(self.store, settings.certificates, clock)
        self._old_records = OldRecords(self.store, settings.engine, settings.retention.age_s, clock)

    async def start(self) -> None:
        """Lead, or stand by where another manager leads.

        :raises StoreError: the store cannot be used.
        """
        await self.leadership.start()

    async def stop(self) -> None:
        """End the term, and give the leadership up."""
        await self.leadership.stop()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def sentence(self) -> str:
        """What this manager does, for those who look at its service."""
        if not self.leadership.leads():
            return f"standby: {self.leadership.why}"
        return f"leads with epoch {self.epoch}: {len(self.hosts.ready())} of {len(self.hosts)} hosts ready"

    async def begin_term(self) -> int:
        """Open the store, raise the epoch, recall the hosts, resume the plans. Returns the epoch.

        :raises StoreError: the store cannot be used.
        """
        if self._used:
            self._put_together()
        self._used = True
        # No cookies: what one host sets would go along to others of its domain.
        self._session = aiohttp.ClientSession(
            connector=connector_to_hosts(self.settings.agent_tls or True),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[telling_what_was_sent()],
        )
        if self._followed.elsewhere and (stored := await self.store.stored_epoch()) is not None:
            await self.hosts.load()
            await self._followed.check(self.hosts, partial(self._agents(0).host, retry=False), stored)
        self.epoch = await self.store.open(self.settings.url, self._followed.above, self.epoch)
        self.hosts.epoch = self.epoch
        self._followed.begin()
        if not self.backing_up.locked():
            await asyncio.to_thread(remove_left, self.settings.database)
        with _loading(self._freezes_memory):
            await self.hosts.load()
        await self._knowledge.recall()
        await self.rebalancing.recall()
        await self.enrolments.recall()
        agents = self._agents(self.epoch)
        self.agent_proxy = AgentProxy(agents, self.hosts, self.store, self.epoch)
        generator = np.random.default_rng(self.settings.seed)
        limits = self.settings.agents
        executor = InstructionExecutor(agents, self.hosts, self.store, limits, generator, self.epoch)
        executor.move_away, executor.move_first = self.lifecycle.move_away, self.settings.move_first
        lots = np.random.default_rng(self.settings.seed)
        chooser = InstructionExecutor(agents, self.hosts, self.store, limits, lots, self.epoch)
        chooser.move_first = self.settings.move_first
        executor.move_mib_s = chooser.move_mib_s = self.settings.move_mib_s
        self.dry_runs = DryRuns(self.hosts, self.operations, self.store, chooser, self.settings.policy)
        if settings_ := self.settings.engine.acquirer:
            provider = HarvestMachines(
                settings_, self.operations, self.store, self.epoch, in_use=lambda: self.acquirer.elsewhere
            )
            await self.acquirer.recall(provider)
        await self.tasks.recall()
        # The last that waits: what is under way goes on from this moment. Tasks are to know whom it preempts.
        await self.operations.start(executor)
        self.tasks.start()
        self.acquirer.start()
        self.feed.start()
        self.alerts.start()
        self._housekeeping.start()
        self._old_records.start()
        self._certificate_end.start()
        if self.settings.history:
            self.recorder.start()
            self.ageing.start()
        self.rebalancing.start()
        self._knowledge.start()
        self._seen.start()
        look = partial(self._followed.look, self.hosts, partial(agents.host, retry=False), self.epoch)
        every_s = self.settings.silent_after_s / 2
        self._looks = Periodic(
            "looks whom the hosts follow", look, every_s, "whom the hosts follow is not known", every_s
        )
        self._looks.start()
        # By then those that are there have reported to this term.
        silence, why = Silence(self.hosts), "silent hosts are not told"
        self._silence = Periodic("tells of silent hosts", silence.look, every_s, why, 2 * every_s)
        self._silence.start()
        log.info("term begun", epoch=self.epoch, hosts=len(self.hosts))
        return self.epoch

    def _agents(self, epoch: int) -> Agents:
        assert self._session is not None
        return Agents(
            self._session,
            self._url_of,
            self.settings.hosts_key,
            self.settings.agents,
            self.leadership.check,
            epoch,
            self.revoked,
        )

    def refuse_report(self, host_id: str) -> None:
        """A host has reported while this manager does not lead."""
        self._followed.refused(host_id)

    def _end_followed(self, why: str) -> None:
        if isinstance(self.settings.database, PostgreSQL):
            turn_to_next(self.settings.database)
        self.leadership.fail(why)

    async def end_term(self) -> None:
        """Stop the plans where they are, close the store; the next term, of whatever manager, goes on from there."""
        session, self._session = self._session, None
        if self._freezes_memory:
            gc.unfreeze()
        # In the opposite order; whatever one of them fails with, the others are stopped.
        async with contextlib.AsyncExitStack() as parts:
            parts.push_async_callback(self.store.close)
            if session is not None:
                parts.push_async_callback(session.close)
            saved = (self._old_records, self._seen, self.recorder, self.ageing, self._knowledge, self._housekeeping)
            first = (self.operations, self.tasks, self.acquirer, self.feed, self.rebalancing, self.alerts)
            for part in (*saved, self._certificate_end, *first):
                parts.push_async_callback(part.stop)
            for periodic in (self._looks, self._silence):
                if periodic is not None:
                    parts.push_async_callback(periodic.stop)
        log.info("term ended", epoch=self.epoch)

    @contextlib.asynccontextmanager
    async def reporting(self, host: str, size: int) -> AsyncIterator[None]:
        """What a report of so many bytes holds while it is read and taken: a host's reports have their turn one after
        the other, and then all others have theirs.
        """
        lock = self._reporting.get(host)
        if lock is None:
            lock = self._reporting[host] = asyncio.Lock()
        async with lock:
            try:
                yield
            finally:
                # Also where it was refused, which costs as much.
                await asyncio.sleep(size / REPORTED_BYTES_PER_S)

    async def repeat_report(self, host: str, raw: bytes) -> ReportReply | None:
        """The answer to a body that is the host's last report once more, unread; None for any other.

        Raises `RequestError`: the host is revoked.
        """
        intake = self.hosts.intake
        if intake.commanded and self.hosts.repeats(host, raw):
            async with intake.turn(self.hosts.ages(host), REPEATED_PAUSE_S):
                pass
        # Again: meanwhile the host may have answered a question, or be forgotten or revoked.
        self.enrolments.refuse_revoked(host)
        if not self.hosts.repeat(host, raw):
            return None
        self.reports["repeated"] += 1
        await self.operations.run_deferred(host)
        return ReportReply(epoch=self.epoch, acknowledged=self.core_changes.acknowledged(host))

    async def take_report(self, report: HostReport, raw: bytes) -> ReportReply:
        """What a host agent tells of itself, and the body in which it came. Raises `RequestError`: it is revoked."""
        # Again: it has waited for its turn.
        self.enrolments.refuse_revoked(report.id)
        if self.hosts.get(report.id) is None:
            self._registering.add(report.id)
            try:
                await self._register(report)
            finally:
                self._registering.discard(report.id)
        else:
            await self.hosts.take(report)
        self.reports["news"] += 1
        acknowledged = await self.core_changes.take(report)
        if all(change.sequence <= acknowledged for change in report.core_changes):
            self.hosts.remember(report, raw)
        if report.core_changes:
            self.tasks.wake()
        await self.operations.run_deferred(report.id)
        return ReportReply(epoch=self.epoch, acknowledged=acknowledged)

    def _lost(self, host: str, changes: list[StoredChange]) -> None:
        """VMs are gone with a host that does not come back."""
        self.core_changes.learn(host, changes)
        self.tasks.wake()

    def take_usage(self, host: str, usage: HostUsage) -> None:
        """What a host agent says of its VMs' use. Raises `RequestError`: 404 it has not reported, 403 it is revoked."""
        self.enrolments.refuse_revoked(host)
        if self.hosts.get(host) is None:
            raise RequestError(404, f"there is no host {host}: it reports first", "id")
        if self.settings.history:
            self.recorder.take(host, usage)

    def revoked(self) -> frozenset[str]:
        """The hosts that are lost, by the tokens file and by request."""
        return self.settings.revoked() | self.enrolments.revoked

    async def _register(self, report: HostReport) -> None:
        """Take the first report of a host. Raises `RequestError`: 403 where there are enough."""
        if len(self.hosts) + len(self._registering) > self.settings.most_hosts:
            sentence = f"{report.id} is not registered: {self.settings.most_hosts} hosts are the most (--most-hosts)"
            raise RequestError(403, sentence, "id")
        await self.hosts.take(report)
        log.info("host registered", host=report.id, url=report.url)

    async def vms(self, name: str | None = None) -> list[ClusterVM]:
        """The VMs whose names are taken, or the one that has this name."""
        return [self._managed(row) for row in await self.store.vms(name)]

    def _url_of(self, host_id: str) -> str | None:
        """Where a host's agent says that it listens; None also where we would not call it."""
        host = self.hosts.get(host_id)
        url = host.report.url if host is not None else ""
        return url if url and not self.no_address(url) else None

    def no_address(self, url: str) -> str:
        """Why no host agent is called at an address; empty where it may be."""
        if self.settings.agent_tls is not None:
            return "" if url.startswith("https://") else "must begin with https://: a certificate says who is there"
        if self.settings.insecure or is_loopback(urlsplit(url).hostname or ""):
            return ""
        return "must be loopback: without --client-ca this manager cannot tell other machines' hosts apart"

    def _shown_state(self, phase: VMPhase, host: str | None, name: str) -> ManagedState:
        """The state of a VM as clients see it: of one that runs or is off its host's last report says more."""
        stored = cast(ManagedState, phase.value)
        if host is None or phase not in (VMPhase.RUNNING, *OFF):
            return stored
        reported = self.hosts.vm(host, name)
        if reported is None:
            return "failed" if phase is VMPhase.RUNNING and self.hosts.is_ready(host) else stored
        if reported.state is VMState.STOPPED:
            return stored if phase in OFF else "stopped"
        return "paused" if reported.state is VMState.PAUSED else "running"

    def _managed(self, row: StoredVM) -> ClusterVM:
        """The store knows what should be, the host's last report what is."""
        reported = self.hosts.vm(row.host, row.name)
        state, sentence = self._shown_state(row.phase, row.host, row.name), row.sentence
        if state != row.phase.value:
            sentence = _SAID[state].format(host=row.host, name=row.name, sentence=sentence)
        by_report = state != row.phase.value or row.phase is VMPhase.RUNNING
        if by_report and row.host is not None and (why := self.hosts.why_not_ready(row.host)):
            sentence = f"{row.host} {why}; as it last reported: {sentence}"
        if row.unread:
            sentence = f"what it is sold as cannot be read in the manager's store ({row.unread}); {sentence}"
        sold = sold_as(row.spec, reported)
        try:
            allocation = sold.allocation(reported.current.vector() if reported is not None else ZERO)
        except InvalidField as error:
            # One host must not spoil the list of all VMs.
            allocation = sold.allocation(ZERO)
            sentence = f"{row.host} says of it what cannot be ({error}); {sentence}"
        return ClusterVM(
            name=row.name,
            host=row.host,
            state=state,
            priority=sold.priority,
            nominal=sold.nominal,
            minimum=reported.minimum if reported is not None else Vector.of(allocation.minimum),
            ceiling=sold.ceiling,
            current=Vector.of(allocation.current),
            generation=max(row.generation, reported.generation if reported is not None else 0),
            guest_connected=reported.guest_connected if reported is not None else False,
            guest_kind=reported.guest_kind if reported is not None else GuestKind.AGENT,
            sentence=sentence,
            version=vm_version(row),
            at_next_start=reported.at_next_start if reported is not None else None,
            on_preemption=row.spec.on_preemption,
            preemption_notice_s=row.spec.preemption_notice_s,
            steady=row.spec.steady,
            preempted=self._preempted(row) if state == "preempted" else None,
            saved_mib=reported.saved_mib if reported is not None else None,
            labels=dict(row.labels),
        )

    def _preempted(self, row: StoredVM) -> Preempted:
        """Its place in the queue, by its host's last report."""
        known, host = self.hosts.get(row.host or ""), row.host or ""
        reserved = self.hosts.availability.reserved(host)
        return self.operations.waiting.place(row, known.report if known is not None else None, reserved)


#: Python's collector looks through everything after 7,000 times so many new objects instead of 70,000.
SELDOM: Final = 1000


@contextlib.contextmanager
def _loading(freeze: bool) -> Iterator[None]:
    """Python's collector would look through all that is loaded again and again: seconds in which nothing else runs.

    With 10,000 hosts of 20 VMs one look took 2 s, near the limit in which the leader has to prove its lock.
    """
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
            # Reports are no cycles, and come in thousands: a look through all of them is half a second for 2,000 hosts.
            gc.set_threshold(700, 10, SELDOM)
        gc.enable()
