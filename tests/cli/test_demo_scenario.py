"""The demo begins only where its figures would be its own."""

from __future__ import annotations

from typing import Any

import pytest

from deflation.allocations import Priority
from deflation.messages import ManagedVM, Vector
from ebb.demo.scenario import Demo
from ebb.errors import DemoFailed
from ebb.lab.state import LabState


class Manager:
    """Knows one VM."""

    async def vms(self) -> list[ManagedVM]:
        size = Vector(cpu_cores=1, memory_mib=512)
        return [
            ManagedVM(
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
    with pytest.raises(DemoFailed, match=r"already \(web\).*`ebb delete web`"):
        await Demo(manager, LabState(), print).run()
