"""`ebb-hostagent release`: gives back where no agent runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from ebbtide.rest.settings import AccessSettings
from hostagent import running
from hostagent.errors import HostAgentError
from hostagent.options import HostAgentOptions
from tests.hostagent.conftest import make_agent
from tests.hostagent.world import World


@pytest.fixture
def release(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def agent(*_: object) -> Any:
        return make_agent(world, tmp_path)

    async def release(listen: str) -> None:
        options = HostAgentOptions(
            id="host-a", capacity="cpu_cores=1", token_file=tmp_path / "token", listen=listen, state_dir=tmp_path
        )
        await running._release(options, AccessSettings())

    monkeypatch.setattr(running, "_agent", agent)
    (tmp_path / "state.json").write_text('{"epoch": 0, "sequence": 0}')
    return release


async def test_what_was_taken_is_given_back_also_where_the_agents_address_is_gone(
    release: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await release("192.0.2.1:7101")
    assert "nothing is taken from its 0 VMs" in capsys.readouterr().out


async def test_beside_an_agent_that_runs_nothing_is_given_back(release: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostAgentError, match=f"an agent runs at {listen}"):
            await release(listen)
