"""Scenario that a test runs with a client made from docs/openapi/manager.json: ``URL`` as argument, ``TOKEN``."""

from __future__ import annotations

import os
import sys

from generated_manager import AuthenticatedClient
from generated_manager.api.events import events
from generated_manager.api.hosts import hosts
from generated_manager.api.operations import operation
from generated_manager.api.vms import create, delete, explain, target, vm, vms
from generated_manager.models.dry_run_report import DryRunReport
from generated_manager.models.operation import Operation
from generated_manager.models.operation_state import OperationState
from generated_manager.models.partial_vector_input import PartialVectorInput
from generated_manager.models.priority import Priority
from generated_manager.models.problem import Problem
from generated_manager.models.problem_code import ProblemCode
from generated_manager.models.reason import Reason
from generated_manager.models.reason_code import ReasonCode
from generated_manager.models.target_request import TargetRequest
from generated_manager.models.vector import Vector
from generated_manager.models.vector_input import VectorInput
from generated_manager.models.vm_explanation import VMExplanation
from generated_manager.models.vm_request import VMRequest
from generated_manager.models.vm_spec_input import VMSpecInput


def main(client: AuthenticatedClient) -> None:
    """Place two VMs, the second by deflating the first; bring one to a size; look at all; delete."""
    ended(client, create.sync(client=client, body=wanted("low", 5.0)))
    dry = create.sync(client=client, body=wanted("high", 4.0, Priority.FIXED, dry_run=True))
    assert isinstance(dry, DryRunReport)
    assert [change.name for change in dry.deflated] == ["low"]
    placed = ended(client, create.sync(client=client, body=wanted("high", 4.0, Priority.FIXED)))
    assert placed.host == "host-a"
    page = vms.sync(client=client)
    assert page is not None
    assert not isinstance(page, Problem)
    sizes = {found.name: found.current.cpu_cores for found in page.vms}
    assert sizes == {"high": 4.0, "low": 2.0}, sizes

    taken = target.sync_detailed("low", client=client, body=size_of("low", 1.0))
    assert taken.headers["Location"] == "/v1/operations/target-low", taken.headers
    resized = ended(client, taken.parsed)
    assert [row.verified for row in resized.vms[0].ledger if row.resource == "cpu_cores"]
    found = vm.sync("low", client=client)
    assert found is not None
    assert not isinstance(found, Problem)
    assert (found.current.cpu_cores, found.current.memory_mib) == (1.0, 1000.0)
    assert isinstance(explain.sync("low", client=client), VMExplanation)

    refused = create.sync_detailed(client=client, body=wanted("low", 1.0, request_id="again"))
    assert refused.status_code == 409
    assert isinstance(refused.parsed, Problem)
    assert refused.parsed.code is ProblemCode.ALREADY_EXISTS
    assert [error.field for error in refused.parsed.errors] == ["vm.name"]
    huge = create.sync(client=client, body=wanted("huge", 100.0, Priority.FIXED))
    assert isinstance(huge, Operation)
    failed = operation.sync(huge.request_id, client=client, wait_s=30.0)
    assert isinstance(failed, Operation)
    assert isinstance(failed.reason, Reason)
    assert failed.reason.code is ReasonCode.NO_ROOM
    assert isinstance(failed.reason.asked, Vector)
    assert failed.reason.asked.cpu_cores == 100.0
    log = events.sync(client=client, vm="low")
    assert log is not None
    assert not isinstance(log, Problem)
    assert {"placed", "deflated", "resized"} <= {event.kind.value for event in log.events}
    known = hosts.sync(client=client)
    assert known is not None
    assert not isinstance(known, Problem)
    assert [host.id for host in known.hosts] == ["host-a"]
    gone = delete.sync("high", client=client, request_id="delete-high")
    ended(client, gone if isinstance(gone, Operation | Problem) else None)


def wanted(
    name: str, cores: float, priority: Priority = Priority.DEFLATABLE, *, request_id: str = "", dry_run: bool = False
) -> VMRequest:
    """A request for a VM; a deflatable one shrinks to half a core and 300 MiB."""
    size, least = VectorInput(cpu_cores=cores, memory_mib=1000.0), VectorInput(cpu_cores=0.5, memory_mib=300.0)
    minimum = least if priority is Priority.DEFLATABLE else VectorInput()
    spec = VMSpecInput(name=name, nominal=size, minimum=minimum, priority=priority)
    return VMRequest(request_id=request_id or f"create-{name}", vm=spec, dry_run=dry_run)


def size_of(name: str, cores: float) -> TargetRequest:
    """A request for a number of cores; memory is not concerned."""
    return TargetRequest(request_id=f"target-{name}", target=PartialVectorInput(cpu_cores=cores))


def ended(client: AuthenticatedClient, begun: object) -> Operation:
    """The operation when it has ended as it should."""
    assert isinstance(begun, Operation), begun
    found = operation.sync(begun.request_id, client=client, wait_s=30.0)
    assert isinstance(found, Operation), found
    assert found.state is OperationState.DONE, found.sentence
    return found


if __name__ == "__main__":
    main(AuthenticatedClient(sys.argv[1], os.environ["TOKEN"]))
