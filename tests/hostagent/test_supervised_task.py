"""Tasks that should never end."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from structlog.testing import capture_logs

from hostagent.supervised_task import guarded


async def test_one_that_ends_is_said_by_name() -> None:
    async def ends() -> None: ...

    with capture_logs() as logs:
        await asyncio.create_task(guarded(ends), name="watch")
    assert [(entry["event"], entry["task"]) for entry in logs] == [("a task that should never end has ended", "watch")]


async def test_one_that_breaks_is_said_and_stays_broken() -> None:
    async def breaks() -> None:
        raise ValueError("broken")

    with capture_logs() as logs, pytest.raises(ValueError, match="broken"):
        await asyncio.create_task(guarded(breaks), name="watch")
    assert [(entry["event"], entry["task"]) for entry in logs] == [("a task that should never end broke", "watch")]


def test_one_that_is_cancelled_before_its_first_step_leaves_no_coroutine_behind() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.create_task(guarded(never), name="watch")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    gc.collect()  # what earlier tests left unclosed is theirs
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        asyncio.run(cancelled())
        gc.collect()
    assert [str(one.message) for one in said] == []
