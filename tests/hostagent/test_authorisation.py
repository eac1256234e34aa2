"""Who may do what at a host agent: every role on every route that there is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest

from deflation.roles import Role
from hostagent.agent import Agent
from hostagent.api import make_app
from rest.access import Access
from rest.listener import serving
from rest.tokens import principal
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
    ("PUT", "/v1/mode"): "operator",
    ("POST", "/v1/vms"): "operator",
    ("DELETE", "/v1/vms/{name}"): "operator",
    ("PUT", "/v1/vms/{name}/target"): "operator",
    ("POST", "/v1/reclaims"): "operator",
    ("POST", "/v1/reinflations"): "operator",
}


@contextlib.asynccontextmanager
async def served(agent: Agent) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    access = Access([principal(role, Role(role), token) for role, token in TOKENS.items()])
    app = make_app(agent, access)
    assert routes_of(app) == set(ROUTES)
    async with serving(app, "127.0.0.1", 0, shutdown_timeout_s=0.0) as listener, aiohttp.ClientSession() as session:
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
