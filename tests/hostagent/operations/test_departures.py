"""Departures at the agent: what is told of a long one."""

from __future__ import annotations

import asyncio

from ebbtide.messages.operations import Operation
from hostagent.operations.operations import TOLD, Operations, done


async def test_the_end_of_a_move_that_took_long_can_be_read() -> None:
    operations, moved = Operations("host-a"), asyncio.Event()

    async def run(operation: Operation) -> Operation:
        await moved.wait()
        return done(operation, "it moved")

    operations.begin("long", "depart", {}, run)
    for second in range(1001):
        operations.progress("long", f"{second} s")
    moved.set()
    ended = await operations.get("long", 5.0)
    assert ended is not None
    read = Operation.model_validate_json(ended.model_dump_json())
    assert (read.sentence, len(read.progress), read.progress[-1]) == ("it moved", TOLD, "1000 s")
