"""What one webhook is sent, when and how often, and what is given up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_manager.alerts.outbox import LONGEST_PAUSE_S, MOST_WAITING, OLDEST_S, PAUSE_S, Drop, Outbox, Outcome
from cluster_manager.alerts.webhooks import Webhook
from ebbtide.messages.explanations import Event

NOW = 1_000_000.0
HOOK = Webhook("oncall", "http://127.0.0.1:1", b"k" * 24, frozenset({"preempted", "lost"}))


def event(id_: int, kind: str = "preempted", at: float = NOW) -> Event:
    return Event(id=id_, at=at, vm="web", host="host-a", kind=kind, sentence="a sentence")


def ids(events: Iterable[Event]) -> list[int]:
    return [one.id for one in events]


def test_chosen_kinds_are_delivered_in_order_one_at_a_time() -> None:
    outbox = Outbox(HOOK, 0).offered([event(1), event(2, "placed"), event(3, "lost")], NOW)
    first = outbox.due(NOW)
    assert first is not None
    assert (first.id, ids(outbox.waiting), outbox.position) == (1, [1, 3], 0)
    outbox = outbox.answered(first, Outcome.DELIVERED, NOW)
    second = outbox.due(NOW)
    assert second is not None
    assert (second.id, outbox.position) == (3, 2)
    outbox = outbox.answered(second, Outcome.DELIVERED, NOW)
    assert (outbox.due(NOW), outbox.position, outbox.tries) == (None, 3, {Outcome.DELIVERED: 2})


def test_what_was_seen_is_not_taken_again() -> None:
    outbox = Outbox(HOOK, 5).offered([event(4), event(5)], NOW)
    assert outbox == Outbox(HOOK, 5)
    assert ids(outbox.offered([event(5), event(6)], NOW).waiting) == [6]


def test_every_kind_is_wanted_by_a_star() -> None:
    hook = Webhook("all", "http://127.0.0.1:1", b"k" * 24, frozenset({"*"}))
    assert ids(Outbox(hook, 0).offered([event(1, "anything")], NOW).waiting) == [1]


def test_failures_are_tried_again_after_growing_pauses() -> None:
    outbox, now, pauses = Outbox(HOOK, 0).offered([event(1)], NOW), NOW, []
    for _ in range(10):
        due = outbox.due(now)
        assert due is not None
        outbox = outbox.answered(due, Outcome.FAILED, now)
        assert outbox.due(now) is None
        pauses.append(outbox.due_at - now)
        now = outbox.due_at
    assert pauses[:4] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert outbox.tries == {Outcome.FAILED: 10}
    due = outbox.due(now)
    assert due is not None
    fresh = outbox.answered(due, Outcome.DELIVERED, now).offered([event(2, at=now)], now)
    due = fresh.due(now)
    assert due is not None
    assert fresh.answered(due, Outcome.FAILED, now).due_at == now + PAUSE_S  # a new event begins anew


@pytest.mark.parametrize(("asked_s", "pause_s"), [(0, PAUSE_S), (30, 30), (9999, LONGEST_PAUSE_S)])
def test_the_receiver_may_ask_for_a_pause_within_bounds(asked_s: float, pause_s: float) -> None:
    outbox = Outbox(HOOK, 0).offered([event(1)], NOW).answered(event(1), Outcome.FAILED, NOW, asked_s)
    assert outbox.due_at == NOW + pause_s


@pytest.mark.parametrize("by_s", [NOW, -NOW / 2.0])
def test_an_alert_is_as_old_as_it_is_when_the_clock_that_has_dated_it_is_set(by_s: float) -> None:
    outbox = Outbox(HOOK, 0).offered([event(1, at=NOW + 3.0)], NOW, 3.0).answered(event(1), Outcome.FAILED, NOW)
    outbox = outbox.offered([event(2, at=NOW + 1.0 + by_s)], NOW + 1.0, by_s)
    now = NOW + OLDEST_S
    outbox = outbox.answered(event(1), Outcome.FAILED, now)
    assert (ids(outbox.waiting), outbox.drops) == ([1, 2], {})
    outbox = outbox.answered(event(1), Outcome.FAILED, now + 0.5)
    assert (ids(outbox.waiting), outbox.drops) == ([2], {Drop.EXPIRED: 1})


def test_a_refusal_is_not_tried_again() -> None:
    outbox = Outbox(HOOK, 0).offered([event(1), event(3)], NOW).answered(event(1), Outcome.REFUSED, NOW)
    assert (ids(outbox.waiting), outbox.drops) == ([3], {Drop.REFUSED: 1})


def test_the_oldest_give_way_where_too_many_wait_and_an_answer_for_one_of_them_changes_nothing() -> None:
    outbox = Outbox(HOOK, 0).offered([event(id_) for id_ in range(1, MOST_WAITING + 4)], NOW)
    assert (ids(outbox.waiting)[0], len(outbox.waiting), outbox.drops) == (4, MOST_WAITING, {Drop.OVERFLOW: 3})
    late = outbox.answered(event(1), Outcome.REFUSED, NOW)
    assert (late.waiting, late.drops, late.tries) == (outbox.waiting, outbox.drops, {Outcome.REFUSED: 1})


def test_what_is_old_is_given_up() -> None:
    outbox = Outbox(HOOK, 0).offered([event(1, at=NOW - OLDEST_S - 1), event(2)], NOW)
    assert (ids(outbox.waiting), outbox.drops) == ([2], {Drop.EXPIRED: 1})
    later = NOW + OLDEST_S + 1
    outbox = outbox.offered([event(3, at=later)], later).answered(event(2), Outcome.FAILED, later)
    assert (ids(outbox.waiting), outbox.drops, outbox.failures) == ([3], {Drop.EXPIRED: 2}, 0)


step = st.one_of(
    st.tuples(st.just("offer"), st.integers(1, 300), st.sampled_from(["preempted", "placed"])),
    st.tuples(st.just("answer"), st.sampled_from(Outcome), st.floats(0, 1000)),
    st.tuples(st.just("wait"), st.floats(0, 2 * OLDEST_S), st.just("")),
)


@given(st.lists(step, max_size=40))
def test_each_wanted_event_waits_is_delivered_or_is_counted_as_dropped(steps: list[tuple[str, object, object]]) -> None:
    outbox, now, last, wanted, delivered = Outbox(HOOK, 0), NOW, 0, 0, 0
    for what, value, more in steps:
        if what == "offer":
            assert isinstance(value, int)
            events = [event(last + number, str(more), now) for number in range(1, value + 1)]
            last += value
            wanted += value if more == "preempted" else 0
            outbox = outbox.offered(events, now)
        elif what == "wait":
            assert isinstance(value, float)
            now += value
        elif (due := outbox.due(now)) is not None:
            assert isinstance(value, Outcome)
            assert isinstance(more, float)
            before = outbox.position
            outbox = outbox.answered(due, value, now, more)
            delivered += value is Outcome.DELIVERED
            assert outbox.position >= before
            assert outbox.due_at <= now + LONGEST_PAUSE_S
        assert wanted == len(outbox.waiting) + delivered + sum(outbox.drops.values())
        assert len(outbox.waiting) <= MOST_WAITING
        assert ids(outbox.waiting) == sorted(set(ids(outbox.waiting)))
