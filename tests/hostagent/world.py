"""A make-believe host outside the agent's process: domains with guests in them, which outlive a killed agent.

It stands in for libvirt and the guests only where a test needs hundreds of kills or an order of events that no real
guest would give; the real ones are tested in tests/guests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Reply = dict[str, Any]


class DomainOff(Exception):
    """What is to be done needs a domain that runs."""


@dataclass
class Domain:
    """One domain and the guest in it. Memory in MiB."""

    intent: str
    vcpus: int
    boot_mib: float
    plugged_mib: float
    state: str = "paused"
    quota: float | None = None
    #: Cap of the whole domain, in cores.
    cap: float | None = None
    online: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    balloon_mib: float = 0.0
    #: What the guest needs besides its application's cache, and what the cache holds.
    used_mib: float = 80.0
    cache_mib: float = 0.0
    resumed_with_quota: float | None = None
    #: How the application answers: "promise", "refuse", "hang", "slow" or "crashed".
    application: str = "promise"
    half_released: bool = False
    releases: dict[str, float] = field(default_factory=dict)
    #: Host-side seconds of each vCPU thread, and those that lie about being parked.
    vcpu_seconds: list[float] = field(default_factory=list)
    liars: set[int] = field(default_factory=set)
    #: Share of time in which the guest's tasks wait for memory, per cent.
    stalled_percent: float = 0.0
    #: Since its boot: faults that waited for a disk, microseconds in which a task waited for memory; None: its agent
    #: does not say.
    major_faults: int | None = None
    stalled_us: int | None = None
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: Cores and memory that the persistent definition would start the domain with.
    starts_with: tuple[float, float] | None = None
    disk_mib_s: float | None = None
    network_mib_s: float | None = None
    limit_mib: float | None = None
    shares: int = 1024
    #: Periods of the quota; in every fourth it stops a vCPU.
    periods: int = 0
    #: What is found of its mechanisms: [mechanism, available, reason, fix].
    findings: list[list[Any]] = field(default_factory=list)
    #: Applications with adapters, by name, with their resident MiB.
    applications: dict[str, float] = field(default_factory=dict)
    #: The notice of preemption that its guest says it has, as one that goes on from a snapshot does.
    notice: str = ""
    #: Of what is available, what is not free before it is reclaimed.
    cold_mib: float = 0.0
    #: The most memory that it can be given while it runs; 0: what it has now.
    most_mib: float = 0.0
    #: What the guest is asked to have plugged, where it does not have that at once; and what it lets go of no further.
    requested_mib: float = 0.0
    stuck_mib: float = 0.0
    #: Whether its vCPUs never run.
    idle: bool = False
    #: How often its balloon driver is asked, seconds; 0: never; None: it has none.
    stats_period_s: int | None = None
    #: Why it cannot be adopted.
    why_not: str = ""
    #: Off, its memory saved to disk, MiB.
    saved_mib: float | None = None
    #: Whether its disk is kept: its guest has run, or may have.
    kept: bool = False
    #: Whether its intent was written into another domain, of which it is a clone.
    clone: bool = False

    @property
    def bound_mib(self) -> float:
        return self.balloon_mib + self.plugged_mib

    @property
    def available_mib(self) -> float:
        return self.bound_mib - self.used_mib - self.cache_mib


@dataclass
class World:
    """All domains. ``calls`` lists what was asked for, in order; ``delay`` gives the seconds each call takes."""

    #: Which boot guests speak for.
    BOOT_ID: ClassVar[str] = "b"

    directory: Path
    domains: dict[str, Domain] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    #: What guests were asked: method and request id.
    guest_calls: list[tuple[str, str]] = field(default_factory=list)
    #: Notices of a preemption that guests have had.
    notices: list[Reply] = field(default_factory=list)
    #: How many of their programs run on.
    programs_run: int = 0
    #: Those that guests were told the end of.
    withdrawn: list[str] = field(default_factory=list)
    delay: Callable[[], float] = lambda: 0.0
    #: The hypervisor's error that every call of a method ends in, while it stands here.
    failures: dict[str, str] = field(default_factory=dict)
    #: The smallest sum of available memory ever seen in any guest: below 0 its kernel would have killed something.
    least_available_mib: float = 1e9
    guests_answer: bool = True
    #: Whether a new domain has what is plugged into it before its guest has booted.
    plugs_at_once: bool = True
    has_swap: bool = False
    #: What is free on the disk for saved memory.
    save_room_mib: float | None = 10_000.0
    #: How often a domain that was off was started.
    starts: int = 0
    #: Domains that move to another host: set when that is called off. And those that have left.
    moving: dict[str, asyncio.Event] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    #: UUIDs of those that were given back to their owners.
    released: set[str] = field(default_factory=set)
    #: How long a move takes: until this is set, or it is called off.
    move_ends: asyncio.Event = field(default_factory=asyncio.Event)
    #: Called with each call that changes something, before it is carried out.
    before: Callable[[str, str], Awaitable[None]] | None = None
    _servers: list[asyncio.Server] = field(default_factory=list)
    _guests: dict[str, asyncio.Server] = field(default_factory=dict)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def socket(self) -> Path:
        return self.directory / "world.sock"

    async def start(self) -> None:
        self._servers.append(await asyncio.start_unix_server(self._serve(self._hypervisor_call), str(self.socket)))

    async def stop(self) -> None:
        for server in [*self._servers, *self._guests.values()]:
            server.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.sleep(0)

    def guest_socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    def _serve(self, answer: Callable[[str, Reply], Awaitable[Reply]]) -> Callable[..., Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while line := await reader.readline():
                    if not line.strip():
                        continue
                    message = json.loads(line)
                    await asyncio.sleep(self.delay())
                    reply = await answer(message["method"], message.get("params", {}))
                    if reply is not None:
                        writer.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode() + b"\n")
                        await writer.drain()
            self._writers.discard(writer)
            writer.close()

        return serve

    # --- the hypervisor ------------------------------------------------------------------------------------------

    async def _hypervisor_call(self, method: str, params: Reply) -> Reply:
        self.calls.append((method, str(params.get("domain", ""))))
        if method in self.failures:
            return {"error": self.failures[method]}
        try:
            if self.before is not None:
                await self.before(method, str(params.get("domain", "")))
            return {"result": await getattr(self, f"_do_{method}")(**params)}
        except KeyError as error:
            return {"error": f"no domain {error}", "gone": True}
        except DomainOff:
            return {"error": "Requested operation is not valid: domain is not running"}

    async def _do_domains(self) -> list[Reply]:
        return [
            {
                "name": n,
                "state": d.state,
                "intent": d.intent,
                "original": False if d.clone else None,
                "released": d.uuid in self.released,
            }
            for n, d in self.domains.items()
        ]

    async def _do_keep(self, domain: str) -> None:
        self.domains[domain].kept = True

    async def _do_is_new(self, domain: str) -> bool:
        return domain not in self.domains or not self.domains[domain].kept

    async def _do_take_over(self, domain: str) -> None:
        self.released.discard(self.domains[domain].uuid)

    async def _do_create(
        self, domain: str, intent: str, vcpus: int, boot_mib: float, plugged_mib: float, shares: int = 1024
    ) -> None:
        held = plugged_mib if self.plugs_at_once else 0.0
        made = Domain(intent, vcpus, boot_mib, held, balloon_mib=boot_mib, online=set(range(vcpus)))
        made.requested_mib = plugged_mib
        made.shares = shares
        made.vcpu_seconds = [0.0] * vcpus
        self.domains[domain] = made
        guest = self._serve(lambda method, params: self._guest_call(made, method, params))
        self._guests[domain] = await asyncio.start_unix_server(guest, str(self.guest_socket(domain)))

    async def create(self, domain: str, intent: str) -> None:
        """A domain of 1 vCPU that appears from outside."""
        await self._do_create(domain, intent, 1, 512.0, 0.0)

    async def _do_survey(self) -> list[Reply]:
        for d in self.domains.values():
            if d.state == "running" and not d.idle:
                for cpu in d.online | d.liars:
                    d.vcpu_seconds[cpu] += 0.5
        return [
            {
                "name": name,
                "uuid": d.uuid,
                "state": d.state,
                "vcpus": d.vcpus,
                "vcpu_seconds": d.vcpu_seconds,
                "balloon_mib": d.bound_mib,
                "usable_mib": max(d.available_mib, 0.0),
                "said_at": time.time(),
            }
            for name, d in self.domains.items()
        ]

    async def _do_suspend(self, domain: str) -> None:
        if self.domains[domain].state == "stopped":
            raise DomainOff
        self.domains[domain].state = "paused"

    async def _do_prepare_start(self, domain: str, cores: float, memory_mib: float) -> None:
        self.domains[domain].starts_with = (cores, memory_mib)

    async def _do_resume(self, domain: str) -> None:
        found = self.domains[domain]
        found.state, found.resumed_with_quota = "running", found.quota

    async def _do_redefine(self, domain: str, vcpus: int, boot_mib: float) -> None:
        d = self.domains[domain]
        d.vcpus, d.boot_mib = vcpus, boot_mib

    async def _do_start(self, domain: str) -> None:
        d = self.domains[domain]
        assert d.state == "stopped", "a domain that runs cannot be started"
        d.vcpu_seconds = [0.0] * d.vcpus
        self.starts += 1
        if d.saved_mib is not None:
            # What it had is in what was saved, its limits too.
            d.state, d.saved_mib = "paused", None
            return
        d.state, d.quota, d.cap, d.balloon_mib, d.online = "paused", None, None, d.boot_mib, set(range(d.vcpus))
        d.plugged_mib = d.requested_mib = max((d.starts_with or (0.0, d.boot_mib))[1] - d.boot_mib, 0.0)
        d.cache_mib = 0.0

    async def _do_shut_down(self, domain: str, limit_s: float) -> str:
        self.domains[domain].state = "stopped"
        return f"its guest powered off within {limit_s:g} s"

    async def _do_to_save(self, domain: str) -> list[Any]:
        d = self.domains[domain]
        if d.state == "stopped":
            raise DomainOff
        return [min(d.used_mib + d.cache_mib, d.bound_mib), d.bound_mib, self.save_room_mib]

    async def _do_save(self, domain: str, limit_s: float) -> list[float]:
        d = self.domains[domain]
        if d.state == "stopped" and d.saved_mib is None:
            raise DomainOff
        d.state, d.saved_mib = "stopped", d.used_mib + d.cache_mib
        return [d.saved_mib, 0.5]

    async def _do_saved_mib(self, domain: str) -> float | None:
        return self.domains[domain].saved_mib

    async def _do_most(self, domain: str) -> list[float]:
        d = self.domains[domain]
        return [float(d.vcpus), d.most_mib or d.boot_mib + d.plugged_mib]

    async def _do_examine(self, domain: str) -> list[Any]:
        d = self.domains[domain]
        before = {"cpu_shares": d.shares, "quota_per_cpu": d.quota, "cap_cores": d.cap}
        return [d.vcpus, d.boot_mib, d.bound_mib, d.why_not, before | {"stats_period_s": d.stats_period_s}]

    async def _do_ask_statistics(self, domain: str, period_s: int) -> None:
        # Our own domains' guests have an agent; what their drivers would say is not needed.
        if self.domains[domain].stats_period_s is not None:
            self.domains[domain].stats_period_s = period_s

    async def _do_give_back(
        self, domain: str, shares: int | None, quota: float | None, cap: float | None, period_s: int | None
    ) -> None:
        d = self.domains[domain]
        d.shares, d.quota, d.cap, d.stats_period_s, d.intent = shares or d.shares, quota, cap, period_s, ""
        self.released.add(d.uuid)

    async def _do_destroy(self, domain: str) -> None:
        self.left.discard(domain)
        del self.domains[domain]
        self._guests.pop(domain).close()

    async def _do_write_intent(self, domain: str, intent: str) -> None:
        self.domains[domain].intent = intent

    async def _do_read(self, domain: str) -> Reply:
        d = self.domains[domain]
        return {
            "vcpu_seconds": d.vcpu_seconds,
            "vcpus": d.vcpus,
            "quota": d.quota,
            "cap": d.cap,
            "balloon_mib": d.balloon_mib,
            "plugged_mib": d.plugged_mib,
            "disk_mib_s": d.disk_mib_s,
            "network_mib_s": d.network_mib_s,
            "limit_mib": d.limit_mib,
            "shares": d.shares,
            # The driver of a domain that was not made here says something while it is asked.
            "statement": [int(time.time()), d.available_mib] if d.stats_period_s else None,
            "read_at": time.time(),
        }

    async def _do_receive(self, domain: str, identity: str, intent: str, boot_mib: float) -> None:
        assert all(d.uuid != identity or name == domain for name, d in self._defined_beside(domain)), "one identity"
        await self._do_create(domain, intent, 1, boot_mib, 0.0)
        self.domains[domain].state, self.domains[domain].uuid = "stopped", identity

    def _defined_beside(self, domain: str) -> list[tuple[str, Domain]]:
        host = domain.partition(".")[0]
        return [(name, d) for name, d in self.domains.items() if name.startswith(f"{host}.")]

    async def _do_send(self, domain: str, to: str, intent: str) -> str:
        here, there = self.domains[domain], self.domains[to]
        if here.state != "running":
            raise DomainOff
        assert there.state == "stopped", "it runs there"
        assert there.uuid == here.uuid, "it is another one there"
        called_off = self.moving[domain] = asyncio.Event()
        kept, there.intent, there.state = there.intent, intent, "paused"
        try:
            waits = [asyncio.create_task(event.wait()) for event in (called_off, self.move_ends)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            if called_off.is_set() or here.state != "running" or self.domains.get(to) is not there:
                there.intent, there.state = kept, "stopped"
                raise DomainOff
            for name in (
                "vcpus",
                "boot_mib",
                "plugged_mib",
                "requested_mib",
                "balloon_mib",
                "cache_mib",
                "quota",
                "cap",
                "shares",
            ):
                setattr(there, name, getattr(here, name))
            there.online, there.vcpu_seconds = set(here.online), list(here.vcpu_seconds)
            here.state, there.state = "stopped", "running"
            self.left.add(domain)
        finally:
            del self.moving[domain]
        return "it moved"

    async def _do_whereabouts(self, domain: str) -> str:
        if domain in self.moving:
            return "moving"
        if self.domains[domain].state == "stopped":
            return "left" if domain in self.left else "off"
        return "here"

    async def _do_stop_move(self, domain: str) -> None:
        if (called_off := self.moving.get(domain)) is not None:
            called_off.set()

    async def _do_set_shares(self, domain: str, shares: int) -> None:
        self.domains[domain].shares = shares

    async def _do_hold_back(self, domain: str) -> None:
        self.domains[domain].requested_mib = self.domains[domain].plugged_mib

    async def _do_call_off(self, domain: str) -> None:
        await self._do_hold_back(domain)

    async def _do_set_disk(self, domain: str, mib_s: float | None) -> str:
        self.domains[domain].disk_mib_s = mib_s
        return ""

    async def _do_set_network(self, domain: str, mib_s: float | None) -> str:
        self.domains[domain].network_mib_s = mib_s
        return ""

    async def _do_findings(self, domain: str) -> list[list[Any]]:
        return self.domains[domain].findings

    async def _do_set_limit(self, domain: str, mib: float | None) -> str:
        if mib is not None and not self.has_swap:
            return "the host has no swap, so no memory limit can be backed"
        self.domains[domain].limit_mib = mib
        return ""

    async def _do_set_quota(self, domain: str, cores: float | None, cap: float | None) -> None:
        self.domains[domain].quota = None if cores is None or cores >= 1 else cores
        self.domains[domain].cap = cap

    async def _do_throttled(self, domain: str) -> list[int]:
        d = self.domains[domain]
        d.periods += 40
        return [d.periods, d.periods // 4]

    async def _do_set_balloon(self, domain: str, mib: float) -> str:
        d = self.domains[domain]
        d.balloon_mib = min(mib, d.boot_mib)
        self._look(d)
        return ""

    async def _do_set_vcpus(self, domain: str, count: int) -> str:
        d = self.domains[domain]
        if any(cpu >= count for cpu in d.online):
            return "a vCPU that is on line was to be unplugged"
        d.vcpus = count
        return ""

    async def _do_set_plugged(self, domain: str, mib: float) -> str:
        d = self.domains[domain]
        d.requested_mib, goal_mib = mib, max(mib, min(d.stuck_mib, d.plugged_mib))
        # In two steps, so that a kill can come in between.
        d.plugged_mib = (d.plugged_mib + goal_mib) / 2
        await asyncio.sleep(self.delay())
        d.plugged_mib = goal_mib
        self._look(d)
        return "" if goal_mib == mib else f"virtio-mem stayed at {goal_mib:g} MiB"

    def _look(self, d: Domain) -> None:
        self.least_available_mib = min(self.least_available_mib, d.available_mib)

    # --- the guest -----------------------------------------------------------------------------------------------

    async def _guest_call(self, d: Domain, method: str, params: Reply) -> Reply:
        # What waits in the channel is answered by a guest that goes on.
        while not self.guests_answer or d.state != "running":
            if d.state == "stopped":
                raise ConnectionResetError("there is no QEMU")
            await asyncio.sleep(0.02)
        self.guest_calls.append((method, str(params.get("request_id", ""))))
        handler = {
            "hello": self._hello,
            "status": self._status,
            "cpus.set": self._cpus_set,
            "cold.reclaim": self._cold_reclaim,
            "application.deflate": self._deflate,
            "application.status": self._application_status,
            "application.reinflate": self._reinflate,
            "preemption": self._preemption,
            "preemption.withdrawn": self._withdrawn,
        }[method]
        return {"result": handler(d, params)}

    def _hello(self, d: Domain, params: Reply) -> Reply:
        boot_id = self.BOOT_ID
        return {"protocol": 1, "nonce": params["nonce"], "agent": "fake", "boot_id": boot_id, "capabilities": ["cpu"]}

    def _status(self, d: Domain, params: Reply) -> Reply:
        reserve = 48.0
        free = sorted(d.online - d.pinned - {0}, reverse=True)
        return {
            "boot_id": self.BOOT_ID,
            "uptime_s": 100.0,
            "cpus": {"present": list(range(d.vcpus)), "online": sorted(d.online), "unpluggable": free},
            "memory": {
                "total_mib": d.bound_mib,
                "available_mib": max(d.available_mib, 0.0),
                "reserve_mib": reserve,
                "floor_mib": d.bound_mib - d.available_mib + reserve,
                "unpluggable_mib": max(d.available_mib - reserve, 0.0),
                "free_mib": max(d.available_mib - d.cold_mib, 0.0),
            },
            "pressure": {
                "memory_some_avg10": d.stalled_percent,
                "memory_full_avg10": d.stalled_percent / 2,
                "cpu_some_avg10": 0.0,
                "memory_some_total_us": d.stalled_us,
            },
            "major_faults": d.major_faults,
            "cold_blocked": "",
            "notice": d.notice,
            "applications": [{"name": name, "resident_mib": mib} for name, mib in d.applications.items()],
        }

    def _cold_reclaim(self, d: Domain, params: Reply) -> Reply:
        freed = min(params["memory_mib"], d.cold_mib)
        d.cold_mib -= freed
        return {"freed_mib": freed, "done": d.cold_mib == 0, "reason": ""}

    def _preemption(self, d: Domain, params: Reply) -> Reply:
        self.notices.append(params)
        return {"programs": 1, "running": self.programs_run}

    def _withdrawn(self, d: Domain, params: Reply) -> Reply:
        self.withdrawn.append(params["request_id"])
        d.notice = "" if d.notice == params["request_id"] else d.notice
        return {"known": True}

    def _cpus_set(self, d: Domain, params: Reply) -> Reply:
        d.online = set(params["online"])
        return {"online": sorted(d.online), "failed": []}

    def _deflate(self, d: Domain, params: Reply) -> Reply:
        request_id = params["request_id"]
        base = {"request_id": request_id, "expected_s": 0.1}
        if d.application == "refuse":
            return base | {"state": "refused", "reason": "in the middle of a checkpoint", "retry_after_s": 60.0}
        if "memory_mib" not in params["target"]:
            return base | {"state": "refused", "reason": "the application has memory only"}
        goal = max(params["target"]["memory_mib"] - d.used_mib - 96.0, 32.0)
        promised = max(d.cache_mib - goal, 0.0)
        if promised == 0:
            return base | {"state": "refused", "reason": "nothing to give"}
        if request_id not in d.releases:
            d.releases[request_id] = promised
            if d.application == "promise":
                d.cache_mib -= promised
        return base | {"state": "promised", "promised": {"memory_mib": d.releases[request_id]}}

    def _application_status(self, d: Domain, params: Reply) -> Reply:
        released = d.releases.get(params["request_id"])
        if released is None:
            return {"request_id": params["request_id"], "state": "unknown"}
        if d.application == "hang":
            return {"request_id": params["request_id"], "state": "running"}
        if d.application == "crashed":
            return {"request_id": params["request_id"], "state": "unknown"}
        if d.application == "slow":
            # Half of it now, and the other half never.
            d.cache_mib -= 0.0 if d.half_released else released / 2
            d.half_released = True
            return {"request_id": params["request_id"], "state": "running", "released": {"memory_mib": released / 2}}
        return {
            "request_id": params["request_id"],
            "state": "released",
            "released": {"memory_mib": released},
            "measured_by": "resident size",
        }

    def _reinflate(self, d: Domain, params: Reply) -> Reply:
        return {"request_id": params["request_id"], "state": "promised"}


def random_delays(seed: int, longest_s: float) -> Callable[[], float]:
    """Delays for a world that is to be interrupted anywhere."""
    generator = random.Random(seed)
    return lambda: generator.uniform(0.0, longest_s)
