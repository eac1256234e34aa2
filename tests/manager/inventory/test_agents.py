"""The client of the host agents: connections with many hosts at a time, and what is known of a call that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from cluster_manager.errors import AgentUnreachable
from cluster_manager.inventory.agents import Agents, connector_to_hosts, telling_what_was_sent
from cluster_manager.settings import AgentLimits
from ebbtide.messages.commands import Command
from ebbtide.messages.operations import OperationState
from tests.manager.plan_events import operation
from tests.waiting import AT_ONCE_S, until

#: More than an HTTP client opens connections by itself.
MANY = 101


class Hosts:
    """All hosts at one address; they hold the end of what runs back, and answer all else at once."""

    def __init__(self) -> None:
        self.held = 0
        self.ends = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/v1/epoch":
            return web.json_response({"epoch": 1})
        if request.method == "GET":
            self.held += 1
            await self.ends.wait()
        return web.json_response(operation("stop").model_dump(mode="json"))


@pytest.fixture
async def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
async def url(hosts: Hosts) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hosts.handle)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=AT_ONCE_S)
    yield f"http://127.0.0.1:{server.port}"
    await server.close()


def agents_of(session: aiohttp.ClientSession, url: str, limits: AgentLimits) -> Agents:
    agents = Agents(session, lambda host: url, "key", limits, epoch=1)
    # That each is there was proved before.
    agents._proven = {f"host-{number}": url for number in range(MANY + 1)}
    return agents


async def test_hosts_that_hold_their_answers_back_keep_no_other_host_from_being_asked(hosts: Hosts, url: str) -> None:
    traces = [telling_what_was_sent()]
    async with aiohttp.ClientSession(connector=connector_to_hosts(True), trace_configs=traces) as session:
        agents = agents_of(session, url, AgentLimits())
        polls = [asyncio.create_task(agents.operation(f"host-{number}", "r", 20.0)) for number in range(MANY)]
        await until(lambda: hosts.held == MANY, "all polls to arrive", limit_s=15.0)
        command = Command(request_id="r", epoch=1)
        begun = await agents.command(f"host-{MANY}", "POST", "/v1/vms/web/stop", command)
        assert begun.state is OperationState.DONE
        hosts.ends.set()
        assert [one.state for one in await asyncio.gather(*polls) if one is not None] == [OperationState.DONE] * MANY


async def test_a_call_that_got_no_connection_in_time_is_known_not_to_have_been_sent(hosts: Hosts, url: str) -> None:
    traces = [telling_what_was_sent()]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), trace_configs=traces) as session:
        agents = agents_of(session, url, AgentLimits(answer_s=1.0, absence_s=0.0))
        polls = asyncio.create_task(agents.operation("host-0", "r", 20.0))
        await until(lambda: hosts.held == 1)
        with pytest.raises(AgentUnreachable) as never:
            await agents.command("host-1", "POST", "/v1/vms/web/stop", Command(request_id="r", epoch=1))
        polls.cancel()
        await asyncio.gather(polls, return_exceptions=True)
        with pytest.raises(AgentUnreachable) as lost:
            await agents.operation("host-1", "r", retry=False)
    assert (never.value.sent, lost.value.sent) == (False, True)


async def test_an_address_where_no_agent_answers_is_said_once_however_often_the_host_is_asked() -> None:
    async with aiohttp.ClientSession() as session:
        at = ["http://127.0.0.1:1"]
        agents = Agents(session, lambda host: at[-1], "key", AgentLimits(retry_s=0.0))
        with capture_logs() as logs:
            for where in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
                at.append(where)
                for _ in range(3):
                    with pytest.raises(AgentUnreachable, match="has not proved to be at"):
                        await agents.host("host-0", retry=False)
        said = [(line["log_level"], line["address"]) for line in logs if line["event"] == "an address is not used"]
        assert [line for line in said if line[0] == "warning"] == [
            ("warning", "http://127.0.0.1:1"),
            ("warning", "http://127.0.0.1:2"),
        ]
