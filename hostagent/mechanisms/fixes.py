"""Fixes that make a blocked mechanism available: XML, ``virt-xml`` line and Vagrantfile snippet, ready to be copied.

Sources: https://libvirt.org/formatdomain.html; virt-xml(1), each line run through virt-xml 4.1; the options that
vagrant-libvirt documents (https://vagrant-libvirt.github.io/vagrant-libvirt/configuration.html). Where it has none for
something, the text says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CHANNEL = "io.ebbtide.guest.0"
QEMU_AGENT = "org.qemu.guest_agent.0"
#: What a guest's kernel has to be told, so that memory plugged later can be unplugged again.
MOVABLE = "memhp_default_state=online_movable"
#: How one that is started by its own boot loader is told.
MOVABLE_IN_GUEST = f"""\
# in a guest of Debian or Ubuntu, for memory that is plugged from now on:
rule='SUBSYSTEM=="memory", ACTION=="add", ATTR{{state}}=="offline", ATTR{{state}}="online_movable"'
echo "$rule" >/etc/udev/rules.d/80-ebbtide.rules
# or, for its next starts, add {MOVABLE} to GRUB_CMDLINE_LINUX in /etc/default/grub and run
update-grub
# in a guest of Fedora or RHEL, for its next starts:
grubby --update-kernel=ALL --args={MOVABLE}"""


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """What the texts name: the domain, and the sizes it has."""

    name: str
    vcpus: int
    memory_mib: int


def text(title: str, *, xml: str = "", virt_xml: str = "", vagrant: str = "", shell: str = "") -> str:
    """One block: a title and each form there is, indented below its heading."""
    lines = [f"{title}:"]
    for heading, body in (
        ("XML", xml),
        ("virt-xml", virt_xml),
        ("Vagrantfile", vagrant),
        ("shell", shell),
    ):
        if body:
            lines.append(f"  {heading}:")
            lines += [f"    {line}" for line in body.splitlines()]
    return "\n".join(lines)


def channel(domain: DomainFacts) -> str:
    return text(
        "Give the guest agent its channel",
        xml="<devices>\n  <channel type='unix'>\n"
        f"    <target type='virtio' name='{CHANNEL}'/>\n  </channel>\n</devices>",
        virt_xml=f"virt-xml {domain.name} --add-device --channel unix,target.type=virtio,target.name={CHANNEL}",
        vagrant=f"libvirt.channel :type => 'unix', :target_name => '{CHANNEL}', :target_type => 'virtio'",
        shell=f"ebb guest enable {domain.name}  # at once, where libvirt can plug it",
    )


def guest_agent(domain: DomainFacts) -> str:
    return text(f"Start the guest agent inside {domain.name}", shell="systemctl enable --now ebb-guestagent")


def cold_first() -> str:
    return text(
        "Have cold pages become free first on this host; under emulation it has shown no gain",
        shell="ebb-hostagent --cold-first  # cold_first = true in /etc/ebbtide/hostagent.toml",
    )


def more_vcpus(domain: DomainFacts) -> str:
    return text(
        "Give the domain a second vCPU",
        xml="<vcpu>2</vcpu>",
        virt_xml=f"virt-xml {domain.name} --edit --vcpus 2",
        vagrant="libvirt.cpus = 2",
    )


def hotpluggable_vcpus(domain: DomainFacts) -> str:
    number = max(domain.vcpus, 2)
    rows = "".join(
        f"  <vcpu id='{cpu}' enabled='yes' hotpluggable='{'yes' if cpu else 'no'}'/>\n" for cpu in range(number)
    )
    return text(
        "Declare the vCPUs hotpluggable",
        xml=f"<vcpus>\n{rows}</vcpus>",
        shell=f"virsh setvcpus {domain.name} 1 --config\nvirsh setvcpus {domain.name} {number} --config --hotpluggable",
        vagrant="# vagrant-libvirt has no option for it: run the shell lines after `vagrant halt`",
    )


def virtio_mem(domain: DomainFacts) -> str:
    """Half of the memory becomes a virtio-mem device, so the sum stays what it was."""
    device = math.ceil(domain.memory_mib / 2 / 128) * 128
    boot = max(domain.memory_mib - device, 128)
    last = max(domain.vcpus, 1) - 1
    cpus = f"0-{last}" if last else "0"
    total = boot + device
    return text(
        "Make half of the memory a virtio-mem device",
        xml=f"""<maxMemory slots='8' unit='MiB'>{total}</maxMemory>
<cpu>
  <numa>
    <cell id='0' cpus='{cpus}' memory='{boot}' unit='MiB'/>
  </numa>
</cpu>
<devices>
  <memory model='virtio-mem'>
    <target>
      <size unit='MiB'>{device}</size>
      <node>0</node>
      <block unit='KiB'>2048</block>
      <requested unit='MiB'>{device}</requested>
    </target>
  </memory>
</devices>""",
        virt_xml=f"""virt-xml {domain.name} --edit --memory maxMemory={total},maxMemory.slots=8
virt-xml {domain.name} --edit --cpu numa.cell0.id=0,numa.cell0.cpus={cpus},numa.cell0.memory={boot},numa.cell0.unit=MiB
virt-xml {domain.name} --add-device --memdev \
model=virtio-mem,target.size={device},target.node=0,target.block=2048,target.requested={device * 1024}""",
        vagrant="# vagrant-libvirt has no option for it: run the virt-xml lines after `vagrant halt`",
        shell=MOVABLE_IN_GUEST,
    )


def movable(has_cmdline: bool) -> str:
    if not has_cmdline:
        return text("See that the guest's kernel keeps plugged memory movable", shell=MOVABLE_IN_GUEST)
    return text(
        "Tell the guest's kernel to keep plugged memory movable",
        xml=f"<os>\n  <cmdline>... {MOVABLE}</cmdline>\n</os>",
        vagrant=f"libvirt.cmd_line = '... {MOVABLE}'",
    )


def balloon(domain: DomainFacts) -> str:
    return text(
        "Give the domain a balloon with statistics and free page reporting",
        xml="<devices>\n  <memballoon model='virtio' freePageReporting='on'>\n    <stats period='1'/>\n"
        "  </memballoon>\n</devices>",
        virt_xml=f"virt-xml {domain.name} --edit --memballoon model=virtio,stats.period=1,freePageReporting=on",
        vagrant="libvirt.memballoon_enabled = true\nlibvirt.memballoon_model = 'virtio'\n"
        "# no option for statistics and reporting: run the virt-xml line after `vagrant halt`",
    )


def _without(title: str, inside: str, element: str, virt_xml: str, option: str) -> str:
    """A fix that takes an element out of the domain."""
    return text(
        title,
        xml=f"<{inside}>\n  <!-- without <{element}> -->\n</{inside}>",
        virt_xml=f"virt-xml {virt_xml}",
        vagrant=f"# without: libvirt.{option}",
    )


def no_hugepages(domain: DomainFacts) -> str:
    edit = f"{domain.name} --edit --memorybacking hugepages=off"
    return _without("Take the huge pages away", "memoryBacking", "hugepages/", edit, "memorybacking :hugepages")


def no_locked(domain: DomainFacts) -> str:
    edit = f"{domain.name} --edit --memorybacking locked=off"
    return _without("Let the memory be unlocked", "memoryBacking", "locked/", edit, "memorybacking :locked")


def no_shared(domain: DomainFacts) -> str:
    return text(
        "Let the memory be private and anonymous",
        xml="<memoryBacking>\n  <source type='anonymous'/>\n  <access mode='private'/>\n</memoryBacking>",
        virt_xml=f"virt-xml {domain.name} --edit --memorybacking source.type=anonymous,access.mode=private",
        vagrant="libvirt.memorybacking :source, :type => 'anonymous'\n"
        "libvirt.memorybacking :access, :mode => 'private'",
    )


def no_passthrough(domain: DomainFacts) -> str:
    edit = f"{domain.name} --remove-device --hostdev all"
    return _without("Take the passed-through devices away", "devices", "hostdev", edit, "pci ...")


def not_confidential(domain: DomainFacts) -> str:
    edit = f"{domain.name} --edit --launchSecurity clearxml=yes"
    return _without("Run the guest without memory encryption", "domain", "launchSecurity", edit, "launchsecurity ...")


def swap(domain: DomainFacts) -> str:
    return text(
        "Give the host swap, compressed memory or a file",
        shell=f"""modprobe zram num_devices=1
echo {domain.memory_mib}M >/sys/block/zram0/disksize
mkswap /dev/zram0 && swapon --priority 100 /dev/zram0
# or: fallocate -l {domain.memory_mib}M /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon /swapfile""",
    )


def cgroups() -> str:
    return text(
        "Mount the cgroups and restart libvirtd",
        shell="mount -t cgroup2 none /sys/fs/cgroup",
    )


def acpi_probe() -> str:
    return text(
        "Let a throw-away guest try it on this host",
        shell="ebb doctor --probe-acpi",
    )


def interfaces(domain: DomainFacts) -> str:
    return text(
        "Connect the domain through a bridge or a network of libvirt",
        xml="<devices>\n  <interface type='network'>\n    <source network='default'/>\n    <model type='virtio'/>\n"
        "  </interface>\n</devices>",
        virt_xml=f"virt-xml {domain.name} --add-device --network network=default,model=virtio",
        vagrant="node.vm.network :private_network, :type => 'dhcp'",
    )
