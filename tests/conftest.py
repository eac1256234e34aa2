"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from app_adapters import server

#: What wants most of the machine, or whose times depend on it: one after another, when all else is done.
ALONE = ("adapters", "chaos", "faults", "guests")
GROUP = "alone"
TESTS = Path(__file__).parent

# In CI the same examples every time: what fails there fails here, too. Everywhere else the search goes on at random.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """For ``-n 2 --dist loadgroup``: files stay together, and what is to be alone is one group."""
    for item in items:
        path = item.path.relative_to(TESTS)
        alone = path.parts[0] in ALONE or item.get_closest_marker("guest") is not None
        item.add_marker(pytest.mark.xdist_group(GROUP if alone else str(path)))
    # Before xdist reads the groups.
    yield


class AloneLast(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
    """The group that is to be alone goes to one process when nothing else is left to begin."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if GROUP in self.workqueue:
            self.workqueue.move_to_end(GROUP)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadGroupScheduling | None:
    return AloneLast(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of hook servers are stopped here, one in a guest's life."""
    monkeypatch.setattr(server, "STOP_LOOK_S", 0.02)
