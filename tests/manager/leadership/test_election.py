"""Who leads, by examples and by a model: whatever answers come when, two managers never act at the same time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster_manager.leadership.election import (
    ElectionEvent,
    ElectionState,
    Held,
    Instruction,
    Phase,
    Refused,
    Resign,
    TermBegun,
    TermEnded,
    TermFailed,
    Tick,
    Unproved,
    advance,
)

START = ElectionState(limit_s=3.0, pause_s=2.0)


def after(*events: ElectionEvent) -> tuple[ElectionState, list[Instruction]]:
    state = START
    last: tuple[Instruction, ...] = ()
    for event in events:
        state, last = advance(state, event)
    return state, list(last)


LEADING = (Tick(0.0), Held(0.0), TermBegun(7))


def test_a_standby_asks_until_it_gets_the_lock_and_then_begins_its_term() -> None:
    assert after(Tick(0.0)) == (START, [Instruction.ASK])
    state, instructions = after(Tick(0.0), Refused("http://other"))
    assert (state.leader, instructions) == ("http://other", [])
    state, instructions = after(Tick(0.0), Refused("http://other"), Tick(1.0), Held(1.0))
    assert instructions == [Instruction.BEGIN_TERM]
    assert state.acts(1.5)
    assert not state.leads(1.5)
    state, instructions = after(*LEADING)
    assert (state.phase, state.epoch, state.leader, instructions) == (Phase.LEADING, 7, None, [])


def test_a_proof_counts_from_the_moment_of_its_question() -> None:
    state, _ = after(*LEADING, Held(1.0))
    assert state.leads(3.9)
    assert not state.leads(4.0)
    assert not state.acts(4.0)
    assert after(*LEADING, Held(1.0), Held(0.5))[0].proved_at == 1.0


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Tick(3.0), "could not prove within 3 s"),
        (Refused(None), "lost the lock"),
        (Unproved("the connection is gone"), "the connection is gone"),
        (TermFailed("epoch 8 leads"), "epoch 8 leads"),
        (Resign(), "stopped"),
    ],
)
def test_whatever_puts_the_lead_in_doubt_ends_the_term_at_once(event: ElectionEvent, said: str) -> None:
    state, instructions = after(*LEADING, event)
    assert instructions == [Instruction.END_TERM]
    assert said in state.why
    assert not state.acts(0.1)


def test_a_proof_that_comes_after_the_end_revives_nothing() -> None:
    state, instructions = after(*LEADING, Tick(3.0), Held(3.1), TermBegun(9))
    assert (state.phase, instructions) == (Phase.ENDING, [])


def test_one_that_stepped_down_leaves_the_lock_to_others_for_a_while() -> None:
    down = (*LEADING, Unproved("x"), TermEnded(5.0))
    assert after(*down)[1] == [Instruction.RELEASE]
    assert after(*down, Tick(6.9))[1] == []
    assert after(*down, Tick(7.0))[1] == [Instruction.ASK]


def test_a_lock_that_was_asked_for_before_the_pause_begins_no_term() -> None:
    down = (*LEADING, TermFailed("x"), TermEnded(1.0))
    state, instructions = after(*down, Held(0.9))
    assert (state.phase, instructions) == (Phase.STANDBY, [Instruction.RELEASE])
    assert after(*down, Held(3.0))[1] == [Instruction.BEGIN_TERM]


def test_one_that_is_stopped_gives_up_even_a_lock_that_comes_late() -> None:
    state, instructions = after(Tick(0.0), Resign())
    assert (state.phase, instructions) == (Phase.STOPPED, [Instruction.RELEASE])
    assert after(Tick(0.0), Resign(), Held(0.0))[1] == [Instruction.RELEASE]
    state, instructions = after(*LEADING, Resign(), TermEnded(1.0))
    assert (state.phase, instructions) == (Phase.STOPPED, [Instruction.RELEASE])


@dataclass
class Model:
    """A server with one lock, and managers whose questions and answers travel at any speed."""

    release_s: float = 5.0
    now: float = 0.0
    states: list[ElectionState] = field(default_factory=lambda: [START, START])
    #: When the lock's holder was last heard by the server.
    holder: int | None = None
    heard_at: float = 0.0
    #: On their way to the server, and answers on their way back: manager and when it asked. Each asks one at a time.
    questions: list[tuple[int, float]] = field(default_factory=list)
    answers: list[tuple[int, ElectionEvent]] = field(default_factory=list)
    #: Managers that give the lock up once nothing of theirs is on its way.
    releasing: set[int] = field(default_factory=set)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.holder is not None and self.now - self.heard_at >= self.release_s:
            self.holder = None

    def asks(self, manager: int) -> bool:
        return any(row[0] == manager for row in (*self.questions, *self.answers))

    def tell(self, manager: int, event: ElectionEvent) -> None:
        self.states[manager], instructions = advance(self.states[manager], event)
        for instruction in instructions:
            if instruction is Instruction.ASK and not self.asks(manager):
                self.questions.append((manager, self.now))
            elif instruction is Instruction.RELEASE:
                self.releasing.add(manager)
        if manager in self.releasing and not self.asks(manager):
            self.releasing.remove(manager)
            if self.holder == manager:
                self.holder = None

    def lose(self, manager: int) -> None:
        """The question ends without an answer."""
        self.questions = [row for row in self.questions if row[0] != manager]
        self.answers = [row for row in self.answers if row[0] != manager]
        self.tell(manager, Unproved("the connection is gone"))

    def serve(self, index: int) -> None:
        manager, asked_at = self.questions.pop(index)
        if self.holder in (None, manager):
            self.holder, self.heard_at = manager, self.now
            self.answers.append((manager, Held(asked_at)))
        else:
            self.answers.append((manager, Refused(None)))


STEPS = st.tuples(
    st.sampled_from(["time", "tick", "serve", "answer", "begun", "ended", "lost", "failed"]),
    st.integers(0, 10),
    st.floats(0.0, 6.0),
)


#: The first one's term is over when its last proof comes; the other one asks.
LATE_PROOF = ["tick", "serve", "answer", "begun", "tick", "serve", "failed", "ended", "answer"]


@example([*((what, 0, 0.0) for what in LATE_PROOF), *((what, 1, 0.0) for what in LATE_PROOF[:3])])
@given(st.lists(STEPS, max_size=120))
def test_no_two_managers_ever_act_at_the_same_time(steps: list[tuple[str, int, float]]) -> None:
    model = Model()
    for what, index, seconds in steps:
        manager = index % 2
        match what:
            case "time":
                model.pass_time(seconds)
            case "tick":
                model.tell(manager, Tick(model.now))
            case "serve" if model.questions:
                model.serve(index % len(model.questions))
            case "answer" if model.answers:
                model.tell(*model.answers.pop(index % len(model.answers)))
            case "begun" if model.states[manager].phase is Phase.BEGINNING:
                model.tell(manager, TermBegun(1))
            case "ended" if model.states[manager].phase is Phase.ENDING:
                model.tell(manager, TermEnded(model.now))
            case "lost" if model.asks(manager):
                model.lose(manager)
            case "failed":
                model.tell(manager, TermFailed("the store failed"))
        acting = [state for state in model.states if state.acts(model.now)]
        assert len(acting) <= 1
