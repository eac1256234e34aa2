"""The client with several managers whose answer is lost: only what is harmless is asked of another one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ebbtide.client import ManagerBusy, ManagerClient, ManagerUnreachable, connection
from ebbtide.rest.tls import server_context
from tests.rest.pki import Pki

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def invites(request: web.Request) -> web.StreamResponse:
    return web.json_response({"token": "t", "url": "http://m", "host": None, "expires_at": 1.0})


async def hangs(request: web.Request) -> web.StreamResponse:
    """It has done what was asked, and its answer does not come in time. The next call may take as long as it will."""
    vars(connection)["ANSWER_S"] = 30.0
    await asyncio.Event().wait()
    raise AssertionError


async def is_killed(request: web.Request) -> web.StreamResponse:
    """It has done what was asked, and its answer does not come."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def is_cut(request: web.Request) -> web.StreamResponse:
    """It has done what was asked, and its answer comes in part."""
    return web.Response(text='{"token": ')


async def stands_by(request: web.Request) -> web.StreamResponse:
    return web.json_response({}, status=503, headers={"Retry-After": "1"})


def busy(times: float) -> Answer:
    """Its first answers are that the token has had too many requests."""
    left = times

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal left
        left -= 1
        if left >= 0:
            return web.json_response({}, status=429, headers={"Retry-After": "3600"})
        return await invites(request)

    return answer


class Manager:
    """One that answers everything in one way, and notes what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, str]] = []
        self._answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        return await self._answer(request)


@asynccontextmanager
async def client_of(*managers: Manager, before: str = "", pki: Pki | None = None) -> AsyncIterator[ManagerClient]:
    """A client of all of them.

    :param before: the address of one that is asked first.
    :param pki: of those with TLS.
    """
    tls = server_context(pki.pair("manager")) if pki else None
    servers = []
    try:
        for manager in managers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", manager.handle)
            servers.append(TestServer(app))
            await servers[-1].start_server(ssl=tls)
        urls = [before, *(f"http{'s' if pki else ''}://127.0.0.1:{server.port}" for server in servers)]
        async with ManagerClient(",".join(urls), "token", tls=pki.client() if pki else None) as client:
            yield client
    finally:
        for server in servers:
            await server.close()


@pytest.fixture(autouse=True)
def brisk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an answer that never comes is given up soon: any other may be late on a busy machine."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    monkeypatch.setattr(connection, "ANSWER_S", 0.5 if params.get("answer") is hangs else 30.0)


LOST = pytest.mark.parametrize("answer", [hangs, is_killed, is_cut])
CALLS: dict[str, Callable[[ManagerClient], Awaitable[Any]]] = {
    "POST": lambda client: client.invite_host(),
    # aiohttp itself asks the same manager again.
    "DELETE": lambda client: client.forget_host("host-a", lost_vms=True),
}


@LOST
@pytest.mark.parametrize("method", CALLS)
async def test_what_has_no_request_id_is_asked_once_and_may_have_been_done(answer: Answer, method: str) -> None:
    first, second = Manager(answer), Manager(invites)
    async with client_of(first, second) as client:
        with pytest.raises(ManagerUnreachable, match="what was asked for may have been done") as caught:
            await CALLS[method](client)
        assert caught.value.may_be_done
        assert ([asked for asked, _ in first.asked], second.asked) == ([method], [])
        await client.invite_host()
        assert len(second.asked) == 1, "the next call goes to the other one first"


async def test_a_connection_with_tls_that_breaks_may_have_brought_what_was_asked_for(tmp_path: Path) -> None:
    first, second = Manager(is_killed), Manager(invites)
    async with client_of(first, second, pki=Pki(tmp_path)) as client:
        with pytest.raises(ManagerUnreachable, match="what was asked for may have been done"):
            await client.invite_host()
    assert (len(first.asked), second.asked) == (1, [])


@LOST
@pytest.mark.parametrize("call", [lambda client: client.delete("web"), lambda client: client.host("host-a")])
async def test_what_has_a_request_id_or_only_reads_is_asked_of_another_manager(
    answer: Answer, call: Callable[[ManagerClient], Awaitable[Any]]
) -> None:
    first, second = Manager(answer), Manager(invites)
    async with client_of(first, second) as client:
        # The other one answers, though with something else.
        with pytest.raises(ManagerUnreachable, match="does not answer like a manager"):
            await call(client)
    assert len(second.asked) == 1


async def test_what_was_never_sent_or_is_refused_by_a_standby_goes_on_to_the_manager_that_leads() -> None:
    standby, leader = Manager(stands_by), Manager(invites)
    # Nobody listens on port 1.
    async with client_of(standby, leader, before="http://127.0.0.1:1") as client:
        assert (await client.invite_host()).token == "t"
    assert (len(standby.asked), len(leader.asked)) == (1, 1)


async def test_one_manager_alone_that_does_not_answer_may_have_done_what_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "REQUEST_TIMEOUT_S", 0.5)
    async with client_of(Manager(hangs)) as client:
        with pytest.raises(ManagerUnreachable, match="may have been done"):
            await client.invite_host()
        with pytest.raises(ManagerUnreachable) as caught:
            await client.host("host-a")
        assert not caught.value.may_be_done


async def test_what_was_too_much_is_asked_again_of_the_same_manager_when_it_has_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "BUSY_PAUSE_S", 0.01)
    first, second = Manager(busy(2)), Manager(invites)
    async with client_of(first, second) as client:
        # Without a request id, too: it was never carried out.
        assert (await client.invite_host()).token == "t"
    assert (len(first.asked), second.asked) == (3, [])


async def test_a_manager_that_stays_too_busy_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BUSY_PAUSE_S", 0.01)
    too_much = busy(math.inf)

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(manager.asked) == 3:
            # Longer than it is asked again for.
            monkeypatch.setattr(connection, "BUSY_PAUSE_S", connection.BUSY_S + 1.0)
        return await too_much(request)

    manager = Manager(answer)
    async with client_of(manager) as client:
        with pytest.raises(ManagerBusy):
            await client.invite_host()
    assert len(manager.asked) == 3
