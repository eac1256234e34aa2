"""Runner of plans: a record before the first action and after every step, one plan a host, resumed after a crash.

Each plan runs in a task of its own, named after it and owned by `Operations`. A shutdown cancels the tasks;
the plans stay unfinished in the store and go on with the next start.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

import structlog

from cluster_manager.defaults import GONE_S
from cluster_manager.errors import LostLeadership, RequestError, StoreError, already_exists, wrong_state
from cluster_manager.execution import plan_log
from cluster_manager.execution.instruction_executor import InstructionExecutor
from cluster_manager.execution.plan_spans import of_plan, of_step, tell, traced, with_follow_ups
from cluster_manager.execution.plan_totals import PlanTotals
from cluster_manager.execution.running_plans import (
    acts,
    arrival_of,
    check_free,
    check_readable,
    defect,
    ended_after,
    is_at,
    is_repeated,
    looks,
    may_have_waited,
    operation_of,
    places,
    plan_id,
    stopwatch,
)
from cluster_manager.execution.waiting_vms import WaitingVMs
from cluster_manager.inventory.hosts import Host, Hosts
from cluster_manager.inventory.versions import ANY_VERSION, Precondition
from cluster_manager.plans.growth import Due, Growth, budget_for, has_harvest_vms, may_begin
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.placements import start_placement
from cluster_manager.plans.plans import (
    ChooseHosts,
    Effect,
    Finish,
    Note,
    Plan,
    ReinflationPending,
    SetPreempted,
    SetSpec,
    SetTarget,
    SetVM,
    SpawnFollowUp,
    Step,
    VMPhase,
    host_of,
)
from cluster_manager.plans.removals import (
    ReinflationPlan,
    RemovalPlan,
    removed_already,
    start_calling_off,
    start_reinflation,
    start_removal,
    start_target,
)
from cluster_manager.plans.returns import Returns, start_return, start_return_elsewhere
from cluster_manager.plans.victims import notices_of
from cluster_manager.store.rows import StoredPlan, StoredVM
from cluster_manager.store.store import Store
from ebbtide.deflation.allocations import check_target
from ebbtide.deflation.errors import InvalidField
from ebbtide.deflation.modes import HostEvent, Reaction, reaction
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ZERO
from ebbtide.matcher.match.notices import Notice
from ebbtide.messages.commands import TargetCommand
from ebbtide.messages.common import LARGEST, Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.requests import TargetRequest, VMRequest
from ebbtide.messages.vms import VMSpec

log = structlog.get_logger()

#: Seconds between two tries of the manager's own plans (owed removals and reinflations) on one host: the first pause,
#: which doubles with each failure, and the longest one.
RETRY_S = 30.0
LONGEST_RETRY_S = 900.0
#: Plans that one explanation tells of.
MOST_ACTING: Final = 20
#: Seconds between two looks at what a host's free room is for.
SHARE_S = 2.0


class Operations:
    """All plans of this manager.

    :param policy: the placement policy of requests that name none.
    :param clock: seconds since the epoch.
    :param gone_s: for how long a VM that comes back elsewhere waits for a host that has not answered in time.
    """

    def __init__(
        self, store: Store, hosts: Hosts, policy: PlacementPolicy, clock: Callable[[], float], gone_s: float = GONE_S
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._policy = policy
        self._clock = clock
        self._gone_s = gone_s
        self._executor: InstructionExecutor | None = None
        self._running: dict[str, StoredPlan] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Between the look at the store and the record of a new plan no other request may add one.
        self.admission = asyncio.Lock()
        #: VMs to be removed as soon as their host answers: host by name. And when a host may be tried again, after what
        #: pause.
        self._owed: dict[str, str] = {}
        self._retry: dict[str, tuple[float, float]] = {}
        self._growth = Growth()
        self._returns = Returns()
        self.waiting = WaitingVMs(store)
        #: Called when a preemption of a VM has begun, or is over.
        self.on_notice: Callable[[], None] = lambda: None
        #: When a host's free room may be shared again.
        self._share_at: dict[str, float] = {}
        self._stopping = False
        self.totals = PlanTotals()

    async def start(self, executor: InstructionExecutor) -> None:
        """Resume what an earlier run left. Its hosts are held before any new plan can ask for them."""
        self._executor = executor
        self._owed = await self._store.owed_removals()
        await self.waiting.read()
        plans = await self._store.unfinished_plans()
        for running in sorted(plans, key=lambda running: may_have_waited(running.state)):
            state, host = running.state, host_of(running.state.instruction)
            if host is not None and not looks(state) and not self._hosts.locks.is_busy(host):
                await self._hosts.locks.hold(state.id, host)
        for running in plans:
            log.info("plan resumed", plan=running.state.id, vm=running.state.vm, at=running.state.instruction.do)
            self._run(running, resumed=True)

    async def stop(self) -> None:
        """Cancel and await every plan's task; the store keeps where they were."""
        self._stopping = True
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def begin(self, request_id: str, fingerprint: str, prepare: Callable[[], Awaitable[Plan]]) -> Operation:
        """Record and run the plan that ``prepare`` makes, unless this request is known already.

        :raises RequestError: as ``prepare`` does; 409 where the request id is another's.
        :raises LostLeadership: this manager ends, or its term has.
        """
        intake = self._hosts.intake
        intake.begin(request_id)
        try:
            async with self.admission:
                if (known := await self._known(request_id, fingerprint)) is not None:
                    return known
                return await self._record(await prepare(), fingerprint)
        finally:
            intake.end(request_id)

    async def _record(self, state: Plan, fingerprint: str) -> Operation:
        """Store a plan, then run it."""
        operation = self._launch(await self._store.add_plan(traced(state), fingerprint))
        if isinstance(state, RemovalPlan):
            # It sees to a removal that is owed, too.
            self._owed.pop(state.vm, None)
        if state.vm in self.waiting.names:
            await self.waiting.read()
        return operation

    async def create(self, request: VMRequest, acquired: bool = False) -> Operation:
        """Place a VM, for the acquirer if that asks. Raises `RequestError`: 409 its name or request id is taken."""

        async def prepare() -> Plan:
            vm, request_id = request.vm, request.request_id
            await self.check_name(vm.name)
            policy = request.policy or self._policy
            return start_placement(plan_id("create", vm.name), request_id, vm, request.deadline_s, policy, acquired)

        # What earlier versions did not know is no part of it, so that their requests can be repeated.
        younger = {"on_preemption", "preemption_notice_s", "steady", "labels"} - request.vm.model_fields_set
        fingerprint = f"create {request.model_dump_json(exclude={'request_id': True, 'dry_run': True, 'vm': younger})}"
        return await self.begin(request.request_id, fingerprint, prepare)

    async def delete(self, name: str, request_id: str, precondition: Precondition = ANY_VERSION) -> Operation:
        """Delete a VM, or call its placement off.

        Raises `RequestError`: 404 unknown, 409 while another plan is at work on it, 412 changed.
        """

        async def prepare() -> Plan:
            row, new_id = await self.deletable(name, precondition), plan_id("delete", name)
            if row.phase is VMPhase.PLACING:
                check_readable(await self._store.plan(row.request_id))
                return start_calling_off(new_id, request_id, name, row.request_id)
            if row.host is None:
                return removed_already(new_id, request_id, name)
            return start_removal(new_id, request_id, name, row.host, row.phase, owed=row.owes_removal)

        return await self.begin(request_id, f"delete {name}", prepare)

    async def target(self, name: str, wanted: TargetRequest, precondition: Precondition = ANY_VERSION) -> Operation:
        """Bring a VM to a size. Raises `RequestError`: 404 unknown, 409 old generation, 412, 503 silent host."""

        async def prepare() -> Plan:
            row = await self.existing(name)
            precondition(row)
            if row.phase is not VMPhase.RUNNING or row.host is None:
                raise wrong_state(f"{name} is {row.phase}, not running", "name")
            command, newest = self.target_command(row, wanted), self._generation(row)
            if command.generation < newest:
                sentence = f"generation: {command.generation} is older than {newest}, which {name} has"
                raise RequestError(409, sentence, "generation", code=ProblemCode.SUPERSEDED)
            if why := self._hosts.why_not_ready(row.host):
                raise RequestError(503, f"{row.host}, where {name} runs, {why}", code=ProblemCode.HOST_UNAVAILABLE)
            return start_target(plan_id("target", name), name, row.host, wanted, command.generation)

        return await self.begin(wanted.request_id, f"target {name} {wanted.fingerprint()}", prepare)

    async def check_name(self, name: str) -> None:
        """Whether a VM may be created by this name. Raises `RequestError`: 409 where it is taken."""
        for row in await self._store.vms(name):
            if row.host is not None or row.phase is not VMPhase.FAILED:
                where = f" on {row.host}" if row.host else ""
                said = f"vm.name: {name} exists already ({row.phase}{where})"
                raise already_exists(said, "vm.name")

    async def deletable(self, name: str, precondition: Precondition) -> StoredVM:
        """The row of a VM that may be deleted; one that is being adopted has a host. Raises as `delete`."""
        row = await self.existing(name)
        precondition(row)
        if row.phase is not VMPhase.PLACING or row.host is not None:
            check_free(row, self.changing(name))
        return row

    def target_command(self, row: StoredVM, wanted: TargetRequest) -> TargetCommand:
        """What a VM's host would be asked for now, with what the request leaves out. Raises InvalidField."""
        reported = self._hosts.vm(row.host, row.name)
        allocation = reported.allocation() if reported is not None else row.spec.allocation(ZERO)
        size = wanted.target.size_of(allocation)
        check_target(allocation, size)
        generation = wanted.generation or self._generation(row) + 1
        if generation > LARGEST:
            raise RequestError(409, "generation: there is none left", "generation", code=ProblemCode.SUPERSEDED)
        return TargetCommand(**wanted.model_dump() | {"generation": generation, "target": Vector.of(size)})

    def _generation(self, row: StoredVM) -> int:
        """Of the latest target of a VM, and of those on their way to it."""
        reported = self._hosts.vm(row.host, row.name)
        on_their_way = (running.state.instruction for running in self._running.values() if running.state.vm == row.name)
        sent = (instruction.generation for instruction in on_their_way if isinstance(instruction, SetTarget))
        return max(row.generation, reported.generation if reported is not None else 0, *sent)

    async def operation(self, request_id: str, wait_s: float) -> Operation | None:
        """The operation of a request, when it has ended or after ``wait_s``; None if there is none."""
        running = next((r for r in self._running.values() if r.state.request_id == request_id), None)
        if running is not None:
            try:
                async with asyncio.timeout(wait_s):
                    # A shutdown ends the plan's task, and with it the news, before the plan itself ends.
                    while running.state.id in self._running and not running.state.finished:
                        await running.news.wait()
            except TimeoutError:
                pass
            return self.view(running)
        if (plan := await self._store.plan(request_id)) is not None and not plan.state.finished:
            await asyncio.sleep(wait_s)  # it cannot be read, so that nothing comes of it
        return self.view(plan) if plan is not None else None

    async def sold(self) -> dict[str, dict[str, VMSpec]]:
        """By host, as what the VMs are sold that are there by the manager's record, where that can be read."""
        found: dict[str, dict[str, VMSpec]] = {}
        for row in await self._store.vms():
            found.setdefault(row.host or "", {}).update({} if row.unread else {row.name: row.spec})
        return found

    def changing(self, name: str) -> str | None:
        """The request whose plan resizes or releases a VM now: neither has a phase of its own."""
        plans = (running.state for running in self._running.values() if not running.state.finished)
        return next((p.request_id for p in plans if p.vm == name and p.kind in ("resize", "release")), None)

    def changed_vms(self) -> frozenset[str]:
        """The VMs that a plan is about now."""
        plans = (running.state for running in self._running.values() if not running.state.finished)
        return frozenset(plan.vm for plan in plans if plan.vm is not None)

    def notices(self) -> dict[str, Notice]:
        """The VMs that are being preempted now, and since when."""
        return {
            vm: Notice(running.updated_at, notice_s, running.since_step_s())
            for running in self._running.values()
            for vm, notice_s in notices_of(running.state.instruction).items()
        }

    def plans_at(self, host: str) -> list[Plan]:
        """What is at work on a host or waits for it."""
        plans, held_by = (running.state for running in self._running.values()), self._hosts.locks.held_by
        return [state for state in plans if is_at(state, host, held_by(state.id))]

    def hosts_at_work(self) -> frozenset[str]:
        """The hosts on which plans act, that they wait for, have chosen room on, or will come to."""
        held_by, chosen_by = self._hosts.locks.held_by, self._hosts.availability.chosen_by
        plans = [running.state for running in self._running.values()]
        found = {place for state in plans for place in (*places(state, held_by(state.id)), chosen_by(state.id))}
        # A move that reads its source still has chosen nothing yet, and will all the same go where it was told to.
        moving = (state for state in plans if isinstance(state, MovePlan) and not state.finished)
        found |= {host for state in moving if state.stage == "source" for host in state.hosts_left}
        return frozenset(place for place in found if place is not None)

    def under_way(self) -> Counter[str]:
        """How many plans of each kind have not ended."""
        return Counter(running.state.kind for running in self._running.values() if not running.state.finished)

    def rebalancing(self) -> int:
        """How many moves of the manager's own are under way."""
        plans = (running.state for running in self._running.values())
        return sum(not state.finished and isinstance(state, MovePlan) and bool(state.why) for state in plans)

    def comes_first(self) -> str:
        """What is at work before which the manager moves nobody by itself; empty: nothing."""
        if notices := sorted(self.notices()):
            return f"{notices[0]} is being preempted"
        plans = (running.state for running in self._running.values())
        choosing = (plan.vm for plan in plans if not plan.finished and isinstance(plan.instruction, ChooseHosts))
        return next((f"a host is looked for for {vm}" for vm in choosing), "")

    def acting_on(self, name: str, host: str | None) -> tuple[str, ...]:
        """What the plans do that are at work on a VM now or wait for its host, a sentence each."""
        held_by, chosen_by = self._hosts.locks.held_by, self._hosts.availability.chosen_by
        plans = [running.state for running in self._running.values() if not running.state.finished]
        return tuple(
            acts(state, name, host, host is not None and held_by(state.id) == host)
            for state in plans
            if state.vm == name
            or (host is not None and (is_at(state, host, held_by(state.id)) or chosen_by(state.id) == host))
        )[:MOST_ACTING]

    async def drop(self, host: str, plans: Iterable[Plan]) -> None:
        """See to these no more, nor to what is to be removed on a host: it does not come back."""
        self._owed = {name: where for name, where in self._owed.items() if where != host}
        tasks = [self._tasks[state.id] for state in plans if state.id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._growth.forget(host)
        self._returns.forget(host)
        self._retry.pop(host, None)
        self._share_at.pop(host, None)

    async def run_deferred(self, host: str) -> None:
        """On a report: remove and reinflate what could not be done while the host was away."""
        known = self._hosts.get(host)
        if known is None or self._stopping:
            return
        now, reserved = asyncio.get_running_loop().time(), self._hosts.availability.reserved(host)
        busy = self._hosts.locks.is_busy(host)
        shares = not busy and not self._owes(host) and now >= self._share_at.get(host, now)
        # Also of a host that is busy: what was shrunk meanwhile is not to grow at once.
        waiting, fits_elsewhere = self.waiting.specs(host), partial(self._fits_elsewhere, host)
        unsure = self.waiting.unsure(host)
        queue = self._returns.observe(known.report, reserved, waiting, now, fits_elsewhere, unsure)
        # Who comes back comes before those that only grow.
        kept = queue.kept(now) if queue is not None else ZERO
        growing = sum(isinstance(running.state, ReinflationPlan) for running in self._running.values())
        grows = shares and may_begin(growing, self._hosts.intake.commanded)
        due = self._growth.due(known.report, reserved + kept, now, decide=grows)
        if shares:
            if queue is not None and (name := queue.due(now)) is not None:
                queue.tried(now, name)
                await self._bring_back(name, host)
            elif queue is not None and (name := queue.due_elsewhere(now)) is not None:
                queue.tried(now, name, elsewhere=True)
                await self._bring_back(name, host, elsewhere=True)
            elif self._hosts.is_ready(host):
                await self._share(host, known, due)
        if shares or busy or not self._owes(host):
            return
        async with self.admission:
            # Again: another task may have seen to it meanwhile.
            if not self._owes(host) or self._hosts.locks.is_busy(host):
                return
            pause_s = min(self._retry[host][1] * 2, LONGEST_RETRY_S) if host in self._retry else RETRY_S
            self._retry[host] = (asyncio.get_running_loop().time() + pause_s, pause_s)
            # One that was refused is owed anew, behind the others.
            owed = [name for name, where in self._owed.items() if where == host]
            if owed:
                new_id = plan_id("delete", owed[0])
                await self._record(start_removal(new_id, new_id, owed[0], host), new_id)
            else:
                state = start_reinflation(plan_id("reinflate", host), host)
                await self._record(state, state.id)

    def _fits_elsewhere(self, home: str, spec: VMSpec) -> bool:
        """Whether a host on which nobody waits has room for all of a VM."""
        return self._executor is not None and self._executor.ranking.has_room(spec, {home, *self.waiting.hosts})

    async def _bring_back(self, name: str, host: str, elsewhere: bool = False) -> None:
        """Start a preempted VM again, unless its owner has done something with it meanwhile."""
        async with self.admission:
            for row in await self._store.vms(name):
                free = row.host == host and not (row.unread or row.owes_removal) and self.changing(name) is None
                if row.phase is VMPhase.PREEMPTED and free:
                    new_id = plan_id("return", name)
                    here = partial(start_return, perhaps=row.perhaps)
                    back = partial(start_return_elsewhere, gone_s=self._gone_s) if elsewhere else here
                    await self._record(back(new_id, row.spec, host), new_id)

    async def _share(self, host: str, known: Host, due: Due | None) -> None:
        """Have VMs grow into room that has appeared; what no VM has a claim to is for harvest VMs."""
        now = asyncio.get_running_loop().time()
        self._share_at[host] = now + SHARE_S
        if due is not None:
            self._growth.tried(host, due, now)
            async with self.admission:
                state = start_reinflation(plan_id("reinflate", host), host, due.vms, Vector.of(due.room))
                await self._record(state, state.id)
        elif has_harvest_vms(known.report) and f"budget of {host}" not in self._tasks:
            task = asyncio.create_task(self._grant(host), name=f"budget of {host}")
            self._tasks[task.get_name()] = task
            task.add_done_callback(lambda done: self._tasks.pop(done.get_name(), None))

    async def _grant(self, host: str) -> None:
        """Grant the next budget, never while a plan holds the host."""
        assert self._executor is not None, "started"
        known = self._hosts.get(host)
        if known is None or self._hosts.locks.is_busy(host):
            return
        report, reserved = known.report, self._hosts.availability.reserved(host)
        async with self._hosts.locks.of(host):
            try:
                await self._executor.grant(host, partial(budget_for, report, reserved))
            except (StoreError, InvalidField) as error:
                # The store has reported it, or the host reports VMs that cannot be; no client waits for this.
                log.warning("budget not granted", host=host, why=str(error))

    def _owes(self, host: str) -> bool:
        """Whether a host has something to be removed or reinflated that need not wait, and would not refuse."""
        known, now = self._hosts.get(host), asyncio.get_running_loop().time()
        not_before, _ = self._retry.get(host, (now, 0.0))
        if known is None or self._stopping or now < not_before or not self._hosts.is_ready(host):
            return False
        # A host whose mode lets nothing grow would refuse: it is asked when it has another mode.
        grows = known.owes_reinflation and reaction(known.report.mode, HostEvent.REINFLATE) is Reaction.DONE
        return grows or host in self._owed.values()

    # --- running -----------------------------------------------------------------------------------------------------

    def go_on(self, rest: Plan) -> None:
        """With a plan that is stored and continues another one."""
        self._launch(StoredPlan(rest, rest.id, now := self._clock(), now))

    def _launch(self, plan: StoredPlan) -> Operation:
        # A plan that was stored while its term ended is resumed in the next one.
        if not plan.state.finished and not self._stopping:
            self._run(plan, resumed=False)
        return self.view(plan)

    def _run(self, running: StoredPlan, resumed: bool) -> None:
        plan_id = running.state.id
        running.since_step_s = stopwatch(running.updated_at, self._clock)
        self._running[plan_id] = running
        self._reserve(running)
        task = asyncio.create_task(of_plan(running, resumed, self._drive), name=f"plan {plan_id} of {running.state.vm}")
        self._tasks[plan_id] = task

    async def _drive(self, running: StoredPlan, resumed: bool) -> None:
        plan_id = running.state.id
        elapsed_s = running.elapsed_s = stopwatch(running.started_at, self._clock)
        try:
            while not running.state.finished:
                if not isinstance(running.state, ReinflationPlan):  # nobody waits for one
                    self._hosts.intake.begin(plan_id)
                try:
                    step = await self._turn(running, resumed, elapsed_s)
                except StoreError:
                    raise
                except Exception as error:
                    log.exception("plan failed by a defect of the manager", plan=plan_id, vm=running.state.vm)
                    step = defect(running.state, error)
                resumed = False
                try:
                    await self._save(running, step, elapsed_s())
                except StoreError:
                    raise
                except Exception as error:
                    if running.state.finished:
                        raise
                    log.exception("a step was not stored, by a defect", plan=plan_id, vm=running.state.vm)
                    await self._save(running, defect(running.state, error), elapsed_s())
        except StoreError as error:
            # Whether this step was stored is unknown: the next term goes on from what the store says.
            log.warning("plan left where it is", plan=plan_id, vm=running.state.vm, why=str(error))
            self._store.give_up(str(error))
        except Exception:
            log.exception("plan left where it is, by a defect of the manager", plan=plan_id, vm=running.state.vm)
        finally:
            self._hosts.intake.end(plan_id)
            self._hosts.locks.release(plan_id)
            self._hosts.availability.reserve(plan_id, None)
            if isinstance(end := running.state.instruction, Finish) and end.state is OperationState.DONE:
                # The host answers: what else it owes need not wait.
                self._retry.pop(running.state.host or "", None)
            self._running.pop(plan_id, None)
            if self._executor is not None:
                self._executor.told.pop(plan_id, None)
                self._executor.called_off.discard(running.state.request_id)
            self._tasks.pop(plan_id, None)
            running.news.set()

    async def _turn(self, running: StoredPlan, resumed: bool, elapsed_s: Callable[[], float]) -> Step:
        """Carry out the plan's instruction and decide the next one."""
        assert self._executor is not None, "started"
        with of_step(running.state, resumed) as one:
            event = await self._executor.perform(running.state, resumed, elapsed_s)
            tell(one, event)
        return running.state.next_step(event)

    async def _save(self, running: StoredPlan, step: Step, elapsed_s: float) -> None:
        """Store the next state with its effects; only then does the plan go on."""
        step = Step(ended_after(step.state, elapsed_s), with_follow_ups(step.effects))
        at = await self._store.save_step(step.state, step.effects)
        said, notices = len(running.state.progress), notices_of(running.state.instruction)
        self.totals.add(running.state, step, elapsed_s)
        running.state, running.updated_at, running.since_step_s = step.state, at, stopwatch(at, self._clock)
        self._reserve(running)
        await self._remember(step.effects)
        if notices_of(step.state.instruction) != notices:
            self.on_notice()
        plan_log.tell(step, step.state.progress[said:])
        news, running.news = running.news, asyncio.Event()
        news.set()

    def _reserve(self, running: StoredPlan) -> None:
        """The room that a running placement has chosen is no other's to count on."""
        state = running.state
        arrival = None if state.finished else arrival_of(state, running.started_at)
        self._hosts.availability.reserve(state.id, state.host if arrival is not None else None, arrival)

    async def _remember(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReinflationPending(host, owed):
                    if (known := self._hosts.get(host)) is not None:
                        known.owes_reinflation = owed
                case SetVM(name=name, owed=owed) if owed or name in self._owed:
                    # The row may be another VM's by now, which this plan has not changed: the store says what is owed.
                    async with self.admission:
                        where = (await self._store.owed_removals()).get(name)
                        self._owed.pop(name, None)
                        if where is not None:
                            self._owed[name] = where
                case SpawnFollowUp(state=rest):
                    self.go_on(rest)
                case Note() | SetSpec() | SetVM() | SetPreempted():
                    pass
        if any(
            isinstance(effect, SetPreempted)
            or (isinstance(effect, SetVM | SetSpec) and effect.name in self.waiting.names)
            or (isinstance(effect, SetVM) and (effect.unless_preempted or effect.phase is VMPhase.PREEMPTED))
            for effect in effects
        ):
            await self.waiting.read()

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _known(self, request_id: str, fingerprint: str) -> Operation | None:
        """The same request again gets the same operation; the same id for another request is refused."""
        if self._stopping:
            raise LostLeadership("the manager is shutting down, or leads no more")
        plan = await self._store.plan(request_id)
        if plan is None:
            return None
        if not is_repeated(plan.fingerprint, fingerprint):
            why = f"request_id: {request_id} was used for another request"
            raise RequestError(409, why, "request_id", code=ProblemCode.REQUEST_ID_REUSED)
        running = self._running.get(plan.state.id)
        return self.view(running or plan)

    async def existing(self, name: str) -> StoredVM:
        """:raises RequestError: 404, no VM has this name."""
        for row in await self._store.vms(name):
            return row
        raise RequestError(404, f"there is no VM named {name}", "name")

    def view(self, plan: StoredPlan) -> Operation:
        """A plan as clients see it."""
        told = self._executor.told if self._executor is not None else {}
        return operation_of(plan, self._clock(), *told.get(plan.state.id, (0, ())))
