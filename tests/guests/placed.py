"""A VM for one test: whatever comes of it, it is deleted, so that a second try finds its name free."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from ebbtide.client import ManagerClient
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec

#: A domain starts within a second on a quiet machine, and in many on two cores that four processes share.
START_S = 180.0
LIMIT_S = 240.0


@contextlib.asynccontextmanager
async def placed(client: ManagerClient, spec: VMSpec) -> AsyncIterator[str]:
    """The host on which it runs; its guest boots still."""
    operation = await client.create(spec, deadline_s=START_S)
    try:
        created = await client.wait(operation, limit_s=LIMIT_S)
        assert created.state is OperationState.DONE, created.sentence
        assert created.host is not None
        yield created.host
    finally:
        if any(vm.name == spec.name for vm in await client.vms()):
            await client.wait(await client.delete(spec.name), limit_s=LIMIT_S)
