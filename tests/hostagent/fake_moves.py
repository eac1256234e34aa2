"""Live migration between make-believe hosts: the agent's side, spoken to a `tests.hostagent.world.World`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ebbtide.messages.migrations import MigrationAddress
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import Departure, Whereabouts
from hostagent.state.intents import Intent

ADDRESS = MigrationAddress(
    uri="qemu+unix:///system?socket=/none", listen="127.0.0.1", disk_dir="/disks", image_dir="/image"
)


class NoMoves:
    """Of a host that takes part in no live migration."""

    address: MigrationAddress | None = None
    by_command_only = ""

    async def receive(self, domain: str, identity: str, intent: Intent) -> None:
        raise HypervisorError("no live migration here")

    async def send(self, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        raise HypervisorError("no live migration here")

    async def whereabouts(self, domain: str) -> Whereabouts:
        raise HypervisorError("no live migration here")

    async def stop_move(self, domain: str) -> None:
        raise HypervisorError("no live migration here")


class FakeMoves(NoMoves):
    """See `hostagent.libvirt.hypervisor.Moves`."""

    address = ADDRESS

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def receive(self, domain: str, identity: str, intent: Intent) -> None:
        boot_mib, text = intent.boot_mib, intent.model_dump_json()
        await self._call("receive", domain=domain, identity=identity, intent=text, boot_mib=boot_mib)

    async def send(self, domain: str, move: Departure, told: Callable[[str], None]) -> str:
        told("half of it is there")
        text = move.intent.model_dump_json()
        return str(await self._call("send", domain=domain, to=move.domain, intent=text))

    async def whereabouts(self, domain: str) -> Whereabouts:
        where: Whereabouts = await self._call("whereabouts", domain=domain)
        return where

    async def stop_move(self, domain: str) -> None:
        await self._call("stop_move", domain=domain)
