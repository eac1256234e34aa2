"""The match maker: which machine a task runs on, or waits for (Agarwal et al. 2023, §3.1.2, Algorithm 1).

The order of tasks is the engine's; here each is given to the machine with the least expected worst-case completion
time (Eq. 2), over all machines at once. All figures are by the kernel functions of
`matcher.predict.completion_probability` and `matcher.predict.expected_time`, which the simulator compiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.match.choices import choose
from ebbtide.matcher.match.fleet import Fleet, Marks, Running
from ebbtide.matcher.match.match_cache import EVER_S, NOTHING_S, Band, MatchCache
from ebbtide.matcher.match.offers import Offer, Weighed
from ebbtide.matcher.predict import expected_time as figures
from ebbtide.matcher.predict.ages import Floats

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
    #: How long it is expected to run; None: unknown.
    duration_s: float | None = None
    #: Of preemption, 0 to 1: 0 counts time only, 1 takes the machine most likely to keep it, whatever the wait.
    preemption_aversion: float = 0.0
    #: How often it was preempted, and the longest that it ran so far without an end.
    attempts: int = 0
    ran_s: float = 0.0
    #: It saves its work every so often; None: never.
    checkpoint_s: float | None = None
    #: How long it has waited by now, since it was submitted or broken off.
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        """A duration that makes no sense is missing, not an error; what the owner decides is checked.

        Raises InvalidField.
        """
        for name in ("cores", "memory_mib", "ran_s", "waited_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(name, f"must be finite and not negative, but is {value!r}")
        if not 0.0 <= self.preemption_aversion <= 1.0:
            raise InvalidField("preemption_aversion", f"must be within [0, 1], but is {self.preemption_aversion!r}")
        if self.attempts < 0:
            raise InvalidField("attempts", f"must not be negative, but is {self.attempts!r}")
        if self.checkpoint_s is not None and not self.checkpoint_s > 0:
            raise InvalidField("checkpoint_s", f"must be above 0, but is {self.checkpoint_s!r}")


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """Switches of the match maker; the defaults are the paper's rules and what it leaves open."""

    #: Wait for a busy machine if that is better; False: the best of those that have room now.
    delay: bool = True
    #: For so many of its durations a task waits for busy machines at the most while others have room; then only these
    #: count. Infinite: paper.
    patience: float = math.inf
    #: Room that is promised to waiting tasks counts as taken.
    promises: bool = True
    #: Durations that each earlier preemption makes the next one count: attempts go to steadier machines. 0: paper.
    escalation: float = 0.0
    #: Of machines with room whose expected time is within this share of the duration of the best, the least steady is
    #: taken: steady ones are kept for tasks that need them. 0: paper.
    spare: float = 0.0
    #: Of machines with room that are as near, the one with the most idle cores is taken: a shrink takes these first,
    #: and machines that are alike get as much each. Not with `spare`. 0: paper.
    spread: float = 0.0
    #: What a machine's tasks will have left by about the middle of this one counts as room that it can lose
    #: (`matcher.predict.expected_time.release_s`). For machines that the newest leave first; by landmarks and sizes
    #: only, and not in Algorithm 3. Off: paper.
    releases: bool = False
    #: Algorithm 3, by which the simulator alone decides.
    threshold: float = THRESHOLD
    #: P_c of machines without history.
    unknown: float = UNKNOWN
    #: Duration of tasks without a stated one that makes sense.
    fallback_s: float = 1800.0

    def __post_init__(self) -> None:
        """Raises InvalidField."""
        for name in ("escalation", "spare", "spread", "fallback_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidField(name, f"must be finite and not negative, but is {value!r}")
        if self.spare > 0 and self.spread > 0:
            raise InvalidField("spread", "must be 0 with spare: both say which of nearly equal machines is taken")
        if not self.patience >= 0:
            raise InvalidField("patience", f"must not be negative, but is {self.patience!r}")
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
    #: E_wc there, with what preemption_aversion, attempts and checkpoints add.
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
        self._match_cache = MatchCache(fleet)
        #: Durations that the best machines have added lately: as far as it is worth looking. Changes no decision.
        self._reach = 0.5

    def decide(self, demand: Demand, now: float, offers: int = 0) -> Decision:
        """Algorithm 1 for one task: the best of all machines; it waits if that one is busy.

        :param offers: of how many machines to say what they offer.
        """
        return self._decide(demand, now, offers, None)

    def _decide(self, demand: Demand, now: float, offers: int, closed: Marks | None) -> Decision:
        """As `decide`.

        :param closed: by row, machines that it does not get.
        """
        self.predictor.advance(now)
        duration_s, fleet = self.duration_s(demand), self.fleet
        if closed is not None and np.count_nonzero(closed) == len(fleet.rows()):
            return Decision(demand.task, None, False, math.inf, None, math.inf, duration_s)
        found, place = self._best(demand, duration_s, now, offers > 0, closed)
        said = found.offers(fleet.name, fleet.lasts, offers, place) if offers else ()
        if place < 0:
            return Decision(demand.task, None, False, math.inf, None, math.inf, duration_s, said)
        row, wait_s = found.rows.item(place), found.waits.item(place)
        return Decision(
            demand.task,
            fleet.name(row),
            wait_s == 0.0,
            wait_s,
            None if fleet.lasts(row) else found.probability(place),
            found.compared.item(place),
            duration_s,
            said,
        )

    def decide_all(
        self,
        demands: Sequence[Demand],
        now: float,
        offers: int = 0,
        closed: Mapping[str, Set[str]] = MappingProxyType({}),
        avoided: Mapping[str, Set[str]] = MappingProxyType({}),
    ) -> list[Decision]:
        """A round over waiting tasks in the engine's order: each counts with what those before it take or wait for.

        The fleet is left as it was, without promises: the caller that starts a task there tells it.

        :param offers: as in `decide`.
        :param closed: by task, machines that it does not get.
        :param avoided: by task, machines that it gets only where no other one will ever have room.
        :raises InvalidField: a task that runs already, or stands there twice.
        """
        fleet = self.fleet
        fleet.forget_promises()
        self.predictor.advance(now)
        decisions = []
        begun = []
        # One user's tasks are closed to the same machines, and others' come in between: each set is looked up once.
        marks: dict[int, tuple[Set[str], Marks]] = {}
        try:
            for demand in demands:
                never, rather_not = closed.get(demand.task), avoided.get(demand.task)
                if never and id(never) not in marks:
                    marks[id(never)] = never, fleet.marked(never)
                shut = marks[id(never)][1] if never else None
                decision = None
                if rather_not:
                    both = fleet.marked(rather_not) if shut is None else shut | fleet.marked(rather_not)
                    decision = self._decide(demand, now, offers, both)
                if decision is None or decision.machine is None:
                    decision = self._decide(demand, now, offers, shut)
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

    def duration_s(self, demand: Demand) -> float:
        """The duration that a task is counted with (`matcher.predict.expected_time.usable_duration_s`)."""
        said = math.nan if demand.duration_s is None else demand.duration_s
        return float(figures.usable_duration_s(said, demand.ran_s, self.options.fallback_s))

    def _release_s(self, duration_s: float) -> float:
        """`matcher.predict.expected_time.release_s`; `NOTHING_S` where it does not count."""
        predicting = self.predictor.options
        counts = self.options.releases and predicting.by_landmarks and predicting.sized
        return figures.release_s(duration_s) if counts else NOTHING_S

    def _may_wait(self, demand: Demand, duration_s: float, now: float, closed: Marks | None) -> bool:
        """Whether a task may wait for a busy machine (`matcher.predict.expected_time.may_wait`)."""
        delay, patience = self.options.delay, self.options.patience
        if figures.may_wait(delay, demand.waited_s, patience, duration_s, True):
            return True
        # Looked at only where it decides.
        band = self._match_cache.within(demand.cores, demand.memory_mib, now, 0.0, self._release_s(duration_s))
        return figures.may_wait(delay, demand.waited_s, patience, duration_s, bool((_waits(band, closed) == 0.0).any()))

    def _best(
        self, demand: Demand, duration_s: float, now: float, every: bool, closed: Marks | None
    ) -> tuple[Weighed, int]:
        """The place of the best machine among those that it is worth to look at; -1: none.

        A machine that is busy for longer than what the best one adds to the duration cannot be better: all with room
        now are weighed, and as many others as that takes.

        :param every: weigh all machines, with what they offer.
        """
        options, delay = self.options, self._may_wait(demand, duration_s, now, closed)
        reach_s = EVER_S if every else self._reach * duration_s if delay else 0.0
        while True:
            band = self._match_cache.within(demand.cores, demand.memory_mib, now, reach_s, self._release_s(duration_s))
            found = self._weigh(demand, duration_s, band, every, closed)
            probability = found.failure
            if options.spare > 0.0:
                probability = np.where(np.isnan(found.fatal), np.nan, 1.0 - probability)
            idle = found.compared
            if options.spread > 0.0:
                idle = np.append(self.fleet.free_cores(found.rows[:-1]), -np.inf)
            place = choose(
                found.compared, found.waits, probability, idle, duration_s, delay, options.spare, options.spread
            )
            if not delay or band.reach_s >= EVER_S:
                return found, place
            # With spare or spread the least may be another's.
            alone = options.spare <= 0.0 and options.spread <= 0.0
            least = found.compared.item(place) if alone and place >= 0 else found.compared.min()
            adds_s = float(least) - duration_s
            if adds_s < band.reach_s - 1e-9 * (duration_s + band.reach_s):
                self._reach = min(max(0.9 * self._reach, 1.1 * adds_s / max(duration_s, 1.0)), 4.0)
                return found, place
            # Ever further, so that this ends.
            reach_s = min(1.01 * adds_s + 1.0, EVER_S) if adds_s >= band.reach_s else EVER_S

    def _weigh(self, demand: Demand, duration_s: float, band: Band, apart: bool, closed: Marks | None) -> Weighed:
        """A task against machines.

        :param apart: tell expected from compared.
        """
        options, waits, silent = self.options, _waits(band, closed), band.silent
        failure, wasted = self.predictor.failure_and_loss(band.outlook, duration_s)
        if len(silent):
            failure[silent] = 1.0 - options.unknown
        # The last one is the machine of Eq. 2's restart, which has just grown.
        restart = figures.restart_s(1.0 - failure.item(-1), wasted.item(-1), duration_s)
        checkpoint_s = math.inf if demand.checkpoint_s is None else demand.checkpoint_s
        aversion = figures.aversion(demand.preemption_aversion, demand.attempts, options.escalation)
        expected = compared = figures.expected_s(waits, failure, wasted, restart, duration_s, checkpoint_s, aversion)
        if apart and aversion > 0.0:
            expected = figures.expected_s(waits, failure, wasted, restart, duration_s, checkpoint_s, 0.0)
        return Weighed(band.rows, waits, failure, expected, compared, band.outlook.fatal)


def _waits(band: Band, closed: Marks | None) -> Floats:
    """How long until each has room; never where it is closed. The band is as it was: it serves other tasks, too."""
    if closed is None:
        return band.waits
    waits = band.waits.copy()
    # The last one is the restart's, which has no row.
    waits[:-1][closed[band.rows[:-1]]] = np.inf
    return waits
