"""A node that registers while its jobs hold cores whose number has changed: Slurm drains it, and takes it back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from benchmarks.matching.slurm_cluster import SlurmCluster
from ebbtide.matcher.match.attempts import RECOUNTED, AttemptState
from tests.engines.engine_hosts import EngineHost
from tests.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]


async def registers_until(condition: Callable[[], Awaitable[bool]], slurm: SlurmCluster) -> None:
    """Start the node's daemon again, more than once where Slurm takes no notice of its registration in time."""
    for left in reversed(range(3)):
        slurm.kill("n3")
        slurm.start_daemon("n3")
        try:
            await until(condition, limit_s=30.0)
            return
        except TimeoutError:
            if not left:
                raise


async def test_the_drain_that_slurm_leaves_behind_counts_as_ours_when_the_node_is_trusted_again(
    slurm: SlurmCluster,
) -> None:
    engine_host = EngineHost(slurm)
    await engine_host.engine.start()
    await engine_host.ready()

    async def drained() -> bool:
        return "count changed and jobs are using them" in (await engine_host.look()).machines["n3"].drained

    async def recounted() -> bool:
        return (await engine_host.look()).machines["n3"].drained == RECOUNTED

    try:
        attempt = await engine_host.running("n3", cores=2)
        await engine_host.engine.set_usable_cores("n3", 1)
        await registers_until(drained, slurm)
        await engine_host.engine.cancel(attempt)
        await engine_host.becomes(attempt, AttemptState.ENDED, AttemptState.GONE)
        # Not before it registers again.
        assert await drained()
        # What the next turn takes away.
        await registers_until(recounted, slurm)
        await engine_host.engine.undrain("n3")
        attempt = await engine_host.held(0.1)
        await engine_host.engine.release(attempt, "n3")
        assert (await engine_host.becomes(attempt, AttemptState.ENDED)).machine == "n3"
    finally:
        await engine_host.engine.set_usable_cores("n3", 4)
        await engine_host.engine.stop()
