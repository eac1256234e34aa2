"""Executor of one instruction of a plan, which answers with an event: the only place where plans meet the world."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import structlog

from cluster_manager.defaults import MoveFirst
from cluster_manager.errors import AgentError, AgentFailed, AgentRefused, AgentUnreachable, RequestError
from cluster_manager.execution.clearing import brought_meanwhile
from cluster_manager.execution.in_place_of_hosts import runs_on, was_gone
from cluster_manager.execution.lifecycle_commands import lifecycle_command
from cluster_manager.execution.running_plans import arrival_of, clears_up, how_ended, looks, wanted
from cluster_manager.inventory.agents import Agents
from cluster_manager.inventory.availability import Ranking
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.live_migrations import cannot_take
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
    HostsChosen,
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
    asked_of_hosts,
    closed,
    has_template,
    not_yet,
    room_for,
    room_to_share,
    still_silent,
)
from cluster_manager.settings import AgentLimits
from cluster_manager.store.store import Store
from ebbtide.deflation.placement.fitness import HostView
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalancing import Rooms
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
from ebbtide.messages.vms import VMSpec, VMState

log = structlog.get_logger()

#: Hosts that a plan keeps in line; it acts on three at most.
LINE = 16
#: For giving room back, seconds.
REINFLATION_DEADLINE_S = 60.0
#: How long to wait for a report at the most before it is looked whether its host is silent, in seconds.
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
        self._generator = generator
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
                chosen = self._choose(state, instruction, elapsed_s())
                if not chosen.hosts:
                    return chosen
                # Before any wait: no other placement may count on this room.
                arrival = arrival_of(state, time.time() - elapsed_s())
                self._hosts.availability.reserve(state.id, chosen.hosts[0], arrival)
                return replace(chosen, first=await self._read(state, chosen.hosts[0], elapsed_s))
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
                while (placement := await self._store.plan(request_id)) is not None and not placement.state.finished:
                    await self._hosts.heard(LOOK_S)
                self.called_off.discard(request_id)
                return how_ended(elapsed_s(), placement)
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
        limit_s = max(state.deadline_s, 1.0) if isinstance(state, RoomPlan) and looks(state) else None
        why = "" if await self._hold(state, host, limit_s) else f"{host} is busy with another plan"
        if why or (clears_up(state) and (why := await brought_meanwhile(self._store, state, host))):
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
        sold, rooms = await self._store.sold(host), self._rooms(state, host)
        elsewhere, copies = self._elsewhere(state, host), self.move_first == "copied"
        # One of which cannot be read how it is to go is not to go.
        recorded &= sold.keys()
        return replace(found, recorded=recorded, sold=sold, elsewhere=elsewhere, rooms=rooms, copies=copies)

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

    def _elsewhere(self, state: PlacementPlan, host: str) -> str | None:
        """Another host that could hold a plan's VM by deflation, perhaps soon, and was not found to give too little."""
        if state.purpose != "preempt" or state.looked_again:
            return None
        offered, tried = self._with_template(state.spec), {host, *state.short_on}
        demand = asked_of_hosts(state.spec, "place")
        rankings: tuple[Ranking, ...] = ("place", "wait")
        for ranking in rankings:
            others = self._hosts.availability.rank(
                demand, 1, ranking, state.policy, self._generator, lambda name: name not in tried and offered(name)
            )
            if others:
                return others[0]
        return None

    def _rooms(self, state: PlacementPlan, host: str) -> Rooms | None:
        """What other hosts have that take VMs which run, for a plan that may preempt."""
        if state.purpose != "preempt" or self.move_first == "never":
            return None

        def takes(other: str) -> bool:
            known = self._hosts.get(other)
            return other != host and known is not None and not cannot_take(self._agents.proven(known.report))

        return self._hosts.availability.rooms(takes)

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

    # --- choosing ----------------------------------------------------------------------------------------------------

    def choices(self, state: Plan, instruction: ChooseHosts) -> tuple[HostsChosen, list[tuple[HostView, float]]]:
        """The hosts that a placement would try now, and each as it is seen, with its fitness."""
        assert isinstance(state, PlacementPlan | MovePlan), "only these choose hosts"
        chosen, demand = self._choose(state, instruction, 0.0), wanted(state, instruction.purpose)
        seen = self._hosts.availability
        return chosen, [seen.view(host, instruction.purpose, demand) for host in chosen.hosts]

    def has_room(self, spec: VMSpec, but: Collection[str]) -> bool:
        """Whether one host besides those of ``but`` could hold all of a VM by deflation."""
        offered, demand = self._with_template(spec), asked_of_hosts(spec, "place")
        first = PlacementPolicy.FIRST_FIT
        return bool(
            self._hosts.availability.rank(
                demand, 1, "place", first, self._generator, lambda name: name not in but and offered(name)
            )
        )

    def _choose(self, state: Plan, instruction: ChooseHosts, elapsed_s: float) -> HostsChosen:
        assert isinstance(state, PlacementPlan | MovePlan), "only these choose hosts"
        began = time.perf_counter()
        demand, purpose = wanted(state, instruction.purpose), instruction.purpose
        open_hosts = self._hosts.availability
        # A VM moves to none but another host.
        spec, home, offered = state.spec, state.home, self._with_template(state.spec, but=state.home)
        chosen: list[str] = []
        if purpose == "preempt":
            # Where the minimums leave enough and a layer failed, before where a minimum itself is in the way.
            allow = open_hosts.minimums_allow(spec.nominal.vector())
            chosen = open_hosts.rank(
                demand, LINE, purpose, state.policy, self._generator, lambda host: allow(host) and offered(host)
            )
        others = open_hosts.rank(demand, LINE, purpose, state.policy, self._generator, offered)
        if purpose == "place" and isinstance(state, PlacementPlan):
            # Only then where guests would have to be waited for.
            others += open_hosts.rank(demand, LINE, "wait", state.policy, self._generator, offered)
        chosen = list(dict.fromkeys((*chosen, *others)))[:LINE]
        ms = round((time.perf_counter() - began) * 1000, 3)
        log.info("hosts ranked", plan=state.id, open=len(open_hosts), chosen=len(chosen), ms=ms)
        if chosen:
            return HostsChosen(elapsed_s, tuple(chosen))
        if not len(open_hosts):
            reports = [host.report for host in self._hosts.all() if not self._hosts.is_silent(host.report.id)][:LINE]
            reasons = ", ".join(closed(report) or f"{report.id} is {report.mode}" for report in reports)
            why = f"no host takes new VMs ({reasons})" if reasons else "no host is ready"
            return HostsChosen(elapsed_s, (), why, ready=False)
        ready = self._hosts.ready()
        if ready and not any(has_template(host.report, spec) for host in ready):
            where = ", ".join(f"{host.report.id} has no template {spec.template}" for host in ready[:LINE])
            return HostsChosen(elapsed_s, (), f"no host is ready that could make it ({where})", ready=False)
        what = "free or held by low-priority VMs" if purpose == "preempt" else "free or deflatable"
        offers = [f"{host} has {offer}" for host, offer in open_hosts.offers(purpose, LINE + 1) if host != home][:LINE]
        lacking = f"no ready host has {demand} {what} beside the VM's overhead ({', '.join(offers)})" if offers else ""
        return HostsChosen(elapsed_s, (), lacking)

    def _with_template(self, spec: VMSpec, but: str | None = None) -> Callable[[str], bool]:
        """Whether a host, but for one, has what a VM is made of."""

        def accepts(host_id: str) -> bool:
            host = self._hosts.get(host_id)
            return host is not None and host_id != but and has_template(host.report, spec)

        return accepts

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
        await self._hosts.locks.hold(state.id, host)
        # A second reclaim takes twice, a second start may find the first: only the plan can tell after a new reading.
        harmless, taken_on = not isinstance(instruction, Reclaim | Create), False
        # Whether the host may have taken it on: that it refuses to say more of it does not undo that.
        perhaps = resumed
        try:
            operation = await self._agents.operation(host, request_id) if resumed else None
            perhaps = operation is not None
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
                async with sides.turn:
                    send, limit_s = self._sending(state, instruction, request_id)
                    operation = operation or await send()
                taken_on = perhaps = True
                operation = await self._follow(state, instruction, operation, limit_s, sides)
                if operation is not None:
                    return await self._ended(state, instruction, OperationEnded(elapsed_s(), operation))
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
