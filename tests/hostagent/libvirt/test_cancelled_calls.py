"""A call of libvirt that is cancelled is cancelled, also where the answer comes in the same moment.

One that was given up is waited for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from hostagent.errors import HypervisorTimeout
from hostagent.libvirt_connection import LibvirtConnection


class _Connection:
    def isAlive(self) -> bool:
        return True

    def setKeepAlive(self, *_: int) -> None:
        """As libvirt's."""

    def close(self) -> None:
        """As libvirt's."""


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_comes_with_the_answer_is_not_forgotten(turns: int) -> None:
    """`asyncio.wait_for` of Python 3.11 did: who watched a migration then went on for ever."""
    connection, answered = LibvirtConnection("test:///", lambda _: _Connection()), threading.Event()
    went_on = False

    async def ask() -> Any:
        nonlocal went_on
        await connection.call(lambda _: answered.wait(30.0))
        went_on = True
        await asyncio.Event().wait()

    try:
        task = asyncio.create_task(ask())
        await connection.call(lambda _: None)  # by now the other call is in its thread
        answered.set()
        time.sleep(0.05)  # noqa: ASYNC251 - the answer waits for the loop's next turn
        for _ in range(turns):
            await asyncio.sleep(0)
        was_answered = went_on
        task.cancel()
        async with asyncio.timeout(10.0):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert went_on is was_answered, "it goes on no further once it is cancelled"
    finally:
        await connection.close()


async def test_a_call_that_was_given_up_is_waited_for_until_its_thread_has_come_back() -> None:
    connection, answered = LibvirtConnection("test:///", lambda _: _Connection()), threading.Event()
    try:
        await connection.ended("d")
        with pytest.raises(HypervisorTimeout):
            await connection.call(lambda _: answered.wait(30.0), modifies="d", limit_s=0.05)
        waiting = asyncio.create_task(connection.ended("d"), name="waiting")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        answered.set()
        async with asyncio.timeout(10.0):
            await waiting
    finally:
        answered.set()
        await connection.close()
