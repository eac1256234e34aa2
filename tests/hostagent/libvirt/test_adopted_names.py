"""The names of adopted domains outlive the agent, and what cannot be read is not taken for none."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from hostagent.errors import AdoptedUnknown, HypervisorError, HypervisorTimeout
from hostagent.libvirt import adopted
from hostagent.libvirt.adopted import LOOK_AGAIN_S, AdoptedDomains, LibvirtAdoption
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.state import intents
from hostagent.state.intents import Before, Intent
from tests.hostagent.libvirt.test_moves import INTENT

UUID = "0c9d1a34-6c1b-4f0e-9a55-0d8d9f6b2c11"


def test_names_are_on_the_disk_before_they_take_the_place_of_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "adopted.json", []
    sync = os.fsync

    def noted(file: int) -> None:
        sync(file)
        written.append((Path(f"/proc/self/fd/{file}").resolve().name, path.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    AdoptedDomains(path).add("web")
    assert written == [("adopted.json.new", False), (tmp_path.name, True)], "and then that they have taken it"
    assert AdoptedDomains(path).names() == {"web"}


@pytest.mark.parametrize("text", ["", "5"])
def test_a_file_that_cannot_be_read_is_an_error_and_is_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adopted.json"
    path.write_text(text)
    with pytest.raises(AdoptedUnknown, match="cannot be read"):
        AdoptedDomains(path).names()
    with pytest.raises(AdoptedUnknown, match="cannot be read"):
        AdoptedDomains(path).add("web")
    assert path.read_text() == text


class _Slow:
    """A connection that does not answer in time the first time."""

    def __init__(self) -> None:
        self.calls = 0

    async def call(self, _function: Any, limit_s: float) -> list[str]:
        self.calls += 1
        if self.calls == 1:
            raise HypervisorTimeout(f"no answer within {limit_s} s")
        return ["web"]


async def test_a_look_that_was_not_answered_in_time_is_made_again() -> None:
    now = 1000.0
    connection = _Slow()
    adoption = LibvirtAdoption("host-a", cast(LibvirtConnection, connection), None, lambda: now)
    await adoption.look_once()
    await adoption.look_once()
    assert (connection.calls, adoption.names.names()) == (1, frozenset()), "not at once: a survey would hang each time"
    now += LOOK_AGAIN_S
    await adoption.look_once()
    await adoption.look_once()
    assert (connection.calls, adoption.names.names()) == (2, frozenset({"web"}))


@pytest.mark.parametrize("known", [True, False])
async def test_a_full_disk_does_not_keep_an_agent_from_its_adopted_domains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    path, now = tmp_path / "adopted.json", 1000.0
    path.write_text('["web"]' if known else "[]")
    connection = _Slow()
    connection.calls = 1  # it answers

    def full(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    adoption = LibvirtAdoption("host-a", cast(LibvirtConnection, connection), path, lambda: now)
    with monkeypatch.context() as disk:
        disk.setattr(adopted, "replace", full)
        await adoption.look_once()
    assert adoption.names.names() == ({"web"} if known else frozenset())
    now += LOOK_AGAIN_S
    await adoption.look_once()
    assert connection.calls == (2 if known else 3)
    assert adoption.names.names() == {"web"}, "looked for again, with room"


class _Refusing:
    """A connection that fails as it is told to, after another task had its turn."""

    def __init__(self, *errors: HypervisorError | None) -> None:
        self._errors = iter(errors)

    async def call(self, _function: Any, modifies: str) -> None:
        await asyncio.sleep(0)
        if (error := next(self._errors)) is not None:
            raise error


async def test_a_domain_whose_adoption_may_have_come_about_stays_among_ours_until_it_is_given_back() -> None:
    connection = _Refusing(HypervisorTimeout("no answer"), HypervisorError("it carries metadata"), None)
    adoption, intent = LibvirtAdoption("host-a", cast(LibvirtConnection, connection), None), cast(Intent, None)
    for _ in range(2):
        with pytest.raises(HypervisorError):
            await adoption.take_over("web", intent)
        assert adoption.names.names() == {"web"}
    await adoption.give_back("web", Before())
    assert adoption.names.names() == frozenset()


async def test_a_domain_that_is_adopted_again_while_it_is_given_back_is_among_ours() -> None:
    adoption = LibvirtAdoption("host-a", cast(LibvirtConnection, _Refusing(None, None)), None)
    await asyncio.gather(adoption.give_back("web", Before()), adoption.take_over("web", cast(Intent, None)))
    assert adoption.names.names() == {"web"}


async def test_an_agent_says_once_that_domains_here_belong_to_a_host_of_another_id() -> None:
    def domain(name: str, owner: str) -> Any:
        text = intents.to_element(INTENT.model_copy(update={"owner": owner}), UUID)
        return SimpleNamespace(name=lambda: name, metadata=lambda *_: text, UUIDString=lambda: UUID)

    there = [domain("ebb-host-b-web", "host-b"), domain("db", "host-b"), domain("ebb-host-a-web", "host-a")]

    class Connection:
        async def call(self, function: Any, limit_s: float) -> Any:
            return function(SimpleNamespace(listAllDomains=lambda: there))

    adoption = LibvirtAdoption("host-a", cast(LibvirtConnection, Connection()), None)
    with capture_logs() as logs:
        await adoption.look_once()
        await adoption.look_once()
    assert [(one["log_level"], one["hosts"], one["domains"], one["count"]) for one in logs] == [
        ("warning", "host-b", "db, ebb-host-b-web", 2)
    ]
