"""The demo begins only where its figures would be its own, and removes only VMs that it has made."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.client import ManagerRefused
from ebbtide.deflation.allocations import Priority
from ebbtide.demo.errors import DemoFailed
from ebbtide.demo.scenario import Demo
from ebbtide.lab.state import LabState
from ebbtide.messages.common import Problem, Vector
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.vms import ClusterVM, ManagedState, VMSpec

TAKEN = "vm.name: low-1 exists already (placing)"


class Manager:
    """Knows one VM, and refuses another one of any name."""

    def __init__(self, name: str, host: str | None = "host-a", state: ManagedState = "running") -> None:
        self._known = name, host, state
        self.deleted = list[str]()

    async def vms(self) -> list[ClusterVM]:
        name, host, state = self._known
        size = Vector(cpu_cores=1, memory_mib=512)
        return [
            ClusterVM(
                name=name,
                host=host,
                state=state,
                priority=Priority.DEFLATABLE,
                nominal=size,
                minimum=size,
                current=size,
                generation=1,
                sentence="",
            )
        ]

    async def create(self, spec: VMSpec, **_: Any) -> None:
        raise ManagerRefused(409, TAKEN, problem=Problem.of(409, TAKEN, code=ProblemCode.ALREADY_EXISTS))

    async def delete(self, name: str) -> None:
        self.deleted.append(name)
        raise ManagerRefused(404, f"there is no VM {name}")


async def test_a_lab_with_other_vms_is_refused_by_their_names() -> None:
    manager: Any = Manager("web")
    with pytest.raises(DemoFailed, match=r"already \(web\).*`ebb vm delete web --yes`"):
        await Demo(manager, LabState(), print).run()


@pytest.mark.parametrize("name", ["low-1", "low-2", "high-1"])
async def test_a_vm_of_the_demos_names_that_is_still_being_placed_is_refused(name: str) -> None:
    manager: Any = Manager(name, None, "placing")
    with pytest.raises(DemoFailed, match=rf"already \({name}\)"):
        await Demo(manager, LabState(), print).run()
    assert manager.deleted == []


@pytest.mark.parametrize(("name", "state"), [("low-1", "failed"), ("web", "placing")])
async def test_a_vm_that_comes_meanwhile_by_a_name_of_the_demos_is_not_deleted(name: str, state: ManagedState) -> None:
    manager: Any = Manager(name, None, state)
    with pytest.raises(ManagerRefused, match="exists already"):
        await Demo(manager, LabState(), print).run()
    assert manager.deleted == []
