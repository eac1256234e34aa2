"""The bounded history: numbers, pages, repetitions, what is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import DecisionKind
from ebbtide.messages.operations import VMOutcome
from hostagent.state import history as module
from hostagent.state.history import History, flat
from hostagent.state.intents import Cause


@pytest.fixture
def history() -> History:
    times = iter(range(100, 100_000))
    return History(lambda: float(next(times)))


def outcome(name: str, sentence: str, before: float = 1.0, target: float = 1.0) -> VMOutcome:
    was, goal = Vector(cpu_cores=before), Vector(cpu_cores=target)
    return VMOutcome(
        name=name, generation=1, before=was, after=goal, target=goal, shortfall=Vector(), ledger=(), seconds=0.0,
        sentence=sentence,
    )  # fmt: skip


def test_a_decision_is_numbered_timed_and_logged_in_one_line(history: History) -> None:
    with capture_logs() as lines:
        decision = history.note("low-1", DecisionKind.DEFLATE, "took 1 core", {"need_cpu_cores": 1.0}, "done")
    assert (decision.number, decision.at, decision.vm, decision.outcome) == (1, 100.0, "low-1", "done")
    assert history.decisions() == (decision,)
    (line,) = lines
    assert line["event"] == "deflate"
    assert line["why"] == "took 1 core"
    assert line["inputs"] == {"need_cpu_cores": 1.0}
    assert line["vm"] == "low-1"


def test_pages_follow_one_another_without_gap_or_repetition(history: History) -> None:
    for count in range(25):
        history.note(f"low-{count % 3}", DecisionKind.DEFLATE, f"decision {count}")
    seen: list[int] = []
    since = 0
    while page := history.decisions(since=since, limit=7):
        seen += [decision.number for decision in page]
        since = page[-1].number
    assert seen == list(range(1, 26))
    assert [d.number for d in history.decisions("low-1", since=10, limit=3)] == [11, 14, 17]
    assert [d.number for d in history.decisions(limit=2)] == [24, 25]
    assert history.decisions("nobody") == ()


def test_the_host_and_each_vm_remember_so_many_and_no_more(history: History) -> None:
    for count in range(module.HOST_REMEMBERED + 50):
        history.note("loud" if count else "quiet", DecisionKind.REPAIR, f"decision {count}")
    assert len(history.decisions(limit=10**6)) == module.HOST_REMEMBERED
    assert len(history.decisions("loud", limit=10**6)) == module.VM_REMEMBERED
    assert [d.sentence for d in history.decisions("quiet")] == ["decision 0"]
    assert [history.forgotten(since=since) for since in (None, 0, 49, 50)] == [False, True, True, False]
    last = history.newest - module.VM_REMEMBERED
    assert [history.forgotten("loud", since) for since in (0, last - 1, last)] == [True, True, False]
    assert not history.forgotten("quiet", 0)


def test_of_many_vms_the_one_that_was_silent_longest_is_forgotten(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VMS_REMEMBERED", 3)
    for name in ("a", "b", "c", "a", "d"):
        history.note(name, DecisionKind.ADMIT, f"{name} {history.newest}")
    assert [bool(history.decisions(name)) for name in "abcd"] == [True, False, True, True]


def test_the_same_decision_again_is_counted_and_not_repeated(history: History) -> None:
    history.note("low-1", DecisionKind.REPAIR, "put right")
    history.note("low-2", DecisionKind.REPAIR, "put right")
    for _ in range(3):
        history.note("low-1", DecisionKind.REPAIR, "put right")
    assert [(d.number, d.vm, d.repeated) for d in history.decisions()] == [(1, "low-1", 3), (2, "low-2", 0)]
    assert [d.repeated for d in history.decisions("low-1")] == [3]
    history.note("low-1", DecisionKind.DEFLATE, "took")
    history.note("low-1", DecisionKind.REPAIR, "put right")
    assert [d.number for d in history.decisions("low-1")] == [1, 3, 4]
    assert history.newest == 4


def test_a_repetition_of_what_the_host_has_forgotten_is_still_counted_for_the_vm(history: History) -> None:
    history.note("low-1", DecisionKind.REPAIR, "put right")
    for count in range(module.HOST_REMEMBERED):
        history.note(None, DecisionKind.MODE, f"mode {count}")
    history.note("low-1", DecisionKind.REPAIR, "put right")
    assert [d.repeated for d in history.decisions("low-1")] == [1]
    assert all(d.vm is None for d in history.decisions(limit=10**6))


def test_the_latest_resizes_of_a_vm_are_remembered_and_each_is_a_decision(history: History) -> None:
    for count in range(module.RESIZES_REMEMBERED + 2):
        cause = Cause(request_id=f"r-{count}", kind="reclaim", body={}, started_at=0.0, before=Vector())
        history.resized(cause, outcome("low-1", f"took {count}", 2.0, 1.0), 30.0, Mode.ASK)
    past = history.resizes("low-1")
    assert [row.request_id for row in past] == [f"r-{count}" for count in range(2, module.RESIZES_REMEMBERED + 2)]
    assert history.resizes("nobody") == ()
    decision = history.decisions("low-1")[0]
    assert (decision.kind, decision.sentence, decision.outcome) == ("deflate", "reclaim r-0: took 0", "done")
    assert decision.inputs == {"before_cpu_cores": 2.0, "before_memory_mib": 0.0, "target_cpu_cores": 1.0,
                               "target_memory_mib": 0.0, "deadline_s": 30.0, "mode": "ask"}  # fmt: skip


@pytest.mark.parametrize(("before", "target", "kind"), [(2, 1, "deflate"), (1, 2, "reinflate"), (1, 1, "resize")])
def test_a_resize_is_named_by_its_direction(history: History, before: float, target: float, kind: str) -> None:
    history.resized(None, outcome("low-1", "moved", before, target), 30.0, Mode.FORCE)
    assert [decision.kind for decision in history.decisions()] == [kind]


def test_inputs_are_numbers_and_short_texts_by_name() -> None:
    given = {"need": {"cpu_cores": 1, "memory_mib": 0.123456}, "why": "x" * 300, "ready": True, "cpus": (1, 2)}
    rows = flat(given)
    assert rows["need_cpu_cores"] == 1.0
    assert rows["need_memory_mib"] == 0.1235
    assert rows["why"] == "x" * module.TEXT
    assert (rows["ready"], rows["cpus"]) == ("true", "(1, 2)")


def test_every_kind_is_in_the_reference() -> None:
    rows = (Path(__file__).parents[3] / "docs/reference/explain.md").read_text().splitlines()
    told = {kind for row in rows if row.startswith("| `") for kind in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told >= set(DecisionKind)
