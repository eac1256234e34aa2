"""The acquirer's decisions: by worked examples, and held to its rules on random histories."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.deflation.errors import InvalidField
from ebbtide.matcher.acquire.acquirer import (
    Acquirer,
    CancelRequest,
    Deallocate,
    Decommission,
    Emptied,
    Event,
    Found,
    Gone,
    Instruction,
    Machine,
    Offered,
    PeriodOver,
    Refused,
    Request,
    RequestMachine,
    Standing,
    advance,
    advance_all,
)
from ebbtide.matcher.acquire.net_changes import AcquirerOptions, View
from ebbtide.matcher.acquire.provision import Provision, calls, news, unfinished
from ebbtide.simulator.matching.acquiring import at_once

HOUR_S = 3600.0


def holding(cores: list[float], next_at: float = 0.0) -> Acquirer:
    """So many machines; m-0 has changed last."""
    return Acquirer({f"m-{n}": Machine(f"m-{n}", 0.0) for n in range(len(cores))}, next_at=next_at)


def pool(cores: list[float]) -> dict[str, View]:
    return {f"m-{n}": View(one, 600.0 * (n + 1)) for n, one in enumerate(cores)}


def look(cores: list[float], wanted: float, options: AcquirerOptions) -> tuple[Acquirer, tuple[Instruction, ...]]:
    return advance(holding(cores), PeriodOver(HOUR_S, pool(cores), wanted), options)


def kinds(instructions: tuple[Instruction, ...]) -> Counter[str]:
    return Counter(type(one).__name__ for one in instructions)


def leaving(state: Acquirer) -> set[str]:
    return {one.name for one in state.machines.values() if one.standing is not Standing.HELD}


def test_the_tenth_that_changed_last_is_replaced_and_nothing_leaves_before_another_has_come() -> None:
    state, instructions = look([4.0] * 20, 56.0, AcquirerOptions())
    assert kinds(instructions) == {"RequestMachine": 2}
    assert sorted(one.replaces or "" for one in state.requests.values()) == ["m-0", "m-1"]
    assert leaving(state) == set()
    state, instructions = advance(state, Offered(HOUR_S, 1, "new-1"), AcquirerOptions())
    assert [type(one) for one in instructions] == [Decommission]
    assert leaving(state) == {"m-0"}
    assert "10 min ago" in state.machines["m-0"].why
    assert len(state.kept) == 20


def test_a_machine_is_given_back_only_when_its_last_task_has_ended() -> None:
    state, _ = look([4.0] * 20, 56.0, AcquirerOptions())
    state, _ = advance(state, Offered(HOUR_S, 1, "new-1"), AcquirerOptions())
    # A machine that is kept is never given back, whether it is empty or not.
    same, nothing = advance(state, Emptied("m-5"), AcquirerOptions())
    assert (same, nothing) == (state, ())
    state, instructions = advance(state, Emptied("m-0"), AcquirerOptions())
    assert [type(one) for one in instructions] == [Deallocate]
    assert unfinished(state, Provision())[-1:] == list(instructions)
    state, instructions = advance(state, Gone(HOUR_S, "m-0"), AcquirerOptions())
    assert instructions == ()
    assert "m-0" not in state.machines


@pytest.mark.parametrize(
    ("wanted", "requests", "leaves"),
    [
        # 80 cores: 60 to 80 % are 48 to 64.
        (48.0, 2, 0),
        (64.0, 2, 0),
        # 66 / .8 = 82.5 cores: one more of 4.
        (66.0, 3, 0),
        # 80 / .8 = 100 cores: five more.
        (80.0, 7, 0),
        # 44 / .6 = 73.3 cores: two of 4 go; replacement had wanted to be rid of those two anyway.
        (44.0, 0, 2),
        # 46 / .6 = 76.7: one goes, one is replaced.
        (46.0, 1, 1),
        # 20 / .6 = 33.3 cores: twelve go, none comes.
        (20.0, 0, 12),
    ],
)
def test_scaling_and_replacement_make_one_net_change(wanted: float, requests: int, leaves: int) -> None:
    state, instructions = look([4.0] * 20, wanted, AcquirerOptions())
    assert kinds(instructions) == +Counter({"RequestMachine": requests, "Decommission": leaves})
    assert leaving(state) == {f"m-{n}" for n in range(leaves)}


def test_without_scaling_a_fixed_number_is_kept() -> None:
    options = AcquirerOptions(least_machines=4, most_machines=4, replaced_share=0.25)
    for wanted in (0.0, 9.0, 400.0):
        assert kinds(look([4.0] * 4, wanted, options)[1]) == {"RequestMachine": 1}
    state, instructions = advance(Acquirer(), PeriodOver(0.0, {}, 0.0), options)
    assert kinds(instructions) == {"RequestMachine": 4}
    assert len(state.coming) == 4


def test_a_machine_without_which_too_little_would_be_left_stays() -> None:
    # 12 of 24 cores are wanted; without m-0 only 8 would be left, without m-1 and m-2 there are 20.
    state, _ = look([16.0, 2.0, 2.0, 4.0], 12.0, AcquirerOptions(replaced_share=0.0))
    assert leaving(state) == {"m-1", "m-2"}


def off(state: Acquirer, now: float, wanted: float, options: AcquirerOptions) -> tuple[Acquirer, Counter[str]]:
    """A look at machines of 4 cores of which m-0 is off; those that have come are on."""
    views = {name: View(0.0 if name == "m-0" else 4.0, 600.0, off=name == "m-0") for name in state.machines}
    state, instructions = advance(state, PeriodOver(now, views, wanted), options)
    return state, kinds(instructions)


def test_in_place_of_a_machine_that_is_off_another_is_asked_for_before_it_is_given_back() -> None:
    options = AcquirerOptions(least_machines=0, most_machines=2, replaced_share=0.0)
    state, did = off(holding([4.0] * 2), 1000.0, 6.0, options)
    # 6 / .8 = 7.5 cores: one of 4 is too few, and two may be on.
    assert (did, state.utilisation) == ({"RequestMachine": 1}, 1.5)
    again, did = off(state, 1000.0 + HOUR_S, 6.0, options)
    assert (did, leaving(again)) == ({}, set()), "none has come yet"
    state, _ = advance(again, Offered(5000.0, 1, "new-1"), options)
    state, did = off(state, 1000.0 + 2 * HOUR_S, 6.0, options)
    assert (did, leaving(state)) == ({"Decommission": 1}, {"m-0"})
    assert state.machines["m-0"].why.endswith("it has been off for 120 min")
    assert state.sentence == "utilisation is 75%: nothing to change; 1 that is off given back"


def test_a_machine_that_is_off_for_less_than_a_period_is_not_given_back_and_counts_again_when_it_is_on() -> None:
    options = AcquirerOptions(least_machines=1, replaced_share=0.0)
    state, did = off(holding([4.0] * 2, next_at=1000.0), 900.0, 3.0, options)
    assert did == {}
    state, did = off(state, 1000.0, 3.0, options)
    assert (did, state.utilisation) == ({}, 0.75)
    state, _ = advance(state, PeriodOver(1500.0, pool([4.0] * 2), 3.0), options)
    state, did = off(state, 1000.0 + HOUR_S, 3.0, options)
    assert (did, leaving(state)) == ({}, set()), "off for less than a period, once more"
    _, instructions = advance(state, PeriodOver(1000.0 + 2 * HOUR_S, pool([4.0] * 2), 5.0), options)
    assert kinds(instructions) == {}, "5 of 8 cores are wanted"


def test_a_machine_that_goes_off_is_made_up_for_at_once_where_too_few_are_left_and_once_only() -> None:
    options = AcquirerOptions(least_machines=2, replaced_share=0.5)
    state, did = off(holding([4.0] * 2, next_at=HOUR_S), 10.0, 6.0, options)
    assert did == {"RequestMachine": 1}
    refused, _ = advance(state, Refused(1, "no room"), options)
    assert off(refused, 20.0, 6.0, options)[1] == {}, "the end of the period decides"
    # What was to replace it comes in its place.
    replaced = Acquirer(holding([4.0] * 2).machines, {1: Request(1, 0.0, "m-0", "")}, 1, next_at=HOUR_S)
    state, did = off(replaced, 10.0, 6.0, options)
    assert (did, [one.replaces for one in state.requests.values()]) == ({}, [None])


def test_requests_that_are_not_wanted_any_more_serve_replacements_before_they_are_cancelled() -> None:
    cores = [4.0] * 10
    state = holding(cores)
    state = Acquirer(state.machines, {n: Request(n, 0.0, None, "") for n in (1, 2, 3)}, number=3)
    state, instructions = advance(state, PeriodOver(HOUR_S, pool(cores), 28.0), AcquirerOptions())
    # 52 cores are coming or there; 28 / .6 = 46.7: two requests are too many, and one machine is to be replaced.
    assert instructions == (CancelRequest(3, state.sentence),)
    assert [(one.number, one.replaces) for one in state.requests.values()] == [(1, None), (2, "m-0")]


def test_a_refused_replacement_leaves_the_machine_where_it_is() -> None:
    state, _ = look([4.0] * 10, 28.0, AcquirerOptions())
    state, instructions = advance(state, Refused(1, "no room"), AcquirerOptions())
    assert (instructions, leaving(state), state.requests) == ((), set(), {})
    # Nothing is asked for before the period is over.
    assert advance(state, PeriodOver(HOUR_S + 1.0, pool([4.0] * 10), 400.0), AcquirerOptions()) == (state, ())


def test_what_goes_by_itself_is_asked_for_anew_down_to_the_least_number() -> None:
    options = AcquirerOptions(least_machines=3)
    state, instructions = advance_all(holding([4.0] * 4), [Gone(1.0, "m-0"), Gone(1.0, "m-1")], options)
    assert kinds(instructions) == {"RequestMachine": 1}
    assert "m-1 is gone" in state.coming[0].why


def test_what_was_to_replace_a_machine_that_goes_by_itself_comes_in_its_place() -> None:
    state, _ = look([4.0] * 10, 28.0, AcquirerOptions(least_machines=10))
    state, instructions = advance(state, Gone(HOUR_S, "m-0"), AcquirerOptions(least_machines=10))
    assert instructions == ()
    state, instructions = advance(state, Offered(HOUR_S, 1, "new"), AcquirerOptions(least_machines=10))
    assert (instructions, len(state.kept)) == ((), 10)


def test_a_machine_of_which_nothing_is_known_is_neither_judged_nor_forgotten() -> None:
    cores = [4.0] * 10
    known = pool(cores)
    del known["m-0"]
    state, instructions = advance(holding(cores), PeriodOver(HOUR_S, known, 28.0), AcquirerOptions())
    assert kinds(instructions) == {"RequestMachine": 1}
    assert state.requests[1].replaces == "m-1"


def test_news_are_what_is_not_known_yet() -> None:
    state = Acquirer({"a": Machine("a", 0.0), "b": Machine("b", 0.0)}, {7: Request(7, 0.0, None, "")}, 7)
    provision = Provision({"a", "c", "d"}, {7: "c", 6: "a"}, {5: "no"}, {"e"})
    assert news(state, provision, 9.0) == [Offered(9.0, 7, "c"), Found(9.0, "d"), Gone(9.0, "b")]
    assert news(state, Provision(frozenset(), silent={"a", "b"}), 9.0) == []


def test_a_cancellation_that_was_lost_is_given_again_until_the_provider_knows() -> None:
    # Withdrawn: 3, which is under way, and 5, whose machine has come. 4 was given b, 2 is still wanted.
    state = Acquirer({"b": Machine("b", 0.0)}, {2: Request(2, 0.0, None, "")}, 5)
    provision = Provision({"b", "c"}, {4: "b", 5: "c"}, asked={2, 3, 4, 5})
    assert news(state, provision, 9.0) == []
    again = unfinished(state, provision)
    assert [one.number for one in again if isinstance(one, CancelRequest)] == [3, 5]
    assert [one.number for one in again if isinstance(one, RequestMachine)] == [2]
    assert not any(isinstance(one, CancelRequest) for one in unfinished(state, Provision({"b"}, {4: "b"}, asked={4})))


@pytest.mark.parametrize("unchanged_s", [600.0, math.inf])
def test_of_machines_that_changed_at_the_same_time_idle_ones_leave(unchanged_s: float) -> None:
    state = holding([4.0] * 20)
    views = {name: View(4.0, unchanged_s, busy=name < "m-15") for name in state.machines}
    # 44 / .6 = 73.3 of 80 cores: two leave.
    state, _ = advance(state, PeriodOver(HOUR_S, views, 44.0), AcquirerOptions())
    assert leaving(state) == {"m-15", "m-16"}
    # A tenth of a second later is no tie: the most recently changed leaves, whatever it does.
    views["m-0"] = View(4.0, unchanged_s - 0.1 if unchanged_s < math.inf else 1e9, busy=True)
    state, _ = advance(holding([4.0] * 20), PeriodOver(HOUR_S, views, 44.0), AcquirerOptions())
    assert "m-0" in leaving(state)


def test_a_provider_that_waits_is_not_called_at_once() -> None:
    class Waiting:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield

    async def wait() -> None:
        await Waiting()

    with pytest.raises(RuntimeError, match="must not wait"):
        at_once(wait())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"least_machines": 5, "most_machines": 4}, "least_machines"),
        ({"least_machines": -1}, "least_machines"),
        ({"replaced_share": 1.5}, "replaced_share"),
        ({"least_utilisation": 0.8}, "least_utilisation"),
        ({"period_s": 0.0}, "period_s"),
        ({"expected_cores": math.inf}, "expected_cores"),
    ],
)
def test_options_that_cannot_be_are_named(fields: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidField) as raised:
        AcquirerOptions(**fields)  # type: ignore[arg-type]
    assert raised.value.field == named


# --- rules, on random histories --------------------------------------------------------------------------------------

OPTIONS = st.builds(
    lambda least, more, share, low, band: AcquirerOptions(least, least + more, share, low, min(low + band, 1.0)),
    st.integers(0, 8),
    st.integers(0, 12),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.7),
    st.floats(0.05, 0.3),
)


@settings(max_examples=200, deadline=None)
@given(OPTIONS, st.data())
def test_no_history_breaks_the_rules(options: AcquirerOptions, data: st.DataObject) -> None:
    """Never below the least number by its own doing, never both directions, given back only when it is empty."""
    state = Acquirer()
    now, made, tasks = 0.0, 0, {}
    asked: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([0.0, 600.0, HOUR_S]))
        pending = sorted(state.requests)
        event: Event
        chosen = data.draw(st.sampled_from(["look", "offer", "offer", "refuse", "gone", "empty"]))
        if chosen == "offer" and pending:
            made += 1
            tasks[f"m-{made}"] = data.draw(st.integers(0, 1))
            event = Offered(now, data.draw(st.sampled_from(pending)), f"m-{made}")
        elif chosen == "refuse" and pending:
            event = Refused(data.draw(st.sampled_from(pending)), "no room")
        elif chosen == "gone" and state.machines:
            event = Gone(now, data.draw(st.sampled_from(sorted(state.machines))))
        elif chosen == "empty" and state.machines:
            name = data.draw(st.sampled_from(sorted(state.machines)))
            tasks[name] = 0
            event = Emptied(name)
        else:
            names = sorted(state.machines)
            views = {name: View(float(data.draw(st.integers(0, 9))), data.draw(st.floats(0.0, 9e4))) for name in names}
            event = PeriodOver(now, views, float(data.draw(st.integers(0, 120))))
        before = state
        state, instructions = advance(before, event, options)
        check(before, state, event, instructions, options)
        for one in instructions:
            if isinstance(one, RequestMachine):
                assert one.number not in asked
                asked.add(one.number)
            if isinstance(one, Deallocate):
                assert tasks[one.machine] == 0


def check(
    before: Acquirer, state: Acquirer, event: Event, instructions: tuple[Instruction, ...], options: AcquirerOptions
) -> None:
    found = kinds(instructions)
    asked, cancelled = found["RequestMachine"], found["CancelRequest"]
    away, given_back = found["Decommission"], found["Deallocate"]
    # Fewer than the least are kept only where fewer were: by our own doing it never falls below.
    if away:
        assert len(state.kept) >= min(options.least_machines, len(before.kept) - (not isinstance(event, Offered)))
        assert len(state.kept) >= options.least_machines or isinstance(event, Offered)
    assert given_back == 0 or isinstance(event, Emptied)
    if given_back:
        machine = event.machine  # type: ignore[union-attr]
        assert before.machines[machine].standing is not Standing.HELD
    if isinstance(event, PeriodOver):
        if event.now < before.next_at:
            assert (state, instructions) == (before, ())
            return
        replacing = sum(one.replaces is not None for one in state.requests.values())
        was = sum(one.replaces is not None for one in before.requests.values())
        net = asked - cancelled - away - (replacing - was)
        grown = len(state.kept) + len(state.coming) - len(before.kept) - len(before.coming)
        # The change in number is what scaling wants: replacement adds nothing to it.
        assert net == grown
        # Nothing is cancelled and asked for at once; what leaves at once is never made up for beyond replacement.
        assert not (asked and cancelled)
        if away or cancelled:
            assert grown < 0
            assert asked <= replacing
        assert len(state.kept) + len(state.coming) <= max(options.most_machines, len(before.kept) + len(before.coming))
        share = math.floor(options.replaced_share * len(before.kept) + 1e-9)
        assert replacing <= max(share, was)
    elif isinstance(event, Gone):
        assert away == 0
        assert len(state.kept) + len(state.coming) >= min(options.least_machines, len(before.kept) + len(before.coming))
    else:
        assert asked == cancelled == 0


def test_a_provider_gets_its_part_and_the_scheduler_the_rest() -> None:
    class Listening:
        def __init__(self) -> None:
            self.calls: list[tuple[str, object]] = []

        async def look(self) -> Provision:
            return Provision()

        async def request(self, number: int) -> None:
            self.calls.append(("request", number))

        async def cancel(self, number: int) -> None:
            self.calls.append(("cancel", number))

        async def deallocate(self, machine: str) -> None:
            self.calls.append(("deallocate", machine))

    provider = Listening()
    told: list[Decommission] = []
    given_: list[Instruction] = [
        RequestMachine(1, ""),
        Decommission("a", "x"),
        Deallocate("b", ""),
        CancelRequest(2, ""),
    ]
    for call in calls(provider, given_, told.append):
        at_once(call)
    assert provider.calls == [("request", 1), ("deallocate", "b"), ("cancel", 2)]
    assert told == [Decommission("a", "x")]
