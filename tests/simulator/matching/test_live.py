"""The live pass and the simulated match maker, given the same states: the same choice for every task.

What differs is how they go through the machines, all at once by tables or one by one; every formula is one function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.match.matching import Demand, MatchMaker, MatchOptions
from ebbtide.matcher.match.rounds import Pool
from ebbtide.matcher.match.tasks import Release, Task, TaskOrder, TaskPhase
from ebbtide.matcher.match.turns import Turn, turn
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.expected_time import may_wait, usable_duration_s
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs import state as arrays
from ebbtide.simulator.jobs.columns import State
from ebbtide.simulator.jobs.lists import enqueue, put_on
from ebbtide.simulator.matching import heartbeats, hooks
from ebbtide.simulator.matching.arrays import Matching
from ebbtide.simulator.matching.policy import fresh
from tests.matcher.match.reports import on_heartbeat

#: Curves are learned at every look, on both sides.
PLAIN = PredictorOptions(fresh_s=0.0, window_s=20_000.0, horizon_s=1800.0, look_every_s=300.0)
FORMS = [
    replace(PLAIN, form=form, sized=sized, censored=censored)
    for form, sized, censored in (
        ("next-change", False, False),
        ("next-change", True, True),
        ("next-shrink", True, True),
        ("landmark", True, True),
    )
]


@dataclass(frozen=True)
class Scene:
    """A moment: what the machines did up to now, what runs there, what waits. Times and cores are whole numbers."""

    now: float
    #: (at, machine, cores), from nothing at 0.
    changes: list[tuple[float, int, int]]
    #: (machine, cores, began at, estimate).
    running: list[tuple[int, int, float, float]]
    #: (cores, estimate, kills).
    waiting: list[tuple[int, float, int]]

    @property
    def cores(self) -> list[int]:
        return list({machine: cores for _, machine, cores in self.changes}.values())


def scene_of(seed: int) -> Scene:
    generator = np.random.default_rng(seed)
    machines = int(generator.integers(1, 9))
    changes = [(0.0, machine, int(generator.integers(1, 9))) for machine in range(machines)]
    cores = {machine: size for _, machine, size in changes}
    mean_s = generator.choice([200.0, 1500.0, 8000.0], machines)
    at = 0.0
    for _ in range(int(generator.integers(0, 120))):
        at += float(generator.integers(1, 300))
        machine = int(generator.choice(machines, p=(1 / mean_s) / (1 / mean_s).sum()))
        # A machine that is gone comes back.
        least = 1 if cores[machine] == 0 else 0
        after = int(np.clip(cores[machine] + generator.choice([-4, -2, -1, 1, 2, 3]), least, 12))
        if after != cores[machine]:
            changes.append((at, machine, after))
            cores[machine] = after
    now = at + float(generator.integers(0, 400))
    running = []
    for machine, size in cores.items():
        held = 0
        while generator.random() < 0.75 and held < size + 2:
            need = int(generator.integers(1, 4))
            held += need
            began_at = max(now - float(generator.integers(0, 3000)), 0.0)
            # Some overrun their estimates.
            running.append((machine, need, began_at, float(generator.integers(0, 4000))))
    waiting = [
        (int(generator.integers(1, 7)), float(generator.integers(0, 5000)), int(generator.integers(0, 3)))
        for _ in range(int(generator.integers(1, 15)))
    ]
    return Scene(now, changes, running, waiting)


@dataclass(frozen=True)
class Choice:
    """Of one task: where it begins or what it waits for, and the figures of all machines."""

    machine: int
    starts: bool
    waits: list[float]
    expected: list[float]
    probability: list[float]


def state_of(
    scene: Scene, predicting: PredictorOptions, matching: MatchOptions, preemption_aversion: float = 0.0
) -> tuple[State, Matching]:
    """The simulator's arrays at the moment, without what waits."""
    s = arrays.with_machines(arrays.empty_state(), len(scene.cores), 0.0)
    s.machines[:, c.MACHINE.memory] = c.UNLIMITED_MIB
    p = fresh(len(scene.cores), 0.0, predicting, matching, preemption_aversion, False)
    for at, machine, cores in scene.changes:
        before = int(s.machines[machine, c.MACHINE.cores])
        s.machines[machine, c.MACHINE.cores] = cores
        hooks.changed(s, p, machine, at, before)
    for task, (machine, cores, began_at, estimate_s) in enumerate(scene.running):
        s.tasks[task, c.TASK.cores], s.times[task, c.TIME.estimate] = cores, estimate_s
        _start(s, task, machine, began_at)
    return s, p


def simulated(
    scene: Scene,
    predicting: PredictorOptions,
    matching: MatchOptions,
    preemption_aversion: float,
    every_s: float | None,
) -> list[Choice]:
    """As the simulator's engine would ask: its arrays, the policy's hooks."""
    s, p = state_of(scene, predicting, matching, preemption_aversion)
    s.sums[c.SUM.checkpoint_every] = every_s or 0.0
    hooks.begin(s, p, scene.now)
    found = []
    for number, (cores, estimate_s, kills) in enumerate(scene.waiting):
        task = len(scene.running) + number
        s.tasks[task, c.TASK.cores], s.tasks[task, c.TASK.kills], s.times[task, c.TIME.estimate] = (
            cores,
            kills,
            estimate_s,
        )
        promised = p.promised.copy()
        machine = hooks.choose(s, p, task, scene.now)
        starts = machine >= 0
        if starts:
            _start(s, task, machine, scene.now)
        elif matching.promises and (p.promised != promised).any():
            machine = int(np.flatnonzero(p.promised != promised)[0])
        elif waits(scene, estimate_s, matching, p.waits.tolist()) and p.expected.min() < math.inf:
            machine = int(np.argmin(p.expected))
        found.append(Choice(machine, starts, p.waits.tolist(), p.expected.tolist(), p.probability.tolist()))
    return found


def waits(scene: Scene, estimate_s: float, matching: MatchOptions, waits_s: list[float]) -> bool:
    """Whether a task may wait for a busy machine: all came at second 0."""
    duration_s = usable_duration_s(estimate_s, 0.0, matching.fallback_s)
    return may_wait(matching.delay, scene.now, matching.patience, duration_s, 0.0 in waits_s)


def _start(s: State, task: int, machine: int, now_s: float) -> None:
    put_on(s, task, machine)
    s.machines[machine, c.MACHINE.used] += s.tasks[task, c.TASK.cores]
    s.times[task, c.TIME.began] = now_s
    s.times[task, c.TIME.expected] = now_s + s.times[task, c.TIME.estimate]


def name(machine: int) -> str:
    return f"m{machine:02}"


def live(
    scene: Scene,
    predicting: PredictorOptions,
    matching: MatchOptions,
    preemption_aversion: float,
    every_s: float | None,
) -> Turn:
    """As the manager does: core changes, tasks, one look at the engine."""
    predictor = Predictor(0.0, predicting)
    before: dict[int, int] = {}
    for at, machine, cores in scene.changes:
        predictor.observe(Change(name(machine), at, float(before.get(machine, 0)), float(cores)))
        before[machine] = cores
    tasks, attempts = [], {}
    for number, (machine, cores, began_at, estimate_s) in enumerate(scene.running):
        # No task is broken off here: that is another step.
        order = TaskOrder(f"r{number:03}", ("true",), cores, estimate_s, restartable=False)
        task = Task(order, "0a", 0.0, TaskPhase.RUNNING, 1, name(machine), began_at=began_at, begun=1)
        tasks.append(task)
        seen = Seen(AttemptState.RUNNING, name(machine), Claim.BEGUN, began_at, silent_s=0.0)
        attempts[task.attempt_name("ebb")] = seen
    for number, (cores, estimate_s, kills) in enumerate(scene.waiting):
        order = TaskOrder(
            f"w{number:03}",
            ("true",),
            cores,
            estimate_s,
            True,
            preemption_aversion=preemption_aversion,
            checkpoint_s=every_s,
        )
        task = Task(order, "0a", 0.0, preemptions=kills)
        tasks.append(task)
        attempts[task.attempt_name("ebb")] = Seen(AttemptState.HELD)
    sizes = {name(machine): size for machine, size in enumerate(scene.cores)}
    machines = {machine: EngineMachine(machine, 12, 12) for machine in sizes}
    pool = Pool(predictor.copy(), frozenset(sizes), matching)
    return turn(tasks, Look(machines, attempts), sizes, pool, scene.now, "ebb")


def agree(scene: Scene, *how: Any) -> list[Choice]:
    """Hold both against each other, task by task."""
    theirs, ours = simulated(scene, *how), live(scene, *how)
    released = {step.attempt: step.machine for step in ours.instructions if isinstance(step, Release)}
    for number, choice in enumerate(theirs):
        task = f"w{number:03}"
        found = ours.choices[task]
        expected = name(choice.machine) if choice.machine >= 0 else None
        assert (found.machine, found.waits_for) == ((expected, None) if choice.starts else (None, expected)), task
        assert released.get(f"ebb.{task}.0a.1") == found.machine
        possible = {machine for machine, value in enumerate(choice.expected) if value < math.inf}
        assert {offer.machine for offer in found.offers} == {name(machine) for machine in possible} or not waits(
            scene, scene.waiting[number][1], how[1], choice.waits
        )
        for offer in found.offers:
            machine = int(offer.machine[1:])
            if machine not in possible:
                # Without delay the simulator does not look at busy machines.
                assert offer.wait_s > 0.0
                continue
            assert offer.wait_s == pytest.approx(choice.waits[machine], rel=1e-12)
            assert offer.compared_s == pytest.approx(choice.expected[machine], rel=1e-9)
            p = choice.probability[machine]
            assert offer.completion_probability == (None if math.isnan(p) else pytest.approx(p, abs=1e-12))
    return theirs


# A scene is drawn from its seed: a smaller one says nothing more.
@settings(deadline=None, max_examples=40, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 2**32),
    predicting=st.sampled_from(FORMS[:3]),
    delay=st.booleans(),
    promises=st.booleans(),
    escalation=st.sampled_from([0.0, 0.5]),
    patience=st.sampled_from([math.inf, 4.0]),
    nearly=st.sampled_from([{}, {"spare": 0.1}, {"spread": 0.1}]),
    preemption_aversion=st.sampled_from([0.0, 0.4, 1.0]),
    every_s=st.sampled_from([None, 300.0]),
    releases=st.booleans(),
)
def test_every_choice_is_the_same(
    seed: int,
    predicting: PredictorOptions,
    delay: bool,
    promises: bool,
    escalation: float,
    patience: float,
    nearly: dict[str, float],
    preemption_aversion: float,
    every_s: float | None,
    releases: bool,
) -> None:
    matching = MatchOptions(delay, patience, promises, escalation, releases=releases, **nearly)
    agree(scene_of(seed), predicting, matching, preemption_aversion, every_s)


@pytest.mark.parametrize("predicting", FORMS, ids=lambda options: f"{options.form}-sized={options.sized}")
def test_scenes_have_what_can_differ(predicting: PredictorOptions) -> None:
    """Tasks that start, that wait, that wait behind promises, overruns, and machines with and without history."""
    starts = waits = known = unknown = 0
    for seed in range(6):
        for choice in agree(scene_of(seed), predicting, MatchOptions(releases=seed % 2 == 0), 0.0, None):
            starts += choice.starts
            waits += choice.machine >= 0 and not choice.starts
            known += sum(not math.isnan(p) for p in choice.probability)
            unknown += sum(math.isnan(p) for p in choice.probability)
    assert min(starts, waits, known, unknown) > 5


@pytest.mark.parametrize("predicting", FORMS, ids=lambda options: f"{options.form}-sized={options.sized}")
def test_a_report_is_answered_live_as_it_is_simulated(predicting: PredictorOptions) -> None:
    """Algorithm 3's first half: the same task, with the same chance, on the machine that reports."""
    options = MatchOptions(promises=False, threshold=0.6)
    starts = none = 0
    for seed in range(12):
        scene = scene_of(seed)
        s, p = state_of(scene, predicting, options)
        demands = []
        s = arrays.with_queues(s, np.array([[0, cores, 0] for cores in range(7)]))
        for number, (cores, estimate_s, _) in enumerate(scene.waiting):
            task = len(scene.running) + number
            s.tasks[task, [c.TASK.cores, c.TASK.queue]] = cores, cores
            s.times[task, c.TIME.estimate] = estimate_s
            enqueue(s, task, number, False)
            demands.append(Demand(str(task), float(cores), duration_s=estimate_s))
        hooks.begin(s, p, scene.now)
        heartbeats.mark_shortest(s)
        maker = live_maker(scene, predicting, options)
        for machine in range(len(scene.cores)):
            task, probability = heartbeats.most_likely(s, p, machine, scene.now)
            found = on_heartbeat(maker, name(machine), demands, scene.now)
            if task < 0:
                none += 1
                by_algorithm_1 = maker.decide(min(demands, key=maker.duration_s), scene.now)
                assert found == (by_algorithm_1 if by_algorithm_1.starts else None)
                assert heartbeats.shortest(s) == int(by_algorithm_1.task)
                continue
            starts += 1
            assert found is not None
            assert (found.task, found.machine) == (str(task), name(machine))
            assert found.completion_probability == pytest.approx(probability, abs=1e-12)
    assert min(starts, none) > 5


def live_maker(scene: Scene, predicting: PredictorOptions, options: MatchOptions) -> MatchMaker:
    """The live match maker at the moment."""
    predictor = Predictor(0.0, predicting)
    before: dict[int, int] = {}
    for at, machine, cores in scene.changes:
        predictor.observe(Change(name(machine), at, float(before.get(machine, 0)), float(cores)))
        before[machine] = cores
    fleet = Fleet(predictor, 12)
    for machine, cores in enumerate(scene.cores):
        fleet.put(name(machine), float(cores))
    for number, (machine, cores, began_at, estimate_s) in enumerate(scene.running):
        fleet.start(name(machine), Running(f"r{number}", float(cores), 0.0, began_at, began_at + estimate_s))
    return MatchMaker(fleet, options)
