"""Random requests of a client that loses no patience: what it asked for, and what it was answered.

A new kind of request is one more function in ``KINDS``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

HOSTS = ("host-a", "host-b", "host-c")
#: A manager that is down or starts again; a client asks again with the same request id.
_AGAIN = (502, 503, 504)


@dataclass
class Request:
    """One request. ``accepted``: None while nobody answered."""

    id: str
    kind: str
    vm: str
    method: str
    path: str
    body: dict[str, Any] | None
    accepted: bool | None = None
    problem: str = ""
    #: The operation as it ended.
    end: dict[str, Any] | None = None


@dataclass
class Client:
    """Asks for things, and remembers."""

    chance: random.Random
    url: str
    session: aiohttp.ClientSession
    requests: list[Request] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    generation: int = 1
    #: Of the VM that had the name last.
    priority: dict[str, str] = field(default_factory=dict)
    #: The VM that the next request is to be about; None: any.
    only: str | None = None

    @property
    def names(self) -> list[str]:
        """Of the VMs that may be there: asked for, and neither refused nor deleted since."""
        names: dict[str, None] = {}
        for request in self.requests:
            if request.kind == "create" and request.accepted is not False:
                if request.end is None or request.end["state"] == "done":
                    names[request.vm] = None
            elif request.kind == "delete":
                names.pop(request.vm, None)
        return [name for name in names if self.only in (None, name)]

    @property
    def stopped(self) -> list[str]:
        """Of the VMs that may be there those that were told to stop, and not to start or to move since."""
        told: dict[str, bool] = {}
        for request in self.requests:
            if request.accepted and request.kind in ("create", "stop", "start", "migrate"):
                told[request.vm] = request.kind == "stop"
        return [name for name in self.names if told.get(name)]

    def think_of(self) -> Request:
        """The next request."""
        weights = [weight for weight, _ in KINDS]
        while True:
            _, build = self.chance.choices(KINDS, weights)[0]
            request = build(self, f"r-{len(self.requests)}")
            if request is not None:
                self.requests.append(request)
                return request

    async def send(self, request: Request) -> None:
        """Send once; a request that nobody answered stays open."""
        try:
            async with (
                asyncio.timeout(5),
                self.session.request(request.method, self.url + request.path, json=request.body) as response,
            ):
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return
        if status == 202:
            request.accepted = True
        elif 400 <= status < 500:
            if request.accepted:
                self.violations.append(f"{request.id} was accepted, and is refused when repeated: {text}")
            request.accepted, request.problem = False, text
        elif status not in _AGAIN:
            self.violations.append(f"{request.method} {request.path} was answered {status}: {text}")

    async def look(self, request: Request, wait_s: float) -> bool:
        """Whether the operation of an accepted request has ended; its answer never changes again."""
        path = f"/v1/operations/{request.id}?wait_s={wait_s:g}"
        try:
            async with self.session.get(self.url + path) as response:
                status, found = response.status, await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        if status in _AGAIN:
            return False
        if status != 200:
            self.violations.append(f"{request.id} was lost: {found}")
            return True
        if request.end is not None and found != request.end:
            self.violations.append(f"{request.id} ended twice: {request.end}, then {found}")
        if found["state"] != "running":
            request.end = found
        return request.end is not None

    async def learn(self) -> None:
        """What has ended meanwhile: else most of what is asked for next is about VMs that never came to be."""
        running = [request for request in self.requests if request.accepted and request.end is None]
        await asyncio.gather(*(self.look(request, 0) for request in running))

    async def finish(self, limit_s: float) -> None:
        """Repeat what was not answered, and wait until everything that was accepted has ended."""
        async with asyncio.timeout(limit_s):
            while open_requests := [r for r in self.requests if r.accepted is None]:
                for request in open_requests:
                    await self.send(request)
            for request in self.requests:
                while request.accepted and request.end is None:
                    if not await self.look(request, 2.0):
                        await asyncio.sleep(0.05)

    async def in_calm(self) -> None:
        """One of each kind about VMs that are there and at rest: most of what storms is refused or fails."""
        for build, state in (
            (target, "running"),
            (resize, "running"),
            (migrate, "running"),
            (stop, "running"),
            (start, "stopped"),
        ):
            known = set(self.names)
            rows = [row for row in await self.vms() if row["name"] in known and row["state"] == state]
            if build is target:
                rows = [row for row in rows if row["priority"] != "fixed"]
            # Not every VM has room on another host: small ones first.
            rows = self.chance.sample(rows, len(rows) if build is migrate else min(len(rows), 1))
            for row in sorted(rows, key=lambda row: row["current"]["memory_mib"]):
                self.only = row["name"]
                request, self.only = build(self, f"r-{len(self.requests)}"), None
                if request is None:
                    continue
                self.requests.append(request)
                await self.send(request)
                await self.finish(60)
                if request.end and request.end["state"] == "done":
                    break

    async def everything(self) -> None:
        """A cluster at rest is emptied, and one VM then asked for everything, all of which is done."""
        for row in await self.vms():
            await self._is_done(delete, row["name"])
        small = {"cpu_cores": 1.0, "memory_mib": 600.0}
        vm = {"name": "vm-0", "priority": "deflatable", "nominal": small}
        await self._is_done(create, "vm-0", vm=vm)
        self.priority["vm-0"] = "deflatable"
        await self._is_done(target, "vm-0")
        await self._is_done(resize, "vm-0", nominal={"cpu_cores": 1.5})
        await self._is_done(stop, "vm-0")
        await self._is_done(start, "vm-0")
        await self._is_done(migrate, "vm-0", host=None)

    async def _is_done(self, build: Build, name: str, **body: Any) -> None:
        """Asked for again while the manager's own plans are at work on the VM, or a busy agent has said 503."""
        async with asyncio.timeout(60):
            while True:
                self.only = name
                request, self.only = build(self, f"r-{len(self.requests)}"), None
                assert request is not None
                if body:
                    asked = {**(request.body or {}), **body}
                    request.body = {key: value for key, value in asked.items() if value is not None}
                self.requests.append(request)
                await self.send(request)
                await self.finish(60)
                if build is delete and "urn:ebbtide:problem:not-found" in request.problem:
                    return  # one that waited for room went meanwhile
                busy = "urn:ebbtide:problem:busy" in request.problem
                said = [] if request.end is None else [request.end["sentence"], *request.end["progress"]]
                if not busy and not any("503" in sentence for sentence in said):
                    break  # a failed migration tells of the 503 on its way only
                await asyncio.sleep(0.05)
        assert request.end is not None, request
        assert request.end["state"] == "done", request

    async def vms(self) -> list[dict[str, Any]]:
        """The VMs as the manager shows them."""
        async with self.session.get(f"{self.url}/v1/vms?limit=1000") as response:
            found: list[dict[str, Any]] = (await response.json())["vms"]
            return found


Build = Callable[[Client, str], Request | None]


def create(client: Client, request_id: str) -> Request:
    chance = client.chance
    name = client.only or f"vm-{chance.randrange(24)}"
    priority = chance.choice(("fixed", "deflatable", "deflatable", "harvest"))
    nominal = {"cpu_cores": chance.choice((1.0, 1.5, 2.0, 3.0)), "memory_mib": chance.choice((400.0, 600.0, 1000.0))}
    vm: dict[str, Any] = {"name": name, "priority": priority, "nominal": nominal}
    if priority != "fixed":
        vm["minimum"] = {"cpu_cores": 0.5, "memory_mib": 300.0}
        vm["on_preemption"] = chance.choice(("stop", "delete"))
        vm["preemption_notice_s"] = 0.1
    if priority == "harvest":
        vm["ceiling"] = {key: value * 2 for key, value in nominal.items()}
    client.priority[name] = priority
    body = {"request_id": request_id, "vm": vm, "deadline_s": 2.0}
    return Request(request_id, "create", name, "POST", "/v1/vms", body)


def delete(client: Client, request_id: str) -> Request | None:
    # Also one whose earlier deletion failed.
    names = [client.only] if client.only else client.names
    if not names:
        return None
    name = client.chance.choice(names)
    return Request(request_id, "delete", name, "DELETE", f"/v1/vms/{name}?request_id={request_id}", None)


def target(client: Client, request_id: str) -> Request | None:
    flexible = [name for name in client.names if client.priority[name] != "fixed"]
    if not flexible:
        return None
    name = client.chance.choice(flexible)
    client.generation += 1
    size = {"cpu_cores": client.chance.choice((0.5, 1.0)), "memory_mib": client.chance.choice((300.0, 400.0))}
    body = {"request_id": request_id, "generation": 1000 + client.generation, "target": size, "deadline_s": 2.0}
    return Request(request_id, "target", name, "PUT", f"/v1/vms/{name}/target", body)


def _about(client: Client, request_id: str, kind: str, **body: Any) -> Request | None:
    """A request about a VM that may be there."""
    if not client.names:
        return None
    name = client.chance.choice(client.names)
    return Request(request_id, kind, name, "POST", f"/v1/vms/{name}/{kind}", {"request_id": request_id, **body})


def stop(client: Client, request_id: str) -> Request | None:
    return _about(client, request_id, "stop", limit_s=0.2)


def start(client: Client, request_id: str) -> Request | None:
    # Most VMs run: one that may have been stopped is meant.
    stopped = client.stopped
    if not stopped and client.only is None and client.chance.random() < 0.9:
        return None
    elsewhere = {"anywhere": True, "lose_disk": True} if client.chance.random() < 0.5 else {}
    request = _about(client, request_id, "start", deadline_s=2.0, **elsewhere)
    if request is not None and stopped:
        request.vm = client.chance.choice(stopped)
        request.path = f"/v1/vms/{request.vm}/start"
    return request


def migrate(client: Client, request_id: str) -> Request | None:
    where = client.chance.choice(({}, {}, *({"host": host} for host in HOSTS)))
    return _about(client, request_id, "migrate", lose_disk=True, deadline_s=2.0, limit_s=0.2, **where)


def resize(client: Client, request_id: str) -> Request | None:
    """Nominal size, minimum or priority."""
    if not client.names:
        return None
    chance, name = client.chance, client.chance.choice(client.names)
    cores, mib = chance.choice((1.0, 1.5, 2.0, 3.0)), chance.choice((400.0, 600.0, 1000.0))
    changes: Sequence[dict[str, Any]] = (
        {"nominal": {"cpu_cores": cores}},
        {"nominal": {"cpu_cores": cores, "memory_mib": mib}},
        {"minimum": {"cpu_cores": chance.choice((0.5, 0.8)), "memory_mib": 300.0}},
        {"priority": chance.choice(("fixed", "deflatable", "harvest"))},
    )
    change = chance.choice(changes)
    client.priority[name] = change.get("priority", client.priority[name])
    body = {"request_id": request_id, "deadline_s": 2.0, **change}
    return Request(request_id, "resize", name, "PATCH", f"/v1/vms/{name}", body)


#: How often each kind is thought of, and how it is made; None where it makes no sense now.
KINDS: Sequence[tuple[float, Build]] = (
    (5.0, create),
    (2.5, delete),
    (2.0, target),
    (2.0, stop),
    (3.0, start),
    (2.0, resize),
    (2.0, migrate),
)
