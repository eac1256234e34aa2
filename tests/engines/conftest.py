"""Real clusters for the tests of engines: one of each kind for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from benchmarks.matching.slurm_cluster import SlurmCluster
from tests.engines.dask_cluster import DaskCluster
from tests.engines.engine_hosts import EngineHost


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dask() -> Iterator[DaskCluster]:
    with DaskCluster() as cluster:
        yield cluster


@pytest_asyncio.fixture(params=["slurm", "dask"])
async def engine_host(request: pytest.FixtureRequest) -> AsyncIterator[EngineHost]:
    """An engine whose machines are free and have all of their cores."""
    made = EngineHost(request.getfixturevalue(request.param))
    await made.engine.start()
    await made.ready()
    yield made
    for attempt, seen in (await made.look()).attempts.items():
        if seen.lives:
            await made.engine.cancel(attempt)
    await made.engine.stop()
