"""SIGHUP: what a daemon reads again counts as a whole or not at all, and it says what counts only after a start."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

from cluster_manager.options import ManagerOptions
from ebbtide.lab.state import write_private
from ebbtide.rest.access import Certificates
from ebbtide.rest.gate import Gate
from ebbtide.rest.logs import configure_logs
from ebbtide.rest.options import Given, collect
from ebbtide.rest.reload import changed, reloading
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import settings_of
from ebbtide.rest.tokens import Principal, principal, read_token

NEEDED = 'hosts_key_file = "hosts.key"\ndatabase = "m.sqlite"\ntoken_file = "token"\n'


class Daemon:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = folder / "manager.toml"
        self.token = folder / "token"
        self._capsys = capsys
        write_private(self.token, "first-token")
        self.file.write_text(NEEDED)
        self.given: Given[ManagerOptions] = collect(ManagerOptions, self.file, {"seed": 3})
        self.gate = Gate(settings_of(self.given.options, "127.0.0.1"), self._own, Certificates(), required=False)

    def _own(self) -> list[Principal]:
        return [principal("token-file", Role.ADMIN, read_token(self.token))]

    def lets_in(self, token: str) -> bool:
        return self.gate.access.principals.of(token) is not None

    async def told_to_reload(self, word: str) -> str:
        """What it logs from the signal on until a line with this word."""
        self._capsys.readouterr()
        os.kill(os.getpid(), signal.SIGHUP)
        said = ""
        async with asyncio.timeout(20):
            while word not in said:
                await asyncio.sleep(0.01)
                said += self._capsys.readouterr().err
        return said


@pytest.fixture
async def daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Daemon]:
    monkeypatch.chdir(tmp_path)
    made = Daemon(tmp_path, capsys)
    configure_logs()
    try:
        async with reloading(made.gate, made.given):
            yield made
    finally:
        structlog.reset_defaults()


async def test_tokens_and_the_level_of_logs_count_at_once(daemon: Daemon) -> None:
    daemon.file.write_text(NEEDED + 'log_level = "debug"\n')
    write_private(daemon.token, "second-token")
    said = await daemon.told_to_reload("event=reloaded")
    assert 'what="tokens, certificates, log_level"' in said
    assert (daemon.lets_in("first-token"), daemon.lets_in("second-token")) == (False, True)
    structlog.get_logger().debug("a step")
    assert 'what="tokens, certificates"' in await daemon.told_to_reload("event=reloaded")


async def test_what_needs_a_start_is_named_each_time_and_the_command_line_stays_in_front(daemon: Daemon) -> None:
    daemon.file.write_text(NEEDED + "seed = 9\nmost_hosts = 5\nkeep_days = 2\n")
    for _ in range(2):
        said = await daemon.told_to_reload("options=")
        assert 'event="some options count only after a start" options="keep_days, most_hosts"' in said


@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (lambda daemon: daemon.file.write_text(NEEDED + 'log_level = "loud"\n'), "manager.toml:4: log_level: "),
        (lambda daemon: daemon.token.write_text("two words"), "token must hold one word"),
        (lambda daemon: daemon.token.chmod(0o644), "can be read by every user"),
    ],
)
async def test_what_cannot_be_read_leaves_all_as_it_was(
    daemon: Daemon, breaks: Callable[[Daemon], object], why: str
) -> None:
    daemon.file.write_text(NEEDED + 'log_level = "error"\n')
    breaks(daemon)
    said = await daemon.told_to_reload("nothing was reloaded")
    assert why in said
    assert daemon.lets_in("first-token")
    # The level of the log is as before, too.
    daemon.file.write_text(NEEDED)
    write_private(daemon.token, "first-token")
    assert "level=info" in await daemon.told_to_reload("event=reloaded")


def test_each_option_counts_at_once_or_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needed = {"hosts_key_file": "k", "database": "d"}
    before = collect(ManagerOptions, None, needed).options
    after = collect(ManagerOptions, None, {**needed, "log_json": True, "listen": "127.0.0.1:1", "seed": 1}).options
    assert changed(before, before) == ((), ())
    assert changed(before, after) == (("log_json",), ("listen", "seed"))
