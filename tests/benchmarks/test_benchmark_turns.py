"""The order in which benchmarks measure what they compare, what they measure first, and turns that do not count."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.deflating import latency, neighbours, overhead, throughput, together
from benchmarks.deflating.overhead import FellShort
from benchmarks.passes import Pass
from benchmarks.simulating import peers
from benchmarks.watching import page, top


async def test_turns_that_do_not_count_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [None, FellShort("short"), FellShort("short"), None]

    async def turn(ground: Any, how: Pass, turns: overhead.Turns, *words: Any) -> None:
        if (failed := outcomes.pop(0)) is not None:
            raise failed
        for values in (turns.calls, turns.stalls_ms):
            values.append(1.0)
        turns.agent_s.append(5.0)
        turns.outside_s.append((0.0, 1.0))
        turns.phases.append({})

    async def nothing(*given: Any, **named: Any) -> None:
        pass

    @contextlib.asynccontextmanager
    async def agent(*given: Any, **named: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(agent=SimpleNamespace(host=SimpleNamespace(forget=nothing)), vm=None)

    for name, instead in (("_turn", turn), ("_agent", agent), ("fill", nothing), ("resize", nothing)):
        monkeypatch.setattr(overhead, name, instead)
    figures = await overhead.measure(SimpleNamespace(), Pass(runs=2))  # type: ignore[arg-type]
    assert figures["turns_dropped_agent"].value == 2
    assert figures["agent_outside_calls_alone"].runs == (1.0, 1.0)
    assert figures["agent_outside_calls_beside"].runs == (1.25, 1.25)


@pytest.mark.parametrize(
    "turn", [neighbours.in_turn, throughput.in_turn, together.in_turn, lambda number: latency.cases(False, number)]
)
def test_what_is_compared_is_measured_in_the_other_order_in_other_runs(turn: Any) -> None:
    orders = [list(turn(number)) for number in range(4)]
    assert {str(order) for order in orders} == {str(orders[0]), str(orders[0][::-1])}
    assert sum(order == orders[0] for order in orders) == 2


def test_each_of_two_vms_is_deflated_alone_first_and_last() -> None:
    first = {(number % neighbours.VMS, neighbours.in_turn(number)[0][0]) for number in range(1, 5)}
    assert len(first) == 4


def test_a_manager_is_measured_alone_before_the_page_in_one_run_and_after_it_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(page, "_alone", lambda *given: order.append("alone"))
    monkeypatch.setattr(page, "_with_tab", lambda *given: order.append("tab"))
    made: Any = SimpleNamespace(begin=lambda seconds: None, agents=SimpleNamespace(result=lambda: None))
    browser: Any = None
    for number in range(2):
        page._once(made, browser, 1.0, {}, number)
    assert order == ["alone", "tab", "tab", "alone"]


def test_a_manager_is_measured_alone_before_top_in_one_run_and_after_it_in_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[str] = []

    def measured(name: str) -> Any:
        def found(*given: Any) -> dict[str, float]:
            order.append(name)
            return {name: 1.0}

        return found

    monkeypatch.setattr(top, "_alone", measured("alone"))
    monkeypatch.setattr(top, "_watched", measured("watched"))
    manager: Any = SimpleNamespace(port=1)
    agents: Any = SimpleNamespace(begin=lambda *given: None, result=lambda: {})
    for number in range(2):
        assert set(top._one(manager, agents, tmp_path, 1.0, 10, number)) == {"alone", "watched"}
    assert order == ["alone", "watched", "watched", "alone"]


def test_what_is_compiled_before_a_peer_is_compared_reads_another_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[str] = []

    def ours(log: Path, *words: Any) -> tuple[float, float]:
        read.append(log.read_text())
        return 1.0, 1.0

    monkeypatch.setattr(peers, "_ours", ours)
    monkeypatch.setattr(peers, "_cpu_s", lambda command: ('{"wait_s": 1.0, "seconds": 1.0}', 1.0))
    peers._compared(20, Pass(runs=2), tmp_path)
    assert len(read) == len(set(read)) == 3
