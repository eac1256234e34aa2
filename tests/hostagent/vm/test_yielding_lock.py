"""The lock of a VM: who waits for it is heard of, and who only waits until it is free takes it from nobody."""

from __future__ import annotations

import asyncio

from hostagent.vm.yielding_lock import YieldingLock


async def test_it_is_free_only_when_nobody_is_about_to_have_it() -> None:
    told: list[None] = []
    lock = YieldingLock(lambda: told.append(None))
    await lock.acquire()
    queued = asyncio.create_task(lock.acquire())
    watching = [asyncio.create_task(lock.wait_until_free()) for _ in range(2)]
    await asyncio.sleep(0)
    assert (lock.is_wanted, len(told)) == (True, 3)
    lock.release()
    assert (lock.locked(), lock.is_free) == (False, False), "the next one is about to have it"
    await queued
    assert not any(task.done() for task in watching)
    lock.release()
    await asyncio.gather(*watching)
    assert (lock.is_free, lock.is_wanted) == (True, False)


async def test_one_who_gives_up_while_it_is_handed_over_leaves_it_free() -> None:
    lock = YieldingLock(lambda: None)
    await lock.acquire()
    queued = asyncio.create_task(lock.acquire())
    watching = asyncio.create_task(lock.wait_until_free())
    await asyncio.sleep(0)
    lock.release()
    queued.cancel()
    async with asyncio.timeout(5):
        await watching
    assert lock.is_free
