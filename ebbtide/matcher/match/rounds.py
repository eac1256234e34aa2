"""A round over the live tasks that wait: what the engine shows is matched, and said in words. Pure.

Nothing is decided here: who gets which machine, or waits for it, is `matcher.match.matching.MatchMaker`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ebbtide.matcher.match.attempts import EngineMachine
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.match.matching import Decision, Demand, MatchMaker, MatchOptions
from ebbtide.matcher.match.offers import Offer
from ebbtide.matcher.match.tasks import Task, TaskPhase
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions

#: Machines whose offers are told, of those that will have room.
OFFERS: Final = 20
#: What live tasks are matched by by default: as the paper, but attempts go to steadier machines, machines that are
#: alike get as many tasks each, no task waits for a busy machine for long where another has room, and what ends soon
#: beside a task counts as its room: the newest are preempted first.
LIVE: Final = MatchOptions(patience=0.25, escalation=0.5, spread=0.001, releases=True)
#: By landmarks; by Eq. 1 until there are enough. A shrink that leaves a task its room is survived.
LIVE_PREDICTION: Final = PredictorOptions(form="landmark", sized=True)


@dataclass(frozen=True, slots=True)
class Pool:
    """What is known of the machines beside what their engine shows.

    :param predictor: the caller's own copy; it is brought up to now.
    :param variable: machines whose cores can be taken away. Of the others history says nothing: they keep them.
    """

    predictor: Predictor
    variable: frozenset[str] = frozenset()
    options: MatchOptions = LIVE


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a task now.

    :param machine: where it is to begin now; None: it waits.
    :param waits_for: the machine it waits for; None: no machine will have room, or it does not wait.
    :param completion_probability: P_c there; None where history is silent.
    :param offers: of the machines that will have room, best first, `OFFERS` and two at the most.
    """

    machine: str | None
    waits_for: str | None
    sentence: str
    completion_probability: float | None = None
    offers: tuple[Offer, ...] = field(default=())


def demand_of(task: Task, now: float) -> Demand:
    """A task as the match maker takes it.

    :param now: on the clock of the task's times.
    """
    order = task.order
    return Demand(
        task.name,
        float(order.cores),
        duration_s=order.duration_s,
        preemption_aversion=order.preemption_aversion,
        attempts=task.preemptions,
        ran_s=task.ran_s,
        checkpoint_s=order.checkpoint_s,
        waited_s=max(now - task.waits_since, 0.0),
    )


def choose(
    waiting: Sequence[Task],
    tasks: Iterable[Task],
    machines: Mapping[str, EngineMachine],
    pool: Pool,
    now: float,
    closed: Mapping[str, Set[str]] = MappingProxyType({}),
    avoided: Mapping[str, Set[str]] = MappingProxyType({}),
) -> dict[str, Choice]:
    """For each waiting task, in their order: begin there, or wait.

    :param tasks: all that have not ended; those that hold cores are seen to.
    :param now: seconds on the clock of the machines' changes.
    :param closed: by task, machines that it does not get.
    :param avoided: by task, machines that it gets only where no other one will ever have room.
    """
    if not waiting:
        return {}
    maker = _maker(tasks, machines, pool, now)
    decisions = maker.decide_all([demand_of(task, now) for task in waiting], now, OFFERS, closed, avoided)
    return {
        task.name: _choice(task, decision, maker, closed.get(task.name, frozenset()), now)
        for task, decision in zip(waiting, decisions, strict=True)
    }


def _maker(tasks: Iterable[Task], machines: Mapping[str, EngineMachine], pool: Pool, now: float) -> MatchMaker:
    """The match maker over the machines that take tasks, with what they hold and for how long."""
    # First, so that no row is given to another machine while the fleet goes by it.
    pool.predictor.advance(now)
    taking = {name: machine for name, machine in sorted(machines.items()) if machine.up and not machine.drained}
    fleet = Fleet(pool.predictor, max((machine.usable_cores for machine in taking.values()), default=0) or 1)
    maker = MatchMaker(fleet, pool.options)
    for name, machine in taking.items():
        fleet.put(name, float(machine.usable_cores), lasting=name not in pool.variable)
        if machine.foreign_cores:
            # Nobody knows for how long.
            fleet.start(name, Running(f"{name}: of others", float(machine.foreign_cores), 0.0, now, math.inf))
    for task in tasks:
        if task.occupies not in taking:
            continue
        began_at = task.began_at if task.phase is TaskPhase.RUNNING and task.began_at is not None else now
        began_at = min(began_at, now)
        # What is being ended is as good as gone, however long it ran.
        ends_at = began_at + maker.duration_s(demand_of(task, now))
        began_at, ends_at = (now, now) if task.stop else (began_at, ends_at)
        fleet.start(task.occupies, Running(task.name, float(task.order.cores), 0.0, began_at, ends_at))
    return maker


def _choice(task: Task, decision: Decision, maker: MatchMaker, closed: Set[str], now: float) -> Choice:
    machine = decision.machine
    offers = {offer.machine: offer for offer in decision.offers}
    if machine is None:
        return Choice(None, None, _why_none(task, maker, closed), offers=decision.offers)
    chosen = offers[machine]
    if decision.starts:
        sentence = f"{machine}: {chosen.in_words}"
        return Choice(machine, None, sentence, decision.completion_probability, decision.offers)
    sentence = f"it waits for {machine}, free in {decision.wait_s:.0f} s: {chosen.in_words}"
    ready = next((offer for offer in decision.offers if offer.wait_s == 0.0), None)
    if ready is not None:
        sentence += f"; {ready.machine} has room now, but there it is {ready.in_words}"
    return Choice(None, machine, sentence, decision.completion_probability, decision.offers)


def _why_none(task: Task, maker: MatchMaker, closed: Set[str]) -> str:
    fleet, cores = maker.fleet, task.order.cores
    most = max((int(fleet.cores[row]) for row in fleet.rows() if fleet.name(row) not in closed), default=None)
    if most is None:
        return "no machine takes tasks now: all are down, or drained"
    if most < cores:
        return f"no machine has {cores} usable cores; the largest has {most}"
    if not maker.options.delay:
        return f"no machine has {cores} free cores now"
    return f"it is unknown when {cores} cores become free"
