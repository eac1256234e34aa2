"""A cluster whose daemons send spans: manager and host agent as processes, a guest agent, and a hook in its guest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from ebbtide.lab.cluster import free_ports
from ebbtide.lab.state import write_private
from ebbtide.messages.operations import Operation, OperationState
from ebbtide.rest.credentials import command_token, report_token
from tests.guestagent.harness import BOOT_ID, Bench, bench
from tests.hostagent.world import Domain, Reply, World
from tests.manager.cluster import TOKEN
from tests.manager.fake_agent import HOSTS_KEY
from tests.tracing.collector import Collector

REPO = Path(__file__).resolve().parents[2]
#: What the guest agent answers itself; the rest is the make-believe domain's.
AGENTS_OWN = ("hello", "application.", "preemption")


class GuestWorld(World):
    """A host in whose guests a real guest agent speaks for the applications."""

    BOOT_ID = BOOT_ID

    guest: Bench

    async def _do_create(
        self, domain: str, intent: str, vcpus: int, boot_mib: float, plugged_mib: float, shares: int = 1024
    ) -> None:
        await super()._do_create(domain, intent, vcpus, boot_mib, plugged_mib, shares)
        made, path = self.domains[domain], str(self.guest_socket(domain))
        self._guests[domain].close()
        await asyncio.to_thread(os.unlink, path)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._converse(made, reader, writer)
            writer.close()

        self._guests[domain] = await asyncio.start_unix_server(serve, path)

    async def _converse(self, made: Domain, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = await asyncio.to_thread(self.guest.host)
        inside, to_inside = await asyncio.open_unix_connection(sock=host.connection.dup())
        back = asyncio.create_task(_copy(inside, writer), name="from the guest agent")
        try:
            while line := await reader.readline():
                message: Reply = json.loads(line) if line.strip() else {"method": "hello"}
                if message["method"].startswith(AGENTS_OWN):
                    to_inside.write(line)
                else:
                    reply = await self._guest_call(made, message["method"], message.get("params", {}))
                    writer.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode() + b"\n")
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            to_inside.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        writer.write(line)


class Hook:
    """An application's hook that gives all it is asked for at once, and keeps the headers that it was called with."""

    def __init__(self) -> None:
        #: By method and path: the `traceparent` that came with it, "" for none.
        self.traceparents: list[tuple[str, str]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                last = self.path.rpartition("/")[2]
                memory = {"current": 400.0, "minimum": 10.0, "maximum": 900.0, "step": 1.0}
                answers = {"modes": ["ask", "force"], "resources": {"memory_mib": memory}, "version": "1"}
                if last != "capabilities":
                    answers = {"request_id": last, "state": "released", "released": {"memory_mib": 100.0}}
                self._answer(200, answers)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                promised = {"request_id": body["request_id"], "state": "promised", "promised": {"memory_mib": 100.0}}
                self._answer(202, promised)

            def _answer(self, status: int, answer: dict[str, Any]) -> None:
                called = f"{self.command} {self.path.split('/')[3]}"
                hook.traceparents.append((called, self.headers.get("traceparent", "")))
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hook")
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@dataclass
class Traced:
    """The cluster. Each process is started, killed and started again by itself."""

    directory: Path
    world: GuestWorld
    hook: Hook
    session: aiohttp.ClientSession
    #: Of OpenTelemetry's variables, those of both daemons.
    environment: dict[str, str]
    manager_port: int
    agent_port: int
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.manager_port}"

    async def start_manager(self, *options: str) -> None:
        where = ["--listen", f"127.0.0.1:{self.manager_port}", "--database", str(self.directory / "m.sqlite")]
        tokens = ["--token-file", str(self.directory / "token"), "--hosts-key-file", str(self.directory / "hosts.key")]
        await self._start(
            "manager", "cluster_manager.main", [*where, *tokens, "--tracing", *options], "event=listening"
        )

    async def start_agent(self) -> None:
        arguments = [str(self.world.socket), str(self.directory), str(self.agent_port), self.url]
        await self._start("agent", "tests.tracing.agent_process", arguments, "event=ready")

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def _start(self, name: str, module: str, arguments: list[str], ready: str) -> None:
        path = self.directory / f"{name}.log"
        with path.open("ab") as log:
            before = log.tell()
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments, cwd=REPO, stderr=log, env={**os.environ, **self.environment}
            )
        async with asyncio.timeout(60):
            while ready not in path.read_bytes()[before:].decode():
                assert self.processes[name].returncode is None, path.read_text()[-2000:]
                await asyncio.sleep(0.05)

    async def end(self, name: str, kill: bool = False) -> int:
        """By SIGTERM, or by SIGKILL; its exit code."""
        process = self.processes.pop(name)
        if process.returncode is None:
            process.kill() if kill else process.terminate()
        async with asyncio.timeout(30):
            return await process.wait()

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    async def has_host(self) -> None:
        async with asyncio.timeout(30):
            while [host["state"] for host in (await self.call("GET", "/v1/hosts"))["hosts"]] != ["ready"]:
                await asyncio.sleep(0.05)

    async def ended(self, request_id: str) -> Operation:
        async with asyncio.timeout(60):
            while True:
                found = await self.call("GET", f"/v1/operations/{request_id}?wait_s=5")
                if (operation := Operation.model_validate(found)).state is not OperationState.RUNNING:
                    return operation

    async def create(self, body: Any, **headers: str) -> Operation:
        request_id = f"create-{body['name']}"
        await self.call("POST", "/v1/vms", {"request_id": request_id, "vm": body, "deadline_s": 30.0}, **headers)
        return await self.ended(request_id)

    async def shrink(self, name: str, request_id: str, memory_mib: float, **headers: str) -> Operation:
        body = {"request_id": request_id, "target": {"memory_mib": memory_mib}}
        await self.call("PUT", f"/v1/vms/{name}/target", body, **headers)
        return await self.ended(request_id)

    async def connected(self, name: str) -> None:
        """Until the guest agent has answered the host's."""
        async with asyncio.timeout(30):
            while f"vm={name}" not in self.log("agent") or "the guest agent answers" not in self.log("agent"):
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def traced(directory: Path, collector: Collector, **environment: str) -> AsyncIterator[Traced]:
    """Manager, host agent, guest agent and hook, ready for VMs."""
    tokens = {
        "token": TOKEN,
        "hosts.key": HOSTS_KEY,
        "command-token": command_token(HOSTS_KEY, "host-a"),
        "report-token": report_token(HOSTS_KEY, "host-a"),
    }
    for name, token in tokens.items():
        write_private(directory / name, token)
    said = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "30",
    }
    hook = Hook()
    # A short path: the name of a unix socket has room for 107 bytes only.
    with TemporaryDirectory(prefix="ebb") as short, bench(Path(short)) as guest, hook.serving():
        guest.register("shop", hook.port)
        world = GuestWorld(Path(short))
        world.guest = guest
        await world.start()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            manager, agent = free_ports(2)
            made = Traced(directory, world, hook, session, said | environment, manager, agent)
            try:
                await made.start_manager()
                await made.start_agent()
                await made.has_host()
                yield made
            finally:
                for name in list(made.processes):
                    await made.end(name, kill=True)
                await world.stop()
