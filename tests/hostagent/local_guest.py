"""A guest that answers on its channel, inside the test's own loop: honest, or nasty in every way that matters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ebbtide.deflation.allocations import Priority

#: What the guest agent keeps free for its kernel, MiB.
RESERVE_MIB = 48.0
#: How long a guest boots, in seconds.
BOOT_S = 7.0
Reply = dict[str, Any]


class Application(StrEnum):
    """What the application does when it is asked."""

    NONE = "none"
    PROMISES = "promises"
    REFUSES = "refuses"
    #: Promises and reports a release, but keeps its memory.
    LIES = "lies"
    #: Promises and never releases.
    HANGS = "hangs"


class Manner(StrEnum):
    """How the guest agent speaks."""

    HONEST = "honest"
    #: Reads, and never answers.
    SILENT = "silent"
    #: Does not even read.
    DEAF = "deaf"
    #: Answers every call with an error.
    REFUSING = "refusing"
    #: Answers what no schema allows.
    GARBLED = "garbled"
    #: Hangs up after every answer.
    CURT = "curt"


@dataclass
class Guest:
    """What runs in a domain. Memory in MiB."""

    online: set[int]
    #: What the guest needs besides its application's cache, and what the cache holds.
    used_mib: float = 100.0
    cache_mib: float = 0.0
    application: Application = Application.PROMISES
    manner: Manner = Manner.HONEST
    pinned: set[int] = field(default_factory=set)
    #: CPUs that the guest calls off line, though they run.
    secret: set[int] = field(default_factory=set)
    #: The guest claims this much more to spare than it has.
    boast_mib: float = 0.0
    #: Since when its tasks wait for memory, and since when the agent has been told of it.
    pressed_at: float | None = None
    told_pressed_at: float | None = None
    boots: int = 1
    boots_until: float = 0.0
    #: What was last told of the memory that must not be taken, MiB; None: nothing yet.
    told_floor_mib: float | None = None
    releases: dict[str, float] = field(default_factory=dict)

    @property
    def needs_mib(self) -> float:
        return self.used_mib + self.cache_mib

    def boot(self, vcpus: int, now: float) -> None:
        """Start anew: all CPUs are on line, the application has nothing in its cache."""
        self.online = set(range(vcpus))
        self.secret, self.pinned = set(), set()
        self.cache_mib = self.boast_mib = 0.0
        self.pressed_at = self.told_pressed_at = None
        self.releases = {}
        self.boots += 1
        self.boots_until = now + BOOT_S


class Conversation:
    """One connection to a guest's channel: what the agent takes for its writer.

    :param held_mib: what the domain holds now; ``priority`` of the VM; ``vcpus`` that are plugged.
    :param blame: called with what an agent must never do.
    """

    def __init__(
        self,
        guest: Guest,
        vcpus: int,
        priority: Callable[[], Priority],
        held_mib: Callable[[], float],
        blame: Callable[[str], None],
        latency: Callable[[], float],
        reader: asyncio.StreamReader,
    ) -> None:
        self._guest = guest
        self._vcpus = vcpus
        self._priority = priority
        self._held_mib = held_mib
        self._blame = blame
        self._latency = latency
        self._reader = reader
        self._boots = guest.boots
        self._greeted = False
        self._unread = 0
        self.open = True
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return self._unread

    def write(self, data: bytes) -> None:
        if self._guest.manner is Manner.DEAF:
            self._unread += len(data)
            return
        loop = asyncio.get_running_loop()
        for line in data.splitlines():
            if line:
                wait = max(self._guest.boots_until - loop.time(), 0.0)
                loop.call_later(wait + self._latency(), self._take, json.loads(line))

    def close(self) -> None:
        self.open = False

    def hang_up(self) -> None:
        """The guest's end, or QEMU's."""
        if self.open:
            self.open = False
            self._reader.feed_eof()

    def ask_for_more(self, memory_mib: float) -> None:
        """Somebody in the guest asks for more than the VM has."""
        if self.open and self._greeted:
            params = {"memory_mib": memory_mib, "reason": "a build is about to start"}
            self._reader.feed_data(
                json.dumps({"jsonrpc": "2.0", "method": "request", "params": params}).encode() + b"\n"
            )

    def _take(self, message: Reply) -> None:
        guest = self._guest
        if not self.open or guest.boots != self._boots or guest.manner in (Manner.SILENT, Manner.DEAF):
            return
        if guest.manner is Manner.GARBLED:
            reply: Reply = {"result": {"online": "all", "memory": -1}}
        elif message["method"] != "hello" and not self._greeted:
            reply = {"error": {"code": -32002, "message": "hello first"}}
        elif guest.manner is Manner.REFUSING and message["method"] != "hello":
            reply = {"error": {"code": -32000, "message": "not today"}}
        else:
            reply = getattr(self, "_" + message["method"].replace(".", "_"))(message.get("params", {}))
        self._reader.feed_data(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode() + b"\n")
        if guest.manner is Manner.CURT:
            self.hang_up()

    def _hello(self, params: Reply) -> Reply:
        self._greeted = True
        answer = {"protocol": 1, "nonce": params["nonce"], "agent": "local", "boot_id": str(self._guest.boots)}
        return {"result": answer | {"capabilities": ["cpu", "memory", "application"]}}

    def _status(self, params: Reply) -> Reply:
        guest, held = self._guest, self._held_mib()
        available = max(held - guest.needs_mib, 0.0) + guest.boast_mib
        # However much it boasts: its kernel's own figure is read from outside.
        guest.told_floor_mib = guest.needs_mib + RESERVE_MIB
        online = sorted(guest.online - guest.secret)
        now = asyncio.get_running_loop().time()
        stalled = 0.0
        if guest.pressed_at is not None:
            stalled = 60.0
            guest.told_pressed_at = now if guest.told_pressed_at is None else guest.told_pressed_at
        brief = params.get("brief", False)
        return {
            "result": {
                "boot_id": str(guest.boots),
                "uptime_s": max(now - guest.boots_until, 0.0),
                "cpus": {
                    "present": list(range(self._vcpus)),
                    "online": online,
                    "unpluggable": [] if brief else [c for c in reversed(online) if c and c not in guest.pinned],
                },
                "memory": {
                    "total_mib": held,
                    "available_mib": available,
                    "reserve_mib": RESERVE_MIB,
                    "floor_mib": max(held - available, 0.0) + RESERVE_MIB,
                    "unpluggable_mib": max(available - RESERVE_MIB, 0.0),
                },
                "pressure": {
                    "memory_some_avg10": stalled,
                    "memory_full_avg10": stalled / 2,
                    "cpu_some_avg10": 0.0,
                },
                "major_faults": int((now - guest.pressed_at) * 500) if guest.pressed_at is not None else 0,
                "applications": [] if brief else [{"name": "cache", "resident_mib": guest.cache_mib}],
            }
        }

    def _cpus_set(self, params: Reply) -> Reply:
        guest, wanted = self._guest, set(params["online"])
        taken = guest.online - guest.secret - wanted
        if 0 not in wanted:
            self._blame("CPU 0 was to go off line")
        if taken & guest.pinned:
            self._blame("a CPU with a pinned task was to go off line")
        if taken and self._priority() is Priority.FIXED:
            self._blame("a CPU of a fixed VM was to go off line")
        guest.online = {cpu for cpu in wanted if cpu < self._vcpus} | guest.secret
        failed = [{"cpu": cpu, "reason": "no such CPU"} for cpu in wanted if cpu >= self._vcpus]
        return {"result": {"online": sorted(guest.online - guest.secret), "failed": failed}}

    def _preemption(self, params: Reply) -> Reply:
        return {"result": {"programs": 0, "running": 0}}

    def _preemption_withdrawn(self, params: Reply) -> Reply:
        return {"result": {"known": True}}

    def _application_deflate(self, params: Reply) -> Reply:
        guest, request_id = self._guest, params["request_id"]
        if self._priority() is Priority.FIXED:
            self._blame("the application of a fixed VM was asked for its memory")
        answer = {"request_id": request_id, "expected_s": 0.5}
        if guest.application is Application.NONE:
            return {"result": answer | {"state": "none"}}
        goal = max(params["target"].get("memory_mib", 1e9) - guest.used_mib - RESERVE_MIB, 16.0)
        promised = max(guest.cache_mib - goal, 0.0)
        if guest.application is Application.REFUSES or promised <= 0:
            return {"result": answer | {"state": "refused", "reason": "nothing to give", "retry_after_s": 60.0}}
        if request_id not in guest.releases:
            guest.releases[request_id] = promised
            if guest.application is Application.PROMISES:
                guest.cache_mib -= promised
        promised_mib = {"memory_mib": guest.releases[request_id]}
        return {"result": answer | {"state": "promised", "promised": promised_mib}}

    def _application_status(self, params: Reply) -> Reply:
        released = self._guest.releases.get(params["request_id"])
        answer: Reply = {"request_id": params["request_id"], "state": "unknown"}
        if released is not None and self._guest.application is Application.HANGS:
            answer["state"] = "running"
        elif released is not None:
            answer |= {"state": "released", "released": {"memory_mib": released}, "measured_by": "resident size"}
        return {"result": answer}

    def _application_reinflate(self, params: Reply) -> Reply:
        return {"result": {"request_id": params["request_id"], "state": "promised"}}
