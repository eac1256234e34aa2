"""Who may do what at the manager: every role on every route that there is, and everybody who is to be refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from cluster_manager.api.app import make_app
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings
from ebbtide.rest.access import Access, require
from ebbtide.rest.credentials import report_token
from ebbtide.rest.listener import Listener, serving
from ebbtide.rest.problems import problem_middleware
from ebbtide.rest.rates import ConnectionLimits, Rate, Rates
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import Principal, principal
from tests.manager import cluster
from tests.manager.cluster import QUICK, vm
from tests.manager.fake_agent import HOSTS_KEY, FakeAgent
from tests.rest.matrix import TOKENS, roles, routes_of, walk, walk_as_stranger

pytestmark = pytest.mark.usefixtures("each_store")

#: The least role for every route of the manager. A new route must be entered here.
ROUTES = {
    ("GET", "/"): "nobody",
    ("GET", "/page/{file}"): "nobody",
    ("GET", "/v1/whoami"): "viewer",
    ("GET", "/healthz"): "nobody",
    ("GET", "/readyz"): "nobody",
    ("GET", "/v1/ca"): "nobody",
    ("GET", "/v1/ca/next"): "nobody",
    ("GET", "/v1/ca/rollover"): "viewer",
    ("POST", "/v1/enrolments"): "nobody",
    ("POST", "/v1/invitations"): "admin",
    ("DELETE", "/v1/invitations"): "admin",
    ("POST", "/v1/hosts/{id}/report"): "agent",
    ("POST", "/v1/hosts/{id}/usage"): "agent",
    ("POST", "/v1/hosts/{id}/certificate"): "agent",
    ("POST", "/v1/hosts/{id}/revocation"): "admin",
    ("GET", "/metrics"): "metrics",
    ("GET", "/v1/hosts/{id}/metrics"): "metrics",
    ("GET", "/v1/prometheus/targets"): "metrics",
    ("GET", "/v1/hosts"): "viewer",
    ("GET", "/v1/hosts/{id}"): "viewer",
    ("DELETE", "/v1/hosts/{id}"): "operator",
    ("PUT", "/v1/hosts/{id}/mode"): "operator",
    ("GET", "/v1/hosts/{id}/steady"): "viewer",
    ("PUT", "/v1/hosts/{id}/steady"): "operator",
    ("GET", "/v1/hosts/{id}/operations/{request_id}"): "viewer",
    ("POST", "/v1/vms"): "operator",
    ("GET", "/v1/vms"): "viewer",
    ("GET", "/v1/vms/{name}"): "viewer",
    ("GET", "/v1/vms/{name}/explain"): "viewer",
    ("GET", "/v1/vms/{name}/history"): "viewer",
    ("GET", "/v1/hosts/{id}/history"): "viewer",
    ("DELETE", "/v1/vms/{name}"): "operator",
    ("PUT", "/v1/vms/{name}/target"): "operator",
    ("PATCH", "/v1/vms/{name}"): "operator",
    ("POST", "/v1/operations/{id}/cancel"): "operator",
    ("PATCH", "/v1/vms/{name}/labels"): "operator",
    ("PATCH", "/v1/hosts/{id}/labels"): "operator",
    ("POST", "/v1/vms/{name}/stop"): "operator",
    ("POST", "/v1/vms/{name}/start"): "operator",
    ("POST", "/v1/vms/{name}/migrate"): "operator",
    ("POST", "/v1/vms/{name}/release"): "operator",
    ("GET", "/v1/adoptions"): "operator",
    ("POST", "/v1/adoptions"): "operator",
    ("GET", "/v1/hosts/{id}/templates"): "viewer",
    ("GET", "/v1/rebalancing"): "viewer",
    ("GET", "/v1/backup"): "admin",
    ("GET", "/v1/operations"): "viewer",
    ("GET", "/v1/operations/{id}"): "viewer",
    ("GET", "/v1/core-changes"): "viewer",
    ("GET", "/v1/machines"): "viewer",
    ("GET", "/v1/machines/{name}"): "viewer",
    ("GET", "/v1/acquirer"): "viewer",
    ("GET", "/v1/calibration"): "viewer",
    ("POST", "/v1/tasks"): "operator",
    ("GET", "/v1/tasks"): "viewer",
    ("GET", "/v1/tasks/{name}"): "viewer",
    ("GET", "/v1/tasks/{name}/explanation"): "viewer",
    ("GET", "/v1/tasks/{name}/output"): "operator",
    ("DELETE", "/v1/tasks/{name}"): "operator",
    ("GET", "/v1/engine"): "viewer",
    ("GET", "/v1/events"): "viewer",
    ("GET", "/v1/events/stream"): "viewer",
    ("GET", "/v1/openapi.json"): "viewer",
}
LIMITS = ConnectionLimits(lingering_s=0.2)


@dataclass
class Served:
    manager: Manager
    app: web.Application
    listener: Listener
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    async def call(self, method: str, path: str, role: str, **options: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {TOKENS[role]}"}
        async with self.session.request(method, self.url + path, headers=headers, **options) as response:
            return response.status, await response.json()


def principals() -> list[Principal]:
    one_each = [principal(role, Role(role), TOKENS[role]) for role in roles() if role != "agent"]
    return [*one_each, replace(principal("host-a", Role.AGENT, TOKENS["agent"]), host="host-a")]


@contextlib.asynccontextmanager
async def manager_with(path: Path, access: Access) -> AsyncIterator[Served]:
    manager = Manager(Settings(cluster.database_in(path), "", "agents", agents=QUICK))
    app = make_app(manager, access)
    async with serving(app, "127.0.0.1", 0, None, LIMITS, 0.0) as listener, aiohttp.ClientSession() as session:
        yield Served(manager, app, listener, session)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with manager_with(tmp_path, Access(principals(), body_timeout_s=0.5)) as made:
        yield made


async def test_every_route_stands_in_the_table(served: Served) -> None:
    assert routes_of(served.app) == set(ROUTES)


@pytest.mark.parametrize("role", roles())
async def test_a_role_gets_in_where_it_may_and_nowhere_else(served: Served, role: str) -> None:
    await walk(served.session, served.url, ROUTES, role)
    assert await served.manager.vms() == []
    assert served.manager.hosts.all() == []


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKENS['admin']}", TOKENS["admin"],
     f"Bearer {TOKENS['admin']} ,", f"Bearer x{TOKENS['admin']}", f"Bearer {TOKENS['admin']}\u00e4"],
)  # fmt: skip
async def test_without_a_right_token_every_path_is_the_same(served: Served, header: str | None) -> None:
    await walk_as_stranger(served.session, served.url, ROUTES, {} if header is None else {"Authorization": header})


async def test_a_token_in_the_url_is_none(served: Served) -> None:
    for name in ("token", "access_token", "Authorization"):
        async with served.session.get(f"{served.url}/v1/vms", params={name: TOKENS["admin"]}) as response:
            assert response.status == 401


async def test_an_agent_reports_of_its_own_host_only(served: Served) -> None:
    for name, status in (("host-a", 200), ("host-b", 403)):
        body = FakeAgent(name, cpu_cores=4.0, memory_mib=1000.0).report().model_dump(mode="json")
        got, answer = await served.call("POST", f"/v1/hosts/{name}/report", "agent", json=body)
        assert got == status, answer
    assert "of the host host-a" in answer["detail"]
    assert [host.report.id for host in served.manager.hosts.all()] == ["host-a"]
    body = FakeAgent("host-b", cpu_cores=4.0, memory_mib=1000.0).report().model_dump(mode="json")
    assert (await served.call("POST", "/v1/hosts/host-a/report", "agent", json=body))[0] == 400
    assert len(served.manager.hosts.all()) == 1


async def test_what_is_not_there_is_said_to_those_who_have_a_token(served: Served) -> None:
    assert (await served.call("GET", "/v1/nothing", "viewer"))[0] == 404
    assert (await served.call("PATCH", "/v1/vms", "viewer"))[0] == 405
    assert (await served.call("POST", "/v1/nothing", "agent"))[0] == 401


async def test_a_handler_can_ask_for_a_role_of_its_own() -> None:
    async def handler(request: web.Request) -> web.Response:
        require(request, Role.ADMIN, "vm.xml")
        return web.json_response({})

    access = Access(principals())
    app = web.Application(middlewares=[problem_middleware("test", lambda request, error: None), access.middleware()])
    app.router.add_post("/v1/vms", handler)
    async with serving(app, "127.0.0.1", 0, None, LIMITS) as listener, aiohttp.ClientSession() as session:
        for role, status in (("operator", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {TOKENS[role]}"}
            async with session.post(f"http://127.0.0.1:{listener.port}/v1/vms", headers=headers) as response:
                assert response.status == status
                if status == 403:
                    problem = await response.json()
                    assert (problem["code"], problem["detail"]) == ("forbidden", "vm.xml needs the role admin")


async def test_domain_xml_in_a_request_is_for_admins_only(served: Served) -> None:
    """Where no XML is taken at all the field is unknown; a role below admin never gets further than that."""
    body = {"request_id": "x", "vm": vm("low-1", xml="<domain type='qemu'><name>low-1</name></domain>")}
    for role in ("viewer", "operator"):
        status, problem = await served.call("POST", "/v1/vms", role, json=body)
        assert status == 403 or "extra inputs" in problem["detail"], problem
    assert await served.manager.vms() == []


# --- bodies ----------------------------------------------------------------------------------------------------------


async def test_an_oversized_body_is_refused_whether_its_size_is_said_or_not(served: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(300):
            yield b" " * 1024

    for data in (b" " * (256 * 1024 + 1), pieces()):
        status, problem = await served.call("POST", "/v1/vms", "operator", data=data)
        assert status == 413
        assert "262144 bytes" in problem["detail"]


def head(length: int, role: str = "operator") -> bytes:
    return (
        f"POST /v1/vms HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS[role]}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def answered(served: Served, *pieces: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.listener.port)
    try:
        async with asyncio.timeout(30):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()


async def test_a_body_that_does_not_arrive_is_refused_and_the_connection_closed(served: Served) -> None:
    answer = await answered(served, head(1000), b'{"request_id"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"within 0.5 s" in answer
    assert b"Connection: close" in answer


async def test_a_body_that_drips_is_refused_however_often_something_comes(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.listener.port)
    writer.write(head(100_000))
    answer = asyncio.create_task(reader.readline(), name="answer")
    async with asyncio.timeout(30):
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_stranger_waits_for_nothing(served: Served) -> None:
    """His body is not even read."""
    request = b"POST /v1/vms HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    assert (await answered(served, request)).startswith(b"HTTP/1.1 401 ")


async def test_a_broken_body_is_the_clients_fault(served: Served) -> None:
    chunked = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert b" 400 " in (await answered(served, chunked, b"zz\r\nnothing\r\n")).splitlines()[0]


async def test_a_token_in_a_broken_request_is_not_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    broken = f"GET /v1/vms HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKENS['admin']}\x01\x00\r\n\r\n"
    with capture_logs() as logs:
        assert b" 400 " in (await answered(served, broken.encode())).splitlines()[0]
    assert TOKENS["admin"] not in caplog.text
    assert TOKENS["admin"] not in str(logs)
    assert [entry["event"] for entry in logs] == ["no HTTP"]


async def test_others_are_served_while_many_drip(served: Served) -> None:
    writers = []
    for _ in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", served.listener.port, local_addr=("127.0.0.2", 0))
        writer.write(head(1000)[:-20])
        writers.append(writer)
    assert (await served.call("GET", "/v1/vms", "viewer"))[0] == 200
    for writer in writers:
        writer.close()


# --- rates -----------------------------------------------------------------------------------------------------------

SLOW = Rate(per_s=0.01, burst=3.0)


async def test_who_asks_too_often_waits_and_nobody_else_does(tmp_path: Path) -> None:
    access = Access(principals(), Rates(people=SLOW, agents=SLOW, strangers=SLOW))
    async with manager_with(tmp_path, access) as served:
        assert [(await served.call("GET", "/v1/vms", "viewer"))[0] for _ in range(4)] == [200, 200, 200, 429]
        url, headers = f"{served.url}/v1/vms", {"Authorization": f"Bearer {TOKENS['viewer']}"}
        async with served.session.get(url, headers=headers) as response:
            assert response.status == 429
            assert 1 <= int(response.headers["Retry-After"]) <= 100
            assert "0.01 requests a second" in (await response.json())["detail"]
        assert (await served.call("GET", "/v1/vms", "operator"))[0] == 200
        statuses = []
        for _ in range(5):
            async with served.session.get(url, headers={"Authorization": "Bearer wrong"}) as response:
                statuses.append(response.status)
        assert statuses == [401, 401, 401, 429, 429]
        # A proxy asks for its health from where wrong tokens come, too.
        healths = []
        for _ in range(4):
            async with served.session.get(f"{served.url}/readyz") as response:
                healths.append(response.status)
        assert healths == [200, 200, 200, 429]
        # Strangers use up nothing of those who have a token.
        assert (await served.call("GET", "/v1/vms", "admin"))[0] == 200


async def test_an_agent_gains_nothing_by_naming_other_hosts_and_fills_no_log(tmp_path: Path) -> None:
    access = Access(principals(), Rates(people=SLOW, agents=Rate(0.01, 30.0), strangers=SLOW), clock=lambda: 0.0)
    async with manager_with(tmp_path, access) as served:
        with capture_logs() as logs:
            paths = [f"/v1/hosts/h%1b[31m{number}/report" for number in range(31)]
            statuses = [(await served.call("POST", path, "agent"))[0] for path in paths]
            assert (await served.call("POST", "/v1/vms/%1b[31m/stop", "viewer"))[0] == 403
            async with served.session.get(f"{served.url}/v1/vms/%1b[31m{'x' * 5000}") as response:
                assert response.status == 401
    assert statuses == [403] * 30 + [429]
    told = [entry for entry in logs if entry["event"] in ("refused", "no right token")]
    assert [entry.get("who") for entry in told] == ["host-a"] * 10 + ["viewer", None]
    assert all(len(entry["path"]) <= 200 for entry in told)
    # No terminal gets to see what a path spells.
    assert not any("\x1b" in str(value) for entry in logs for value in entry.values())


async def test_each_host_is_counted_alone(tmp_path: Path) -> None:
    access = Access([], Rates(people=SLOW, agents=Rate(0.01, 1.0), strangers=SLOW), hosts_key=HOSTS_KEY)
    async with manager_with(tmp_path, access) as served:
        statuses = []
        for name in ("host-a", "host-a", "host-b"):
            body = FakeAgent(name, cpu_cores=4.0, memory_mib=1000.0).report().model_dump(mode="json")
            url, headers = (
                f"{served.url}/v1/hosts/{name}/report",
                {"Authorization": f"Bearer {report_token(HOSTS_KEY, name)}"},
            )
            async with served.session.post(url, json=body, headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [200, 429, 200]
