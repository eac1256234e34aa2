"""An agent with its server: what it has done when it cannot have its port, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.lab.state import write_private
from ebbtide.rest.options import Given
from hostagent.options import HostAgentOptions
from hostagent.service import serve
from tests.hostagent.conftest import make_agent
from tests.hostagent.world import World


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("alone", [False, True], ids=["its own", "that of the metrics"])
async def test_an_agent_whose_port_is_taken_has_done_nothing(
    world: World, tmp_path: Path, taken: int, alone: bool
) -> None:
    token = tmp_path / "token"
    write_private(token, "of-the-manager")
    options = HostAgentOptions(
        id="host-a", capacity="cpu_cores=1", token_file=token, metrics_port=taken if alone else None
    )
    agent = make_agent(world, tmp_path)
    with pytest.raises(OSError, match="Address already in use"):
        await serve(agent, "127.0.0.1", 0 if alone else taken, token, None, None, asyncio.Event(), given=Given(options))
    assert not world.calls
    assert not (tmp_path / "state.json").exists()
