"""Service of the tasks: looks at the engine again and again, stores what follows, and has the engine do it.

The decisions are `matcher.match.turns`'; here they are stored before they are carried out, so that a manager that
is killed anywhere goes on from its store and from what the engine shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, Protocol

import structlog

from cluster_manager.errors import RequestError, StoreError, already_exists, not_configured, wrong_state
from cluster_manager.store.tasks import StoredTask, TaskNote, TaskRows
from cluster_manager.tasks.output import file_of
from ebbtide.matcher.engines.interface import Engine
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineError, EngineFull, EngineRefused
from ebbtide.matcher.match.attempts import AttemptState, EngineMachine, Look, task_of
from ebbtide.matcher.match.notices import Notice
from ebbtide.matcher.match.rounds import Choice, Pool
from ebbtide.matcher.match.silences import Silences, measured
from ebbtide.matcher.match.tasks import (
    SILENCE_LIMIT_S,
    Cancel,
    Drain,
    Forget,
    Instruction,
    Release,
    SetCores,
    Signal,
    Submit,
    Task,
    TaskOrder,
    TaskPhase,
    Undrain,
    cancelled,
    outcome,
    refused,
)
from ebbtide.matcher.match.turns import UNBEGUN_PAUSE_S, Unbegun, Unrecorded, in_turn, turn, without
from ebbtide.messages.explanations import EventKind
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.tasks import TaskRequest, TaskSpec

log = structlog.get_logger()

#: Unfinished tasks at a time.
MOST_TASKS: Final = 100_000

#: Events of tasks that have ended.
_ENDED: Final[Mapping[TaskPhase, EventKind]] = {
    TaskPhase.DONE: "task-done",
    TaskPhase.FAILED: "task-failed",
    TaskPhase.CANCELLED: "task-cancelled",
}


class Machines(Protocol):
    """What is known of the engine's machines; see `cluster_manager.tasks.machines.TaskMachines`."""

    def changed(self) -> None: ...

    async def cores(self, names: Collection[str]) -> dict[str, int]: ...

    @property
    def closing(self) -> Mapping[str, str]: ...

    @property
    def paused(self) -> frozenset[str]: ...

    def pool(self) -> Pool: ...

    def settle(self, predicted: float, completed: bool) -> None: ...


class TaskService:
    """Runs from `start` to `stop`, for one term.

    :param engine: None: tasks are refused.
    :param check: raises where this manager does not lead; called before everything that the engine is to do.
    :param clock: seconds since the epoch.
    :param monotonic: seconds that never go back.
    """

    def __init__(
        self,
        store: TaskRows,
        machines: Machines,
        engine: Engine | None,
        settings: EngineSettings,
        check: Callable[[], None],
        clock: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._known = machines
        self._engine = engine
        self._settings = settings
        self._check = check
        self._clock = clock
        self._monotonic = monotonic
        #: Those that have not ended, by name, in their order.
        self._tasks: dict[str, Task] = {}
        #: And those of them whose stored states cannot be read: nothing is done with them.
        self._unread: dict[str, Task] = {}
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()
        #: Whether that is of machines, for which new attempts wait.
        self._woken = False
        #: Of tasks that somebody waits for. And whether nobody is to wait any more.
        self._ends: dict[str, asyncio.Event] = {}
        self._hung_up = False
        self._work: asyncio.Task[None] | None = None
        self._ready = False
        #: Attempts of tasks that have ended, which the engine was told to forget.
        self._forgotten: set[str] = set()
        #: Machines that stood still, and when they were last seen to.
        self._paused_at: dict[str, float] = {}
        self._unrecorded: Unrecorded = {}
        self._unbegun: Unbegun = {}
        self._silences: Silences = {}
        self.choices: Mapping[str, Choice] = {}
        self.machines: Mapping[str, EngineMachine] = {}
        #: The same as the engine showed them: what it was told since may have been refused.
        self.shown: Mapping[str, EngineMachine] = {}
        #: Machines of this manager among them.
        self.known: frozenset[str] = frozenset()
        #: Of machines, those that take no new task: the acquirer's, as long as it does not hold them; and those that
        #: are only called so, and are somebody else's.
        self.closed: Callable[[Mapping[str, EngineMachine]], tuple[frozenset[str], frozenset[str]]] = lambda machines: (
            frozenset(),
            frozenset(),
        )
        #: Machines whose VMs are being preempted now.
        self.notices: Callable[[], Mapping[str, Notice]] = dict
        self.looked_at: float | None = None
        #: Tasks that have ended, by how, and attempts that were broken off with their machines.
        self.ended: Counter[str] = Counter()
        self.killed = 0
        #: Why the engine cannot be used; empty where it can.
        self.trouble = ""
        #: Why the latest round came to nothing, though not by the engine; empty where it did not.
        self.stuck = ""
        #: Why it refused something in the latest round; empty where it did not.
        self.refused = ""

    @property
    def kind(self) -> str:
        """Of the engine."""
        return self._engine.kind if self._engine is not None else "none"

    @property
    def works(self) -> bool:
        """Whether the engine answers, and what follows is done."""
        return self.looked_at is not None and not self.trouble and not self.stuck

    @property
    def unfinished(self) -> Mapping[str, Task]:
        """Tasks that have not ended, in the order in which they get their turn."""
        return self._tasks | self._unread if self._unread else self._tasks

    async def recall(self) -> None:
        """Recall the tasks. Raises StoreError."""
        found = await self._store.unfinished_tasks()
        self._tasks = {stored.task.name: stored.task for stored in found if not stored.unread}
        self._unread = {stored.task.name: stored.task for stored in found if stored.unread}

    def start(self) -> None:
        """Begin, with the tasks that were recalled."""
        if self._engine is not None:
            self._work = asyncio.create_task(self._run(self._engine), name="tasks")

    async def stop(self) -> None:
        """What runs goes on."""
        self.hang_up()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
            self._work = None
        if self._engine is not None:
            await self._engine.stop()

    def hang_up(self) -> None:
        """Whoever waits for a task's end is answered now: the term, or the manager, ends."""
        self._hung_up = True
        for end in self._ends.values():
            end.set()

    def wake(self) -> None:
        """Cores have changed, or are about to go: look now."""
        self._known.changed()
        self._woken = True
        self._news.set()

    # --- what clients ask for --------------------------------------------------------------------------------------

    async def submit(self, request: TaskRequest, owner: str) -> Task:
        """Take a task on; the same request again gets the same task.

        :param owner: who asks for it, by the name of the token.
        :raises RequestError: 403, 409.
        """
        if self._engine is None:
            raise not_configured("this manager has no engine to run tasks: see its option --engine-file")
        spec, fingerprint = request.task, _fingerprint(request.task)
        user = self._settings.users.get(owner, self._settings.user)
        if self._settings.users and user is None:
            raise RequestError(403, f"{owner} has no user for its tasks: see [users] in the manager's engine file")
        async with self._lock:
            repeated = await self._store.task(request_id=request.request_id)
            if repeated is not None:
                if repeated.fingerprint != fingerprint:
                    raise RequestError(
                        409,
                        f"request {request.request_id} was another one",
                        "request_id",
                        code=ProblemCode.REQUEST_ID_REUSED,
                    )
                return self._tasks.get(repeated.task.name, repeated.task)
            if await self._store.task(name=spec.name) is not None:
                raise already_exists(f"there is a task named {spec.name} already", "task.name")
            most = max((machine.most_cores for machine in self.machines.values()), default=spec.cores)
            if spec.cores > most and self._settings.engine != "dask":
                # Whatever comes to Dask is new; others know their machines.
                sentence = f"task.cores: {spec.cores} are more than the {most} of the largest machine that there is"
                raise RequestError(409, sentence, "task.cores", code=ProblemCode.NEVER_FITS)
            if len(self._tasks) >= MOST_TASKS:
                raise RequestError(409, f"there are {MOST_TASKS} tasks that have not ended")
            now = self._clock()
            # Not to be guessed: it is in the names of what its attempts write.
            task = Task(_order(spec, user), secrets.token_hex(16), now)
            note = TaskNote("task-submitted", None, f"{spec.name} was submitted: {spec.cores} cores")
            await self._store.add_task(task, request.request_id, fingerprint, note)
            self._tasks[task.name] = task
        self._news.set()
        return task

    async def cancel(self, name: str) -> Task:
        """End a task, whether it has begun or not; harmless where it has ended.

        :raises RequestError: 404; 409, it cannot be read.
        """
        async with self._lock:
            task = await self.task(name)
            if name in self._unread:
                raise wrong_state(f"{name}: {task.sentence}", "name")
            changed = cancelled(task)
            if changed != task:
                await self._store.save_tasks([changed])
                self._tasks[name] = changed
        self._news.set()
        return changed

    async def task(self, name: str) -> Task:
        """:raises RequestError: 404."""
        stored = self._tasks.get(name)
        if stored is not None:
            return stored
        found = await self._store.task(name=name)
        if found is None:
            raise RequestError(404, f"there is no task named {name}", "name")
        return found.task

    async def wait(self, name: str, wait_s: float) -> Task:
        """A task, when it has ended or after ``wait_s``.

        :raises RequestError: 404.
        """
        found = await self.task(name)
        # Again: it may have ended while the store was asked. Of one that cannot be read nothing is heard all that time.
        if wait_s > 0 and name in self.unfinished and not self._hung_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ends.setdefault(name, asyncio.Event()).wait()
            return await self.task(name)
        return found

    def output(self, task: Task) -> str | None:
        """The file with what the last attempt that has begun prints."""
        path = file_of(self._settings, task)
        return str(path) if path is not None else None

    # --- the loop --------------------------------------------------------------------------------------------------

    async def _run(self, engine: Engine) -> None:
        while True:
            self._news.clear()
            try:
                await self._cycle(engine)
                self._say("")
            except EngineError as error:
                self._say(str(error))
            except StoreError as error:
                # The term ends, or the store comes back.
                log.warning("the tasks could not be looked after", why=str(error))
                self.stuck = f"the tasks could not be looked after: {error}"
            except Exception as error:
                log.exception("the tasks could not be looked after, by a defect of the manager")
                self.stuck = f"the tasks could not be looked after: a defect of the manager: {error!r}"
            try:
                async with asyncio.timeout(self._settings.period_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    def _say(self, trouble: str) -> None:
        self.stuck = ""
        if trouble != self.trouble:
            self.trouble = trouble
            log.info("the engine answers") if not trouble else log.warning("the engine cannot be used", why=trouble)

    async def _cycle(self, engine: Engine) -> None:
        self._check()
        if not self._ready:
            await engine.start()
            self._ready = True
        label, began = self._settings.label, self._monotonic()
        # Cancelled ones: where records are lost for good, cancelling their tasks has the others go on.
        kept = (task.begun_name(label) for task in self._tasks.values() if task.stop != "cancel")
        begun = {name for name in kept if name is not None}
        look = await engine.look({task.attempt_name(label) for task in self._tasks.values()}, begun)
        self._woken = False
        # Before the cores: a VM whose preemption ends in between counts as off, or as being preempted, never as whole.
        notices = self.notices()
        # Those that the engine has lost count too while a task runs there: their VMs may stand still, and go on.
        occupied = {task.occupies for task in self.unfinished.values() if task.occupies is not None}
        cores = await self._known.cores({*look.machines, *occupied})
        # In a thread, on a pool of its own: many tasks on many machines are not decided in an instant. Clients go on
        # meanwhile: what they submit gets its turn after this one, as does what they change.
        tasks, pool = dict(self._tasks), self._known.pool()
        (closed, foreign), closing = self.closed(look.machines), self._known.closing
        now = self._clock()
        paused = self._stood_still(self._known.paused, self._monotonic())
        look, self._silences = measured(look, self._silences, self._monotonic(), paused)
        machines = closed, notices, closing, paused, foreign
        beside = self._unrecorded, tuple(self._unread.values()), self._unbegun, self._settings.most_held
        made = await asyncio.to_thread(turn, tuple(tasks.values()), look, cores, pool, now, label, *machines, *beside)
        for machine, user in made.unrecorded.keys() - self._unrecorded.keys():
            log.warning(
                "a machine takes no tasks: attempts cannot write their records there", machine=machine, user=user
            )
        self._unrecorded, self._unbegun = made.unrecorded, made.unbegun
        async with self._lock:
            made = without(made, {name for name, task in tasks.items() if self._tasks[name] is not task}, label)
            await self._store.save_tasks(made.changed, self._notes(made.changed))
            self._take(made.changed)
            self.choices, self.machines, self.looked_at = made.choices, made.machines, self._clock()
            self.shown = look.machines
            self.known = frozenset(cores.keys() & look.machines.keys())
        # As long as the look took, too: else a burst would be mostly looks.
        submits_s = max(self._settings.period_s, self._monotonic() - began)
        why = await self._carry_out(engine, made.instructions, submits_s)
        orphans = await self._end_orphaned_attempts(made.orphaned_attempts, look)
        why += await self._carry_out(engine, orphans)
        # Not before: an engine that is away is told again.
        self._forgotten.update(one.attempt for one in orphans if isinstance(one, Forget))
        self.refused = why[0] if why else ""

    def _stood_still(self, paused: frozenset[str], now: float) -> frozenset[str]:
        """Machines that stand still, or did a moment ago: what runs there has not been heard of yet."""
        since = {name: at for name, at in self._paused_at.items() if 0.0 <= now - at <= SILENCE_LIMIT_S}
        self._paused_at = since | dict.fromkeys(paused, now)
        return frozenset(self._paused_at)

    def _take(self, changed: Iterable[Task]) -> None:
        for task in changed:
            if (came := outcome(self._tasks[task.name], task)) is not None:
                self._known.settle(*came)
            self.killed += max(task.preemptions - self._tasks[task.name].preemptions, 0)
            if task.final:
                self.ended[task.phase.value] += 1
                self._tasks.pop(task.name, None)
                if (end := self._ends.pop(task.name, None)) is not None:
                    end.set()
            else:
                self._tasks[task.name] = task

    def _notes(self, changed: Iterable[Task]) -> list[TaskNote]:
        notes = []
        kind: EventKind
        for task in changed:
            before = self._tasks[task.name]
            if task.final:
                kind, sentence = _ENDED[task.phase], f"{task.name}: {task.sentence}"
            elif task.preemptions > before.preemptions:
                kind = "task-preempted"
                sentence = f"{task.name} was broken off on {before.machine} ({before.sentence}): {task.sentence}"
            elif task.told_at is not None and task.told_at != before.told_at:
                kind, sentence = "task-warned", f"{task.name}: {task.sentence}"
            elif task.phase is TaskPhase.RUNNING and before.phase is not TaskPhase.RUNNING:
                kind, sentence = "task-started", f"{task.name} runs on {task.machine}, attempt {task.attempt}"
            else:
                continue
            log.info(kind, task=task.name, machine=task.machine or before.machine, why=task.sentence)
            notes.append(TaskNote(kind, task.machine or before.machine, sentence))
        return notes

    async def _carry_out(
        self, engine: Engine, instructions: Iterable[Instruction], submits_s: float = 0.0
    ) -> list[str]:
        """One after another; what is refused does not keep the others, an engine that is silent does.

        :param submits_s: for so long, and until machines change, it is given new attempts, which come last; the others,
            and releases of these that are left then, follow from the next look.
        :returns: why the engine refused what it did; but for tasks that it did not take, which say so themselves.
        """
        why: list[str] = []
        ordered = in_turn(instructions)
        absent = {one.attempt for one in ordered if isinstance(one, Submit)}
        until: float | None = None
        for instruction in ordered:
            if isinstance(instruction, Submit):
                now = self._monotonic()
                if until is None:
                    until = now + submits_s
                elif self._woken or now >= until:
                    self._news.set()
                    continue
            elif isinstance(instruction, Release) and (
                instruction.attempt in absent or (until is not None and self._woken)
            ):
                continue
            if isinstance(instruction, Submit | Release) and not self._still_wanted(instruction):
                continue
            self._check()
            try:
                await _do(engine, instruction)
                if isinstance(instruction, Submit):
                    absent.discard(instruction.attempt)
                elif isinstance(instruction, Release):
                    self._released_now(instruction.attempt)
            except EngineRefused as error:
                log.warning("the engine refused", instruction=type(instruction).__name__, why=str(error))
                if isinstance(instruction, Submit):
                    await self._not_taken(instruction.attempt, error)
                    continue
                why.append(str(error))
                if isinstance(instruction, Release) and (task := self._present(instruction.attempt)) is not None:
                    until_s = self._clock() + UNBEGUN_PAUSE_S
                    self._unbegun = {**self._unbegun, (instruction.machine, task.name): until_s}
        return why

    def _present(self, attempt: str) -> Task | None:
        """The task whose present attempt it is."""
        found = task_of(attempt, self._settings.label)
        assert found is not None, "named by us"
        task = self._tasks.get(found[0])
        return task if task is not None and task.attempt_name(self._settings.label) == attempt else None

    def _still_wanted(self, one: Submit | Release) -> bool:
        """Whether its task has not changed since the turn, as where its owner has cancelled it."""
        task = self._present(one.attempt)
        if task is None or task.stop:
            return False
        return isinstance(one, Submit) or task.phase is TaskPhase.RELEASED

    def _released_now(self, attempt: str) -> None:
        """Its machine has time to begin it from now on: what was carried out before took its own."""
        task = self._present(attempt)
        if task is not None and task.phase is TaskPhase.RELEASED:
            self._tasks[task.name] = replace(task, released_at=self._clock())

    async def _not_taken(self, attempt: str, error: EngineRefused) -> None:
        async with self._lock:
            task = self._present(attempt)
            # Its owner may want no more of it by now.
            if task is None or task.stop:
                return
            changed = refused(task, str(error), self._clock(), isinstance(error, EngineFull))
            await self._store.save_tasks([changed], self._notes([changed]))
            self._take([changed])

    async def _end_orphaned_attempts(self, orphaned_attempts: Iterable[str], look: Look) -> list[Instruction]:
        """Attempts that no unfinished task has or comes to: of tasks that have ended, and earlier ones."""
        instructions: list[Instruction] = []
        self._forgotten &= set(look.attempts)
        for attempt in orphaned_attempts:
            found = task_of(attempt, self._settings.label)
            if attempt in self._forgotten or found is None:
                continue
            name, key, _ = found
            if name in self._unread:
                continue  # perhaps its own, which is to go on
            stored = self._tasks.get(name) or _task(await self._store.task(name=name))
            if stored is None or stored.key != key:
                log.warning("the engine has an attempt of a task that is not in the store", attempt=attempt)
                self._forgotten.add(attempt)
            elif look.attempts[attempt].lives:
                instructions.append(Cancel(attempt))
            elif stored.final or look.attempts[attempt].state is AttemptState.ENDED:
                # Also one that the engine has lost: something of it may be left beside its records.
                instructions.append(Forget(attempt))
        return instructions


async def _do(engine: Engine, instruction: Instruction) -> None:
    match instruction:
        case Submit(attempt, order):
            await engine.submit(attempt, order)
        case Release(attempt, machine):
            await engine.release(attempt, machine)
        case Cancel(attempt, begun_too):
            await engine.cancel(attempt, begun_too)
        case Signal(attempt, signal, notice):
            await engine.signal(attempt, signal, notice)
        case Forget(attempt):
            await engine.forget(attempt)
        case SetCores(machine, cores):
            await engine.set_usable_cores(machine, cores)
        case Drain(machine, reason):
            await engine.drain(machine, reason)
        case Undrain(machine):
            await engine.undrain(machine)


def _task(stored: StoredTask | None) -> Task | None:
    return stored.task if stored is not None else None


def _fingerprint(spec: TaskSpec) -> str:
    """The body as it is stored; without what is younger than stored bodies, where it was not given."""
    younger = {
        "preemption_aversion": 0.0,
        "checkpoint_s": None,
        "checkpoint_signal": None,
        "checkpoint_grace_s": None,
    }
    return spec.model_dump_json(exclude={name for name, silent in younger.items() if getattr(spec, name) == silent})


def _order(spec: TaskSpec, user: str | None) -> TaskOrder:
    return TaskOrder(
        spec.name,
        spec.command,
        spec.cores,
        spec.duration_s,
        spec.restartable,
        spec.max_attempts,
        spec.preemption_aversion,
        spec.checkpoint_s,
        user,
        spec.checkpoint_signal.value if spec.checkpoint_signal is not None else None,
        spec.checkpoint_grace_s,
    )
