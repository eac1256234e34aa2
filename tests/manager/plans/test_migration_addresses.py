"""Addresses that a host names for VMs that move to it live: none that another host's libvirt would run a program for,
and none of another machine.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster_manager.plans.live_migrations import cannot_take
from ebbtide.messages.hosts import HostReport
from ebbtide.messages.migrations import DepartureCommand, MigrationAddress
from tests.manager.plan_events import report_of

OWN = {"uri": "qemu+tls://192.0.2.12/system", "listen": "192.0.2.12", "disk_dir": "/disks", "image_dir": "/images"}


@pytest.mark.parametrize(
    "change",
    [
        {"uri": "qemu+ext:///system?command=/bin/sh"},
        {"uri": "qemu+ssh://192.0.2.12/system"},
        {"uri": "qemu+tls://192.0.2.12/system?pkipath=/tmp"},
        {"uri": "qemu+tls://192.0.2.12/system?no_verify=1"},
        {"uri": "qemu+tls://root@192.0.2.12/system"},
        {"uri": "qemu+tls://192.0.2.12/session"},
        {"uri": "qemu+unix:///system?socket=/run/x&command=/bin/sh"},
        {"uri": "qemu+unix:///system?socket=/run/x#"},
        {"uri": "qemu+tls://192.0.2.12/system\n"},
        {"uri": "test:///default"},
        {"uri": "qemu:///system"},
        {"listen": "192.0.2.12/x"},
        {"listen": "192.0.2.12\n"},
        {"listen": ""},
        {"disk_dir": "disks"},
        {"disk_dir": "/disks\n"},
        {"image": "x" * 64},
    ],
)
def test_no_address_has_another_hosts_libvirt_run_a_program_or_go_anywhere_else(change: dict[str, str]) -> None:
    assert MigrationAddress.model_validate(OWN).uri == OWN["uri"]
    with pytest.raises(ValidationError):
        MigrationAddress.model_validate(OWN | change)
    command = {"request_id": "r", "epoch": 1, "order": 1, "to": "host-b", "address": OWN | change}
    with pytest.raises(ValidationError):
        DepartureCommand.model_validate(command)


def at(url: str, **changes: Any) -> HostReport:
    return report_of("host-b").model_copy(
        update={"url": url, "migration": MigrationAddress.model_validate(OWN | changes)}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"uri": "qemu+tls://192.0.2.13/system"},
        {"listen": "192.0.2.13"},
        {"uri": "qemu+tls://192.0.2.13/system", "listen": "192.0.2.13"},
        {"uri": "qemu+unix:///system?socket=/tmp/rogue"},
        {"uri": "qemu+unix:///system?socket=/tmp/rogue", "listen": "127.0.0.1"},
    ],
)
def test_a_vm_is_sent_to_no_address_but_that_of_its_next_hosts_own_agent(changes: dict[str, str]) -> None:
    assert cannot_take(at("https://192.0.2.12:7101")) == ""
    assert cannot_take(at("https://192.0.2.12:7101", **changes)) != ""
