"""The match maker: Algorithms 1 and 3, waiting, promises, and what a task may say of itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.match.choices import choose
from ebbtide.matcher.match.fleet import Fleet, Running
from ebbtide.matcher.match.matching import Demand, MatchMaker, MatchOptions
from ebbtide.matcher.predict.changes import Change
from ebbtide.matcher.predict.expected_time import may_wait, release_s
from ebbtide.matcher.predict.predictor import Predictor, PredictorOptions
from tests.matcher.equation_one import completion_probability, history_of
from tests.matcher.match.reports import on_heartbeat
from tests.matcher.pools import NOW_S, renewal_pool, short_or_long, steady_and_shaky


def maker(options: MatchOptions | None = None, **cores: float) -> MatchMaker:
    fleet = Fleet(steady_and_shaky())
    for name, amount in cores.items():
        fleet.put(name, amount)
    return MatchMaker(fleet, options)


def test_a_long_task_goes_to_the_steady_machine() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    decision = matcher.decide(Demand("t", 4.0, duration_s=3600.0), NOW_S)
    assert (decision.machine, decision.starts, decision.wait_s) == ("steady", True, 0.0)
    assert decision.completion_probability is not None
    assert decision.completion_probability > 0.8
    assert decision.expected_s > 3600.0


def test_it_waits_for_the_steady_machine_if_that_is_soon_free_and_not_if_it_is_not() -> None:
    for ends_in_s, expected in ((60.0, ("steady", False)), (50_000.0, ("shaky", True))):
        matcher = maker(steady=8.0, shaky=8.0)
        matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + ends_in_s))
        decision = matcher.decide(Demand("t", 4.0, duration_s=3600.0), NOW_S)
        assert (decision.machine, decision.starts) == expected


def test_without_delay_the_best_that_has_room_is_taken() -> None:
    matcher = maker(MatchOptions(delay=False), steady=8.0, shaky=8.0)
    matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 60.0))
    decision = matcher.decide(Demand("t", 4.0, duration_s=3600.0), NOW_S)
    assert (decision.machine, decision.starts) == ("shaky", True)
    matcher.fleet.start("shaky", Running("more", 8.0, 0.0, NOW_S, NOW_S + 60.0))
    assert matcher.decide(Demand("t", 4.0, duration_s=3600.0), NOW_S).machine is None


def test_what_no_machine_can_hold_waits_for_none() -> None:
    decision = maker(steady=8.0).decide(Demand("t", 9.0, duration_s=60.0), NOW_S)
    assert (decision.machine, decision.starts, decision.wait_s) == (None, False, math.inf)
    assert maker().decide(Demand("t", 1.0), NOW_S).machine is None


def test_tasks_that_wait_do_not_herd_onto_one_machine() -> None:
    demands = [Demand(f"t{number}", 8.0, duration_s=3600.0) for number in range(3)]
    chosen = {}
    for promises in (True, False):
        matcher = maker(MatchOptions(promises=promises), steady=8.0, shaky=8.0)
        matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 60.0))
        chosen[promises] = [decision.machine for decision in matcher.decide_all(demands, NOW_S)]
    assert chosen[False] == ["steady"] * 3
    assert chosen[True][:2] == ["steady", "shaky"]


def test_a_round_gives_no_room_twice_and_leaves_no_promise_behind() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    demands = [Demand(f"t{number}", 5.0, duration_s=600.0) for number in range(4)]
    decisions = matcher.decide_all(demands, NOW_S)
    assert sorted(d.machine for d in decisions if d.starts and d.machine) == ["shaky", "steady"]
    assert (matcher.fleet.free_cores()[list(matcher.fleet.rows())] == 8.0).all()


def test_a_machine_that_is_closed_to_a_task_is_none_for_it_and_as_good_as_before_for_the_others() -> None:
    demands = [Demand(name, 3.0, duration_s=600.0) for name in ("first", "second", "third", "fourth")]
    closed = {"second": {"steady", "unknown"}, "third": {"steady"}}
    matcher = maker(steady=8.0, shaky=4.0)
    decisions = matcher.decide_all(demands, NOW_S, closed=closed)
    assert [(one.machine, one.starts) for one in decisions] == [
        ("steady", True),
        ("shaky", True),
        ("shaky", False),
        ("steady", True),
    ]
    # As where there is no such machine.
    alone = maker(shaky=4.0).decide_all(demands[1:3], NOW_S)
    assert [one.expected_s for one in decisions[1:3]] == [one.expected_s for one in alone]
    assert matcher.decide_all(demands, NOW_S) == maker(steady=8.0, shaky=4.0).decide_all(demands, NOW_S)


def test_what_is_closed_to_some_tasks_has_no_machine_looked_at_again_for_the_others() -> None:
    """Else tasks of two users in turns look at all machines that are closed to one of them each time."""
    matcher = maker(MatchOptions(promises=False), steady=8.0, shaky=4.0)
    for name, cores in (("steady", 8.0), ("shaky", 4.0)):
        matcher.fleet.start(name, Running(f"on {name}", cores, 0.0, NOW_S, NOW_S + 60.0))
    before = matcher.fleet.touched()
    demands = [Demand(f"t{number}", 1.0, duration_s=600.0) for number in range(4)]
    decisions = matcher.decide_all(demands, NOW_S, closed={"t0": {"steady"}, "t2": {"steady"}})
    assert [decision.machine for decision in decisions] == ["shaky", "steady", "shaky", "steady"]
    assert matcher.fleet.touched() == before


def test_a_task_that_has_waited_for_long_waits_on_where_only_closed_machines_have_room() -> None:
    matcher = maker(MatchOptions(patience=0.5), steady=8.0, shaky=4.0)
    matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 60.0))
    demand = Demand("t", 1.0, duration_s=600.0, waited_s=900.0)
    for closed, expected in (({}, ("shaky", True)), ({"t": {"shaky"}}, ("steady", False))):
        (decision,) = matcher.decide_all([demand], NOW_S, closed=closed)
        assert (decision.machine, decision.starts) == expected


def test_a_task_to_which_all_machines_are_closed_gets_none_without_a_look_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matcher, every = maker(steady=8.0, shaky=4.0), {"steady", "shaky", "unknown"}
    demand = Demand("t", 1.0, duration_s=600.0)
    (avoids,) = matcher.decide_all([demand], NOW_S, avoided={"t": every})
    assert avoids.machine == "steady"
    monkeypatch.setattr(matcher, "_weigh", None)
    (decision,) = matcher.decide_all([demand], NOW_S, 3, closed={"t": every})
    assert (decision.machine, decision.starts, decision.offers) == (None, False, ())


@pytest.mark.parametrize("duration_s", [None, -5.0, math.nan, math.inf])
def test_a_task_without_a_usable_estimate_is_matched_as_one_of_the_fallback(duration_s: float | None) -> None:
    matcher = maker(MatchOptions(fallback_s=1234.0), steady=8.0, shaky=8.0)
    decision = matcher.decide(Demand("t", 1.0, duration_s=duration_s), NOW_S)
    assert decision.duration_s == 1234.0
    assert decision == matcher.decide(Demand("t", 1.0, duration_s=1234.0), NOW_S)


def test_an_estimate_of_nothing_starts_at_once_wherever_there_is_room() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 1.0))
    decision = matcher.decide(Demand("t", 1.0, duration_s=0.0), NOW_S)
    assert (decision.machine, decision.starts, decision.expected_s) == ("shaky", True, 0.0)


def test_an_estimate_that_an_earlier_attempt_has_refuted_is_not_believed_again() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    decision = matcher.decide(Demand("t", 1.0, duration_s=60.0, ran_s=4000.0), NOW_S)
    assert decision.duration_s == 5000.0
    assert decision.machine == "steady"


@given(error=st.floats(-1.0, 1.0))
def test_an_estimate_wrong_by_up_to_all_of_it_still_gives_a_decision(error: float) -> None:
    matcher = MATCHER
    decision = matcher.decide(Demand("t", 1.0, duration_s=1800.0 * (1.0 + error)), NOW_S)
    assert decision.machine in ("steady", "shaky")
    assert math.isfinite(decision.expected_s)
    assert decision.expected_s >= 0.0


def test_who_dislikes_preemption_waits_longer_for_a_steady_machine() -> None:
    def chosen(**said: float) -> tuple[str | None, bool]:
        matcher = maker(MatchOptions(escalation=2.0), steady=8.0, shaky=8.0)
        matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 4000.0))
        decision = matcher.decide(Demand("t", 4.0, duration_s=1800.0, **said), NOW_S)  # type: ignore[arg-type]
        return decision.machine, decision.starts

    assert chosen() == ("shaky", True)
    assert chosen(preemption_aversion=0.9) == ("steady", False)
    # Attempts escalate to steadier machines.
    assert chosen(attempts=4) == ("steady", False)


def test_a_task_that_saves_its_work_cares_less() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 250.0))
    plain = matcher.decide(Demand("t", 4.0, duration_s=7200.0), NOW_S)
    saving = matcher.decide(Demand("t", 4.0, duration_s=7200.0, checkpoint_s=60.0), NOW_S)
    assert plain.machine == "steady"
    assert saving.machine == "shaky"


def test_machines_without_history_are_used_and_said_to_be_unknown() -> None:
    fleet = Fleet(Predictor(0.0))
    fleet.put("a", 4.0)
    decision = MatchMaker(fleet).decide(Demand("t", 1.0, duration_s=60.0), 10.0)
    assert (decision.machine, decision.starts, decision.completion_probability) == ("a", True, None)


def test_short_tasks_leave_steady_machines_to_others_if_told_to_spare_them() -> None:
    demand = Demand("t", 1.0, duration_s=20.0)
    assert maker(steady=8.0, shaky=8.0).decide(demand, NOW_S).machine == "steady"
    assert maker(MatchOptions(spare=0.2), steady=8.0, shaky=8.0).decide(demand, NOW_S).machine == "shaky"
    long = Demand("t", 1.0, duration_s=7200.0)
    assert maker(MatchOptions(spare=0.02), steady=8.0, shaky=8.0).decide(long, NOW_S).machine == "steady"


def test_a_heartbeat_starts_the_task_most_likely_to_complete_there() -> None:
    matcher = maker(steady=8.0, shaky=8.0)
    demands = [Demand(name, 4.0, duration_s=d) for name, d in (("long", 9000.0), ("short", 300.0), ("mid", 900.0))]
    decision = on_heartbeat(matcher, "steady", demands, NOW_S)
    assert decision is not None
    assert (decision.task, decision.machine, decision.starts) == ("short", "steady", True)


def test_below_the_threshold_the_shortest_task_goes_where_algorithm_1_sends_it() -> None:
    matcher = maker(MatchOptions(threshold=0.999), steady=8.0, shaky=8.0)
    demands = [Demand("long", 4.0, duration_s=9000.0), Demand("short", 4.0, duration_s=3000.0)]
    decision = on_heartbeat(matcher, "shaky", demands, NOW_S)
    assert decision is not None
    assert (decision.task, decision.machine) == ("short", "steady")
    matcher.fleet.start("steady", Running("other", 8.0, 0.0, NOW_S - 100.0, NOW_S + 60.0))
    assert on_heartbeat(matcher, "shaky", demands, NOW_S) is None
    assert on_heartbeat(matcher, "shaky", [], NOW_S) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores", -1.0),
        ("cores", math.nan),
        ("memory_mib", math.inf),
        ("preemption_aversion", 1.5),
        ("attempts", -1),
        ("ran_s", -1.0),
    ],
)
def test_a_demand_that_makes_no_sense_names_its_field(field: str, value: float) -> None:
    given_fields: dict[str, float] = {"cores": 1.0, field: value}
    with pytest.raises(InvalidField, match=field):
        Demand("t", **given_fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("threshold", 1.5), ("spare", -1.0), ("fallback_s", math.nan)])
def test_an_option_that_makes_no_sense_names_its_field(field: str, value: float) -> None:
    with pytest.raises(InvalidField, match=field):
        MatchOptions(**{field: value})  # type: ignore[arg-type]


def test_over_all_machines_it_decides_as_algorithm_1_does_one_by_one() -> None:
    """Against a plain loop over machines with the exact form, by completed intervals."""
    changes = list(renewal_pool(60, short_or_long, NOW_S, seed=11))
    predictor = Predictor(0.0, PredictorOptions(censored=False))
    for change in changes:
        predictor.observe(change)
    history = history_of(changes, NOW_S)
    fleet = Fleet(predictor)
    for name in predictor.rows:
        fleet.put(name, 4.0)
    for duration_s in (120.0, 900.0, 2400.0):
        decision = MatchMaker(fleet).decide(Demand("t", 2.0, duration_s=duration_s), NOW_S)
        assert decision.machine is not None
        exact = {}
        for name, last in history.last.items():
            shrink = history.shrink_probability(last.direction)
            exact[name] = completion_probability(history.intervals, shrink, NOW_S - last.at, duration_s) or 0.0
        # The machine that it takes is among the best by the exact form; the grid decides between near equals.
        assert exact[decision.machine] >= max(exact.values()) - 0.05


def test_the_least_expected_time_is_chosen_and_nothing_that_never_has_room() -> None:
    expected = np.array([5.0, 3.0, 3.0, math.inf])
    waits = np.array([0.0, 10.0, 0.0, math.inf])
    probability = np.array([0.9, 0.9, math.nan, 0.9])
    used = np.zeros(4)
    assert choose(expected, waits, probability, used, 1.0, True, 0.0, 0.0) == 1
    assert choose(expected, waits, probability, used, 1.0, False, 0.0, 0.0) == 2
    assert choose(expected[3:], waits[3:], probability[3:], used[3:], 1.0, True, 0.0, 0.0) == -1
    assert choose(expected[:0], waits[:0], probability[:0], used[:0], 1.0, True, 0.0, 0.0) == -1
    near = np.array([0.9, 0.4, 0.8])
    assert choose(np.array([10.0, 10.4, 12.0]), np.zeros(3), near, np.zeros(3), 10.0, True, 0.05, 0.0) == 1


def test_of_machines_nearly_as_good_the_one_with_the_most_idle_cores_is_taken() -> None:
    expected, probability = np.array([10.0, 10.4, 12.0, 9.9]), np.full(4, 0.9)
    idle = np.array([2.0, 6.0, 8.0, 8.0])

    def chosen(waits: list[float], spread: float) -> int:
        return choose(expected, np.array(waits), probability, idle, 10.0, True, 0.0, spread)

    assert chosen([0.0, 0.0, 0.0, math.inf], 0.0) == 3
    assert choose(expected[:3], np.zeros(3), probability[:3], idle[:3], 10.0, True, 0.0, 0.05) == 1
    assert chosen([0.0, 0.0, 0.0, 0.0], 0.05) == 3
    # A busy machine that is the best is waited for all the same.
    assert chosen([0.0, 0.0, 0.0, 5.0], 0.05) == 3
    # Who is too far above the least is not alike.
    assert choose(expected[:3], np.zeros(3), probability[:3], idle[:3], 10.0, True, 0.0, 0.3) == 2


def test_a_machine_that_shrinks_has_as_many_tasks_as_those_alike() -> None:
    predictor = Predictor(0.0)
    fleet = Fleet(predictor)
    for number in range(4):
        predictor.observe(Change(f"m{number}", 0.0, 0.0, 8.0))
        fleet.put(f"m{number}", 8.0)
    demands = [Demand(f"t{number}", 1.0, duration_s=600.0) for number in range(8)]
    for spread, counts in ((0.0, [8]), (0.01, [2, 2, 2, 2])):
        decided = MatchMaker(fleet, MatchOptions(spread=spread)).decide_all(demands, 10.0)
        where = [decision.machine for decision in decided]
        assert sorted(where.count(name) for name in set(where)) == counts


def test_of_machines_that_are_alike_a_larger_one_with_more_at_work_is_taken_for_its_idle_cores() -> None:
    predictor = Predictor(0.0)
    fleet = Fleet(predictor)
    for name, cores in (("small", 2.0), ("large", 9.0)):
        predictor.observe(Change(name, 0.0, 0.0, cores))
        fleet.put(name, cores)
    for number in range(4):
        fleet.start("large", Running(f"r{number}", 1.0, 0.0, 0.0, 600.0))
    taken = MatchMaker(fleet, MatchOptions(spread=0.01)).decide(Demand("t", 1.0, duration_s=600.0), 10.0)
    assert taken.machine == "large"


def test_a_task_that_has_waited_for_long_takes_what_has_room() -> None:
    predictor = Predictor(0.0)
    fleet = Fleet(predictor)
    for at, cores in enumerate((4.0, 1.0, 4.0, 1.0, 4.0)):
        predictor.observe(Change("shrinks", 100.0 * at, 0.0 if at == 0 else 5.0 - cores, cores))
    predictor.observe(Change("lasts", 400.0, 0.0, 4.0))
    fleet.put("lasts", 4.0, lasting=True)
    fleet.put("shrinks", 4.0)
    fleet.start("lasts", Running("before", 4.0, 0.0, 400.0, 460.0))
    maker = MatchMaker(fleet, MatchOptions(patience=0.5))
    for waited_s, name, starts in ((0.0, "lasts", False), (300.0, "lasts", False), (301.0, "shrinks", True)):
        decision = maker.decide(Demand("t", 2.0, duration_s=600.0, waited_s=waited_s), 410.0)
        assert (decision.machine, decision.starts) == (name, starts)
    for option in (-1.0, math.nan):
        with pytest.raises(InvalidField, match="patience"):
            MatchOptions(patience=option)
    with pytest.raises(InvalidField, match="waited_s"):
        Demand("t", 2.0, waited_s=-1.0)


def test_a_task_that_has_waited_for_long_is_promised_room_where_there_is_none() -> None:
    predictor = Predictor(0.0)
    fleet = Fleet(predictor)
    predictor.observe(Change("busy", 0.0, 0.0, 4.0))
    fleet.put("busy", 4.0)
    fleet.start("busy", Running("before", 3.0, 0.0, 0.0, 60.0))
    wide = Demand("wide", 4.0, duration_s=600.0, waited_s=9000.0)
    narrow = Demand("narrow", 1.0, duration_s=60.0)
    maker = MatchMaker(fleet, MatchOptions(patience=0.25))
    first, second = maker.decide_all([wide, narrow], 10.0)
    assert (first.machine, first.starts) == ("busy", False)
    assert first.wait_s == pytest.approx(50.0)
    # Narrower tasks do not pass it for ever.
    assert not second.starts
    # Without delay none waits for a machine, and each takes what there is.
    first, second = MatchMaker(fleet, MatchOptions(delay=False)).decide_all([wide, narrow], 10.0)
    assert (first.machine, second.starts) == (None, True)


def test_the_paper_s_patience_has_no_end() -> None:
    assert may_wait(True, 1e9, math.inf, 0.0, True)
    assert not may_wait(True, 1e9, 0.25, 0.0, True)


def test_what_ends_soon_beside_a_task_counts_as_room_that_its_machine_can_lose() -> None:
    options = PredictorOptions(form="landmark", sized=True)
    kept = []
    for releases, ends_in_s in ((False, 60.0), (True, 60.0), (True, 50_000.0)):
        fleet = Fleet(steady_and_shaky(options))
        fleet.put("shaky", 8.0)
        fleet.start("shaky", Running("older", 4.0, 0.0, NOW_S - 100.0, NOW_S + ends_in_s))
        found = MatchMaker(fleet, MatchOptions(releases=releases)).decide(Demand("t", 4.0, duration_s=3600.0), NOW_S)
        assert found.starts
        assert found.completion_probability is not None
        kept.append(found.completion_probability)
    assert kept[1] > kept[0] == kept[2]


@pytest.mark.parametrize("duration_s", [1.0, 59.0, 600.0, 3600.0, 86_400.0])
def test_a_release_counts_within_about_half_of_a_duration(duration_s: float) -> None:
    assert 0.35 < release_s(duration_s) / duration_s < 0.71
    assert release_s(duration_s) == release_s(1.01 * duration_s) or release_s(1.01 * duration_s) < 0.36 * duration_s
    assert release_s(0.0) == release_s(1.0)


def test_with_spread_no_machine_at_all_is_no_error() -> None:
    maker = MatchMaker(Fleet(Predictor(0.0)), MatchOptions(spread=0.01))
    assert maker.decide(Demand("t", 1.0), 10.0).machine is None


def test_spare_and_spread_are_not_wanted_at_once() -> None:
    with pytest.raises(InvalidField, match="spread"):
        MatchOptions(spare=0.1, spread=0.1)


MATCHER = maker(steady=8.0, shaky=8.0)
