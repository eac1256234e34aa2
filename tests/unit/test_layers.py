"""What blocks each mechanism, and what is printed to put it right: word by word."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ebbtide.deflation.cascade.mechanisms import LAYER_OF, Finding, Mechanism, Mechanisms
from ebbtide.deflation.ledger import Layer
from hostagent.limits import cgroups
from hostagent.mechanisms import acpi_probe
from hostagent.mechanisms.host_facts import huge_pools
from hostagent.mechanisms.layers import HostFacts, examine
from tests.unit.layer_domains import (
    BALLOON,
    CHANNEL,
    DIMM,
    DISK,
    FACTS,
    HEALTHY,
    INTERFACE,
    VCPUS,
    VIRTIO_MEM,
    finding,
    with_,
    with_device,
    without,
)

M = Mechanism
EMULATED = HEALTHY.replace("type='kvm'", "type='qemu'")
SINGLE = HEALTHY.replace("<vcpu placement='static'>4</vcpu>", "<vcpu placement='static'>1</vcpu>").replace(
    f"{VCPUS}</vcpus>", ""
)
HUGE = with_("<memoryBacking><hugepages/></memoryBacking>")
LOCKED = with_("<memoryBacking><locked/></memoryBacking>")
SHARED = with_("<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>")
SEV = with_("<launchSecurity type='sev'><policy>0x0003</policy></launchSecurity>")
TDX = with_("<launchSecurity type='tdx'/>")
VFIO = with_device("<hostdev mode='subsystem' type='pci'/>")
NO_SWAP = dataclasses.replace(FACTS, swap_total_mib=0, swap_free_mib=0)
FULL_SWAP = dataclasses.replace(FACTS, swap_free_mib=3)
OLD_KERNEL = dataclasses.replace(FACTS, no_limit=cgroups.NO_RECLAIM)
NO_MEMORY_GROUPS = dataclasses.replace(FACTS, no_limit=cgroups.NO_MEMORY_GROUPS)
NO_CPU_GROUPS = dataclasses.replace(FACTS, no_quota=cgroups.NO_CPU_GROUPS)
NO_BANDWIDTH = dataclasses.replace(FACTS, no_quota=cgroups.NO_BANDWIDTH)
POOL = dataclasses.replace(FACTS, huge_pools=frozenset({0, 2048}))
NO_CGROUPS = dataclasses.replace(FACTS, cgroups="none")
UNTRIED = dataclasses.replace(FACTS, acpi_unplug=acpi_probe.UNTRIED)
OLD_QEMU = dataclasses.replace(FACTS, qemu_version=6_000_000)

ADD_CHANNEL = """\
Give the guest agent its channel:
  XML:
    <devices>
      <channel type='unix'>
        <target type='virtio' name='io.ebbtide.guest.0'/>
      </channel>
    </devices>
  virt-xml:
    virt-xml web --add-device --channel unix,target.type=virtio,target.name=io.ebbtide.guest.0
  Vagrantfile:
    libvirt.channel :type => 'unix', :target_name => 'io.ebbtide.guest.0', :target_type => 'virtio'
  shell:
    ebb guest enable web  # at once, where libvirt can plug it"""
START_AGENT = """\
Start the guest agent inside web:
  shell:
    systemctl enable --now ebb-guestagent"""
COLD_FIRST = """\
Have cold pages become free first on this host; under emulation it has shown no gain:
  shell:
    ebb-hostagent --cold-first  # cold_first = true in /etc/ebbtide/hostagent.toml"""
SECOND_VCPU = """\
Give the domain a second vCPU:
  XML:
    <vcpu>2</vcpu>
  virt-xml:
    virt-xml web --edit --vcpus 2
  Vagrantfile:
    libvirt.cpus = 2"""
HOTPLUGGABLE = """\
Declare the vCPUs hotpluggable:
  XML:
    <vcpus>
      <vcpu id='0' enabled='yes' hotpluggable='no'/>
      <vcpu id='1' enabled='yes' hotpluggable='yes'/>
      <vcpu id='2' enabled='yes' hotpluggable='yes'/>
      <vcpu id='3' enabled='yes' hotpluggable='yes'/>
    </vcpus>
  Vagrantfile:
    # vagrant-libvirt has no option for it: run the shell lines after `vagrant halt`
  shell:
    virsh setvcpus web 1 --config
    virsh setvcpus web 4 --config --hotpluggable"""
PROBE_ACPI = """\
Let a throw-away guest try it on this host:
  shell:
    ebb doctor --probe-acpi"""
ADD_VIRTIO_MEM = """\
Make half of the memory a virtio-mem device:
  XML:
    <maxMemory slots='8' unit='MiB'>2048</maxMemory>
    <cpu>
      <numa>
        <cell id='0' cpus='0-3' memory='1024' unit='MiB'/>
      </numa>
    </cpu>
    <devices>
      <memory model='virtio-mem'>
        <target>
          <size unit='MiB'>1024</size>
          <node>0</node>
          <block unit='KiB'>2048</block>
          <requested unit='MiB'>1024</requested>
        </target>
      </memory>
    </devices>
  virt-xml:
    virt-xml web --edit --memory maxMemory=2048,maxMemory.slots=8
    virt-xml web --edit --cpu numa.cell0.id=0,numa.cell0.cpus=0-3,numa.cell0.memory=1024,numa.cell0.unit=MiB
    virt-xml web --add-device --memdev model=virtio-mem,target.size=1024,target.node=0,target.block=2048,\
target.requested=1048576
  Vagrantfile:
    # vagrant-libvirt has no option for it: run the virt-xml lines after `vagrant halt`
  shell:
    # in a guest of Debian or Ubuntu, for memory that is plugged from now on:
    rule='SUBSYSTEM=="memory", ACTION=="add", ATTR{state}=="offline", ATTR{state}="online_movable"'
    echo "$rule" >/etc/udev/rules.d/80-ebbtide.rules
    # or, for its next starts, add memhp_default_state=online_movable to GRUB_CMDLINE_LINUX in /etc/default/grub and run
    update-grub
    # in a guest of Fedora or RHEL, for its next starts:
    grubby --update-kernel=ALL --args=memhp_default_state=online_movable"""
ADD_BALLOON = """\
Give the domain a balloon with statistics and free page reporting:
  XML:
    <devices>
      <memballoon model='virtio' freePageReporting='on'>
        <stats period='1'/>
      </memballoon>
    </devices>
  virt-xml:
    virt-xml web --edit --memballoon model=virtio,stats.period=1,freePageReporting=on
  Vagrantfile:
    libvirt.memballoon_enabled = true
    libvirt.memballoon_model = 'virtio'
    # no option for statistics and reporting: run the virt-xml line after `vagrant halt`"""
FROM_POOL = "huge pages that are given back go to the host's pool of them, which is no free memory"
NO_HUGE_PAGES = """\
Take the huge pages away:
  XML:
    <memoryBacking>
      <!-- without <hugepages/> -->
    </memoryBacking>
  virt-xml:
    virt-xml web --edit --memorybacking hugepages=off
  Vagrantfile:
    # without: libvirt.memorybacking :hugepages"""
UNLOCK = """\
Let the memory be unlocked:
  XML:
    <memoryBacking>
      <!-- without <locked/> -->
    </memoryBacking>
  virt-xml:
    virt-xml web --edit --memorybacking locked=off
  Vagrantfile:
    # without: libvirt.memorybacking :locked"""
UNSHARE = """\
Let the memory be private and anonymous:
  XML:
    <memoryBacking>
      <source type='anonymous'/>
      <access mode='private'/>
    </memoryBacking>
  virt-xml:
    virt-xml web --edit --memorybacking source.type=anonymous,access.mode=private
  Vagrantfile:
    libvirt.memorybacking :source, :type => 'anonymous'
    libvirt.memorybacking :access, :mode => 'private'"""
NO_PASSTHROUGH = """\
Take the passed-through devices away:
  XML:
    <devices>
      <!-- without <hostdev> -->
    </devices>
  virt-xml:
    virt-xml web --remove-device --hostdev all
  Vagrantfile:
    # without: libvirt.pci ..."""
NOT_CONFIDENTIAL = """\
Run the guest without memory encryption:
  XML:
    <domain>
      <!-- without <launchSecurity> -->
    </domain>
  virt-xml:
    virt-xml web --edit --launchSecurity clearxml=yes
  Vagrantfile:
    # without: libvirt.launchsecurity ..."""
ADD_SWAP = """\
Give the host swap, compressed memory or a file:
  shell:
    modprobe zram num_devices=1
    echo 2048M >/sys/block/zram0/disksize
    mkswap /dev/zram0 && swapon --priority 100 /dev/zram0
    # or: fallocate -l 2048M /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon /swapfile"""
MOUNT_CGROUPS = """\
Mount the cgroups and restart libvirtd:
  shell:
    mount -t cgroup2 none /sys/fs/cgroup"""
CONNECT = """\
Connect the domain through a bridge or a network of libvirt:
  XML:
    <devices>
      <interface type='network'>
        <source network='default'/>
        <model type='virtio'/>
      </interface>
    </devices>
  virt-xml:
    virt-xml web --add-device --network network=default,model=virtio
  Vagrantfile:
    node.vm.network :private_network, :type => 'dhcp'"""

NO_CHANNEL = "the domain has no channel io.ebbtide.guest.0 for the guest agent"
NOT_CONNECTED = "no guest agent has opened the channel io.ebbtide.guest.0"
PINNED = "a passed-through device (hostdev) pins the guest's memory"
NOT_TRIED = "no throw-away guest has passed ACPI vCPU unplug, plug and reset on this host yet"
NO_UNPLUG = "ACPI vCPU unplug is off under emulation: libvirt timed out, could not plug again, and a reset crashed QEMU"

CASES = [
    *((mechanism, without(CHANNEL), FACTS, NO_CHANNEL, ADD_CHANNEL) for mechanism in (M.APPLICATION, M.CPU_OFFLINE)),
    *((mechanism, without(CHANNEL), FACTS, NO_CHANNEL, ADD_CHANNEL) for mechanism in (M.VIRTIO_MEM, M.MEMORY_LIMIT)),
    (M.COLD, without(CHANNEL), FACTS, NO_CHANNEL, ADD_CHANNEL),
    (M.COLD, HEALTHY, dataclasses.replace(FACTS, cold_first=False), "off unless the host agent is told", COLD_FIRST),
    (M.APPLICATION, HEALTHY.replace("'connected'", "'disconnected'"), FACTS, NOT_CONNECTED, START_AGENT),
    (M.CPU_OFFLINE, SINGLE, FACTS, "the domain has one vCPU, which stays", SECOND_VCPU),
    (M.CPU_UNPLUG, SINGLE, FACTS, "the domain has one vCPU, which stays", SECOND_VCPU),
    (
        M.CPU_UNPLUG,
        without(f"{VCPUS}</vcpus>"),
        FACTS,
        "the domain booted with vCPUs that are not hotpluggable",
        HOTPLUGGABLE,
    ),
    (M.CPU_UNPLUG, EMULATED, FACTS, NO_UNPLUG, ""),
    (
        M.CPU_UNPLUG,
        HEALTHY,
        UNTRIED,
        "no throw-away guest has passed ACPI vCPU unplug, plug and reset on this host yet",
        PROBE_ACPI,
    ),
    (M.VIRTIO_MEM, without(VIRTIO_MEM), FACTS, "the domain has no virtio-mem device", ADD_VIRTIO_MEM),
    (M.VIRTIO_MEM, LOCKED, FACTS, "QEMU refuses virtio-mem with locked memory", UNLOCK),
    (
        M.VIRTIO_MEM,
        VFIO,
        OLD_QEMU,
        "virtio-mem beside a passed-through device (hostdev) needs QEMU 6.1",
        NO_PASSTHROUGH,
    ),
    *((mechanism, HUGE, POOL, FROM_POOL, NO_HUGE_PAGES) for mechanism in (M.VIRTIO_MEM, M.DIMM)),
    (M.DIMM, without(DIMM), FACTS, "the domain has no DIMM; virtio-mem gives the same in smaller steps", ""),
    (M.DIMM, without(DIMM).replace(VIRTIO_MEM, ""), FACTS, "the domain has no DIMM", ""),
    (M.QUOTA, HEALTHY, NO_CGROUPS, "no cgroup file system is mounted on the host", MOUNT_CGROUPS),
    (M.QUOTA, HEALTHY, NO_CPU_GROUPS, "no control group of this kernel limits CPU time", ""),
    (M.QUOTA, HEALTHY, NO_BANDWIDTH, "this kernel gives control groups no CPU quotas (CONFIG_CFS_BANDWIDTH)", ""),
    (M.BALLOON, without(BALLOON), FACTS, "the domain has no balloon", ADD_BALLOON),
    (
        M.BALLOON,
        HEALTHY.replace(BALLOON, "<memballoon model='none'/>"),
        FACTS,
        "the domain has no balloon",
        ADD_BALLOON,
    ),
    (
        M.BALLOON,
        HUGE,
        FACTS,
        "the balloon hands back pages of 4 KiB, the host frees huge pages only as a whole",
        NO_HUGE_PAGES,
    ),
    (M.MEMORY_LIMIT, HUGE, FACTS, "huge pages are never swapped", NO_HUGE_PAGES),
    (M.MEMORY_LIMIT, HEALTHY, NO_SWAP, "the host has no swap, so the kernel would kill QEMU at the limit", ADD_SWAP),
    (M.MEMORY_LIMIT, HEALTHY, FULL_SWAP, "the host's swap is full", ADD_SWAP),
    (
        M.MEMORY_LIMIT,
        HEALTHY,
        OLD_KERNEL,
        "this kernel cannot reclaim from a control group (memory.reclaim, Linux 5.19)",
        "",
    ),
    (M.MEMORY_LIMIT, HEALTHY, NO_MEMORY_GROUPS, "no control group of this kernel limits memory", ""),
    (
        M.MEMORY_LIMIT,
        SHARED,
        FACTS,
        "the guest's memory is shared, so pages may be charged to other processes than QEMU",
        UNSHARE,
    ),
    *((mechanism, VFIO, FACTS, PINNED, NO_PASSTHROUGH) for mechanism in (M.BALLOON, M.MEMORY_LIMIT)),
    *((mechanism, LOCKED, FACTS, "the guest's memory is locked", UNLOCK) for mechanism in (M.BALLOON, M.MEMORY_LIMIT)),
    *(
        (
            mechanism,
            xml,
            FACTS,
            f"the guest is confidential ({kind}): its encrypted memory cannot be taken or swapped",
            NOT_CONFIDENTIAL,
        )
        for xml, kind in ((SEV, "SEV"), (TDX, "TDX"))
        for mechanism in (M.VIRTIO_MEM, M.DIMM, M.BALLOON, M.MEMORY_LIMIT)
    ),
    (M.DISK, without(DISK), FACTS, "the domain has no disk", ""),
    (M.NETWORK, without(INTERFACE), FACTS, "the domain has no network interface", CONNECT),
]


@pytest.mark.parametrize(("mechanism", "xml", "facts", "reason", "fix"), CASES)
def test_what_blocks_a_mechanism_and_what_fixes_it(
    mechanism: Mechanism, xml: str, facts: HostFacts, reason: str, fix: str
) -> None:
    found = finding(mechanism, xml, facts)
    assert (found.available, found.reason, found.fix) == (False, reason, fix)


def test_every_mechanism_is_blocked_by_some_case() -> None:
    assert {mechanism for mechanism, *_ in CASES} == set(Mechanism)


AVAILABLE = {
    M.APPLICATION: "asked through the guest agent",
    M.COLD: "asked of the guest's kernel through the guest agent",
    M.CPU_OFFLINE: "up to 3 of 4 vCPUs, by the guest agent",
    M.CPU_UNPLUG: "3 of 4 vCPUs, one at a time",
    M.VIRTIO_MEM: "up to 1024 MiB, in blocks of 2 MiB",
    M.DIMM: "1 of 256 MiB, each as a whole",
    M.QUOTA: "on 4 vCPU threads, cgroup v2, with bursts of 50 % of it",
    M.BALLOON: "model virtio, with free page reporting",
    M.MEMORY_LIMIT: "backed by 2048 MiB of swap, 2000 MiB free",
    M.DISK: "on all disks together",
    M.NETWORK: "on all interfaces together, each way",
}


@pytest.mark.parametrize("mechanism", list(Mechanism))
def test_a_healthy_domain_has_every_mechanism_and_says_what_it_uses(mechanism: Mechanism) -> None:
    found = finding(mechanism, HEALTHY)
    assert (found.available, found.reason, found.fix) == (True, AVAILABLE[mechanism], "")


def test_there_is_one_finding_for_each_mechanism_in_their_order() -> None:
    for xml in (HEALTHY, EMULATED, "<domain><name>bare</name><devices/></domain>"):
        assert [found.mechanism for found in examine(xml, NO_SWAP)] == list(Mechanism)


@pytest.mark.parametrize("xml", [HUGE, VFIO])
def test_virtio_mem_still_works_with_huge_pages_and_with_passed_through_devices(xml: str) -> None:
    assert finding(M.VIRTIO_MEM, xml).available


def test_of_a_pool_of_huge_pages_nothing_is_taken_and_what_a_vm_lacks_is_given() -> None:
    findings = examine(HUGE, POOL)
    assert not any(map(Mechanisms.of(findings).has, (M.VIRTIO_MEM, M.DIMM)))
    assert all(map(Mechanisms.to_give(findings).has, (M.VIRTIO_MEM, M.DIMM)))
    assert finding(M.VIRTIO_MEM, HEALTHY, POOL).available, "its pages are small"


@pytest.mark.parametrize(
    ("page", "device", "pools", "taken"),
    [
        ("<page size='2048' unit='KiB'/>", "", {1048576}, True),
        ("<page size='2048'/>", "", {0, 2048}, False),
        ("<page size='1' unit='G'/>", "", {1048576}, False),
        ("<page size='1' unit='GiB'/>", "", {0, 2048}, True),
        ("", "", {1048576}, True),
        ("", "", {0, 1048576}, False),
        ("<page size='2048'/>", "<source><pagesize unit='KiB'>1048576</pagesize></source>", {1048576}, False),
    ],
)
def test_only_a_pool_of_the_very_pages_that_a_vm_has_keeps_its_memory(
    page: str, device: str, pools: set[int], taken: bool
) -> None:
    xml = HUGE.replace("<hugepages/>", f"<hugepages>{page}</hugepages>").replace("<target>", f"{device}<target>")
    facts = dataclasses.replace(FACTS, huge_pools=frozenset(pools))
    assert finding(M.VIRTIO_MEM, xml, facts).available == taken


def test_huge_pages_are_a_pool_where_they_do_not_all_go_with_the_vms(tmp_path: Path) -> None:
    (meminfo := tmp_path / "meminfo").write_text("HugePages_Surp:      512\nHugepagesize:       2048 kB\n")
    assert huge_pools(tmp_path, meminfo) == set()
    small, large = tmp_path / "hugepages-2048kB", tmp_path / "hugepages-1048576kB"
    for pool, pages, surplus in ((small, 512, 512), (large, 0, 0)):
        pool.mkdir()
        (pool / "nr_hugepages").write_text(f"{pages}\n")
        (pool / "surplus_hugepages").write_text(f"{surplus}\n")
    assert huge_pools(tmp_path, meminfo) == set()
    (large / "nr_hugepages").write_text("4\n")
    assert huge_pools(tmp_path, meminfo) == {1048576}
    (small / "surplus_hugepages").write_text("0\n")
    assert huge_pools(tmp_path, meminfo) == {0, 2048, 1048576}
    meminfo.write_text("MemTotal: 1 kB\n")
    assert huge_pools(tmp_path, meminfo) == {2048, 1048576}, "this kernel has no default"


def test_a_usb_device_that_is_passed_through_pins_no_memory() -> None:
    xml = with_device("<hostdev mode='subsystem' type='usb'/>")
    assert finding(M.BALLOON, xml).available
    assert finding(M.MEMORY_LIMIT, xml).available


def test_several_things_in_the_way_are_all_named_and_all_fixed() -> None:
    xml = SINGLE.replace(CHANNEL, "")
    found = finding(M.CPU_OFFLINE, xml)
    assert found.reason == f"{NO_CHANNEL}; the domain has one vCPU, which stays"
    assert found.fix == f"{ADD_CHANNEL}\n\n{SECOND_VCPU}"


def test_a_domain_that_does_not_run_is_not_blamed_for_a_silent_guest_agent() -> None:
    xml = HEALTHY.replace(" id='7'", "").replace(" state='connected'", "")
    assert finding(M.APPLICATION, xml).available


def test_a_balloon_without_statistics_is_available_and_gets_a_hint() -> None:
    found = finding(M.BALLOON, HEALTHY.replace(BALLOON, "<memballoon model='virtio'/>"))
    assert found == Finding(M.BALLOON, True, "model virtio, without statistics, without page reporting", ADD_BALLOON)


def test_a_kernel_command_line_that_keeps_plugged_memory_unmovable_gets_a_hint() -> None:
    xml = HEALTHY.replace("memhp_default_state=online_movable", "quiet")
    assert "libvirt.cmd_line = '... memhp_default_state=online_movable'" in finding(M.VIRTIO_MEM, xml).fix


def test_a_guest_with_a_boot_loader_of_its_own_gets_the_hint_for_its_distribution() -> None:
    fix = finding(M.VIRTIO_MEM, without("<cmdline>memhp_default_state=online_movable</cmdline>")).fix
    assert "/etc/udev/rules.d/80-ebbtide.rules" in fix
    assert "update-grub" in fix
    assert "grubby --update-kernel=ALL --args=memhp_default_state=online_movable" in fix
    assert fix in PAGE


def test_dimms_that_are_unplugged_now_are_found_in_the_configuration() -> None:
    assert finding(M.DIMM, without(DIMM), config=HEALTHY).available


def test_dimms_that_were_attached_to_the_running_domain_only_are_none_to_take() -> None:
    found = finding(M.DIMM, HEALTHY, config=without(DIMM))
    why = "the domain's DIMMs are not in its definition, so they could not be given back"
    assert (found.available, found.reason) == (False, why)
    other = with_device(DIMM.replace("</target>", "</target><address type='dimm' slot='3'/>"))
    assert finding(M.DIMM, other, config=HEALTHY).reason == "1 of 256 MiB, each as a whole"


def test_xml_in_fixes_is_well_formed() -> None:
    checked = 0
    for *_, fix in CASES:
        _, found, rest = fix.partition("  XML:\n")
        if found:
            lines = rest.splitlines()
            end = next((n for n, line in enumerate(lines) if not line.startswith("    ")), len(lines))
            ElementTree.fromstring(f"<x>{''.join(lines[:end])}</x>")
            checked += 1
    assert checked > 10


def test_findings_become_what_the_machines_take() -> None:
    mechanisms = Mechanisms.of(examine(without(CHANNEL), FACTS))
    assert not mechanisms.has(M.APPLICATION)
    assert mechanisms.why_not(Layer.APPLICATION) == NO_CHANNEL
    assert mechanisms.has(M.QUOTA)
    assert mechanisms.why_not(Layer.HYPERVISOR) == ""
    assert mechanisms.block_mib == 2
    huge = HEALTHY.replace("<block unit='KiB'>2048</block>", "<block unit='KiB'>1048576</block>")
    assert Mechanisms.of(examine(huge, FACTS)).block_mib == 1024
    assert Mechanisms.of(examine(without(VIRTIO_MEM), FACTS)).block_mib == 2


def test_what_lacks_only_the_guest_agent_gives_memory_and_takes_none() -> None:
    silent = HEALTHY.replace("state='connected'", "state='disconnected'")
    for xml in (silent, without(CHANNEL)):
        findings = examine(xml, FACTS)
        to_take, to_give = Mechanisms.of(findings), Mechanisms.to_give(findings)
        assert not any(map(to_take.has, (M.VIRTIO_MEM, M.DIMM)))
        assert [m for m in M if to_give.has(m) and not to_take.has(m)] == [M.VIRTIO_MEM, M.DIMM]
    assert not Mechanisms.to_give(examine(silent.replace(VIRTIO_MEM, ""), FACTS)).has(M.VIRTIO_MEM), "it has none"


def test_a_finding_knows_its_layer() -> None:
    for found in examine(HEALTHY, FACTS):
        assert found.layer is LAYER_OF[found.mechanism]


#: Long commands are broken by the shell's backslash.
PAGE = (Path(__file__).parents[2] / "docs/reference/layers.md").read_text(encoding="utf-8").replace("\\\n", "")


@pytest.mark.parametrize(("mechanism", "xml", "facts", "reason", "fix"), CASES)
def test_the_page_has_every_reason_in_its_mechanisms_row_and_every_fix(
    mechanism: Mechanism, xml: str, facts: HostFacts, reason: str, fix: str
) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {LAYER_OF[mechanism].value} | `{mechanism}` |")]
    said = finding(mechanism, xml, facts)
    assert said.reason.replace("(TDX)", "(SEV)") in row
    assert said.fix in PAGE
