"""The match maker: which machine a task runs on, or waits for (seed 000 §3.1.2, Algorithms 1 and 3).

The order of tasks is the engine's; here each is given to the machine with the least expected worst-case completion
time (Eq. 2), over all machines at once. All figures are by the kernel functions of :mod:`task_matcher.probabilities`,
which the simulator compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from deflation.errors import InvalidField
from task_matcher import probabilities as figures
from task_matcher.choices import choose
from task_matcher.fleet import Fleet, Running
from task_matcher.offers import Offer, Weighed
from task_matcher.rolling import GROWTH, Integers

#: Algorithm 3's threshold of P_c, which the paper does not state; 70 % is the confidence of its Fig. 13.
THRESHOLD: Final = 0.7
#: P_c where history is silent: machines without history are taken, but after those that are known to be better.
UNKNOWN: Final = 0.5


@dataclass(frozen=True, slots=True)
class Demand:
    """A task that is to run. Everything but its name and cores may be left out."""

    task: str
    cores: float
    memory_mib: float = 0.0
    #: How long it is expected to run; None: nobody said.
    duration_s: float | None = None
    #: Of preemption, 0 to 1: 0 counts time only, 1 takes the machine most likely to keep it, whatever the wait.
    dislike: float = 0.0
    #: How often it was preempted, and the longest that it ran so far without an end.
    attempts: int = 0
    ran_s: float = 0.0
    #: It saves its work every so often; None: never.
    checkpoint_s: float | None = None

    def __post_init__(self) -> None:
        """A duration that makes no sense is missing, not an error; what the owner decides is checked.

        Raises InvalidField.
        """
        for name, value in (("cores", self.cores), ("memory_mib", self.memory_mib), ("ran_s", self.ran_s)):
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(name, f"must be finite and not negative, but is {value!r}")
        if not 0.0 <= self.dislike <= 1.0:
            raise InvalidField("dislike", f"must be within [0, 1], but is {self.dislike!r}")
        if self.attempts < 0:
            raise InvalidField("attempts", f"must not be negative, but is {self.attempts!r}")
        if self.checkpoint_s is not None and not self.checkpoint_s > 0:
            raise InvalidField("checkpoint_s", f"must be above 0, but is {self.checkpoint_s!r}")


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """Switches of the match maker; the defaults are the paper's rules and what it leaves open."""

    #: Wait for a busy machine if that is better; False: the best of those that have room now.
    delay: bool = True
    #: Room that is promised to waiting tasks counts as taken.
    promises: bool = True
    #: Durations that each earlier preemption makes the next one count: attempts go to steadier machines. 0: paper.
    escalation: float = 0.0
    #: Of machines with room whose expected time is within this share of the duration of the best, the least steady is
    #: taken: steady ones are kept for tasks that need them. 0: paper.
    spare: float = 0.0
    #: Algorithm 3.
    threshold: float = THRESHOLD
    #: P_c of machines without history.
    unknown: float = UNKNOWN
    #: Duration of tasks of which nobody said one that makes sense.
    fallback_s: float = 1800.0

    def __post_init__(self) -> None:
        """Raises InvalidField."""
        for name in ("escalation", "spare", "fallback_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(name, f"must be finite and not negative, but is {value!r}")
        for name in ("threshold", "unknown"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InvalidField(name, f"must be within [0, 1], but is {value!r}")


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a task now."""

    task: str
    #: Where it runs, or for which machine it waits; None: no machine will ever have room for it.
    machine: str | None
    #: Whether it starts now.
    starts: bool
    #: How long the machine takes to have room; infinite where none ever has.
    wait_s: float
    #: P_c there; None where history is silent.
    completion_probability: float | None
    #: E_wc there, with what dislike, attempts and checkpoints add.
    expected_s: float
    #: The duration that was counted with.
    duration_s: float
    #: Of the best machines, if they were asked for.
    offers: tuple[Offer, ...] = ()


class MatchMaker:
    """Decides over the machines of a fleet. Changes nothing but promises: starting tasks is the engine's."""

    def __init__(self, fleet: Fleet, options: MatchOptions | None = None) -> None:
        self.fleet = fleet
        self.predictor = fleet.predictor
        self.options = options or MatchOptions()

    def decide(self, demand: Demand, now: float, offers: int = 0) -> Decision:
        """Algorithm 1 for one task: the best of all machines; it waits if that one is busy.

        :param offers: of how many machines to say what they offer.
        """
        self.predictor.advance(now)
        duration_s = self.duration_s(demand)
        found = self._weigh(demand, duration_s, now)
        options = self.options
        row = choose(found.compared, found.waits, found.probability, duration_s, options.delay, options.spare)
        said = found.offers(self.fleet.name, offers, row) if offers else ()
        if row < 0:
            return Decision(demand.task, None, False, math.inf, None, math.inf, duration_s, said)
        return Decision(
            demand.task,
            self.fleet.name(row),
            bool(found.waits[row] == 0.0),
            float(found.waits[row]),
            found.probability_of(row),
            float(found.compared[row]),
            duration_s,
            said,
        )

    def decide_all(self, demands: Sequence[Demand], now: float, offers: int = 0) -> list[Decision]:
        """A round over waiting tasks in the engine's order: each counts with what those before it take or wait for.

        The fleet is left as it was, without promises: whoever starts a task there tells it.

        :param offers: as in :meth:`decide`.
        :raises InvalidField: a task that runs already, or stands there twice.
        """
        fleet = self.fleet
        fleet.forget_promises()
        decisions = []
        begun = []
        try:
            for demand in demands:
                decision = self.decide(demand, now, offers)
                decisions.append(decision)
                if decision.machine is None:
                    continue
                ends_at = now + decision.wait_s + decision.duration_s
                held = Running(demand.task, demand.cores, demand.memory_mib, now, ends_at)
                if decision.starts:
                    fleet.start(decision.machine, held)
                    begun.append(demand.task)
                elif self.options.promises:
                    fleet.promise(self.predictor.rows[decision.machine], held)
        finally:
            for task in begun:
                fleet.end(task)
            fleet.forget_promises()
        return decisions

    def on_heartbeat(self, machine: str, demands: Sequence[Demand], now: float) -> Decision | None:
        """Algorithm 3: what is started since a machine has reported; None: nothing.

        Of the tasks that have room there, the one most likely to complete, if more than the threshold; otherwise the
        shortest task goes where Algorithm 1 sends it, if there is room.
        """
        self.predictor.advance(now)
        best: Decision | None = None
        row = self.predictor.rows.get(machine)
        for demand in demands if row is not None else ():
            duration_s = self.duration_s(demand)
            weighed = self._weigh(demand, duration_s, now, np.array([row], np.int64))
            found = float(weighed.probability[0])
            if weighed.waits[0] > 0.0 or not found > self.options.threshold:
                continue
            if best is None or found > (best.completion_probability or 0.0):
                compared_s = float(weighed.compared[0])
                best = Decision(demand.task, machine, True, 0.0, found, compared_s, duration_s)
        if best is not None or not demands:
            return best
        decision = self.decide(min(demands, key=self.duration_s), now)
        return decision if decision.starts else None

    def duration_s(self, demand: Demand) -> float:
        """The duration that a task is counted with (:func:`task_matcher.probabilities.usable_duration_s`)."""
        said = math.nan if demand.duration_s is None else demand.duration_s
        return float(figures.usable_duration_s(said, demand.ran_s, self.options.fallback_s))

    def _weigh(self, demand: Demand, duration_s: float, now: float, only: Integers | None = None) -> Weighed:
        """A task against all machines, or against some rows of them."""
        predictor, options = self.predictor, self.options
        waits = self.fleet.waits_s(demand.cores, demand.memory_mib, now)
        free = self.fleet.free_cores() - demand.cores
        lasting = self.fleet.lasting
        direction, elapsed_s = predictor.directions(), predictor.elapsed_s()
        if only is not None:
            waits, free, lasting = waits[only], free[only], lasting[only]
            direction, elapsed_s = direction[only], elapsed_s[only]
        # The last row is the machine of Eq. 2's restart, which has just grown.
        count = len(waits)
        states: Integers = np.empty(count + 1, np.int64)
        states[:count], states[count] = direction, GROWTH
        figures_in = np.zeros((2, count + 1))
        figures_in[0, :count], figures_in[1, :count] = elapsed_s, free
        np.add(elapsed_s, waits, out=figures_in[0, :count], where=waits < np.inf)
        p, w = predictor.chances(states, figures_in[0], duration_s, figures_in[1])
        p[:count][lasting > 0.0] = 1.0
        silent = np.isnan(p)
        usable = np.where(silent, options.unknown, p) if silent.any() else p
        restart = float(figures.restart_s(usable[count], w[count], duration_s))
        checkpoint_s = math.inf if demand.checkpoint_s is None else demand.checkpoint_s
        aversion = float(figures.aversion(demand.dislike, demand.attempts, options.escalation))
        expected = compared = figures.expected_s(
            waits, usable[:count], w[:count], restart, duration_s, checkpoint_s, aversion
        )
        if aversion > 0.0:
            expected = figures.expected_s(waits, usable[:count], w[:count], restart, duration_s, checkpoint_s, 0.0)
        return Weighed(waits, p[:count], expected, compared, lasting)
