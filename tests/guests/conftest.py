"""A real lab for the tests: a manager, two host agents and libvirt. A missing part is an error, never a skip."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbtide.client import ManagerClient
from ebbtide.lab import paths
from ebbtide.lab.cluster import HostSlice, Lab
from ebbtide.lab.state import LabState


@dataclass(frozen=True)
class RunningLab:
    """A lab that is up. ``environment``: what `ebb` needs to find it."""

    lab: Lab
    state: LabState
    environment: dict[str, str]

    @property
    def token(self) -> str:
        return self.state.manager_token_file.read_text().strip()

    def client(self) -> ManagerClient:
        return ManagerClient(self.state.manager_url, self.token)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a guest of their own come first: a lab's agents look at every domain of the machine every 2 s."""
    items.sort(key=lambda item: "lab" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def lab() -> Iterator[RunningLab]:
    """Hosts of names of their own, so that a lab which the user has up keeps its VMs; the image cache is shared."""
    if os.geteuid() != 0:
        pytest.fail("tests with real guests need root: `make test`, or `make check` for those that do not")
    # Not pytest's directory: the user under which libvirt runs QEMU must be able to pass through.
    directory = Path(tempfile.mkdtemp(prefix="ebbtide-test-", dir="/var/tmp"))
    tag = directory.name.removeprefix("ebbtide-test-").replace("_", "x").lower()
    home = Lab(directory / "lab", report=print)
    hosts = [
        HostSlice.parse(f"test-{tag}-a=cpu_cores=6,memory_mib=3600"),
        HostSlice.parse(f"test-{tag}-b=cpu_cores=2,memory_mib=1600"),
    ]
    try:
        directory.chmod(0o711)
        state = home.up(hosts)
        environment = dict(os.environ) | {paths.STATE_VARIABLE: str(home.directory), "EBB_CONTEXT": "lab"}
        yield RunningLab(home, state, environment)
    finally:
        home.down()
        shutil.rmtree(directory)
