"""`ebb-hostagent release`: gives back where no agent runs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from ebbtide.rest.options import Given
from ebbtide.rest.settings import AccessSettings
from hostagent import running
from hostagent.errors import HostAgentError, HypervisorError
from hostagent.options import HostAgentOptions
from hostagent.state.files import alone_in
from tests.hostagent.conftest import make_agent
from tests.hostagent.world import World


async def test_an_agent_whose_hypervisor_has_answered_is_known_by_its_state(world: World, tmp_path: Path) -> None:
    world.failures["domains"] = "Failed to connect socket: Connection refused"
    agent = make_agent(world, tmp_path)
    with pytest.raises(HypervisorError):
        await agent.start()
    assert not (tmp_path / "state.json").exists(), "it has taken nothing"
    world.failures.clear()
    await agent.start()
    await agent.close()
    assert (tmp_path / "state.json").exists()


async def test_a_full_disk_keeps_it_from_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _text: str) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("hostagent.state.journal._replace", full)
    agent = make_agent(world, tmp_path)
    await agent.start()
    await agent.close()


@pytest.fixture
def release(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    async def agent(*_: object) -> Any:
        return make_agent(world, tmp_path)

    async def release(listen: str) -> None:
        options = HostAgentOptions(
            id="host-a",
            capacity="cpu_cores=1,memory_mib=512",
            token_file=tmp_path / "token",
            listen=listen,
            state_dir=tmp_path,
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


async def test_with_the_state_directory_of_an_agent_that_runs_nothing_is_given_back(
    release: Any, world: World, tmp_path: Path
) -> None:
    with alone_in(tmp_path), pytest.raises(HostAgentError, match=f"an agent runs with the state directory {tmp_path}"):
        await release("192.0.2.1:7101")
    assert not world.calls
    await release("192.0.2.1:7101")


async def test_a_second_agent_with_the_same_state_directory_is_refused_before_it_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(*_: object) -> Any:
        raise AssertionError("it reads what the first one writes")

    monkeypatch.setattr(running, "_agent", agent)
    options = HostAgentOptions(
        id="host-a", capacity="cpu_cores=1,memory_mib=512", token_file=tmp_path / "token", state_dir=tmp_path
    )
    with alone_in(tmp_path), pytest.raises(HostAgentError, match=f"an agent runs with the state directory {tmp_path}"):
        await running._serve(Given(options), AccessSettings())
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600
