"""The manager that a file's commands ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from cluster_manager.api.app import make_app
from tests import schema_run
from tests.cli.running import Running
from tests.manager import cluster as tests_cluster
from tests.manager.with_agent import Lab, lab_of


@contextmanager
def quiet() -> Iterator[None]:
    """Logs of the manager must not stand between what a command prints in the same process."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture
async def lab(quiet_logs: None, tmp_path: Path) -> AsyncIterator[Lab]:
    async with lab_of(tmp_path) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    seen: schema_run.Seen = Counter()
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests_cluster, "make_app", lambda manager: schema_run.watch(make_app(manager), seen))
        async with lab_of(tmp_path_factory.mktemp("running")) as lab:
            made = Running(lab, seen)
            for name in ("old", "other"):
                await made.add_domain(name)
            await lab.add_old_host()
            yield made
