"""A node that registers while its jobs hold cores whose number has changed: Slurm drains it, and takes it back."""

from __future__ import annotations

import pytest

from ebb.benchmarks.slurm_cluster import SlurmCluster
from task_matcher.attempts import RECOUNTED, AttemptState
from tests.engines.beds import Bed, until

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]


async def test_the_drain_that_slurm_leaves_behind_counts_as_ours_when_the_node_is_trusted_again(
    slurm: SlurmCluster,
) -> None:
    bed = Bed(slurm)
    await bed.engine.start()

    async def drained() -> bool:
        return "count changed and jobs are using them" in (await bed.look()).machines["n3"].drained

    async def recounted() -> bool:
        return (await bed.look()).machines["n3"].drained == RECOUNTED

    try:
        attempt = await bed.running("n3", cores=2)
        await bed.engine.set_usable_cores("n3", 1)
        slurm.kill("n3")
        slurm.start_daemon("n3")
        await until(drained)
        await bed.engine.cancel(attempt)
        await bed.becomes(attempt, AttemptState.ENDED, AttemptState.GONE)
        # Not before it registers again.
        assert await drained()
        slurm.kill("n3")
        slurm.start_daemon("n3")
        # What the next turn takes away.
        await until(recounted)
        await bed.engine.undrain("n3")
        attempt = await bed.held(0.1)
        await bed.engine.release(attempt, "n3")
        assert (await bed.becomes(attempt, AttemptState.ENDED)).machine == "n3"
    finally:
        await bed.engine.set_usable_cores("n3", 4)
        await bed.engine.stop()
