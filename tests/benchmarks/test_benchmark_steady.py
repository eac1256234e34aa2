"""The benchmark `steady`: its parts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.deflating import steady


def test_the_host_hands_out_what_its_guests_have_and_what_is_free() -> None:
    assert steady.HOST_MIB == steady.VMS * steady.SIZE.memory_mib + steady.FREE_MIB == 1728


async def test_what_a_rule_takes_before_the_first_arrival_is_counted_with_what_it_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_mib = {"host": 0.0}
    host: Any = SimpleNamespace(agent=SimpleNamespace(host=SimpleNamespace(steady_taken_mib=0.0)))

    async def nothing(*given: Any) -> None:
        pass

    async def live(host: Any, day: Any, seconds: float) -> dict[str, float]:
        # Each of the two stretches takes something, and has it read again.
        taken_mib["host"] += 10.0
        host.agent.host.steady_taken_mib = taken_mib["host"]
        return {}

    async def counted(guest: Any) -> dict[str, float]:
        return {"refaulted_mib": taken_mib["host"], "major_faults": 0.0}

    async def in_guest(guest: Any, script: str) -> str:
        return "{}"

    host.begin = nothing
    for name, instead in (("_live", live), ("_counted", counted), ("in_guest", in_guest)):
        monkeypatch.setattr(steady, name, instead)
    monkeypatch.setattr(asyncio, "sleep", nothing)
    row = await steady._day(host, [SimpleNamespace()], 0, quick=True)  # type: ignore[list-item]
    assert (row["refaulted_mib"], row["trimmed_mib"]) == (20.0, 20.0)
