"""Which domains of others can be looked after, by their XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import libvirt
import pytest

from ebbtide.deflation.resources import ResourceVector
from hostagent.libvirt import adopted
from hostagent.libvirt.adopted import _CONFIG, _LIVE, _cap_alone, _examine, _give_back, _why_not
from hostagent.libvirt.hypervisor import HostSideReading
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.libvirt_readings import cap_parameters, limit_cores, quota_parameters
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt.sizes import LibvirtSizes
from hostagent.limits.footprints import EMULATOR_MIB
from hostagent.state.intents import Before, CpuLimits, to_qualified_element
from tests.hostagent.libvirt.one_domain import OneDomain
from tests.hostagent.libvirt.test_moves import INTENT
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain

VIRTIO = "<memory model='virtio-mem'/>"


@pytest.mark.parametrize("devices", ["", VIRTIO, f"{VIRTIO}<memory model='dimm'/><memory model='dimm'/>"])
def test_a_domain_whose_memory_is_known_can_be_adopted(devices: str) -> None:
    assert _why_not(_domain(devices), 2, 1024.0) == ""


def test_a_domain_with_two_virtio_mem_devices_is_refused_since_its_size_would_be_that_of_one() -> None:
    assert _why_not(_domain(VIRTIO * 2), 2, 1024.0).startswith("it has more than one virtio-mem device")


@pytest.mark.parametrize(
    ("device", "pins"),
    [
        ("<hostdev mode='subsystem' type='pci'/>", True),
        ("<hostdev mode='subsystem' type='mdev'/>", True),
        ("<interface type='hostdev'/>", True),
        ("<interface type='vdpa'/>", True),
        ("<disk type='nvme'/>", True),
        ("<disk type='vhostvdpa'/>", True),
        ("<hostdev mode='subsystem' type='usb'/>", False),
        ("<interface type='bridge'/>", False),
    ],
)
def test_a_domain_is_refused_for_devices_that_pin_its_memory_and_for_no_others(device: str, pins: bool) -> None:
    why = "it has a device of the host, which pins its memory" if pins else ""
    assert _why_not(_domain(device), 2, 1024.0) == why


@pytest.mark.parametrize(
    ("rule", "nodes", "refused"),
    [
        ("<memory mode='strict' nodeset='0'/>", 2, True),
        ("<memory mode='strict' placement='auto'/>", 2, True),
        ("<memory nodeset='0'/>", 2, True),
        ("<memory mode='preferred' nodeset='0'/><memnode cellid='0' mode='restrictive' nodeset='1'/>", 2, True),
        ("<memory mode='preferred' nodeset='0'/>", 2, False),
        ("<memory mode='strict' nodeset='0'/>", 1, False),
    ],
)
def test_a_domain_whose_memory_is_bound_to_some_of_several_numa_nodes_is_not_adopted(
    rule: str, nodes: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted, "nodes", lambda: [Path(f"node{number}") for number in range(nodes)])
    root = ElementTree.fromstring(f"<domain type='kvm'><numatune>{rule}</numatune></domain>")
    assert ("NUMA nodes" in _why_not(root, 2, 1024.0)) is refused


def test_a_domain_that_is_looked_after_is_refused_by_the_name_of_its_host_and_vm() -> None:
    metadata = f"<metadata>{to_qualified_element(INTENT)}</metadata>"
    why = _why_not(ElementTree.fromstring(f"<domain type='kvm'>{metadata}</domain>"), 2, 1024.0)
    assert why == f"host {INTENT.owner} looks after it already as VM {INTENT.spec.name}, as our metadata in it say"


class Running:
    """A running domain of two vCPUs, with a memory limit of its owner's in what it is, or is defined as."""

    def __init__(self, live: str, defined: str) -> None:
        self._memtune = {0: live, libvirt.VIR_DOMAIN_XML_INACTIVE: defined}

    def lookupByName(self, name: str) -> Running:
        return self

    def state(self) -> list[int]:
        return [libvirt.VIR_DOMAIN_RUNNING, 0]

    def isPersistent(self) -> bool:
        return True

    def XMLDesc(self, flags: int = 0) -> str:
        size = "<memory unit='KiB'>1048576</memory><vcpu>2</vcpu>"
        return f"<domain type='kvm'>{size}<memtune>{self._memtune[flags]}</memtune><devices/></domain>"

    def schedulerParametersFlags(self, flag: int) -> dict[str, int]:
        return {}

    def memoryStats(self) -> dict[str, int]:
        return {}

    def memoryParameters(self, flag: int) -> dict[str, int]:
        return {"hard_limit": 2097152}


HARD, SOFT = "<hard_limit unit='KiB'>2097152</hard_limit>", "<soft_limit unit='KiB'>2097152</soft_limit>"


@pytest.mark.parametrize(
    ("live", "defined", "refused"), [(HARD, HARD, 1), (HARD, "", 1), (SOFT, HARD, 1), (SOFT, "", 0)]
)
def test_a_domain_whose_owner_limits_its_memory_is_refused_since_giving_back_would_lift_that(
    live: str, defined: str, refused: bool
) -> None:
    why = _examine(Running(live, defined), "web").why_not
    assert why.startswith("its owner limits its memory (memtune hard_limit)") if refused else why == ""


class Limited(Running):
    """Its memory is limited while it runs."""

    def __init__(self) -> None:
        super().__init__(HARD, "")
        self.set: list[dict[str, int]] = []

    def setMemoryParameters(self, parameters: dict[str, int], flags: int) -> None:
        self.set.append(parameters)


class Reopened(OneDomain):
    """A connection."""

    def on_open(self, forget: object) -> None:
        """It is opened once."""

    async def call(self, function: Callable[[Any], Any], **_limits: Any) -> Any:
        return await super().call(function)

    async def change(self, domain: str, function: Callable[[Any], Any], **_limits: Any) -> Any:
        return await self.call(lambda _: function(self._domain))


class NoNetwork:
    """In the place of what limits interfaces."""

    async def read(self, root: ElementTree.Element) -> None:
        """There is none."""


async def test_a_memory_limit_that_an_owner_sets_after_the_adoption_is_no_size_and_is_never_raised_or_lifted(
    tmp_path: Path,
) -> None:
    domain = Limited()
    parts: tuple[Any, ...] = (LibvirtSettings("a", "", "kvm", tmp_path, tmp_path), Reopened(domain), NoNetwork(), None)
    sizes = LibvirtSizes(*parts)
    theirs, ours = await sizes.read("web"), await sizes.read("ebb-a.web")
    assert (theirs.limit_mib, ours.limit_mib) == (None, 2048.0 - EMULATOR_MIB["kvm"])
    assert theirs.bound(2).memory_mib == 1024.0
    for limit_mib in (None, 4096.0, 512.0):
        assert await sizes.set_limit("web", limit_mib, 1.0) == "an adopted domain gets no memory limit"
    assert domain.set == []


@pytest.mark.parametrize(
    ("quota", "cap", "refused"),
    [(None, None, False), (None, 2.06, True), (0.25, 1.03, False), (0.25, 0.5, True), (None, 4.12, False)],
)
def test_a_domain_that_its_owner_caps_as_a_whole_is_refused_since_quotas_would_not_keep_that(
    quota: float | None, cap: float | None, refused: bool
) -> None:
    reading = HostSideReading(vcpus=4, quota_per_cpu=quota, cap_cores=cap, balloon_mib=0, plugged_mib=0)
    assert bool(_cap_alone(reading)) is refused


class Released:
    """A running domain with its scheduler parameters by flag, all others of libvirt's calls taken and forgotten."""

    def __init__(self) -> None:
        self.scheduler: dict[int, dict[str, int]] = {_LIVE: {}, _CONFIG: {}}

    def lookupByName(self, name: str) -> Any:
        return self

    def isActive(self) -> bool:
        return True

    def isPersistent(self) -> bool:
        return True

    def schedulerParametersFlags(self, flag: int) -> dict[str, int]:
        return dict(self.scheduler[flag])

    def setSchedulerParametersFlags(self, parameters: dict[str, int], flag: int) -> None:
        self.scheduler[flag] |= parameters

    def setMetadata(self, *words: object) -> None:
        pass


def test_what_an_owner_set_for_the_running_domain_only_stays_out_of_its_definition() -> None:
    owner = Before(cpu_shares=500, quota_per_cpu=0.5, definition=CpuLimits(quota_per_cpu=0.25))
    domain = Released()
    _give_back(domain, "web", owner)
    live, defined = (limit_cores(domain.scheduler[flag], "vcpu") for flag in (_LIVE, _CONFIG))
    assert (live, defined) == (0.5, 0.25)
    assert {flag: has["cpu_shares"] for flag, has in domain.scheduler.items()} == {_LIVE: 500, _CONFIG: 500}
    earlier = Before.model_validate({"cpu_shares": 500, "quota_per_cpu": 0.5})  # of an agent that told no difference
    _give_back(domain, "web", earlier)
    assert limit_cores(domain.scheduler[_CONFIG], "vcpu") == 0.5


@pytest.mark.parametrize(
    ("noted", "defined", "version", "live", "config"),
    [
        (1024, None, 2, 100, 100),
        (100, None, 1, 1024, 1024),
        (1024, None, 1, 1024, 1024),
        (100, None, 2, 100, 100),
        (1024, 1024, 2, 1024, 1024),
        (20_000, 20_000, 2, 10_000, 10_000),
        (500, 300, 2, 500, 300),
        (1024, None, None, 1024, 1024),
    ],
)
def test_shares_that_nobody_had_set_come_back_as_those_of_all_others_also_on_another_layout_of_control_groups(
    monkeypatch: pytest.MonkeyPatch, noted: int, defined: int | None, version: int | None, live: int, config: int
) -> None:
    """Adopted under cgroup v1 and released under v2, or the other way round; what libvirt would refuse is cut."""
    monkeypatch.setattr("hostagent.limits.cgroups.cpu_version", lambda _mountinfo: version)
    domain = Released()
    _give_back(domain, "web", Before(cpu_shares=noted, definition=CpuLimits(cpu_shares=defined)))
    assert {flag: has["cpu_shares"] for flag, has in domain.scheduler.items()} == {_LIVE: live, _CONFIG: config}


class Undefined(Released):
    """It runs on without a definition, as libvirt has it."""

    def __init__(self) -> None:
        super().__init__()
        del self.scheduler[_CONFIG]
        self.metadata_by: list[object] = []

    def isPersistent(self) -> bool:
        return False

    def setMetadata(self, *words: object) -> None:
        self.metadata_by.append(words[-1])


async def test_a_domain_that_is_undefined_while_it_runs_has_its_shares_set_and_is_given_back(tmp_path: Path) -> None:
    domain = Undefined()
    parts: tuple[Any, ...] = (LibvirtSettings("a", "", "kvm", tmp_path, tmp_path), Reopened(domain), NoNetwork(), None)
    await LibvirtSizes(*parts).set_shares("web", 300)
    assert domain.scheduler == {_LIVE: {"cpu_shares": 300}}
    _give_back(domain, "web", Before(cpu_shares=500, quota_per_cpu=0.5, requested_mib=512.0))
    assert (domain.scheduler[_LIVE]["cpu_shares"], limit_cores(domain.scheduler[_LIVE], "vcpu")) == (500, 0.5)
    assert domain.metadata_by == [_LIVE]


class Plugged(Released, Running):
    """A domain whose definition has 1024 MiB at boot, a virtio-mem device of 512 and a DIMM of 512."""

    requested_mib = 0

    def __init__(self) -> None:
        Released.__init__(self)

    def XMLDesc(self, flags: int = 0) -> str:
        sizes = {"size": 512, "block": 2, "requested": self.requested_mib}
        target = "".join(f"<{what} unit='KiB'>{mib * 1024}</{what}>" for what, mib in sizes.items())
        dimm = "<memory model='dimm'><target><size unit='KiB'>524288</size></target></memory>"
        return f"""<domain type='kvm'><vcpu>2</vcpu><memory>1048576</memory>
            <cpu><numa><cell memory='1048576' unit='KiB'/></numa></cpu>
            <devices><memory model='virtio-mem'><target>{target}</target></memory>{dimm}</devices></domain>"""

    def updateDeviceFlags(self, xml: str, flags: int) -> None:
        assert flags == _CONFIG
        requested_mib = int(ElementTree.fromstring(xml).findtext("target/requested", "")) // 1024
        assert requested_mib in range(0, 513, 2), "libvirt refuses what is no whole block or beyond the device"
        self.requested_mib = requested_mib


@pytest.mark.parametrize(("size_mib", "requested_mib"), [(1400, 0), (1536, 0), (1801, 264), (2048, 512), (4096, 512)])
async def test_a_definition_asks_of_virtio_mem_what_boot_memory_and_dimms_leave_of_a_size(
    tmp_path: Path, size_mib: float, requested_mib: int
) -> None:
    domain, connection = Plugged(), StandIn(tmp_path)
    connection._domains["web"] = cast(StandInDomain, domain)
    settings = LibvirtSettings("a", "stand-in", "kvm", tmp_path, tmp_path)
    hypervisor = LibvirtHypervisor(settings, lambda uri: connection)
    await hypervisor.prepare_start("web", ResourceVector(cpu_cores=2.0, memory_mib=size_mib))
    await hypervisor.close()
    assert domain.requested_mib == requested_mib


@pytest.mark.parametrize(("owner_mib", "earlier", "after_mib"), [(0, False, 0), (128, False, 128), (128, True, 512)])
def test_a_definition_that_is_given_back_asks_of_virtio_mem_what_its_owner_has_it_ask(
    owner_mib: int, earlier: bool, after_mib: int
) -> None:
    domain = Plugged()
    domain.requested_mib = owner_mib
    before = _examine(domain, "web").before
    if earlier:
        before = Before.model_validate(before.model_dump(exclude={"requested_mib"}))
    domain.requested_mib = 512
    _give_back(domain, "web", before)
    assert domain.requested_mib == after_mib


class Grouped(Plugged):
    """Its groups as cgroup v1 has them: no vCPU's share of time is above that of them all."""

    def setSchedulerParametersFlags(self, parameters: dict[str, int], flag: int) -> None:
        for one, value in parameters.items():
            super().setSchedulerParametersFlags({one: value}, flag)
            quota, cap = (limit_cores(self.scheduler[flag], whose) for whose in ("vcpu", "global"))
            assert quota is None or cap is None or quota <= cap + 1e-9, "the kernel refuses it"


@pytest.mark.parametrize("period", [10_000, 100_000, 333_000, 1_000_000])
@pytest.mark.parametrize("capped", [False, True])
def test_an_owners_limits_come_back_in_the_periods_that_they_had(period: int, capped: bool) -> None:
    domain = Grouped()
    for flag, share in ((_LIVE, 2), (_CONFIG, 4)):
        domain.scheduler[flag] = {"cpu_shares": 500, "vcpu_period": period, "vcpu_quota": period // share}
        cap = {"global_period": period, "global_quota": 2 * period} if capped else {}
        domain.scheduler[flag] |= {"global_period": 100_000, "global_quota": -1} | cap
    owners = {flag: dict(has) for flag, has in domain.scheduler.items()}
    before = _examine(domain, "web").before
    for has in domain.scheduler.values():
        has |= quota_parameters(0.1) | cap_parameters(0.3)
    earlier = {"vcpu_period_us", "global_period_us"} & before.model_dump().keys()
    assert bool(earlier) is (period != 100_000), "an earlier agent reads what it could have written"
    _give_back(domain, "web", Before.model_validate_json(before.model_dump_json()))
    assert domain.scheduler == owners


def _domain(devices: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<domain type='kvm'><devices>{devices}</devices></domain>")
