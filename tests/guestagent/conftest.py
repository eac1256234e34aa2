"""A guest with its agent, the host's end of the port, and hooks in the guest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app_adapters.adapter import Adapter
from app_adapters.server import HookServer
from tests.guestagent.elastic import Serve
from tests.guestagent.harness import Bench, Host, bench


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
