"""Typed Python client of the manager's REST interface, for programs.

    from ebbtide.client import ManagerClient

    async with ManagerClient("http://127.0.0.1:7100", token) as manager:
        for vm in await manager.vms():
            print(vm.name, vm.current)

Without asyncio: `SyncManagerClient`. More in docs/reference/client.md.

Bodies are those of `ebbtide.messages`. A request fails with a ClientError: ManagerUnreachable, ManagerRefused (with
the HTTP status and the field that is wrong), ManagerStandsBy or ManagerBusy. Several managers of one store are given as
one URL with commas; the client finds the one that leads.
"""

from ebbtide.client.blocking import SyncManagerClient
from ebbtide.client.errors import ClientError, ManagerBusy, ManagerRefused, ManagerStandsBy, ManagerUnreachable
from ebbtide.client.lifecycle import new_request_id
from ebbtide.client.manager import ManagerClient
from ebbtide.client.tls import TLSFiles

__all__ = [
    "ClientError",
    "ManagerBusy",
    "ManagerClient",
    "ManagerRefused",
    "ManagerStandsBy",
    "ManagerUnreachable",
    "SyncManagerClient",
    "TLSFiles",
    "new_request_id",
]
