"""Core changes from the hosts' reports, and the ranking of machines that the matcher makes of them.

Changes are acknowledged by host and sequence, whichever incarnation of the agent sent them: an agent keeps its
sequence over a restart, and one that lost it goes on above what the manager acknowledges.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import dropwhile, islice, takewhile
from typing import Any, Final

import structlog

from cluster_manager.inventory.hosts import LOOKS, Hosts
from cluster_manager.store.rows import StoredChange
from cluster_manager.store.store import Store
from ebbtide.deflation.allocations import Priority
from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.match.ranking import Machine, Rank, RankedMachine, rank_machines
from ebbtide.matcher.match.rounds import LIVE_PREDICTION
from ebbtide.matcher.predict import memory
from ebbtide.matcher.predict.calibration import Calibration
from ebbtide.matcher.predict.changes import WINDOW_S, whole_cores
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.self_check import SelfCheck
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.machines import CalibrationCurve, CalibrationReport, Decile, MachineRanking
from ebbtide.messages.vms import VMState
from ebbtide.rest.rates import Buckets, Rate

log = structlog.get_logger()

#: So many machines are ranked before the loop's other work gets its turn.
BATCH: Final = 1000
#: Predictions of a decile from which on its error says something.
ENOUGH: Final = 200
#: States of a VM that may be on another host.
_AWAY: Final = (VMState.STOPPED, VMState.MIGRATING)
_VERSION: Final = 1
#: By how much managers' clocks may differ, seconds: what was learned up to a later moment was written by a wrong one.
_CLOCKS_S: Final = 60.0
#: Machines of a silent host count as known for so long after it was seen, seconds: when it was is stored each minute.
_SEEN_S: Final = 120.0
#: Core changes that are taken of one host; what is left comes again with its next reports.
_TAKEN: Final = Rate(per_s=2.0, burst=5000.0)


class CoreChanges:
    """What machines' cores did, and what follows from it.

    :param clock: seconds since the epoch.
    :param options: of the prediction engine.
    :param monotonic: seconds that never go back.
    """

    def __init__(
        self,
        store: Store,
        hosts: Hosts,
        clock: Callable[[], float],
        options: PredictorOptions = LIVE_PREDICTION,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._clock = clock
        self._monotonic = monotonic
        self._taken = Buckets()
        #: What both clocks said when it was last looked whether they agree.
        self._clocks = clock(), monotonic()
        #: The highest sequence of each host that is stored.
        self._acknowledged: dict[str, int] = {}
        #: The highest sequence of each host that the predictor knows.
        self._learned: dict[str, int] = {}
        #: What the machines' changes teach, learned change by change, and how well its predictions come true.
        self._options = options
        self.predictor = self._followed(Predictor(clock() - WINDOW_S, options))
        self.check = SelfCheck(self.predictor)
        #: How well the predictions of tasks came true, when their attempts were released.
        self.tasks = Calibration()
        #: What is learned while the past day is learned again; None: it is not.
        self._meanwhile: list[StoredChange] | None = None
        self._learning_again = asyncio.Lock()

    async def load(self, found: Mapping[str, Any] | None = None) -> None:
        """Recall what earlier runs have stored.

        :param found: what `document` wrote: it is gone on with, and changes that it does not know are learned.
            None, or one that cannot be read: the past day is learned again.
        """
        self._acknowledged = await self._store.acknowledged()
        await self._read_reports()
        if found is not None and self._resume(found):
            await self._catch_up()
        else:
            self._learned = dict(self._acknowledged)
            await self._learn_again()
        # Before hosts tell of the time in which no manager heard them: it is no time in which they kept all cores.
        self.predictor.advance(self._clock())

    async def _read_reports(self) -> None:
        """Read what earlier runs have stored of hosts: a look asks for the VMs of them all, and thousands of reports
        that are read only then would hold the loop up for seconds.
        """
        for number, (_, host) in enumerate(self._hosts.items(), 1):
            _ = host.report
            if number % LOOKS == 0:
                await asyncio.sleep(0)

    async def _learn_again(self) -> None:
        """Learn the past day from the store, each change once, whatever reports bring meanwhile."""
        now, learned = self._clock(), dict(self._learned)
        predictor = self._followed(Predictor(now - WINDOW_S, self._options))
        self._meanwhile = []
        try:
            for number, stored in enumerate(await self._store.core_changes_since(now - WINDOW_S), 1):
                predictor.observe(stored, min(stored.at, now), stored.variable)
                learned[stored.host] = max(learned.get(stored.host, 0), stored.sequence)
                if number % BATCH == 0:
                    await asyncio.sleep(0)
            for stored in self._meanwhile:
                if stored.sequence > learned.get(stored.host, 0):
                    predictor.observe(stored, now, stored.variable)
                    learned[stored.host] = stored.sequence
        finally:
            self._meanwhile = None
        check = SelfCheck(predictor)
        # How well predictions came true has no date.
        check.calibration = self.check.calibration
        self.predictor, self.check, self._learned = predictor, check, learned

    def is_ahead(self, predictor: Predictor) -> bool:
        """Whether a predictor was brought to a moment that is still to come, by a clock that was ahead: until then it
        would neither note nor forget anything, and what it knew is forgotten.
        """
        return predictor.now - self._clock() > _CLOCKS_S

    async def follow_clock(self) -> None:
        """Learn the past day again where the clock was ahead for a while, or behind: what was learned then is forgotten
        at once when it goes on to the right time. Raises StoreError.
        """
        async with self._learning_again:
            clocks = self._clock(), self._monotonic()
            leapt_s = (clocks[0] - self._clocks[0]) - (clocks[1] - self._clocks[1])
            if self.is_ahead(self.predictor):
                ahead_s = self.predictor.now - self._clock()
                log.warning("the clock was ahead: what was learned by it is learned again", ahead_s=round(ahead_s))
                await self._learn_again()
            elif leapt_s > _CLOCKS_S:
                log.warning("the clock was behind: what was learned by it is learned again", behind_s=round(leapt_s))
                await self._learn_again()
            self._clocks = clocks

    def document(self) -> Callable[[], dict[str, Any]]:
        """What writes down all that was learned up to now; it may be called elsewhere, and later."""
        self._settle(self._clock())
        known, learned = self.predictor.copy(), dict(self._learned)
        check, tasks = self.check.document(), self.tasks.document()

        def written() -> dict[str, Any]:
            predictor = memory.document(known)
            return {"version": _VERSION, "predictor": predictor, "learned": learned, "check": check, "tasks": tasks}

        return written

    def calibration(self) -> CalibrationReport:
        """Whether predictions come true."""
        self._settle(self._clock())
        return CalibrationReport(machines=_curve(self.check.calibration), tasks=_curve(self.tasks))

    def _resume(self, found: Mapping[str, Any]) -> bool:
        """Whether it could be gone on with; of one that is of another time only the calibrations are taken over."""
        try:
            if found.get("version") != _VERSION:
                raise InvalidField("version", f"must be {_VERSION}, but is {found.get('version')!r}")
            predictor = self._followed(memory.restored(found["predictor"], self._options))
            check = SelfCheck(predictor)
            check.resume(found["check"])
            tasks = Calibration.of(found["tasks"])
            learned = {str(host): int(sequence) for host, sequence in found["learned"].items()}
        except (InvalidField, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("what was learned cannot be read, and is learned again", why=str(error))
            return False
        old_s = self._clock() - predictor.now
        # Too old by a clock that was behind, perhaps: then it says that it knows what is in no window of it.
        if self.is_ahead(predictor) or old_s > WINDOW_S:
            log.warning("what was learned is of another time, and is learned again", old_s=round(old_s))
            # These have no dates, and hold whatever the clock says.
            self.check.calibration, self.tasks = check.calibration, tasks
            return False
        self.predictor, self.check, self.tasks, self._learned = predictor, check, tasks, learned
        return True

    async def _catch_up(self) -> None:
        """Learn what was stored after the document was written, in the order in which it happened."""
        new: list[StoredChange] = []
        for host, sequence in self._acknowledged.items():
            if sequence > self._learned.get(host, 0):
                new += await self._store.core_changes_of(host, self._learned.get(host, 0))
                self._learned[host] = sequence
        now = self._clock()
        for stored in sorted(new, key=lambda stored: stored.at):
            self._observe(stored, min(max(stored.at, self.predictor.now), now))

    def acknowledged(self, host: str) -> int:
        """Up to which sequence the host need not send again."""
        return self._acknowledged.get(host, 0)

    async def take(self, report: HostReport) -> int:
        """Store what a report brings. A sequence that is stored already is passed over.

        :returns: up to which sequence the host need not send again.
        """
        known, now = self.acknowledged(report.id), self._monotonic()
        unknown = sorted((c for c in report.core_changes if c.sequence > known), key=lambda change: change.sequence)
        changes = list(takewhile(lambda _: not self._taken.take(report.id, _TAKEN, now), unknown))
        if changes:
            learned = self._learned.get(report.id, 0)
            self._acknowledged[report.id], new = await self._store.add_core_changes(
                report.id, changes, learned, cache(self._reported)
            )
            for change in changes:
                cores = {"cores_before": change.cores_before, "cores_after": change.cores_after}
                log.info("core change", machine=change.machine, host=report.id, **cores, why=change.cause)
            self._learn(report.id, new)
        return self.acknowledged(report.id)

    def learn(self, host: str, stored: list[StoredChange]) -> None:
        """Take in core changes that the store has made itself, in their order, of a host that does not come back."""
        if stored:
            self._acknowledged[host] = max(self.acknowledged(host), stored[-1].sequence)
            self._learn(host, stored)

    def _reported(self, host: str) -> dict[str, bool]:
        """The VMs of which a host tells, and whether it has said lately that each is on there, and is not moving."""
        known, silent = self._hosts.get(host), self._hosts.is_silent(host)
        return {vm.name: not silent and vm.state not in _AWAY for vm in known.report.vms} if known is not None else {}

    async def ranking(
        self, duration_s: float, name: str | None = None, *, most: int | None = None, after: Rank | None = None
    ) -> list[MachineRanking]:
        """The running machines, or the one of a name, for a task of this duration, best first, unknown ones last.

        :param most: so many at the most.
        :param after: the rank behind which they begin.

        The pool that teaches the distribution is every VM whose cores can be taken; a fixed VM keeps its cores while it
        lives, so it neither teaches nor has a probability.

        :raises InvalidField: a duration that is negative or not finite.
        """
        await self.follow_clock()
        now = self._clock()
        rows = await self._store.running_vms(name)
        self._settle(now)
        hosts: dict[str, str | None] = {}
        batches: list[list[RankedMachine]] = []
        for begin in range(0, len(rows), BATCH):
            machines = []
            for row in rows[begin : begin + BATCH]:
                reported = self._hosts.vm(row.host, row.name)
                if reported is not None and reported.state is VMState.STOPPED:
                    continue  # It has powered itself off: no task can run there.
                # Whole cores that it has now, as its host last reported.
                cores = whole_cores(reported.current.cpu_cores if reported is not None else 0.0)
                machines.append(Machine(row.name, cores, variable=row.priority is not Priority.FIXED))
                hosts[row.name] = row.host
            batches.append(rank_machines(machines, self.predictor, now, duration_s))
            await asyncio.sleep(0)
        found: Iterator[RankedMachine] = heapq.merge(*batches, key=lambda ranked: ranked.rank)
        if after is not None:
            found = dropwhile(lambda ranked: ranked.rank <= after, found)
        return [
            MachineRanking(
                machine=ranked.name,
                host=hosts[ranked.name],
                cores=ranked.cores,
                since_change_s=ranked.since_change_s,
                last_change=ranked.last_change.value if ranked.last_change is not None else None,
                duration_s=duration_s,
                completion_probability=ranked.completion_probability,
            )
            for ranked in islice(found, most)
        ]

    def _learn(self, host: str, changes: list[StoredChange]) -> None:
        """Take in what is new of a host, each change once, whichever reports came at the same time."""
        now = self._clock()
        for stored in changes:
            if stored.sequence <= self._learned.get(host, 0):
                continue
            self._learned[host] = stored.sequence
            self._observe(stored, now)
        # Only now: what refutes predictions may have come late.
        self._settle(now)

    def _settle(self, now: float) -> None:
        self.check.advance(now, self._known_until)

    def _known_until(self) -> dict[str, float]:
        """Up to when the core changes of each VM are known, of hosts that have reported to this manager."""
        until = {}
        for host_id, host in self._hosts.items():
            if host.seen is None:
                continue
            changes, learned = host.report.core_changes, self._learned.get(host_id, 0)
            # A report has so many at the most, the oldest: what happened after the last one may come with the next.
            last = next((change for change in changes if change.sequence > learned), changes[-1] if changes else None)
            until.update(dict.fromkeys((vm.name for vm in host.report.vms), last.at if last else host.seen_at))
        return until

    def _followed(self, predictor: Predictor) -> Predictor:
        predictor.known_until = self._heard_until
        return predictor

    def _heard_until(self) -> dict[str, float]:
        """Up to when each VM of a silent host has been heard of; the others tell what happens now at once."""
        until: dict[str, float] = {}
        hosts = self._hosts.items()
        silent = {host_id for host_id, _ in hosts if self._hosts.is_silent(host_id)}
        for host_id, host in hosts:
            if host_id in silent:
                at = host.seen_at + _SEEN_S
                for vm in host.report.vms:
                    until[vm.name] = max(until.get(vm.name, at), at)
        for host_id, host in hosts if until else ():
            if host_id not in silent:
                for vm in host.report.vms:
                    # It has moved, or was begun again there.
                    until.pop(vm.name, None)
        return until

    def _observe(self, stored: StoredChange, now: float) -> None:
        if self._meanwhile is not None:
            self._meanwhile.append(stored)
        if stored.variable:
            self.check.observe(stored)
        self.predictor.observe(stored, now, stored.variable)


def _curve(found: Calibration) -> CalibrationCurve:
    return CalibrationCurve(
        count=found.count,
        brier=found.brier,
        worst_error=found.worst_error(ENOUGH),
        deciles=tuple(
            Decile(low=row.low, count=row.count, predicted=row.predicted, observed=row.observed)
            for row in found.curve()
        ),
    )
