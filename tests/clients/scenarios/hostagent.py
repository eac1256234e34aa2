"""Scenario that a test runs with a client made from docs/openapi/hostagent.json: ``URL`` as argument, ``TOKEN``."""

from __future__ import annotations

import os
import sys

from generated_hostagent import AuthenticatedClient
from generated_hostagent.api.host import get_host, reclaim
from generated_hostagent.api.operations import get_operation
from generated_hostagent.api.vms import get_vms
from generated_hostagent.models.host_report import HostReport
from generated_hostagent.models.operation import Operation
from generated_hostagent.models.operation_state import OperationState
from generated_hostagent.models.problem import Problem
from generated_hostagent.models.reclaim_command import ReclaimCommand
from generated_hostagent.models.vector_input import VectorInput


def main(client: AuthenticatedClient) -> None:
    """Look at a host with one VM, and free a core."""
    before = get_host.sync(client=client)
    assert isinstance(before, HostReport)
    assert [vm.name for vm in before.vms] == ["low"]
    need = VectorInput(cpu_cores=1.0)
    begun = reclaim.sync(client=client, body=ReclaimCommand(request_id="room", epoch=1, need=need))
    assert isinstance(begun, Operation), begun
    found = get_operation.sync("room", client=client, wait_s=30.0)
    assert isinstance(found, Operation), found
    assert found.state is OperationState.DONE, found.sentence
    after = get_vms.sync(client=client)
    assert after is not None
    assert not isinstance(after, Problem)
    assert after.vms[0].current.cpu_cores < before.vms[0].current.cpu_cores


if __name__ == "__main__":
    main(AuthenticatedClient(sys.argv[1], os.environ["TOKEN"]))
