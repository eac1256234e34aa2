"""`ebb guest enable` as people call it; real domains are in tests/guests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.cli.commands import guest
from ebbtide.cli.guest_channel import Enabled
from ebbtide.cli.main import app
from ebbtide.errors import EbbError
from tests import libvirt_driver

LIVE = Enabled("Web", True, True, "Web has the channel io.ebbtide.guest.0 now, without a restart")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["guest", "enable", *words])


def test_it_says_what_has_become_of_the_vm_and_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def enable(vm: str, uri: str) -> Enabled:
        asked.append((vm, uri))
        return LIVE

    monkeypatch.setattr(guest, "enable_channel", enable)
    said = run("web", "--uri", "qemu:///session")
    assert said.exit_code == 0
    assert said.stdout.startswith(f"{LIVE.sentence}\nInstall ebbtide-guest in it")
    assert "ebb vm doctor web" in said.stdout
    assert asked == [("web", "qemu:///session")]
    assert json.loads(run("web", "-o", "json").stdout) == {
        "domain": "Web",
        "live": True,
        "at_next_start": True,
        "sentence": LIVE.sentence,
    }


def test_what_is_no_qemu_and_what_is_not_there_are_refused_in_one_sentence() -> None:
    libvirt_driver.opened().close()
    assert str(run("test", "--uri", "test:///default").exception) == (
        "a domain of type test is no QEMU, and has no virtio-serial"
    )
    missing = run("nobody", "--uri", "test:///default").exception
    assert isinstance(missing, EbbError)
    assert str(missing) == "there is no VM and no domain nobody; `virsh list --all` shows the domains"
