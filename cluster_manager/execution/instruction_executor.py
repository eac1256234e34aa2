"""Executor of one instruction of a plan, which answers with an event: the only place where plans meet the world."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import structlog

from cluster_manager.defaults import MoveFirst
from cluster_manager.errors import AgentError, AgentFailed, AgentRefused, AgentUnreachable, RequestError
from cluster_manager.execution.clearing import brought_meanwhile
from cluster_manager.execution.host_ranking import HostRanking
from cluster_manager.execution.in_place_of_hosts import runs_on, was_gone
from cluster_manager.execution.lifecycle_commands import lifecycle_command
from cluster_manager.execution.running_plans import arrival_of, clears_up, how_ended, looks
from cluster_manager.inventory.agents import Agents
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import (
    Arrival,
    AwaitGuests,
    AwaitHost,
    AwaitPlan,
    CalledOff,
    ChooseHosts,
    Commanding,
    Create,
    Depart,
    EndedTogether,
    Event,
    Finish,
    Forgotten,
    HostBack,
    HostFailed,
    HostRead,
    MoveAway,
    Moved,
    OperationEnded,
    Plan,
    Preempt,
    PreemptTogether,
    ReadHost,
    Reclaim,
    Reinflate,
    Release,
    Remove,
    RoomPlan,
    SetTarget,
    host_of,
    preempted_by,
)
from cluster_manager.plans.report_queries import (
    not_yet,
    room_for,
    room_to_share,
    still_silent,
)
from cluster_manager.plans.waits import hold_s, lined_up
from cluster_manager.settings import AgentLimits
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.waiting import MOVE_MIB_S
from ebbtide.messages.commands import (
    Budget,
    Command,
    CreateCommand,
    ReclaimCommand,
    ReinflateCommand,
    TargetCommand,
    WithdrawCommand,
)
from ebbtide.messages.common import LARGEST, PartialVector, Vector
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMState

log = structlog.get_logger()

#: For giving room back, seconds.
REINFLATION_DEADLINE_S = 60.0
#: How long to wait at the most before it is looked whether a host is silent, or a plan has ended, in seconds.
LOOK_S = 1.0
#: How often it is looked whether a preemption is still needed, in seconds.
WATCH_S = 1.0
#: How often a harmless command is sent to an agent that forgets it.
REPEATS = 3
#: Sentences of a host's progress that are shown with a plan's own.
MOST_TOLD = 500


@dataclass(slots=True)
class _Sides:
    """What several commands to one host at the same time have in common."""

    #: Held while one is sent: they arrive in the order in which they count.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Why they lead to nothing; empty as long as they may.
    why_not: str = ""


class InstructionExecutor:
    """Carries out instructions, each while its plan holds the host.

    :param epoch: of this manager; agents refuse commands of a lower one.
    """

    def __init__(
        self,
        agents: Agents,
        hosts: Hosts,
        store: Store,
        limits: AgentLimits,
        generator: np.random.Generator,
        epoch: int,
    ) -> None:
        self._agents = agents
        self._hosts = hosts
        self._store = store
        self._limits = limits
        self.ranking = HostRanking(agents, hosts, generator)
        self._epoch = epoch
        #: Counts the commands; a host never has two under way, so a lower number at an agent is one that comes late.
        self._orders = itertools.count(1)
        #: Requests for placements that their owners have called off, and how to end the wait of one for a host.
        self.called_off: set[str] = set()
        self._waits: dict[str, asyncio.Timeout] = {}
        #: By plan: how far its host is with a command that takes long, and after which of its own sentences that comes.
        self.told: dict[str, tuple[int, tuple[str, ...]]] = {}
        #: How a VM moves away for a placement (`Lifecycle.move_away`), and which ones do before one is preempted.
        self.move_away: Callable[[str, MoveAway, str, float], Awaitable[Operation]] | None = None
        self.move_first: MoveFirst = "never"
        self.move_mib_s = MOVE_MIB_S

    async def perform(self, state: Plan, resumed: bool, elapsed_s: Callable[[], float]) -> Event:
        """Carry out the state's instruction.

        :param resumed: whether an earlier run of the manager may have begun it.
        """
        event = await self._perform(state, resumed, elapsed_s)
        # What it has begun at a host comes to its end before.
        looking = isinstance(state.instruction, ChooseHosts | ReadHost | AwaitGuests | MoveAway)
        return CalledOff(elapsed_s()) if state.request_id in self.called_off and looking else event

    def call_off(self, placement: str) -> None:
        """Have the placement of a request end as soon as it can.

        What it does next for its VM is decided by its plan (`CalledOff`).
        """
        self.called_off.add(placement)
        if (wait := self._waits.get(placement)) is not None:
            wait.reschedule(asyncio.get_running_loop().time())

    async def _perform(self, state: Plan, resumed: bool, elapsed_s: Callable[[], float]) -> Event:
        instruction = state.instruction
        if host_of(instruction) is None:
            self._hosts.locks.release(state.id)
        match instruction:
            case ChooseHosts():
                await self._hosts.settle()
                chosen = self.ranking.choose(state, instruction, elapsed_s())
                if not chosen.hosts:
                    return chosen
                first, *rest = chosen.hosts
                # Before any wait: no other placement may count on this room.
                arrival = arrival_of(state, time.time() - elapsed_s())
                self._hosts.availability.reserve(state.id, first, arrival)
                if isinstance(state, PlacementPlan):
                    state = lined_up(state, chosen).having(hosts_left=tuple(rest))
                return replace(chosen, first=await self._read(state, first, elapsed_s))
            case ReadHost(host=host):
                return await self._read(state, host, elapsed_s)
            case AwaitHost(host=host, until_s=until_s):
                while True:
                    await asyncio.sleep(self._limits.retry_s)
                    if self._hosts.is_ready(host):
                        return HostBack(elapsed_s())
                    if until_s is not None and elapsed_s() >= until_s:
                        await self._hosts.settle()  # after a start all are silent
                        if not self._hosts.is_ready(host):
                            return HostFailed(elapsed_s(), f"{host} does not report", uncertain=True)
            case AwaitGuests(host=host, vms=vms, until_s=until_s):
                before = known = self._hosts.get(host)
                while before is not None and known is not None and elapsed_s() < until_s:
                    if state.request_id in self.called_off:
                        break
                    if not self._hosts.is_ready(host) or not still_silent(before.report, known.report, vms):
                        break
                    await self._hosts.heard(min(until_s - elapsed_s(), LOOK_S))
                    known = self._hosts.get(host)
                return HostBack(elapsed_s())
            case MoveAway() as move:
                return await self._move_away(state, move, elapsed_s)
            case AwaitPlan(request_id=request_id):
                self.call_off(request_id)
                while True:
                    placement = await self._store.plan(request_id)
                    if placement is None or placement.state.finished:
                        self.called_off.discard(request_id)
                        return how_ended(elapsed_s(), placement)
                    # No report tells of its end, and hundreds of hosts report all the time.
                    await asyncio.sleep(LOOK_S)
            case PreemptTogether(victims=victims):
                sides = _Sides()

                async def one(victim: Preempt | Remove) -> Event:
                    event = await self._command(state, victim, resumed, elapsed_s, sides)
                    if not isinstance(event, OperationEnded) or event.operation.state is OperationState.FAILED:
                        sides.why_not = f"{victim.vm} cannot go"
                    return event

                # Before they are sent side by side: one plan must not wait for itself.
                await self._hosts.locks.hold(state.id, instruction.host)
                tasks = [asyncio.create_task(one(victim), name=f"{victim.do} {victim.vm}") for victim in victims]
                try:
                    ended = await asyncio.gather(*tasks)
                finally:
                    # Where one raises, the others would go on for a plan that has ended.
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                return EndedTogether(elapsed_s(), tuple(ended))
            case Finish():
                raise ValueError("a plan that has ended has nothing to carry out")
            case _:
                return await self._command(state, instruction, resumed, elapsed_s)

    async def grant(self, host: str, budget_of: Callable[[int], Budget | None]) -> None:
        """Give a host the next budget for its harvest VMs, if there is one; one that fails is given another time.

        :param budget_of: the budget, given this manager's epoch.
        """
        budget = budget_of(self._epoch)
        if budget is None:
            return
        # Counted with the commands: one that comes late, after the reclaim that revoked it, grants nothing.
        budget = budget.model_copy(update={"order": next(self._orders)})
        try:
            await self._agents.grant(host, budget)
            await self.refresh(host)
        except AgentError as error:
            log.info("budget not granted", host=host, why=str(error))

    async def _read(self, state: Plan, host: str, elapsed_s: Callable[[], float]) -> HostRead | HostFailed:
        """Take the host for the plan and ask its agent; a plan that looks for a place goes on when its time is up."""
        if not await self._hold(state, host, self._may_wait_s(state, elapsed_s())):
            why = f"{host} is busy with another plan"
            return HostFailed(elapsed_s(), why, uncertain=False, code=ReasonCode.FAILED, busy=True)
        if clears_up(state) and (why := await brought_meanwhile(self._store, state, host)):
            return HostFailed(elapsed_s(), why, uncertain=False, code=ReasonCode.FAILED)
        try:
            report = await self._agents.host(host)
        except AgentError as error:
            return HostFailed(elapsed_s(), str(error), not isinstance(error, AgentRefused), code=error.reason)
        await self._hosts.take(report)
        recorded = await self._store.recorded(host)
        proven, queue = self._agents.proven(report), self._queue(state, host)
        found = HostRead(elapsed_s(), proven, recorded, at=time.time(), queue=queue)
        if not isinstance(state, PlacementPlan) or not (state.purpose == "preempt" or not_yet(report)):
            return found
        sold = await self._store.sold(host)
        rooms = self.ranking.rooms(host) if state.purpose == "preempt" and self.move_first != "never" else None
        elsewhere, copies = self.ranking.elsewhere(state, host), self.move_first == "copied"
        # One of which cannot be read how it is to go is not to go.
        recorded &= sold.keys()
        mib_s = self.move_mib_s
        return replace(
            found, recorded=recorded, sold=sold, elsewhere=elsewhere, rooms=rooms, copies=copies, move_mib_s=mib_s
        )

    def _may_wait_s(self, state: Plan, elapsed_s: float) -> float | None:
        """For how long a plan waits for the host that it is to read; None: for as long as it takes."""
        if not isinstance(state, RoomPlan) or not looks(state):
            return None
        if not isinstance(state, PlacementPlan):
            return max(state.deadline_s, 1.0)
        others_free = not all(self._hosts.locks.is_busy(host) for host in state.hosts_left)
        return hold_s(state, elapsed_s, others_free)

    async def _hold(self, state: Plan, host: str, limit_s: float | None) -> bool:
        """Take the host for the plan; whether it was free in time, and the plan was not called off meanwhile."""
        if state.request_id in self.called_off:
            return False
        try:
            async with asyncio.timeout(None) as self._waits[state.request_id]:
                return await self._hosts.locks.hold(state.id, host, limit_s)
        except TimeoutError:
            return False
        finally:
            del self._waits[state.request_id]

    def _queue(self, state: Plan, host: str) -> tuple[Arrival, ...]:
        """Who waits for the host that a plan has."""
        return self._hosts.availability.queue(host, but=state.id)

    async def _move_away(self, state: Plan, move: MoveAway, elapsed_s: Callable[[], float]) -> Moved:
        """Have a VM move, and wait for that, unless the placement is called off meanwhile."""
        assert self.move_away is not None, "hosts were offered to it"
        assert state.vm is not None, "a placement"
        if state.request_id in self.called_off:
            return Moved(elapsed_s(), False, f"{move.vm} is to move no more")
        request_id = f"{state.id}.{move.step}"
        try:
            async with asyncio.timeout(None) as self._waits[state.request_id]:
                wait_s = max(move.until_s - elapsed_s(), 0.0)
                ended = await self.move_away(request_id, move, state.vm, wait_s)
        except RequestError as error:
            return Moved(elapsed_s(), False, f"{move.vm} does not move to {move.to}: {error}")
        except TimeoutError:
            return Moved(elapsed_s(), False, f"{move.vm} is not waited for any more")
        finally:
            del self._waits[state.request_id]
        if ended.state is OperationState.RUNNING:
            return Moved(elapsed_s(), False, f"{move.vm} is still moving to {move.to}: {ended.sentence}")
        return Moved(elapsed_s(), ended.state is OperationState.DONE, ended.sentence)

    # --- commands ----------------------------------------------------------------------------------------------------

    async def _command(
        self,
        state: Plan,
        instruction: Commanding,
        resumed: bool,
        elapsed_s: Callable[[], float],
        sides: _Sides | None = None,
    ) -> Event:
        request_id = f"{state.id}.{instruction.step}"
        host, sides = instruction.host, sides or _Sides()
        came_s, deadline_s, limit_s = elapsed_s(), 0.0, None
        if isinstance(instruction, SetTarget):
            deadline_s = instruction.deadline_s
            # It waits for its host in its own time; one that was begun by an earlier run comes to its end.
            limit_s = None if resumed else max(max(deadline_s, 1.0) - came_s, 0.0)
        if not await self._hosts.locks.hold(state.id, host, limit_s):
            why = f"{host} was busy with another plan until the deadline"
            return HostFailed(elapsed_s(), why, uncertain=False, code=ReasonCode.FAILED, busy=True)
        waited_s = elapsed_s() - came_s
        # A second reclaim takes twice, a second start may find the first: only the plan can tell after a new reading.
        harmless, taken_on = not isinstance(instruction, Reclaim | Create), False
        # Whether the host may have taken it on: that it refuses to say more of it does not undo that.
        perhaps = resumed
        try:
            operation = await self._agents.operation(host, request_id) if resumed else None
            if perhaps := operation is not None:
                waited_s = 0.0  # it was sent before
            if resumed and operation is None and not harmless:
                return Forgotten(elapsed_s(), lapse=False)
            if resumed and operation is None and isinstance(instruction, Preempt | Remove):
                operation = await self._spared(state, instruction, request_id, sides)
            for _ in range(REPEATS):
                if operation is None and isinstance(instruction, SetTarget):
                    try:
                        instruction = await self._filled(instruction)
                    except AgentError as error:
                        return HostFailed(elapsed_s(), str(error), resumed or taken_on, code=error.reason)
                    left_s = deadline_s - elapsed_s()
                    if left_s <= 0 and (resumed or taken_on):
                        late = f"{host} was to be asked once more, and the deadline has passed"
                        return HostFailed(elapsed_s(), late, uncertain=True, code=ReasonCode.FAILED)
                    instruction = instruction.model_copy(update={"deadline_s": round(max(left_s, 0.0), 3)})
                async with sides.turn:
                    send, limit_s = self._sending(state, instruction, request_id)
                    operation = operation or await send()
                taken_on = perhaps = True
                operation = await self._follow(state, instruction, operation, limit_s, sides)
                if operation is not None:
                    event = OperationEnded(elapsed_s(), operation, waited_s=waited_s)
                    return await self._ended(state, instruction, event)
                if not harmless:
                    return Forgotten(elapsed_s(), lapse=True)
        except AgentRefused as error:
            if isinstance(instruction, Remove | Release) and error.status == 404:
                gone = OperationEnded(elapsed_s(), was_gone(request_id, instruction))
                return await self._ended(state, instruction, gone)
            return HostFailed(elapsed_s(), str(error), uncertain=error.sent_before or perhaps, code=error.reason)
        except AgentFailed as error:
            return HostFailed(elapsed_s(), str(error), uncertain=True)
        except AgentUnreachable as error:
            # A start that never left this machine may be tried elsewhere; who was to be preempted by it stays.
            preempts = isinstance(instruction, Preempt | Remove) and bool(preempted_by(instruction))
            matters = preempts or isinstance(instruction, Create)
            never_sent = matters and not (error.sent or resumed or taken_on)
            return HostFailed(elapsed_s(), str(error), uncertain=not never_sent, reached=not never_sent)
        return HostFailed(elapsed_s(), f"{host} forgot the same command {REPEATS} times", uncertain=True)

    async def _filled(self, instruction: SetTarget) -> SetTarget:
        """A target with all components, as agents of 0.1 need it, and its number. What it leaves out is what the VM
        has now: the plan that had the host before may have resized it.

        :raises AgentError: the host cannot be read, or its VM has had the last number.
        """
        if not instruction.unnumbered and None not in instruction.target.model_dump().values():
            return instruction
        await self._hosts.take(await self._agents.host(instruction.host))
        reported = self._hosts.vm(instruction.host, instruction.vm)
        if reported is None:
            return instruction  # its host says so itself
        size = Vector.of(instruction.target.size_of(reported.allocation()))
        number = max(instruction.generation, reported.generation + 1 if instruction.unnumbered else 0)
        if number > LARGEST:
            raise AgentRefused(409, "generation: there is none left")
        return instruction.model_copy(update={"target": PartialVector(**size.model_dump()), "generation": number})

    async def _follow(
        self, state: Plan, instruction: Commanding, operation: Operation, limit_s: float, sides: _Sides
    ) -> Operation | None:
        """Wait for the end of a command; a preemption that is not needed any more is called off. Raises as `follow`."""
        tell = partial(self._tell, state) if isinstance(instruction, Depart) else None
        following = asyncio.create_task(
            self._agents.follow(instruction.host, operation, limit_s, tell), name=f"follow {operation.request_id}"
        )
        try:
            told = isinstance(instruction, Preempt | Remove) and bool(preempted_by(instruction))
            while told and not following.done():
                await asyncio.wait({following}, timeout=WATCH_S)
                why = sides.why_not or self._not_needed(state, instruction.host)
                if not following.done() and why:
                    assert isinstance(instruction, Preempt | Remove), "it is told"
                    told = not await self._call_off(instruction, operation.request_id, why, sides)
            return await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _spared(self, state: Plan, victim: Preempt | Remove, request_id: str, sides: _Sides) -> Operation | None:
        """What is said of a VM that was not told yet and need not go any more; None: it has to. Raises `AgentError`."""
        if not preempted_by(victim):
            return None
        await self._hosts.take(await self._agents.host(victim.host))
        found, why = self._hosts.vm(victim.host, victim.vm), self._not_needed(state, victim.host)
        if not why or found is None or found.state in (VMState.STOPPING, VMState.STOPPED):
            return None
        # This fences the command, should it still come from before.
        await self._call_off(victim, request_id, why, sides)
        return await self._agents.operation(victim.host, request_id) or runs_on(request_id, victim, why)

    def _not_needed(self, state: Plan, host: str) -> str:
        """Why nobody has to go: the arrival is called off, or its host reports room for it; empty if somebody has."""
        if state.request_id in self.called_off:
            return f"the placement of {state.vm} is called off"
        known = self._hosts.get(host)
        return room_for(state.spec, known.report) if isinstance(state, PlacementPlan) and known is not None else ""

    async def _call_off(self, instruction: Preempt | Remove, request_id: str, why: str, sides: _Sides) -> bool:
        """Have a VM stay that was told that it goes; one that has gone already has gone.

        :returns: whether that is all; what is refused may be too early: an agent takes it once the notice runs.
        """
        try:
            async with sides.turn:
                command = WithdrawCommand(
                    request_id=f"{request_id}.off",
                    epoch=self._epoch,
                    order=next(self._orders),
                    preemption=request_id,
                    reason=why[:200],
                )
                await self._agents.command(instruction.host, "POST", f"/v1/vms/{instruction.vm}/withdrawal", command)
        except AgentError as error:
            log.info("preemption not called off", vm=instruction.vm, why=str(error))
            return isinstance(error, AgentRefused) and error.status == 404
        return True

    def _tell(self, state: Plan, operation: Operation) -> None:
        self.told[state.id] = len(state.progress), operation.progress[-MOST_TOLD:]

    def _sending(
        self, state: Plan, instruction: Commanding, request_id: str
    ) -> tuple[Callable[[], Awaitable[Operation]], float]:
        """How to send a command, and how long it may take."""
        host, epoch, agents, order = instruction.host, self._epoch, self._agents, next(self._orders)
        grace_s = self._limits.grace_s
        match instruction:
            case Reclaim(need=need, deadline_s=deadline_s, exclude=exclude):
                reclaim = ReclaimCommand(
                    request_id=request_id, epoch=epoch, order=order, need=need, deadline_s=deadline_s, exclude=exclude
                )
                return lambda: agents.command(host, "POST", "/v1/reclaims", reclaim), deadline_s + grace_s
            case Create(start_size=start_size):
                assert isinstance(state, PlacementPlan | MovePlan), "only these start VMs"
                create = CreateCommand(
                    request_id=request_id, epoch=epoch, order=order, vm=state.spec, start_size=start_size
                )
                return lambda: agents.command(host, "POST", "/v1/vms", create), self._limits.start_stop_s
            case Remove(vm=vm, reason=reason, notice_s=notice_s):
                command, limit_s = Command(request_id=request_id, epoch=epoch, order=order), self._limits.start_stop_s
                return lambda: agents.remove(host, vm, command, reason, notice_s), notice_s + limit_s
            case Reinflate(vms=vms, room=room):
                if (known := self._hosts.get(host)) is not None:
                    room = room_to_share(known.report, self._queue(state, host), room)
                share = ReinflateCommand(
                    request_id=request_id,
                    epoch=epoch,
                    order=order,
                    deadline_s=REINFLATION_DEADLINE_S,
                    vms=vms,
                    room=room,
                )
                path, limit_s = "/v1/reinflations", REINFLATION_DEADLINE_S + grace_s
                return lambda: agents.command(host, "POST", path, share), limit_s
            case SetTarget(vm=vm, generation=generation, target=target, deadline_s=deadline_s, mode=mode):
                resize = TargetCommand(
                    request_id=request_id,
                    epoch=epoch,
                    order=order,
                    generation=generation,
                    target=target,
                    deadline_s=deadline_s,
                    mode=mode,
                )
                return lambda: agents.command(host, "PUT", f"/v1/vms/{vm}/target", resize), deadline_s + grace_s
        lifecycle = lifecycle_command(instruction, request_id, epoch, order, self._limits, self._hosts.vm)
        sent = lifecycle.method, lifecycle.path, lifecycle.body, lifecycle.without
        return lambda: agents.command(host, *sent), lifecycle.limit_s

    async def _ended(self, state: Plan, instruction: Commanding, event: OperationEnded) -> OperationEnded:
        """The end of a command, with its host read, unless the plan reads it next: once between two commands."""
        if not instruction.read_next:
            await self.refresh(instruction.host)
        if not event.operation.vms:
            return event
        recorded, vms = await self._store.recorded(instruction.host) | {state.vm}, event.operation.vms
        told = tuple(outcome for outcome in vms if outcome.name in recorded)
        failed = tuple((one.name, one.errors[0]) for one in vms if one.errors and one.name not in recorded)
        return replace(event, operation=event.operation.model_copy(update={"vms": told}), failed=failed)

    async def refresh(self, host: str) -> None:
        """See what a command changed before a client asks; the next report comes anyway."""
        try:
            await self._hosts.take(await self._agents.host(host, retry=False))
        except AgentError as error:
            log.info("host not read after a command", host=host, why=str(error))
