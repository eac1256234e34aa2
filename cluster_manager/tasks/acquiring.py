"""Service of the acquirer: keeps a pool of harvest VMs for tasks, those that change least, as many as the work needs.

The decisions are `matcher.acquire.acquirer`'s. What is held, and what was leaving, is read from the store and nothing
else, so that a manager that is killed anywhere finds its machines again, and goes on with what it had begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Final

import structlog
from sqlalchemy import func, select

from cluster_manager.errors import RequestError, StoreError
from cluster_manager.store import schema
from cluster_manager.store.pruning import DECOMMISSIONED, LOOKED, PLACED
from cluster_manager.store.store import Store
from cluster_manager.store.tasks import TaskNote
from cluster_manager.tasks.machines import TaskMachines
from cluster_manager.tasks.tasks import TaskService
from ebbtide.matcher.acquire import acquirer
from ebbtide.matcher.acquire.acquirer import (
    Acquirer,
    Deallocate,
    Decommission,
    Emptied,
    Event,
    Instruction,
    Machine,
    PeriodOver,
    advance_all,
)
from ebbtide.matcher.acquire.net_changes import View
from ebbtide.matcher.acquire.provision import Provider, Provision, calls, news, unfinished
from ebbtide.matcher.acquire.settings import AcquirerSettings
from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.predict.changes import whole_cores
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.tasks import AcquirerMachineStatus, AcquirerRequestStatus, AcquirerStatus, Standing

log = structlog.get_logger()

#: How long a look may go on while the term ends, seconds.
STOP_S: Final = 1.0
#: Of the events that say that a machine is only called as ours are.
_NOT_OURS: Final[EventKind] = "acquirer-not-ours"
#: For how long after its end a machine of an earlier term may still be up for the engine, seconds.
_LINGERS_S: Final = 3600.0


class AcquirerService:
    """Runs from `start` to `stop`, for one term.

    :param settings: None: there is no acquirer.
    :param machines: its own; it asks for other names than the tasks' service does.
    :param check: raises where this manager does not lead.
    :param clock: seconds since the epoch.
    """

    def __init__(
        self,
        settings: AcquirerSettings | None,
        tasks: TaskService,
        machines: TaskMachines,
        store: Store,
        check: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._machines = machines
        self._store = store
        self._check = check
        self._clock = clock
        self._work: asyncio.Task[None] | None = None
        self._provider: Provider | None = None
        #: When the tasks' service was told that a machine leaves.
        self._told: dict[str, float] = {}
        self._views: dict[str, View] = {}
        self._first = True
        #: Names that VMs of ours hold, and that VMs of others in the same store do, by the last look.
        self._opened: Set[str] = frozenset()
        self._others: Set[str] = frozenset()
        #: Names that VMs of ours held, while the engine still shows their machines up.
        self._lingering: set[str] = set()
        #: Names like ours of machines that are up for the engine and are of no VM of this manager.
        self.elsewhere: frozenset[str] = frozenset()
        #: Those of which it was said that they are somebody else's.
        self._said: set[str | None] = set()
        self.state = Acquirer()
        #: Held during a look, from one state to the next.
        self.looking = asyncio.Lock()
        #: Why the last look came to nothing; empty where it did not.
        self.trouble = ""

    async def recall(self, provider: Provider) -> None:
        """What an earlier term held, what was leaving and when its last period ended; before any task is matched.

        :raises StoreError: it cannot be read.
        """
        if (settings := self._settings) is None:
            return
        table, now = schema.events, self._clock()
        query = select(table.c.at).where(table.c.kind == LOOKED).order_by(table.c.id.desc()).limit(1)
        last = next((float(row.at) for row in await self._store.rows(query)), -math.inf)
        provision = await provider.look()
        vms, at = schema.vms.c, now - _LINGERS_S
        ended = select(vms.name).where(vms.acquired == 1, vms.phase == schema.constant("ended"), vms.ended_at > at)
        self._lingering = {row.name for row in await self._store.rows(ended)}
        self._know(provision)
        leaving = await self._left(settings, provision.machines | provision.silent)
        state = Acquirer(leaving, next_at=min(last + settings.period_s, now + settings.period_s))
        self.state, _ = advance_all(state, news(state, provision, now), settings.options())
        self._provider = provider
        self._tasks.closed = self._closed
        self._tell()

    def _know(self, provision: Provision) -> None:
        """Whose names are whose by now."""
        self._lingering = (self._lingering | (self._opened - provision.opened)) - provision.opened
        self._opened, self._others = provision.opened, provision.others

    async def _left(self, settings: AcquirerSettings, names: Set[str]) -> dict[str, Machine]:
        """Of VMs that are there, those that were decommissioned since they were placed."""
        table, now = schema.events, self._clock()
        ours = table.c.vm.startswith(settings.prefix, autoescape=True)
        # The last of either kind for each name: a name is given again.
        last = select(func.max(table.c.id)).where(ours, table.c.kind.in_((DECOMMISSIONED, PLACED)))
        query = select(table).where(table.c.id.in_(last.group_by(table.c.vm)), table.c.kind == DECOMMISSIONED)
        return {
            row.vm: Machine(row.vm, now, acquirer.Standing.LEAVING, row.at, row.sentence.removeprefix(_leaves(row.vm)))
            for row in await self._store.rows(query)
            if row.vm in names
        }

    def start(self) -> None:
        """Begin, if there is anything to do; after `recall`."""
        if self._settings is not None and self._provider is not None:
            self._work = asyncio.create_task(self._run(self._settings, self._provider), name="acquirer")

    async def stop(self) -> None:
        """What is under way goes on; the machines stay."""
        if self._work is not None:
            with contextlib.suppress(TimeoutError):
                # A query that is broken off costs its connection.
                async with asyncio.timeout(STOP_S), self.looking:
                    self._work.cancel()
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._work = None

    async def _run(self, settings: AcquirerSettings, provider: Provider) -> None:
        while True:
            try:
                async with self.looking:
                    await self._look(settings, provider)
                self.trouble = ""
            except (StoreError, RequestError) as error:
                # The term ends, the store comes back, or what was asked for is asked for again.
                if self.trouble != str(error):
                    log.warning("the acquirer could not go on", why=str(error))
                self.trouble = str(error)
            except Exception as error:
                log.exception("the acquirer could not go on, by a defect of the manager")
                self.trouble = f"a defect of the manager: {error}"
            await asyncio.sleep(settings.look_s)

    async def _look(self, settings: AcquirerSettings, provider: Provider) -> None:
        self._check()
        provision = await provider.look()
        self._know(provision)
        # No period is longer: the clock was set back since it began.
        self.state = replace(self.state, next_at=min(self.state.next_at, self._clock() + settings.period_s))
        events: list[Event] = news(self.state, provision, self._clock())
        options = settings.options()
        found, instructions = advance_all(self.state, events, options)
        if self._first and len(found.kept) + len(found.coming) + provision.under_way < options.least_machines:
            # What an earlier term wanted may never have been asked for, or has gone in the meantime.
            found = replace(found, next_at=-math.inf)
        await self._see([one.name for one in found.kept])
        events = [Emptied(one.name) for one in found.machines.values() if self._is_empty(one.name)]
        if self._tasks.looked_at is not None and not self._tasks.trouble:
            # Without an answer of the engine it is not known what is wanted.
            events.append(PeriodOver(self._clock(), self._views, float(self._wanted_cores(settings))))
        after, more = advance_all(found, events, options)
        instructions += more
        # Written down first: a period that was looked at is not looked at again after a crash.
        warnings = self._warnings(settings)
        await self._store.save_tasks([], [*self._notes(after, instructions), *warnings])
        self._said |= {note.machine for note in warnings}
        self._first = False
        self.state = after
        self._tell()
        again = [one for one in unfinished(after, provision) if one not in instructions]
        refused: RequestError | None = None
        for call in calls(provider, [*again, *instructions], _log):
            try:
                await call
            except RequestError as error:
                # What is refused does not keep the others; all are given again, as long as they are wanted.
                refused = refused or error
        if refused is not None:
            raise refused

    async def _see(self, names: list[str]) -> None:
        """What is known of machines; those of which no host tells are left out."""
        cores = await self._machines.cores(names)
        last = self._machines.last_changes()
        busy = {task.occupies for task in self._tasks.unfinished.values()}
        busy |= {machine.name for machine in self._tasks.machines.values() if machine.foreign_cores}
        now = self._clock()
        self._views = {
            name: View(
                float(cores[name]),
                max(now - last[name].at, 0.0) if name in last else math.inf,
                name in busy,
                off=name in self._machines.off,
            )
            for name in names
            if name in cores
        }

    def _wanted_cores(self, settings: AcquirerSettings) -> int:
        """Of the tasks that wait, and of those on machines of ours: those elsewhere have theirs."""
        most = self._most_cores(settings)
        return sum(
            task.order.cores
            for task in self._tasks.unfinished.values()
            if (task.occupies is None and task.order.cores <= most)
            or (
                task.occupies is not None
                and settings.number_of(task.occupies) is not None
                and task.occupies not in self._others | self.elsewhere
            )
        )

    def _most_cores(self, settings: AcquirerSettings) -> int:
        """Of the largest machine that it may get or has: one more of them is of no use to a larger task."""
        spec = settings.spec(1)
        size = max(spec.nominal.cpu_cores, spec.ceiling.cpu_cores if spec.ceiling is not None else 0.0)
        return int(max([whole_cores(size), *(view.cores for view in self._views.values())]))

    def _sentence(self, settings: AcquirerSettings) -> str:
        said, most = self.trouble or self.state.sentence, self._most_cores(settings)
        waiting = (task for task in self._tasks.unfinished.values() if task.occupies is None)
        large = [task for task in waiting if task.order.cores > most]
        if large:
            first = f"{large[0].name} with {large[0].order.cores} cores"
            said += f"; nothing is asked for {first}" + (f" and {len(large) - 1} more" if len(large) > 1 else "")
            said += f": no machine of the pool has more than {most}"
        return said

    def _is_empty(self, name: str) -> bool:
        """Whether nothing runs on a leaving machine, and nothing will: the tasks' service has looked since."""
        told, looked_at = self._told.get(name), self._tasks.looked_at
        # One that is still to come was by a clock that was set back since.
        if told is None or looked_at is None or not told < looked_at <= self._clock() or self._tasks.trouble:
            return False
        machine = self._tasks.shown.get(name)
        if machine is not None and (machine.foreign_cores or (machine.up and not machine.drained)):
            # As long as the engine does not show it drained, more may begin there.
            return False
        counted = self._tasks.machines.get(name)
        if counted is not None and counted.foreign_cores:
            # Also of attempts of ours that are no task's any more.
            return False
        return not any(task.occupies == name for task in self._tasks.unfinished.values())

    def _closed(self, machines: Mapping[str, EngineMachine]) -> tuple[frozenset[str], frozenset[str]]:
        """Of an engine's machines, those of ours that we do not hold; and those that are only called as ours are.

        The engine may know names that no VM has now, and those that another manager's machines have.
        """
        assert self._settings is not None, "recalled"
        called_so = {name for name in machines if self._settings.number_of(name) is not None}
        self._lingering &= {name for name in called_so if machines[name].up}
        ours = called_so & (self._opened | self.state.machines.keys() | self._lingering)
        foreign = called_so - ours - self._others
        self.elsewhere = frozenset(name for name in foreign if machines[name].up)
        return frozenset(ours - {one.name for one in self.state.kept}), frozenset(foreign)

    def _warnings(self, settings: AcquirerSettings) -> list[TaskNote]:
        """That machines with names like ours are somebody else's, once a term for each."""
        notes = []
        for names, of_whom in (
            (self._others, "this manager has a VM {0}, which"),
            (self.elsewhere - self._opened - self._others, "the engine has a machine {0} of no VM of this manager: it"),
        ):
            for name in sorted(names - self._said):
                said = (
                    f"{of_whom.format(name)} is called as the acquirer calls its machines ({settings.prefix}N), which "
                    "has not opened it: it is left alone. Give the acquirer another prefix, or whoever opened it"
                )
                log.warning("a machine is called as ours are, and is somebody else's", machine=name, why=said)
                notes.append(TaskNote(_NOT_OURS, name, said))
        return notes

    def _tell(self) -> None:
        """Note since when machines take no new task."""
        now, kept = self._clock(), {one.name for one in self.state.kept}
        self._told = {name: min(self._told.get(name, now), now) for name in self.state.machines if name not in kept}

    def _notes(self, after: Acquirer, instructions: Iterable[Instruction]) -> list[TaskNote]:
        notes = []
        if after.next_at != self.state.next_at:
            log.info(LOOKED, why=after.sentence)
            notes.append(TaskNote(LOOKED, None, after.sentence))
        for one in instructions:
            if isinstance(one, Decommission):
                notes.append(TaskNote(DECOMMISSIONED, one.machine, f"{_leaves(one.machine)}{one.why}"))
            elif isinstance(one, Deallocate) and self.state.machines[one.machine].standing != "empty":
                notes.append(TaskNote("acquirer-gave-back", one.machine, f"nothing runs on {one.machine} any more"))
        return notes

    def status(self) -> AcquirerStatus:
        """What it holds, and why."""
        state, settings = self.state, self._settings
        if settings is None:
            said = "there is no acquirer: the engine file has no table [acquirer]"
            return AcquirerStatus(on=False, sentence=said, cores=0, wanted_cores=0, machines=(), requests=())
        held: dict[str, list[str]] = {}
        for task in self._tasks.unfinished.values():
            if task.occupies is not None:
                held.setdefault(task.occupies, []).append(task.name)
        return AcquirerStatus(
            on=True,
            sentence=self._sentence(settings),
            next_at=state.next_at if math.isfinite(state.next_at) else None,
            utilisation=state.utilisation,
            cores=int(sum(self._views[one.name].cores for one in state.kept if one.name in self._views)),
            wanted_cores=self._wanted_cores(settings),
            machines=tuple(
                _shown(one, self._views.get(one.name), held.get(one.name, ()))
                for one in sorted(state.machines.values(), key=lambda one: settings.number_of(one.name) or 0)
            ),
            requests=tuple(
                AcquirerRequestStatus(number=one.number, at=one.at, replaces=one.replaces, sentence=one.why)
                for one in state.requests.values()
            ),
        )


def _shown(machine: acquirer.Machine, view: View | None, tasks: Iterable[str]) -> AcquirerMachineStatus:
    unchanged_s = view.unchanged_s if view is not None and math.isfinite(view.unchanged_s) else None
    return AcquirerMachineStatus(
        name=machine.name,
        standing=Standing(machine.standing.value),
        cores=int(view.cores) if view is not None else None,
        came_at=machine.came_at,
        unchanged_s=unchanged_s,
        leaves_at=machine.leaves_at,
        tasks=tuple(tasks),
        sentence=f"{machine.why}; it is off" if view is not None and view.off else machine.why,
    )


def _leaves(machine: str) -> str:
    """What the sentence of such an event begins with."""
    return f"{machine} leaves: "


def _log(told: Decommission) -> None:
    log.info("a machine leaves", machine=told.machine, why=told.why)
