"""A guest with its agent, the host's end of the port, and hooks in the guest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.adapter import Adapter
from app_adapters.server import HookServer
from guestagent import applications
from tests.guestagent.elastic import Serve
from tests.guestagent.harness import Bench, Host, bench

USUAL_LIMITS = {
    name: getattr(applications, name)
    for name in ("CAPABILITIES_LIMITS_S", "TARGET_LIMITS_S", "PROGRESS_LIMIT_S", "SIZE_LIMIT_S")
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an application that is to answer may be late."""
    for name, usual in USUAL_LIMITS.items():
        monkeypatch.setattr(applications, name, (20.0, 20.0) if isinstance(usual, tuple) else 20.0)


@pytest.fixture
def usual_limits(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of hooks that do not answer in time."""
    for name, usual in USUAL_LIMITS.items():
        monkeypatch.setattr(applications, name, usual)


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


@pytest.fixture
def host(guest: Bench) -> Host:
    host = guest.host()
    host.hello()
    return host


@pytest.fixture
def serve(guest: Bench) -> Iterator[Serve]:
    servers: list[HookServer] = []

    def start(name: str, adapter: Adapter) -> None:
        servers.append(HookServer(adapter, port=0, token_file=str(guest.run_dir / "token")).start())
        guest.register(name, servers[-1].address[1])

    yield start
    for server in servers:
        server.stop()
