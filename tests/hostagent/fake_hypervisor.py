"""The agent's side of the make-believe host: the hypervisor port, spoken to a `tests.hostagent.world.World`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ebbtide.deflation.allocations import cpu_shares
from ebbtide.deflation.cascade.mechanisms import Finding, Mechanism
from ebbtide.deflation.cascade.ordinary import Statement
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.hosts import TemplateInfo
from ebbtide.messages.vms import VMSpec
from ebbtide.rest.metrics.totals import Calls
from hostagent.errors import DomainGone, HypervisorError, RequestRefused
from hostagent.libvirt.hypervisor import (
    Candidate,
    DomainState,
    DomainSummary,
    GuestCpus,
    HostSideReading,
    Saved,
    ToSave,
)
from hostagent.state.intents import Before, Intent
from tests.hostagent.fake_moves import NoMoves

#: What no domain of the world has.
NOT_HERE = (Mechanism.COLD, Mechanism.CPU_UNPLUG, Mechanism.DIMM, Mechanism.MEMORY_LIMIT)


class FakeHypervisor:
    """See `hostagent.libvirt.hypervisor.Hypervisor`. Each call has a connection of its own, like a thread of a pool."""

    def __init__(self, socket: Path, host_id: str = "host-a") -> None:
        self._socket = socket
        self._host_id = host_id
        self.moves = NoMoves()
        self.calls = Calls()
        #: What the host's kernel would say of each, MiB.
        self.residents: dict[str, float] = {}
        self._numbers = itertools.count()
        #: Who is told that a domain has started, stopped or rebooted.
        self.listeners: list[Callable[[str, bool], None]] = []

    async def _call(self, method: str, **params: Any) -> Any:
        reader, writer = await asyncio.open_unix_connection(str(self._socket))
        try:
            message = {"id": next(self._numbers), "method": method, "params": params}
            writer.write(json.dumps(message).encode() + b"\n")
            reply = json.loads(await reader.readline())
        finally:
            writer.close()
        if "error" in reply:
            raise (DomainGone if reply.get("gone") else HypervisorError)(reply["error"])
        return reply["result"]

    @property
    def sizes(self) -> FakeHypervisor:
        return self

    @property
    def adoption(self) -> FakeHypervisor:
        return self

    async def domains(self) -> list[DomainState]:
        found = await self._call("domains")
        read = [
            DomainState(
                d["name"],
                d["state"],
                Intent.model_validate_json(d["intent"]),
                original=d["original"],
                released=d["released"],
            )
            for d in found
            if d["intent"]
        ]
        return [domain for domain in read if domain.intent.owner == self._host_id]

    async def survey(self) -> dict[str, DomainSummary]:
        return {
            d["name"]: DomainSummary(
                d["uuid"],
                d["state"],
                d["vcpus"],
                tuple(d["vcpu_seconds"]),
                d["balloon_mib"],
                d["usable_mib"],
                said_at=d["said_at"],
            )
            for d in await self._call("survey")
        }

    async def resident_mib(self, domains: Iterable[str]) -> dict[str, float]:
        return {name: self.residents[name] for name in domains if name in self.residents}

    async def sweep(self, creating: Collection[str] = ()) -> None:
        pass

    async def keep(self, domain: str) -> None:
        await self._call("keep", domain=domain)

    async def is_new(self, domain: str) -> bool:
        return bool(await self._call("is_new", domain=domain))

    async def check(self, spec: VMSpec) -> None:
        if spec.template != "lab":
            raise RequestRefused(400, f"there is no template {spec.template}", "vm.template")

    @property
    def can_create(self) -> bool:
        return True

    def templates(self) -> tuple[TemplateInfo, ...]:
        return (TemplateInfo(name="lab", description="as in the make-believe world"),)

    async def start(self, domain: str, intent: Intent) -> None:
        if await self.saved_mib(domain) is None:
            if intent.redefine:
                await self.redefine(domain, intent)
            await self.prepare_start(domain, intent.committed.vector())
        await self._call("start", domain=domain)

    async def redefine(self, domain: str, intent: Intent) -> None:
        vcpus = math.ceil(intent.spec.nominal.cpu_cores)
        await self._call("redefine", domain=domain, vcpus=vcpus, boot_mib=intent.boot_mib)
        await self.prepare_start(domain, intent.committed.vector())

    async def shut_down(self, domain: str, limit_s: float) -> str:
        return str(await self._call("shut_down", domain=domain, limit_s=limit_s))

    async def to_save(self, domain: str) -> ToSave:
        return ToSave(*await self._call("to_save", domain=domain))

    async def save(self, domain: str, limit_s: float) -> Saved:
        return Saved(*await self._call("save", domain=domain, limit_s=limit_s))

    async def saved_mib(self, domain: str) -> float | None:
        found = await self._call("saved_mib", domain=domain)
        return None if found is None else float(found)

    async def most(self, domain: str) -> ResourceVector:
        return ResourceVector(*await self._call("most", domain=domain))

    async def examine(self, domain: str) -> Candidate:
        vcpus, boot_mib, memory_mib, why_not, before = await self._call("examine", domain=domain)
        return Candidate(vcpus, boot_mib, memory_mib, Before(**before), why_not)

    async def take_over(self, domain: str, intent: Intent) -> None:
        await self._call("take_over", domain=domain)
        await self._call("write_intent", domain=domain, intent=intent.model_dump_json())

    async def give_back(self, domain: str, before: Before) -> None:
        was = {"shares": before.cpu_shares, "quota": before.quota_per_cpu, "cap": before.cap_cores}
        await self._call("give_back", domain=domain, period_s=before.stats_period_s, **was)

    async def create(self, domain: str, intent: Intent, xml: str | None = None) -> None:
        nominal = intent.spec.nominal
        await self._call(
            "create",
            domain=domain,
            intent=intent.model_dump_json(),
            vcpus=math.ceil((intent.spec.ceiling or nominal).cpu_cores),
            boot_mib=intent.boot_mib,
            plugged_mib=intent.committed.memory_mib - intent.boot_mib,
            shares=cpu_shares(intent.spec.priority, nominal.cpu_cores),
        )

    async def suspend(self, domain: str) -> None:
        await self._call("suspend", domain=domain)

    async def findings(self, domain: str) -> tuple[Finding, ...]:
        found = {
            mechanism: Finding(mechanism, mechanism not in NOT_HERE, "as in the make-believe world")
            for mechanism in Mechanism
        }
        for name, *rest in await self._call("findings", domain=domain):
            found[Mechanism(name)] = Finding(Mechanism(name), *rest)
        return tuple(found.values())

    async def prepare_start(self, domain: str, size: ResourceVector) -> None:
        await self._call("prepare_start", domain=domain, cores=size.cpu_cores, memory_mib=size.memory_mib)

    async def resume(self, domain: str) -> None:
        await self._call("resume", domain=domain)

    async def destroy(self, domain: str) -> None:
        try:
            await self._call("destroy", domain=domain)
        except DomainGone:
            return

    async def write_intent(self, domain: str, intent: Intent) -> None:
        await self._call("write_intent", domain=domain, intent=intent.model_dump_json())

    async def read(self, domain: str) -> HostSideReading:
        r = await self._call("read", domain=domain)
        return HostSideReading(
            r["vcpus"],
            r["quota"],
            r["balloon_mib"],
            r["plugged_mib"],
            r["disk_mib_s"],
            r["network_mib_s"],
            r["limit_mib"],
            r["shares"],
            cap_cores=r["cap"],
            statement=Statement(*r["statement"]) if r["statement"] else None,
            read_at=r["read_at"],
        )

    async def cpu_seconds(self, domain: str) -> float:
        return float(sum((await self._call("read", domain=domain))["vcpu_seconds"]))

    async def set_quota(self, domain: str, cores_per_cpu: float | None, cap_cores: float | None) -> None:
        await self._call("set_quota", domain=domain, cores=cores_per_cpu, cap=cap_cores)

    async def set_shares(self, domain: str, shares: int) -> None:
        await self._call("set_shares", domain=domain, shares=shares)

    async def throttled(self, domain: str) -> tuple[int, int]:
        periods, throttled = await self._call("throttled", domain=domain)
        return periods, throttled

    async def set_balloon(self, domain: str, balloon_mib: float, limit_s: float) -> str:
        return str(await self._call("set_balloon", domain=domain, mib=balloon_mib))

    async def set_plugged(self, domain: str, plugged_mib: float, limit_s: float) -> str:
        reason = str(await self._call("set_plugged", domain=domain, mib=plugged_mib))
        if reason:
            await self.hold_back(domain)
        return reason

    async def ask_plugged(self, domain: str, plugged_mib: float) -> None:
        await self._call("set_plugged", domain=domain, mib=plugged_mib)

    async def set_vcpus(self, domain: str, count: int, limit_s: float) -> str:
        return str(await self._call("set_vcpus", domain=domain, count=count))

    async def hold_back(self, domain: str) -> None:
        await self._call("hold_back", domain=domain)

    async def call_off(self, domain: str) -> None:
        await self._call("call_off", domain=domain)

    async def set_disk(self, domain: str, disk_mib_s: float | None) -> str:
        return str(await self._call("set_disk", domain=domain, mib_s=disk_mib_s))

    async def set_network(self, domain: str, network_mib_s: float | None) -> str:
        return str(await self._call("set_network", domain=domain, mib_s=network_mib_s))

    async def set_limit(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        return str(await self._call("set_limit", domain=domain, mib=limit_mib))

    async def ask_statistics(self, domain: str, period_s: int) -> None:
        await self._call("ask_statistics", domain=domain, period_s=period_s)

    async def guest_cpus(self, domain: str) -> GuestCpus | None:
        return None

    async def set_guest_cpus(self, domain: str, online: tuple[int, ...]) -> str:
        return "no domain here has a qemu-guest-agent"

    async def check_limits(self) -> dict[str, str]:
        return {}

    async def guest_channel(self, domain: str) -> Path | None:
        if any(found.name == domain and found.state == "stopped" for found in await self.domains()):
            raise HypervisorError("its domain is off")
        return self._socket.parent / f"{domain}.sock"

    def on_lifecycle(self, callback: Callable[[str, bool], None]) -> None:
        self.listeners.append(callback)

    async def close(self) -> None:
        pass
