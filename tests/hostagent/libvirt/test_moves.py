"""What is known of a move before it is made."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import libvirt
import pytest

from ebbtide.messages.common import Vector
from ebbtide.messages.migrations import MigrationAddress
from ebbtide.messages.vms import VMSpec
from hostagent.domain_xml.templates import tap_name
from hostagent.libvirt.hypervisor import Departure
from hostagent.libvirt.moves import LibvirtMoves, risk_of
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import LibvirtConnection
from hostagent.state.intents import NAMESPACE, Intent, Phase, from_element, to_qualified_element

NOT_ASKED: Any = None


@pytest.mark.parametrize(
    ("accelerator", "version", "risky"),
    [("qemu", 7_002_022, True), ("qemu", 9_000_000, False), ("kvm", 7_002_022, False), (None, 0, False)],
)
def test_an_emulated_guest_that_moves_under_an_old_qemu_may_lose_writes(
    accelerator: str | None, version: int, risky: bool
) -> None:
    assert ("may lose writes" in risk_of(accelerator, version)) == risky


@pytest.mark.parametrize(
    ("accelerator", "version", "allowed", "only"),
    [
        ("qemu", 7_002_022, False, True),
        ("qemu", 0, False, True),
        ("qemu", 7_002_022, True, False),
        ("qemu", 9_000_000, False, False),
        ("kvm", 7_002_022, False, False),
    ],
    ids=["old", "not known yet", "old, and allowed", "new", "kvm"],
)
def test_where_a_move_may_harm_its_guest_a_host_says_that_it_takes_a_command(
    accelerator: Literal["kvm", "qemu"], version: int, allowed: bool, only: bool, tmp_path: Path
) -> None:
    uri = "qemu+tls://host-a.example/system"
    settings = LibvirtSettings(
        "host-a", uri, accelerator, tmp_path, tmp_path, migration_uri=uri, migration_emulated=allowed
    )
    moves = LibvirtMoves(settings, LibvirtConnection(uri), NOT_ASKED)
    moves.qemu_version = version
    assert bool(moves.by_command_only) == only


async def test_the_version_is_that_of_the_libvirt_that_is_connected_to_now(tmp_path: Path) -> None:
    class Opened:
        alive = True

        def __init__(self, version: int) -> None:
            self._version = version

        def isAlive(self) -> bool:
            return self.alive

        def getVersion(self) -> int:
            return self._version

        def setKeepAlive(self, interval: int, count: int) -> None:
            """Nothing to keep alive."""

        def close(self) -> None:
            """Nothing to close."""

    opened = [Opened(9_000_000), Opened(7_002_022)]
    left = list(opened)
    connection = LibvirtConnection("test:///", lambda _: left.pop(0))
    moves = LibvirtMoves(LibvirtSettings("host-a", "test:///", "qemu", tmp_path, tmp_path), connection, NOT_ASKED)
    try:
        seen = [moves.qemu_version]
        for one in opened:
            await connection.call(lambda _: None)
            seen.append(moves.qemu_version)
            one.alive = False
        assert seen == [0, 9_000_000, 7_002_022]
    finally:
        await connection.close()


SIZE = Vector(cpu_cores=1.0, memory_mib=640.0)
INTENT = Intent(
    owner="a",
    spec=VMSpec(name="web", nominal=SIZE),
    boot_mib=384,
    generation=7,
    phase=Phase.LEAVING,
    target=SIZE,
    committed=SIZE,
)
THERE = INTENT.changed(owner="b", phase=Phase.ARRIVING)
ADDRESS = MigrationAddress(
    uri="qemu+tls://b/system", listen="10.0.0.2", disk_dir="/there/disks", image_dir="/there/image"
)
THEIRS = "<o:os xmlns:o='http://libosinfo.org/'>debian</o:os>"


class Leaving:
    """A running domain with an overlay, a device and metadata that no template brings."""

    def __init__(self, persistent: bool) -> None:
        self._persistent = persistent
        self.sent: dict[str, Any] = {}
        self.flags = 0

    def isPersistent(self) -> bool:
        return self._persistent

    def getVersion(self) -> int:
        return 9_000_000

    def lookupByName(self, name: str) -> Any:
        return self

    def XMLDesc(self, flags: int = 0) -> str:
        device = "<watchdog model='i6300esb'/>" if flags & libvirt.VIR_DOMAIN_XML_INACTIVE else "<rng model='virtio'/>"
        return f"""<domain type='kvm'><name>ebb-a.web</name><uuid>1-2</uuid>
            <metadata>{to_qualified_element(INTENT)}{THEIRS}</metadata><os><kernel>/here/image/vmlinuz</kernel></os>
            <devices><disk type='file'><source file='/here/disks/ebb-a.web/disk.snap'/></disk>
            <interface type='ethernet'><mac address='52:54:00:00:00:07'/><target dev='{tap_name("ebb-a.web")}'/>
            </interface>{device}</devices></domain>"""

    def migrateToURI3(self, uri: str, parameters: dict[str, Any], flags: int) -> None:
        assert uri == ADDRESS.uri
        self.sent, self.flags = parameters, flags

    def jobStats(self, flags: int = 0) -> dict[str, int]:
        return {}

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    async def change(self, domain: str, function: Callable[[Any], Any], limit_s: float) -> None:
        assert domain == "ebb-a.web"
        function(self)

    def on_open(self, _callback: Any) -> None:
        """It is open."""


async def sent(persistent: bool) -> Leaving:
    domain: Any = Leaving(persistent)
    settings = LibvirtSettings("a", "", "kvm", Path("/here/image"), Path("/here/disks"))
    move = Departure("ebb-b.web", THERE, ADDRESS, False, 0.0, 60.0)
    await LibvirtMoves(settings, domain, NOT_ASKED).send("ebb-a.web", move, print)
    found: Leaving = domain
    return found


async def test_a_domain_moves_with_its_own_definition_in_place_of_the_one_that_was_made_for_its_coming() -> None:
    domain = await sent(persistent=True)
    assert domain.flags & libvirt.VIR_MIGRATE_PERSIST_DEST
    there = ElementTree.fromstring(domain.sent[libvirt.VIR_MIGRATE_PARAM_PERSIST_XML])
    assert (there.findtext("name"), there.findtext("uuid")) == ("ebb-b.web", "1-2")
    places = [there.find(f"./devices/{path}") for path in ("disk/source", "interface/mac", "interface/target")]
    assert [dict(place.attrib) for place in places if place is not None] == [
        {"file": "/there/disks/ebb-b.web/disk.snap"},
        {"address": "52:54:00:00:00:07"},
        {"dev": tap_name("ebb-b.web")},
    ]
    assert there.findtext("os/kernel") == "/there/image/vmlinuz"
    assert (there.find("./devices/watchdog") is None, there.find("./devices/rng") is None) == (False, True)


@pytest.mark.parametrize("what", [libvirt.VIR_MIGRATE_PARAM_DEST_XML, libvirt.VIR_MIGRATE_PARAM_PERSIST_XML])
async def test_other_programs_metadata_moves_too_and_ours_is_that_of_the_other_host(what: str) -> None:
    metadata = ElementTree.fromstring((await sent(persistent=True)).sent[what]).find("metadata")
    assert metadata is not None
    (ours,) = [element for element in metadata if NAMESPACE in element.tag]
    assert from_element(ElementTree.tostring(ours, encoding="unicode")) == THERE
    assert metadata.findtext("{http://libosinfo.org/}os") == "debian"


async def test_a_domain_whose_definition_was_removed_while_it_runs_moves_without_one() -> None:
    domain = await sent(persistent=False)
    assert not domain.flags & libvirt.VIR_MIGRATE_PERSIST_DEST
    assert libvirt.VIR_MIGRATE_PARAM_PERSIST_XML not in domain.sent
