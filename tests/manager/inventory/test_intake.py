"""Reports have their turns one after the other, and commands go before them, in faked time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from cluster_manager.inventory.intake import HOLD_S, PAUSE_S, REPEATED_PAUSE_S, Intake
from tests.hostagent.faked_loop import FakedLoop


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=FakedLoop) as runner:
        runner.run(work)


async def read(intake: Intake, many: int, urgent: bool = False, pause_s: float = PAUSE_S) -> list[float]:
    """When each of so many reports was read, that came at once; no two at a time."""
    at, reading = list[float](), list[int]()

    async def one(number: int) -> None:
        async with intake.turn(urgent, pause_s):
            reading.append(number)
            await asyncio.sleep(0)
            assert reading.pop() == number
            at.append(asyncio.get_running_loop().time())

    await asyncio.gather(*map(one, range(many)))
    return at


def test_without_commands_reports_wait_for_each_other_only() -> None:
    async def work() -> None:
        assert await read(Intake(), 50) == [0.0] * 50

    run(work())


def test_while_a_command_is_under_way_few_reports_are_read_and_those_that_must_not_wait() -> None:
    async def work() -> None:
        intake = Intake()
        intake.begin("create")
        at = await read(intake, 4)
        assert [round(one / PAUSE_S, 6) for one in at] == [1.0, 2.0, 3.0, 4.0]
        began = asyncio.get_running_loop().time()
        at = await read(intake, 3, pause_s=REPEATED_PAUSE_S)
        assert [round((one - began) / REPEATED_PAUSE_S, 6) for one in at] == [1.0, 2.0, 3.0]
        began = asyncio.get_running_loop().time()
        assert await read(intake, 4, urgent=True) == [began] * 4

    run(work())


def test_reports_go_on_as_soon_as_the_last_command_is_over_or_takes_long() -> None:
    async def work() -> None:
        intake, loop = Intake(), asyncio.get_running_loop()
        for name in ("first", "second"):
            intake.begin(name)
        loop.call_later(PAUSE_S / 4, intake.end, "first")
        loop.call_later(PAUSE_S / 2, intake.end, "second")
        assert await read(intake, 10) == [PAUSE_S / 2] * 10
        intake.begin("long")
        assert intake.commanded
        began = loop.time()
        at = await read(intake, 200)
        held = [one for one in at if one < began + HOLD_S - PAUSE_S / 2]
        assert len(held) == round(HOLD_S / PAUSE_S) - 1
        assert max(at) <= began + HOLD_S + PAUSE_S / 2
        assert not intake.commanded
        # Its next step is a command again.
        intake.begin("long")
        assert await read(intake, 1) == [loop.time()]
        assert loop.time() > max(at)

    run(work())
