"""Who may do what at a host agent: every role on every route that there is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from ebbtide.rest.access import Access
from ebbtide.rest.listener import serving
from ebbtide.rest.rates import ConnectionLimits
from ebbtide.rest.roles import Role
from ebbtide.rest.tokens import principal
from hostagent.api.app import make_app
from hostagent.operations.agent import Agent
from tests.hostagent.world import World
from tests.rest.matrix import TOKENS, roles, routes_of, walk, walk_as_stranger

#: The least role for every route of the host agent. A new route must be entered here.
ROUTES = {
    ("GET", "/healthz"): "nobody",
    ("GET", "/v1/host"): "viewer",
    ("GET", "/v1/vms"): "viewer",
    ("GET", "/v1/vms/{name}"): "viewer",
    ("GET", "/v1/vms/{name}/explain"): "viewer",
    ("GET", "/v1/operations/{request_id}"): "viewer",
    ("GET", "/v1/decisions"): "viewer",
    ("GET", "/v1/mode"): "viewer",
    ("GET", "/v1/openapi.json"): "viewer",
    ("PUT", "/v1/mode"): "operator",
    ("PUT", "/v1/epoch"): "manager",
    ("GET", "/v1/budget"): "viewer",
    ("PUT", "/v1/budget"): "operator",
    ("GET", "/v1/steady"): "viewer",
    ("PUT", "/v1/steady"): "operator",
    ("POST", "/v1/vms"): "operator",
    ("DELETE", "/v1/vms/{name}"): "operator",
    ("PUT", "/v1/vms/{name}/target"): "operator",
    ("PUT", "/v1/vms/{name}/spec"): "operator",
    ("POST", "/v1/vms/{name}/stop"): "operator",
    ("POST", "/v1/vms/{name}/withdrawal"): "operator",
    ("POST", "/v1/vms/{name}/start"): "operator",
    ("POST", "/v1/vms/{name}/release"): "operator",
    ("POST", "/v1/vms/{name}/arrival"): "manager",
    ("POST", "/v1/vms/{name}/departure"): "manager",
    ("GET", "/v1/adoptions"): "operator",
    ("POST", "/v1/adoptions"): "operator",
    ("GET", "/v1/templates"): "viewer",
    ("GET", "/metrics"): "metrics",
    ("POST", "/v1/reclaims"): "operator",
    ("POST", "/v1/reinflations"): "operator",
}


@contextlib.asynccontextmanager
async def served(agent: Agent) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    access = Access([principal(role, Role(role), token) for role, token in TOKENS.items()], body_timeout_s=0.5)
    app = make_app(agent, access)
    assert routes_of(app) == set(ROUTES)
    limits = ConnectionLimits(lingering_s=0.2, idle_s=1.0)
    async with serving(app, "127.0.0.1", 0, None, limits, 0.0) as listener, aiohttp.ClientSession() as session:
        yield session, f"http://127.0.0.1:{listener.port}"


@pytest.mark.parametrize("role", roles())
async def test_a_role_gets_in_where_it_may_and_nowhere_else(agent: Agent, world: World, role: str) -> None:
    async with served(agent) as (session, url):
        await walk(session, url, ROUTES, role)
    assert not world.domains


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKENS["admin"]}])
async def test_without_a_right_token_every_path_is_the_same(agent: Agent, headers: dict[str, str]) -> None:
    async with served(agent) as (session, url):
        await walk_as_stranger(session, url, ROUTES, headers)


async def test_an_oversized_body_is_refused(agent: Agent, world: World) -> None:
    headers = {"Authorization": f"Bearer {TOKENS['operator']}"}
    async with (
        served(agent) as (session, url),
        session.post(f"{url}/v1/vms", data=b" " * (256 * 1024 + 1), headers=headers) as response,
    ):
        assert response.status == 413
        assert "262144 bytes" in (await response.json())["detail"]
    assert not world.domains


HEAD = "/v1/vms HTTP/1.1\r\nHost: x\r\n"
OPERATOR = f"Authorization: Bearer {TOKENS['operator']}"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (f"POST {HEAD}{OPERATOR}\r\nContent-Length: 9\r\n\r\n{{", b" 408 "),
        (f"POST {HEAD}Content-Length: 9\r\n\r\n{{", b" 401 "),
        (f"GET {HEAD}{OPERATOR}{'x' * 10_000}\r\n\r\n", b" 400 "),
        (f"GET {HEAD}{OPERATOR}\r\n", b""),
    ],
    ids=["slow body", "slow body of a stranger", "oversized head", "slow head"],
)
async def test_a_slow_or_oversized_request_ends_its_connection(agent: Agent, sent: str, status: bytes) -> None:
    async with served(agent) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(sent.encode())
        async with asyncio.timeout(30):
            answer = await reader.read()
        assert status in answer.split(b"\r\n")[0]
        assert bool(answer) is bool(status)
        writer.close()
