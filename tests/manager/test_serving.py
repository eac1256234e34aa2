"""A manager's process: what it has done when it cannot have its port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_manager.configured import settings_of_all
from cluster_manager.manager import Manager
from cluster_manager.options import ManagerOptions
from cluster_manager.serving import serve
from ebbtide.lab.state import write_private
from ebbtide.rest.options import Given


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("alone", [False, True], ids=["its own", "that of the metrics"])
async def test_a_manager_whose_port_is_taken_does_not_lead(
    tmp_path: Path, taken: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(_: Manager) -> None:
        raise AssertionError("its term begins")

    monkeypatch.setattr(Manager, "start", start)
    for name in ("token", "hosts.key"):
        write_private(tmp_path / name, f"the-{name}")
    options = ManagerOptions(
        listen=f"127.0.0.1:{0 if alone else taken}",
        metrics_port=taken if alone else None,
        database=str(tmp_path / "manager.sqlite"),
        token_file=tmp_path / "token",
        hosts_key_file=tmp_path / "hosts.key",
    )
    with pytest.raises(OSError, match="Address already in use"):
        await serve(*settings_of_all(options), Given(options))
    assert not (tmp_path / "manager.sqlite").exists()
