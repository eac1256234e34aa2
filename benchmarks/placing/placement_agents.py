"""`placement`: the agents of very many made-up hosts, in a process of their own, over real HTTP.

``python -m benchmarks.placing.placement_agents``: settings come as JSON on standard input; one line says where the
agents listen; then each line on standard input starts a round of reports, and one line on standard output says what
came of it; end of input ends the process. Connections stay open, and each sends the next host's report as soon as the
one before is answered, so that the manager is as busy as it can be, or when it is due.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass

from aiohttp import web

from benchmarks.placing.placement_hosts import (
    ADDRESS,
    NUMBER,
    address_of,
    host_name,
    number_of,
    report_template,
    usage_template,
)
from ebbtide.messages.commands import Command, CreateCommand, ReinflateCommand
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.credentials import report_token


@dataclass(frozen=True)
class Settings:
    """Of all rounds."""

    hosts: int
    connections: int
    key: str


@dataclass(frozen=True)
class Round:
    """``changed``: the share of reports that differ from the host's last one, by sizes, so that they are stored.

    ``seconds``: how long; 0: until every host has reported once.
    ``every_s``: between two reports of a host; 0: as fast as they are answered.
    ``usage_each``: a host tells what its VMs use after so many reports; 0: never.
    """

    manager_port: int
    seconds: float
    changed: float
    every_s: float = 0.0
    usage_each: int = 0


class Agents:
    """All hosts of one process."""

    def __init__(self, settings: Settings, port: int) -> None:
        self._settings = settings
        self._bodies = [report_template(port, deflated) for deflated in (0.0, 0.25)]
        #: Which of its two bodies each host has sent last.
        self._last = [0] * settings.hosts
        self._next = 0
        self._usage = usage_template()
        self.answered = 0
        self.refused = 0

    def body(self, number: int) -> bytes:
        """The host's present report."""
        return (
            self._bodies[self._last[number]]
            .replace(NUMBER, f"{number:06d}".encode())
            .replace(ADDRESS, address_of(number).encode())
        )

    async def round(self, round_: Round) -> dict[str, float]:
        """Report on all connections; returns how many answers came in how many seconds."""
        self.answered = self.refused = self._next = 0
        end = time.perf_counter() + round_.seconds if round_.seconds else None
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(self._settings.connections):
                group.create_task(self._until_lost(round_, end), name=f"connection {number}")
        return {"answered": self.answered, "refused": self.refused, "seconds": time.perf_counter() - began}

    def _request(self, number: int, what: str, body: bytes) -> bytes:
        token = report_token(self._settings.key, host_name(number))
        head = (
            f"POST /v1/hosts/{host_name(number)}/{what} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _until_lost(self, round_: Round, end: float | None) -> None:
        try:
            await self._connection(round_, end)
        except (OSError, asyncio.IncompleteReadError):
            self.refused += 1

    async def _connection(self, round_: Round, end: float | None) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", round_.manager_port)
        began = time.perf_counter()
        try:
            while time.perf_counter() < end if end is not None else self._next < self._settings.hosts:
                number, self._next = self._next % self._settings.hosts, self._next + 1
                if round_.every_s:
                    due_s = began + self._next * round_.every_s / self._settings.hosts
                    await asyncio.sleep(due_s - time.perf_counter())
                # Spread evenly, the same in each round: as many of hundred in a row as the share says.
                if self._next * 37 % 100 < 100 * round_.changed:
                    self._last[number] ^= 1
                taken = self._next // self._settings.hosts
                if round_.usage_each and (taken + number) % round_.usage_each == 0:
                    # Spread evenly over the hosts.
                    usage = self._usage.replace(NUMBER, f"{number:06d}".encode())
                    writer.write(self._request(number, "usage", usage))
                    self.refused += await _status(reader) != 200
                writer.write(self._request(number, "report", self.body(number)))
                await writer.drain()
                if await _status(reader) == 200:
                    self.answered += 1
                else:
                    self.refused += 1
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _status(reader: asyncio.StreamReader) -> int:
    """The status of one answer, whose body is read and dropped."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, length = int(head.split(b" ", 2)[1]), 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    await reader.readexactly(length)
    return status


def make_app(found: list[Agents]) -> web.Application:
    """What the manager asks of a host: its report, to start a VM and to let VMs grow; both are done at once."""

    def asked(request: web.Request) -> int:
        number = number_of(request.get_extra_info("sockname")[0])
        if number is None:
            raise web.HTTPNotFound
        return number

    async def report(request: web.Request) -> web.Response:
        body = found[0].body(asked(request))
        return web.Response(body=body, content_type="application/json")

    def done(request: web.Request, command: Command, kind: str, vm: str | None, sentence: str) -> web.Response:
        operation = Operation(
            request_id=command.request_id,
            kind=kind,
            state=OperationState.DONE,
            sentence=sentence,
            vm=vm,
            host=host_name(asked(request)),
            started_at=time.time(),
        )
        return web.Response(text=operation.model_dump_json(), status=202, content_type="application/json")

    async def create(request: web.Request) -> web.Response:
        command = CreateCommand.model_validate_json(await request.read())
        return done(request, command, "create", command.vm.name, f"{command.vm.name} runs")

    async def reinflate(request: web.Request) -> web.Response:
        command = ReinflateCommand.model_validate_json(await request.read())
        return done(request, command, "reinflate", None, "no VM had anything to give or to get")

    app = web.Application()
    app.router.add_get("/v1/host", report)
    app.router.add_post("/v1/vms", create)
    app.router.add_post("/v1/reinflations", reinflate)
    return app


async def serve() -> None:
    """Until standard input ends."""
    settings = Settings(**json.loads(await asyncio.to_thread(sys.stdin.readline)))
    found: list[Agents] = []
    runner = web.AppRunner(make_app(found), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        # Every address of loopback; what comes in by another one finds nothing.
        await web.TCPSite(runner, "0.0.0.0", 0).start()
        port = runner.addresses[0][1]
        found.append(Agents(settings, port))
        HostReport.model_validate_json(found[0].body(0))
        print(json.dumps({"port": port}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await found[0].round(Round(**json.loads(line)))), flush=True)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve())
