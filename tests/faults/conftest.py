"""The guests that all tests of this package share, and what surrounds each of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from ebbtide.lab import services
from ebbtide.lab.state import LabState
from tests.faults.ward import Ward, open_ward
from tests.hostagent.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """The make-believe host."""
    # A short path: the name of a unix socket has room for 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="ebb") as directory:
        made = World(Path(directory))
        await made.start()
        yield made
        await made.stop()


@pytest.fixture(scope="package")
def libvirt_services() -> Iterator[LabState]:
    """libvirt answers; what had to be started for it is stopped at the end."""
    if os.geteuid() != 0:
        pytest.fail("tests with real guests need root: `make test`, or `make check` for those that do not")
    logs = Path(tempfile.mkdtemp(prefix="ebbtide-faults-logs-", dir="/var/tmp"))
    state = LabState()
    try:
        services.ensure_services(state, logs, lambda: None, print)
        yield state
    finally:
        services.stop_services(state, print)
        shutil.rmtree(logs)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_ward(libvirt_services: LabState) -> AsyncIterator[Ward]:
    async with open_ward(libvirt_services) as ward:
        yield ward


@pytest_asyncio.fixture(loop_scope="session")
async def ward(shared_ward: Ward) -> AsyncIterator[Ward]:
    """All VMs at their nominal size before the test, and again after it: what it breaks, it has to mend."""
    await shared_ward.begin()
    yield shared_ward
    await shared_ward.recover()
