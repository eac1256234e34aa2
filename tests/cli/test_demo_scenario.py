"""The demo begins only where its figures would be its own."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.deflation.allocations import Priority
from ebbtide.demo.errors import DemoFailed
from ebbtide.demo.scenario import Demo
from ebbtide.lab.state import LabState
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import ClusterVM


class Manager:
    """Knows one VM."""

    async def vms(self) -> list[ClusterVM]:
        size = Vector(cpu_cores=1, memory_mib=512)
        return [
            ClusterVM(
                name="web",
                host="host-a",
                state="running",
                priority=Priority.DEFLATABLE,
                nominal=size,
                minimum=size,
                current=size,
                generation=1,
                sentence="",
            )
        ]


async def test_a_lab_with_other_vms_is_refused_by_their_names() -> None:
    manager: Any = Manager()
    with pytest.raises(DemoFailed, match=r"already \(web\).*`ebb vm delete web --yes`"):
        await Demo(manager, LabState(), print).run()
