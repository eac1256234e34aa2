"""The hosts by their agents' reports: who is ready, who is silent, and what placement may count on.

A silent host gets no new VM, and is never assumed empty: its last report stands until the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import count, islice
from typing import Final, Literal

import structlog
from pydantic import ValidationError

from cluster_manager.inventory.availability import Availability
from cluster_manager.inventory.changes import Changes
from cluster_manager.inventory.host_locks import HostLocks
from cluster_manager.inventory.intake import Intake
from cluster_manager.inventory.later_words import read_of_agent
from cluster_manager.inventory.report_news import News, has_room_to_share, news_in, same_essence, tell
from cluster_manager.inventory.versions import host_version
from cluster_manager.plans.report_queries import closed
from cluster_manager.store.rows import StoredHost, why_unread
from cluster_manager.store.store import Line, Store
from ebbtide.deflation.modes import HostMode, takes_new_vms
from ebbtide.deflation.resources import TOLERANCE
from ebbtide.messages.common import Vector
from ebbtide.messages.hosts import HostReport, HostStatus
from ebbtide.messages.labels import LabelsRequest, Selector, matches
from ebbtide.messages.vms import VMStatus
from ebbtide.rest.rates import Buckets, Rate

log = structlog.get_logger()

#: Events that the reports of one host may bring.
_EVENTS: Final = Rate(per_s=0.2, burst=50.0)
#: Those beyond them that are told in the log.
_LOGGED: Final = Rate(per_s=0.1, burst=10.0)
#: So many hosts are looked at before the loop's other work gets its turn.
LOOKS: Final = 50
#: So many times at which hosts were seen are stored in one transaction.
SEEN: Final = 500
#: So many reports are stored in one transaction: a command's may have to wait for it.
SAVED: Final = 16
HostState = Literal["ready", "overcommitted", "unavailable", "silent"]


class Host:
    """One host. ``seen_at`` is for people (seconds since the epoch), ``seen`` for ages (monotonic; None: not yet).

    :param report: or its row, which is read when it is asked for: thousands are recalled at a start.
    """

    __slots__ = ("_report", "arrival", "digest", "labels", "owes_reinflation", "seen", "seen_at")

    def __init__(
        self,
        report: HostReport | StoredHost,
        seen_at: float,
        seen: float | None,
        owes_reinflation: bool,
        arrival: int = 0,
        labels: Mapping[str, str] = {},
    ) -> None:
        self.labels = labels
        self._report = report
        self.seen_at = seen_at
        self.seen = seen
        self.owes_reinflation = owes_reinflation
        #: Which report it was, in the order in which they came.
        self.arrival = arrival
        #: Of the body in which the report came, once all of it is taken.
        self.digest: bytes | None = None

    def came_as(self, raw: bytes) -> bool:
        """Whether its report came in this body, or was stored as it by an earlier run, and can be read."""
        # Nothing is known of one that cannot be read, its address neither.
        return self.report.url != "" and self.digest == _digest(raw)

    @property
    def report(self) -> HostReport:
        """One that cannot be read is that of a host of which nothing is known but its name, until the next."""
        if isinstance(stored := self._report, StoredHost):
            self.digest = _digest(stored.report_json.encode())
            try:
                self._report = read_of_agent(HostReport, stored.report_json, stored.id)
            except ValidationError as error:
                why = why_unread(error)
                log.warning("a stored report cannot be read; the host's next one replaces it", host=stored.id, why=why)
                self._report = _unread(stored.id)
            return self._report
        return stored


class Hosts:
    """Every host that has ever reported to this store.

    :param clock: seconds since the epoch.
    :param monotonic: seconds that never go back.
    :param revoked: the hosts that are lost: they count as silent at once.
    """

    def __init__(
        self,
        store: Store,
        silent_after_s: float,
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        revoked: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._store = store
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._monotonic = monotonic
        self._revoked = revoked
        #: Of this manager; None: not known yet.
        self.epoch: int | None = None
        self.locks = HostLocks()
        self.intake = Intake()
        self._hosts: dict[str, Host] = {}
        #: Hosts of earlier runs that have not reported to this one.
        self._awaited: set[str] = set()
        self._news = asyncio.Event()
        self._loaded_at = self._seen_saved = monotonic()
        self._arrivals = count(1)
        #: Reports to be stored: the first writer writes all that have come by then, in one transaction.
        self._unsaved: dict[str, HostReport] = {}
        self._saving = asyncio.Lock()
        #: Hosts that are being forgotten, while `_saving` is held.
        self._leaving: set[str] = set()
        self._availability = Availability()
        self._told = Buckets()
        #: The report of each host whose news are being told: another one at the same time does not tell them again.
        self._telling: dict[str, HostReport] = {}
        #: What was told last of hosts whose later news could not be written.
        self._untold: dict[str, HostReport | None] = {}
        self.changes = Changes(clock())
        #: When each host was last seen, oldest first.
        self._ages: OrderedDict[str, float] = OrderedDict()

    async def load(self) -> None:
        """Recall the hosts of earlier runs; they count as silent until they report."""
        self._hosts = {
            stored.id: Host(stored, stored.seen_at, None, stored.owes_reinflation, labels=stored.labels)
            for stored in await self._store.hosts()
        }
        self._awaited = set(self._hosts)
        self._availability = Availability()
        self._ages.clear()
        self._loaded_at = self._monotonic()
        # Earlier numbers are of another term.
        self.changes = Changes(self._clock())

    # --- reports -----------------------------------------------------------------------------------------------------

    async def take(self, report: HostReport) -> None:
        """Take an agent's report, or its answer to a question; stored when it changes more than free memory."""
        while report.id in self._leaving:
            # Once it is forgotten, this is the first report of a new host.
            async with self._saving:
                pass
        arrival = next(self._arrivals)
        host = self._hosts.get(report.id)
        if host is not None and _overtaken(report, host.report):
            return
        known = self._untold.get(report.id, host.report if host is not None else None)
        told = self._telling.get(report.id, known)
        if told is not None and _overtaken(report, told):
            told = report  # its news are old
        else:
            self._telling[report.id] = report
        try:
            await self._take(report, arrival, told)
        finally:
            if self._telling.get(report.id) is report:
                del self._telling[report.id]

    async def _take(self, report: HostReport, arrival: int, told: HostReport | None) -> None:
        """:param told: what is no news any more."""
        host = self._hosts.get(report.id)
        known = host.report if host is not None else None
        changed = known is None or not same_essence(known, report)
        news = await self._news_in(report, told)
        # A host may drop names that it has made up: they are no news to those who list VMs.
        dropped = _names(known) - _names(report) if changed else set()
        recorded = await self._store.recorded(report.id) if dropped else None
        if changed and not news:
            await self._save(report)
        # Meanwhile a later report may have been taken: that one stands, in the store too.
        host = self._hosts.get(report.id)
        if host is not None and (
            _overtaken(report, host.report) or (host.arrival > arrival and not _overtaken(host.report, report))
        ):
            await self._tell(news, report.id, told)
            if changed and not news:
                await self._save(host.report)
            return
        owes = (host is not None and host.owes_reinflation) or has_room_to_share(report, known)
        # What says nothing new after a silence counts again; and what it was compared with may have been replaced.
        latest, labels = (host.report, host.labels) if host is not None else (None, {})
        replaced = latest is not known
        changed = changed or self.is_silent(report.id) or replaced
        self._hosts[report.id] = Host(report, self._clock(), None, owes, arrival, labels)
        self.changes.note("host", (report.id,))
        if changed:
            self.changes.note("host's VMs", (report.id,))
            dropped = _names(latest) - _names(report)
            self.changes.note("VM", dropped if recorded is None else dropped & recorded)
        self._see(report.id)
        # Only now: who is told of it and looks, or looks and is told what comes after, finds it.
        await self._tell(news, report.id, told)
        if replaced and not news:
            # What came in between may have been stored after this one; or the host was forgotten, and is back.
            await self._save(self._hosts[report.id].report)

    async def _news_in(self, report: HostReport, told: HostReport | None) -> list[News]:
        """What to tell of a report: of VMs, only where the host's are recorded."""
        news: list[News] = []
        before = told.mode if told is not None else HostMode.ACTIVE
        if report.mode != before:
            because = f" ({report.mode_reason})" if report.mode_reason else ""
            news.append(News("mode", None, f"{report.id} is {report.mode}{because}, was {before}"))
        news += news_in(report, told)
        asking = _asking(report)
        if asking and told is not None:
            asking -= _asking(told)
        for vm in sorted(asking):
            asks = next(status.asks.vector() for status in report.vms if status.name == vm)
            sentence = f"{vm} is under pressure and asks for {asks} beyond what {report.id} can spare"
            news.append(News("pressure", vm, sentence))
        if all(line.vm is None for line in news):
            return news
        recorded = await self._store.recorded(report.id)
        return [line for line in news if line.vm is None or line.vm in recorded]

    async def _tell(self, news: Sequence[News], host: str, told: HostReport | None) -> None:
        """Write what a report brings, and the host's report in the same transaction: of what is stored the next manager
        tells no more. Not so many events of one host that those of others are pruned for them.

        :param told: of which report it is news; that stays so where they are not written.
        """
        lines: list[Line] = []
        for line in news:
            if self._told.take(host, _EVENTS, self._monotonic()):
                if not self._told.take(f"log {host}", _LOGGED, self._monotonic()):
                    said = {"kind": line.kind, "vm": line.vm, "host": host, "why": line.sentence}
                    log.info("event not written: its host has too many", **said)
            else:
                tell(line, host)
                lines.append((line.kind, line.vm, host, line.sentence))
        written = not news
        try:
            if lines:
                async with self._saving:
                    # A write that has begun comes to its end, whoever is cancelled.
                    written = True
                    if (known := self._hosts.get(host)) is not None:
                        await self._store.save_hosts([known.report], lines)
            elif news:
                await self._save(self._hosts[host].report)
                written = True
        except Exception:
            written = False
            raise
        finally:
            if not written:
                self._untold.setdefault(host, told)
            elif self._untold.get(host, told) is told:
                self._untold.pop(host, None)

    def remember(self, report: HostReport, raw: bytes) -> None:
        """The body in which a report came, all of which has been taken: the same again is no news."""
        host = self._hosts.get(report.id)
        if host is not None and host.report is report:
            host.digest = _digest(raw)

    def repeats(self, host_id: str, raw: bytes) -> bool:
        """Whether a body is the last report of a host once more."""
        host = self._hosts.get(host_id)
        return host is not None and host_id not in self._leaving and host.came_as(raw)

    def repeat(self, host_id: str, raw: bytes) -> bool:
        """The same; then the host has been seen, and that is all."""
        if not self.repeats(host_id, raw):
            return False
        host = self._hosts[host_id]
        if self.is_silent(host_id):
            self.changes.note("host", (host_id,))
            self.changes.note("host's VMs", (host_id,))
        host.seen_at, host.arrival = self._clock(), next(self._arrivals)
        self._see(host_id)
        return True

    def ages(self, host_id: str) -> bool:
        """Whether half of the time is over after which a host counts as silent, or it has not reported yet."""
        host = self._hosts.get(host_id)
        return host is None or host.seen is None or self._monotonic() - host.seen > self._silent_after_s / 2

    def _see(self, host_id: str) -> None:
        """A host has reported just now."""
        host = self._hosts[host_id]
        known, host.seen = host.seen, self._monotonic()
        if takes_new_vms(host.report.mode) and not closed(host.report) and not self._led_by(host.report):
            # A repeated report changes nothing, unless silence had closed the host.
            if known is None or host_id not in self._ages:
                self._availability.open(host.report)
            self._ages[host_id] = host.seen
            self._ages.move_to_end(host_id)
        else:
            self._close(host_id)
        self._awaited.discard(host_id)
        self._news.set()

    async def _save(self, report: HostReport) -> None:
        before = self._unsaved.get(report.id)
        self._unsaved[report.id] = report
        try:
            async with self._saving:
                while report.id in self._unsaved:
                    await self.intake.give_way()
                    batch = dict(islice(self._unsaved.items(), SAVED))
                    for host_id in batch:
                        del self._unsaved[host_id]
                    try:
                        await self._store.save_hosts(list(batch.values()))
                    except BaseException:
                        # The tasks that wait for these try again.
                        self._unsaved = {**batch, **self._unsaved}
                        raise
        except BaseException:
            # It is not taken: stored later, it would replace one that was. Another task may wait for the one before.
            if self._unsaved.get(report.id) is report:
                del self._unsaved[report.id]
                if before is not None:
                    self._unsaved[report.id] = before
            raise

    async def save_seen(self) -> None:
        """Store when hosts were last seen: a report that says nothing new is not written itself."""
        since, now = self._seen_saved, self._monotonic()
        seen = ((id_, host.seen_at) for id_, host in self.items() if host.seen is not None and host.seen >= since)
        while batch := dict(islice(seen, SEEN)):
            await self.intake.give_way()
            await self._store.save_seen(batch)
        self._seen_saved = now

    @contextlib.asynccontextmanager
    async def leaving(self, host_id: str) -> AsyncIterator[None]:
        """Held while it is decided whether a host is forgotten, and until it is: its reports wait for that."""
        async with self._saving:
            self._leaving.add(host_id)
            try:
                yield
            finally:
                self._leaving.discard(host_id)

    def forget(self, host_id: str) -> None:
        """Drop a host that the store has forgotten; if it reports after all, it is a new one."""
        self._hosts.pop(host_id, None)
        self._unsaved.pop(host_id, None)
        self._telling.pop(host_id, None)
        self._untold.pop(host_id, None)
        self._close(host_id)
        self._awaited.discard(host_id)
        self.changes.note("host", (host_id,))
        self._news.set()

    async def label(self, host_id: str, wanted: LabelsRequest) -> None:
        """Change the labels of a host, if there is one. Raises `InvalidField`: they are too many."""
        # Behind the first report of a new host, which makes its row.
        async with self._saving:
            if (host := self._hosts.get(host_id)) is None:
                return
            labels = wanted.onto(host.labels)
            await self._store.label_host(host_id, labels)
            if (host := self._hosts.get(host_id)) is not None:
                host.labels = labels
            self.changes.note("host", (host_id,))

    # --- placement ---------------------------------------------------------------------------------------------------

    @property
    def availability(self) -> Availability:
        """What placement may count on, of the hosts that are ready and take VMs."""
        oldest = self._monotonic() - self._silent_after_s
        while self._ages:
            host_id, seen = next(iter(self._ages.items()))
            if seen >= oldest:
                break
            self._close(host_id)
        for host_id in self._revoked():
            self._close(host_id)
        return self._availability

    def _close(self, host_id: str) -> None:
        self._ages.pop(host_id, None)
        self._availability.close(host_id)

    async def settle(self) -> None:
        """After a start, give the hosts of earlier runs the time to report before one decides without them."""
        while self._awaited:
            left = self._loaded_at + self._silent_after_s - self._monotonic()
            if left <= 0:
                return
            self._news.clear()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                return

    async def heard(self, limit_s: float) -> None:
        """Wait until any host reports, or for so long, in seconds."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._news.wait()

    # --- questions ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._hosts)

    def ids(self) -> frozenset[str]:
        return frozenset(self._hosts)

    def get(self, host_id: str) -> Host | None:
        return self._hosts.get(host_id)

    def items(self) -> list[tuple[str, Host]]:
        """By id, their reports unread."""
        return sorted(self._hosts.items(), key=lambda item: item[0])

    def all(self) -> list[Host]:
        """By id."""
        return [self._hosts[host_id] for host_id in sorted(self._hosts)]

    async def page(
        self,
        limit: int,
        after: str | None,
        *,
        state: str | None = None,
        mode: HostMode | None = None,
        since: int | None = None,
        selector: Selector = (),
    ) -> list[HostStatus]:
        """Hosts as clients see them, by id, and one more than ``limit`` where there are more.

        :param after: the id behind which they begin.
        :param state: only those in this one.
        :param since: only what has changed after this number, and hosts that are not ready: silence is no report.
        """
        ids = sorted(self._hosts)
        changed = self.changes.since("host", since) if since is not None else None
        found: list[HostStatus] = []
        for looked, host_id in enumerate(islice(ids, bisect_right(ids, after) if after is not None else 0, None)):
            if looked % LOOKS == LOOKS - 1:
                # Reports of an earlier run are read only now: thousands of them would hold the loop up for seconds.
                await asyncio.sleep(0)
            host = self._hosts.get(host_id)
            if host is None:
                continue  # it was forgotten meanwhile
            if changed is not None and host_id not in changed and self.is_ready(host_id):
                continue
            if state is not None and self.state(host_id)[0] != state:
                continue
            if not matches(selector, host.labels):
                continue
            if mode is not None and host.report.mode is not mode:
                continue
            status = self.status(host_id)
            if status is not None:
                found.append(status)
            if len(found) > limit:
                break
        return found

    def ready(self) -> list[Host]:
        """Those that have reported lately and can be commanded, by id."""
        return [self._hosts[host_id] for host_id in sorted(self._hosts) if self.is_ready(host_id)]

    def reporting(self) -> dict[str, Host]:
        """Those that have reported lately, by id."""
        oldest, revoked = self._monotonic() - self._silent_after_s, self._revoked()
        return {
            host_id: host
            for host_id, host in self._hosts.items()
            if host.seen is not None and host.seen >= oldest and host_id not in revoked
        }

    def is_ready(self, host_id: str) -> bool:
        """Whether a host reports and its hypervisor answers: commands can be sent there."""
        return not self.why_not_ready(host_id)

    def is_silent(self, host_id: str) -> bool:
        host = self._hosts.get(host_id)
        if host_id in self._revoked():
            return True
        return host is None or host.seen is None or self._monotonic() - host.seen > self._silent_after_s

    def is_reporting(self, host_id: str) -> bool:
        """Whether a host has reported lately, or a report of it is being taken."""
        return host_id in self._telling or not self.is_silent(host_id)

    def why_not_ready(self, host_id: str) -> str:
        """Why no command can be sent to a host, to go on with after its name; empty if one can."""
        if host_id in self._revoked():
            return "is revoked"
        if self.is_silent(host_id):
            return "is silent"
        report = self._hosts[host_id].report
        if led := self._led_by(report):
            return led
        return f"cannot reach its hypervisor ({report.unavailable})" if report.unavailable else ""

    def _led_by(self, report: HostReport) -> str:
        """That a host would refuse every command, to go on with after its name; empty if not."""
        if self.epoch is None or report.epoch <= self.epoch:
            return ""
        return f"follows a manager of epoch {report.epoch}, and this one has {self.epoch}"

    def state(self, host_id: str) -> tuple[HostState, str]:
        """What a host is to its clients, and why."""
        if self.is_silent(host_id):
            return "silent", "it is revoked" if host_id in self._revoked() else ""
        report = self._hosts[host_id].report
        if why := self._led_by(report) or report.unavailable:
            return "unavailable", why
        beyond = report.overcommitted.vector()
        return ("ready", "") if beyond.is_zero() else ("overcommitted", f"by {beyond}")

    def status(self, host_id: str) -> HostStatus | None:
        """The host as clients see it."""
        host = self._hosts.get(host_id)
        if host is None:
            return None
        report = host.report
        state, state_reason = self.state(host_id)
        return HostStatus(
            id=report.id,
            url=report.url,
            state=state,
            state_reason=state_reason,
            seen_at=host.seen_at,
            capacity=report.capacity,
            free=report.free,
            deflatable=report.deflatable,
            accelerator=report.accelerator,
            mode=report.mode,
            mode_reason=report.mode_reason,
            vms=tuple(vm.name for vm in report.vms),
            version=host_version(report),
            labels=dict(host.labels),
        )

    def vm(self, host_id: str | None, name: str) -> VMStatus | None:
        """A VM as its host last reported it."""
        host = self._hosts.get(host_id) if host_id is not None else None
        return next((vm for vm in host.report.vms if vm.name == name), None) if host is not None else None


def _unread(host_id: str) -> HostReport:
    none = Vector()
    return HostReport.model_construct(
        id=host_id,
        url="",
        incarnation="",
        capacity=none,
        free=none,
        deflatable=none,
        vm_overhead_mib=0.0,
        accelerator="",
        vms=(),
    )


def _names(report: HostReport | None) -> set[str]:
    return {vm.name for vm in report.vms} if report is not None else set()


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()


def _overtaken(report: HostReport, known: HostReport) -> bool:
    """Whether a report came so late that a later one of the same agent has been taken: it is no sign of life either."""
    return report.incarnation == known.incarnation and 0 < report.sequence < known.sequence


def _asking(report: HostReport) -> frozenset[str]:
    """Names of the VMs that want more than their host has."""
    return frozenset(vm.name for vm in report.vms if any(amount > TOLERANCE for amount in vm.asks.__dict__.values()))
