"""What a match maker keeps from one decision to the next is never stale, and leaves no machine out that counts.

A long-lived one is held against one made anew for every decision, and against Algorithm 1 over all machines with
nothing kept or left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ebbtide.matcher.match.choices import choose
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.match.match_cache import CLASSES, EVER_S, REACHES_S, MatchCache
from ebbtide.matcher.match.matching import Decision, Demand, MatchMaker, MatchOptions
from ebbtide.matcher.match.offers import Offer
from ebbtide.matcher.predict import expected_time as figures
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.landmarks import ANY_CORES
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.matcher.predict.rolling import GROWTH

SHORT = PredictorOptions(window_s=20_000.0, horizon_s=1800.0, look_every_s=300.0, fresh_s=300.0, fresh_share=0.3)
FORMS = [
    replace(SHORT, form="next-change", censored=False, fresh_s=0.0),
    replace(SHORT, form="next-change"),
    replace(SHORT, form="next-change", sized=True),
    replace(SHORT, form="next-shrink", sized=True, fresh_s=0.0),
    replace(SHORT, form="landmark", sized=True),
    replace(SHORT, form="landmark"),
]
MACHINES = 25
STEP_MIB = 2048.0


class World:
    """A pool in which things happen at random, and the match maker that lives through it."""

    def __init__(self, seed: int, predicting: PredictorOptions, options: MatchOptions) -> None:
        self.draw = np.random.default_rng(seed)
        self.options = options
        self.now = 0.0
        self.predictor = Predictor(0.0, predicting)
        self.fleet = Fleet(self.predictor, most_cores=12)
        self.machines: dict[str, tuple[float, float, bool]] = {}
        self.running: dict[str, tuple[str, Running]] = {}
        self.promised: list[tuple[str, Running]] = []
        self.began = 0
        self.maker = MatchMaker(self.fleet, options)
        for number in range(int(self.draw.integers(1, MACHINES))):
            self.resize(f"m{number:02}")
        for _ in range(60):
            self.pass_time()
            self.resize(self.any_machine())
        for name in self.machines:
            for _ in range(int(self.draw.integers(0, 6))):
                self.start(name)

    def any_machine(self) -> str:
        return str(self.draw.choice(sorted(self.machines))) if self.machines else "m00"

    def whole(self, least: int, below: int) -> float:
        """Whole numbers, so that machines and times are often equal."""
        return float(self.draw.integers(least, below))

    def put(self, name: str, cores: float, lasting: bool) -> None:
        memory_mib = math.inf if self.draw.random() < 0.5 else STEP_MIB * self.whole(1, 9)
        self.machines[name] = (cores, memory_mib, lasting)
        self.fleet.put(name, cores, memory_mib, lasting)

    def resize(self, name: str) -> None:
        """The machine has other cores, or appears, and the predictor hears of it."""
        before, _, lasting = self.machines.get(name, (0.0, 0.0, False))
        cores = self.whole(1, 14)
        self.predictor.observe(Change(name, self.now, before, cores))
        self.put(name, cores, lasting)

    def put_silently(self, name: str) -> None:
        """Another machine, or other figures of one, without a change of its cores that anybody heard of."""
        lasting = bool(self.draw.random() < 0.1)
        if name in self.machines and self.draw.random() < 0.5:
            cores, memory_mib, before = self.machines[name]
            lasting = not before and bool(self.draw.random() < 0.3)
            self.machines[name] = (cores, memory_mib, lasting)
            self.fleet.put(name, cores, memory_mib, lasting)
        else:
            self.put(name, self.whole(1, 14), lasting)

    def remove(self, name: str) -> None:
        for task in self.fleet.remove(name):
            del self.running[task]
        self.machines.pop(name, None)
        self.promised = [(machine, task) for machine, task in self.promised if machine != name]
        if self.draw.random() < 0.5:
            self.predictor.forget(name)

    def task(self) -> Running:
        self.began += 1
        began_at = max(self.now - self.whole(0, 2000), 0.0)
        # Some should have ended long ago.
        ends_at = math.inf if self.draw.random() < 0.05 else self.now + self.whole(-300, 2500)
        return Running(f"r{self.began}", self.whole(1, 6), 512.0 * self.whole(0, 9), began_at, ends_at)

    def start(self, name: str) -> None:
        task = self.task()
        self.running[task.task] = (name, task)
        self.fleet.start(name, task)

    def end(self) -> None:
        if self.running:
            task = str(self.draw.choice(sorted(self.running)))
            del self.running[task]
            self.fleet.end(task)

    def promise(self, name: str) -> None:
        task = replace(self.task(), ends_at=self.now + self.whole(1, 2500))
        self.promised.append((name, task))
        self.fleet.promise(self.predictor.rows[name], task)

    def forget_promises(self) -> None:
        self.promised = []
        self.fleet.forget_promises()

    def pass_time(self) -> None:
        self.now += float(self.draw.choice([0.0, 1.0, 30.0, 200.0, 900.0]))
        if self.draw.random() < 0.5:
            self.predictor.advance(self.now)

    def happen(self) -> None:
        """One thing."""
        kind = int(self.draw.integers(0, 12))
        name = self.any_machine()
        if kind == 0:
            self.pass_time()
        elif kind == 1:
            self.resize(f"m{self.whole(0, MACHINES):02.0f}")
        elif kind == 2:
            self.put_silently(f"m{self.whole(0, MACHINES):02.0f}")
        elif kind == 3 and self.draw.random() < 0.4:
            self.remove(name)
        elif kind == 4 and self.draw.random() < 0.5:
            self.end()
        elif kind == 5:
            self.forget_promises()
        elif kind == 6:
            # Somebody else asks, for another moment.
            self.fleet.waits_s(2.0, 0.0, self.now + self.whole(-300, 300))
        elif name in self.machines:
            (self.start if kind < 10 else self.promise)(name)

    def demand(self) -> Demand:
        """Of few classes, so that one asks again for what others asked for."""
        draw = self.draw
        return Demand(
            "t",
            float(draw.choice([2.0, 2.0, 2.0, 1.0, 4.0, 1.5])),
            float(draw.choice([0.0, 0.0, 0.0, 3000.0])),
            duration_s=None if draw.random() < 0.1 else float(draw.choice([0.0, 20.0, 600.0, 601.0, 3000.0, 40_000.0])),
            preemption_aversion=float(draw.choice([0.0, 0.0, 0.4, 1.0])),
            attempts=int(draw.integers(0, 3)),
            ran_s=float(draw.choice([0.0, 0.0, 900.0])),
            checkpoint_s=None if draw.random() < 0.6 else 120.0,
            waited_s=float(draw.choice([0.0, 0.0, 500.0, 9000.0])),
        )

    def anew(self) -> MatchMaker:
        """A match maker that has lived through nothing, over the same machines."""
        fleet = Fleet(self.predictor.copy(), most_cores=12)
        for name, (cores, memory_mib, lasting) in self.machines.items():
            fleet.put(name, cores, memory_mib, lasting)
        for name, task in self.running.values():
            fleet.start(name, task)
        for name, task in self.promised:
            fleet.promise(fleet.predictor.rows[name], task)
        return MatchMaker(fleet, self.options)


def plainly(maker: MatchMaker, demand: Demand, now: float) -> tuple[str | None, float, float | None, float]:
    """Algorithm 1 over all machines: which, its wait, P_c and E_wc."""
    fleet, predictor, options = maker.fleet, maker.predictor, maker.options
    predictor.advance(now)
    duration_s = maker.duration_s(demand)
    waits = fleet.waits_s(demand.cores, demand.memory_mib, now)
    then_s = predictor.elapsed_s() + np.where(waits < np.inf, waits, 0.0)
    free = fleet.free_cores() - demand.cores
    if options.releases and predictor.options.by_landmarks and predictor.options.sized:
        within_s = figures.release_s(duration_s)
        free += [fleet.released_of(row, within_s)[0] * (wait == 0.0) for row, wait in enumerate(waits.tolist())]
    failure, w = predictor.failure_and_loss(
        predictor.outlook(predictor.directions(), then_s, free, fleet.cores), duration_s
    )
    p = np.where(fleet.lasting > 0.0, 1.0, 1.0 - failure)
    failing, wasted = predictor.failure_and_loss(predictor.outlook(GROWTH, 0.0, 0.0, ANY_CORES), duration_s)
    anew = 1.0 - failing
    restart = figures.restart_s(options.unknown if math.isnan(anew) else float(anew), float(wasted), duration_s)
    usable = np.where(np.isnan(p), options.unknown, p)
    aversion = figures.aversion(demand.preemption_aversion, demand.attempts, options.escalation)
    checkpoint_s = demand.checkpoint_s or math.inf
    expected = figures.expected_s(waits, 1.0 - usable, w, restart, duration_s, checkpoint_s, aversion)
    idle = fleet.free_cores()
    delay = figures.may_wait(options.delay, demand.waited_s, options.patience, duration_s, bool((waits == 0.0).any()))
    row = choose(expected, waits, p, idle, duration_s, delay, options.spare, options.spread)
    if row < 0:
        return None, math.inf, None, math.inf
    known = None if math.isnan(p[row]) or fleet.lasting[row] else float(p[row])
    return fleet.name(row), float(waits[row]), known, float(expected[row])


def same(one: Decision | None, other: Decision | None) -> None:
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert (one.task, one.machine, one.starts) == (other.task, other.machine, other.starts)
    assert figures_of(one) == pytest.approx(figures_of(other), rel=1e-9, abs=1e-9)
    assert [offer.machine for offer in one.offers] == [offer.machine for offer in other.offers]
    for ours, theirs in zip(one.offers, other.offers, strict=True):
        assert figures_of(ours) == pytest.approx(figures_of(theirs), rel=1e-9, abs=1e-9)
        assert ours.lasting == theirs.lasting


def figures_of(found: Decision | Offer) -> list[float]:
    p = found.completion_probability
    more = found.duration_s if isinstance(found, Decision) else found.compared_s
    return [found.wait_s, -1.0 if p is None else p, found.expected_s, more]


def decide_everywhere(world: World, demand: Demand, offers: int) -> Decision:
    anew = world.anew()
    kept = world.maker.decide(demand, world.now, offers)
    same(kept, anew.decide(demand, world.now, offers))
    machine, wait_s, p, expected_s = plainly(anew, demand, world.now)
    assert (kept.machine, kept.starts) == (machine, wait_s == 0.0)
    ours = [kept.wait_s, -1.0 if kept.completion_probability is None else kept.completion_probability, kept.expected_s]
    assert ours == pytest.approx([wait_s, -1.0 if p is None else p, expected_s], rel=1e-9, abs=1e-9)
    return kept


def live(seed: int, predicting: PredictorOptions, options: MatchOptions, steps: int = 40) -> Sequence[Decision]:
    world = World(seed, predicting, options)
    found = []
    for _ in range(steps):
        for _ in range(int(world.draw.integers(0, 4))):
            world.happen()
        if world.draw.random() < 0.2:
            world.pass_time()
        kind = world.draw.random()
        if kind < 0.75:
            found.append(decide_everywhere(world, world.demand(), 2 * MACHINES if world.draw.random() < 0.4 else 0))
        else:
            demands = [replace(world.demand(), task=f"w{number}") for number in range(int(world.draw.integers(1, 9)))]
            others = world.anew().decide_all(demands, world.now)
            world.promised = []
            for one, other in zip(world.maker.decide_all(demands, world.now), others, strict=True):
                same(one, other)
                found.append(one)
    return found


# A world is drawn from its seed: a smaller one says nothing more.
@settings(deadline=None, max_examples=30, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    predicting=st.sampled_from(FORMS),
    delay=st.booleans(),
    promises=st.booleans(),
    patience=st.sampled_from([math.inf, 0.5]),
    escalation=st.sampled_from([0.0, 0.5]),
    nearly=st.sampled_from([{}, {}, {"spare": 0.1}, {"spread": 0.1}]),
    unknown=st.sampled_from([0.5, 1.0]),
    releases=st.booleans(),
)
def test_what_is_kept_is_never_stale_and_nobody_who_counts_is_left_out(
    seed: int,
    predicting: PredictorOptions,
    delay: bool,
    promises: bool,
    patience: float,
    escalation: float,
    nearly: dict[str, float],
    unknown: float,
    releases: bool,
) -> None:
    options = MatchOptions(delay, patience, promises, escalation, unknown=unknown, releases=releases, **nearly)
    live(seed, predicting, options)


def one_by_one(world: World, demands: Sequence[Demand], closed: dict[str, set[str]]) -> list[Decision]:
    """A round where each task finds a fleet of its own, in which the machines that are closed to it have no cores."""
    held: list[tuple[Running, Decision]] = []
    for demand in demands:
        maker = world.anew()
        for name in closed[demand.task] & world.machines.keys():
            _, memory_mib, lasting = world.machines[name]
            maker.fleet.put(name, 0.0, memory_mib, lasting)
        for task, decision in held:
            if decision.starts:
                maker.fleet.start(str(decision.machine), task)
            elif decision.machine is not None and world.options.promises:
                maker.fleet.promise(maker.predictor.rows[decision.machine], task)
        decision = maker.decide(demand, world.now, MACHINES)
        ends_at = world.now + decision.wait_s + decision.duration_s
        held.append((Running(demand.task, demand.cores, demand.memory_mib, world.now, ends_at), decision))
    return [decision for _, decision in held]


@settings(deadline=None, max_examples=15, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    predicting=st.sampled_from(FORMS),
    delay=st.booleans(),
    promises=st.booleans(),
    patience=st.sampled_from([math.inf, 0.5]),
    nearly=st.sampled_from([{}, {"spare": 0.1}, {"spread": 0.1}]),
    releases=st.booleans(),
)
def test_a_machine_that_is_closed_to_a_task_is_to_it_as_one_without_cores_and_to_no_other(
    seed: int,
    predicting: PredictorOptions,
    delay: bool,
    promises: bool,
    patience: float,
    nearly: dict[str, float],
    releases: bool,
) -> None:
    world = World(seed, predicting, MatchOptions(delay, patience, promises, releases=releases, **nearly))
    draw = world.draw
    for _ in range(2):
        world.happen()
        users = [{name for name in [*world.machines, "m99"] if draw.random() < share} for share in (0.0, 0.3, 0.8, 1.0)]
        demands = [replace(world.demand(), task=f"w{number}") for number in range(int(draw.integers(1, 7)))]
        closed = {demand.task: users[int(draw.integers(0, len(users)))] for demand in demands}
        world.forget_promises()
        expected = one_by_one(world, demands, closed)
        for one, other in zip(world.maker.decide_all(demands, world.now, MACHINES, closed), expected, strict=True):
            same(one, other)


def moving(seed: int, predicting: PredictorOptions, options: MatchOptions, steps: int = 15) -> list[Decision]:
    """Decisions at a moment of their own each, while hardly anything else happens but that tasks overrun."""
    world = World(seed, replace(predicting, fresh_s=2000.0, fresh_share=1.0), options)
    found = []
    for _ in range(steps):
        world.now += float(world.draw.choice([0.25, 1.0, 7.0, 40.0, 300.0]))
        if world.draw.random() < 0.1:
            world.happen()
        if world.machines:
            found.append(decide_everywhere(world, world.demand(), 2 * MACHINES if world.draw.random() < 0.2 else 0))
    return found


@settings(deadline=None, max_examples=20, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    predicting=st.sampled_from(FORMS),
    options=st.sampled_from([MatchOptions(), MatchOptions(delay=False), MatchOptions(spread=0.1, releases=True)]),
)
def test_what_is_kept_from_one_moment_to_the_next_is_as_it_would_be_anew(
    seed: int, predicting: PredictorOptions, options: MatchOptions
) -> None:
    moving(seed, predicting, options)


def test_machines_are_older_at_another_moment_and_have_room_sooner() -> None:
    fleet, match_cache = kept_of(300, fresh_s=5000.0)
    kept = match_cache.within(2.0, 0.0, 10.0, 7000.0)
    fleet.predictor.advance(40.0)
    later = match_cache.within(2.0, 0.0, 40.0, 7000.0)
    assert later is kept
    assert later.reach_s == 7680.0 - 30.0
    anew = MatchCache(fleet).within(2.0, 0.0, 40.0, 7000.0)
    assert (later.rows.tolist(), later.waits.tolist()) == (anew.rows.tolist(), anew.waits.tolist())
    assert later.outlook.aged.age.tolist() == anew.outlook.aged.age.tolist()
    # By then a task has overrun its estimate, and what was near has come nearer than the band reaches.
    fleet.predictor.advance(1100.0)
    later = match_cache.within(2.0, 0.0, 1100.0, 5000.0)
    assert later is kept
    anew = MatchCache(fleet).within(2.0, 0.0, 1100.0, 5000.0)
    assert dict(zip(later.rows.tolist(), later.waits.tolist(), strict=True)).items() <= (
        dict(zip(anew.rows.tolist(), anew.waits.tolist(), strict=True)).items()
    )
    assert match_cache.within(2.0, 0.0, 1100.0, 7000.0) is not kept


def test_what_is_kept_does_not_grow_with_the_moments_at_which_it_is_asked_for() -> None:
    fleet, match_cache = kept_of(100, fresh_s=5000.0)
    for number in range(1000, 1600):
        fleet.put(f"m{number}", 8.0)
        fleet.start(f"m{number}", Running(f"t{number}", 8.0, 0.0, 0.0, 35.0 if number % 2 else 110.0))
    for second in range(10, 20):
        fleet.predictor.advance(float(second))
        for reach_s in (0.0, 30.0, 120.0):
            match_cache.within(2.0, 0.0, float(second), reach_s)
    (kept,) = match_cache._classes.values()
    assert len(kept.bands) == 3


@pytest.mark.parametrize("predicting", FORMS, ids=lambda options: f"{options.form}-{options.sized}-{options.fresh_s}")
def test_worlds_have_what_can_go_stale(predicting: PredictorOptions) -> None:
    found = [decision for seed in range(3) for decision in live(seed, predicting, MatchOptions())]
    starts = sum(decision.starts for decision in found)
    waits = sum(0.0 < decision.wait_s < math.inf for decision in found)
    known = sum(decision.completion_probability is not None for decision in found)
    assert min(starts, waits, known, len(found) - known) > 5


def kept_of(machines: int, fresh_s: float = 60.0) -> tuple[Fleet, MatchCache]:
    predictor = Predictor(0.0, PredictorOptions(fresh_s=fresh_s))
    fleet = Fleet(predictor)
    for number in range(machines):
        predictor.observe(Change(f"m{number}", 0.0, 0.0, 8.0))
        fleet.put(f"m{number}", 8.0)
        if number % 2:
            fleet.start(f"m{number}", Running(f"t{number}", 8.0, 0.0, 0.0, 1000.0 * number))
    predictor.advance(10.0)
    predictor.known()
    return fleet, MatchCache(fleet)


def test_machines_that_are_busy_for_long_are_looked_at_only_if_asked_for() -> None:
    fleet, match_cache = kept_of(300)
    near = match_cache.within(2.0, 0.0, 10.0, 0.0)
    assert near.rows[:-1].tolist() == [fleet.predictor.rows[f"m{number}"] for number in range(0, 300, 2)]
    assert (near.waits[:-1] == 0.0).all()
    every = match_cache.within(2.0, 0.0, 10.0, EVER_S)
    assert len(every.rows) == 301
    assert (every.waits[-1], every.rows[-1], every.reach_s) == (math.inf, -1, EVER_S)
    assert len(match_cache.within(2.0, 0.0, 10.0, 7000.0).rows) == 155
    assert list(REACHES_S) == sorted(REACHES_S)


def test_the_same_question_is_answered_with_what_was_kept_and_another_anew() -> None:
    fleet, match_cache = kept_of(100)
    kept = match_cache.within(2.0, 0.0, 10.0, 0.0)
    assert match_cache.within(2.0, 0.0, 10.0, 0.0) is kept
    # Of machines that were looked at room that is taken or given is brought up to date, of others it is looked at anew.
    fleet.start("m0", Running("more", 8.0, 0.0, 10.0, 500.0))
    assert match_cache.within(2.0, 0.0, 10.0, 0.0) is kept
    assert kept.waits[kept.rows == fleet.predictor.rows["m0"]].tolist() == [490.0]
    fleet.end("more")
    assert match_cache.within(2.0, 0.0, 10.0, 0.0) is kept
    assert kept.waits[kept.rows == fleet.predictor.rows["m0"]].tolist() == [0.0]
    fleet.end("t1")
    assert match_cache.within(2.0, 0.0, 10.0, 0.0) is not kept
    kept = match_cache.within(2.0, 0.0, 10.0, 0.0)
    fleet.put("m0", 8.0, lasting=True)
    assert match_cache.within(2.0, 0.0, 10.0, 0.0) is not kept
    kept = match_cache.within(2.0, 0.0, 10.0, 0.0)
    fleet.predictor.advance(11.0)
    assert match_cache.within(2.0, 0.0, 11.0, 0.0) is not kept
    kept = match_cache.within(2.0, 0.0, 11.0, 0.0)
    fleet.predictor.observe(Change("m0", 11.0, 8.0, 4.0))
    assert match_cache.within(2.0, 0.0, 11.0, 0.0) is not kept


def test_a_machine_that_is_kept_longer_than_anything_known_becomes_unknown() -> None:
    predictor = Predictor(0.0, PredictorOptions(censored=False, fresh_s=1e6))
    for at in (0.0, 1000.0, 2000.0):
        predictor.observe(Change("m0", at, 8.0 + at, 9.0 + at))
    fleet = Fleet(predictor)
    fleet.put("m0", 8.0)
    maker, demand = MatchMaker(fleet), Demand("t", 2.0, duration_s=600.0)
    found = maker.decide(demand, 2900.0)
    assert (found.machine, found.completion_probability is None) == ("m0", False)
    fleet.start("m0", Running("other", 8.0, 0.0, 2900.0, 3400.0))
    found = maker.decide(demand, 2900.0)
    assert (found.machine, found.wait_s, found.completion_probability) == ("m0", 500.0, None)
    assert found == MatchMaker(fleet).decide(demand, 2900.0)


def test_a_change_counts_at_once_also_if_the_curves_are_fresh_enough() -> None:
    predictor = Predictor(0.0, PredictorOptions(fresh_s=1e6, fresh_share=1.0))
    for at in range(0, 20_000, 1000):
        predictor.observe(Change("m0", float(at), 8.0, 9.0 if at % 3000 else 7.0))
    fleet = Fleet(predictor)
    fleet.put("m0", 8.0)
    maker, demand = MatchMaker(fleet), Demand("t", 2.0, duration_s=600.0)
    before = maker.decide(demand, 19_900.0)
    predictor.observe(Change("m0", 19_900.0, 9.0, 7.0))
    after = maker.decide(demand, 19_900.0)
    assert after == MatchMaker(fleet).decide(demand, 19_900.0)
    assert after.expected_s != before.expected_s


def test_a_round_of_tasks_that_all_want_other_memory_keeps_few_classes() -> None:
    _, match_cache = kept_of(20)
    for number in range(5 * CLASSES):
        match_cache.within(2.0, float(number), 10.0, 0.0)
    assert len(match_cache._classes) == CLASSES
