"""Domain XML of a request: what is allowed passes, and each way out of it is refused."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostagent.domain_xml.image_paths import check_files
from hostagent.domain_xml.template_library import TemplateLibrary, sample
from hostagent.domain_xml.templates import PACKAGED, DomainTemplate, TemplateError, render_domain
from hostagent.domain_xml.xml_allow_list import FileUse, Rights, XMLRefused, check, parse

RIGHTS = Rights(("/srv/images",))
DISK = (
    "<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/srv/images/web.qcow2'/>"
    "<target dev='vda' bus='virtio'/></disk>"
)
GOOD = f"""<domain type='kvm'><name>web</name><title>A web server</title>
<memory unit='MiB'>512</memory><vcpu placement='static'>2</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type>
<kernel>/srv/images/vmlinuz</kernel><cmdline>console=ttyS0</cmdline></os>
<features><acpi/><apic/></features><cpu mode='host-passthrough'><feature policy='disable' name='vmx'/></cpu>
<clock offset='utc'><timer name='rtc' tickpolicy='catchup'/></clock><on_poweroff>destroy</on_poweroff>
<devices>{DISK}<interface type='network'><source network='default'/><mac address='52:54:00:00:00:01'/>
<model type='virtio'/></interface><serial type='pty'/><channel type='unix'>
<target type='virtio' name='org.qemu.guest_agent.0'/></channel>
<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
<memballoon model='virtio'/></devices></domain>"""


def allowed(xml: str, rights: Rights = RIGHTS) -> tuple[FileUse, ...]:
    return check(parse(xml), rights)


def test_what_a_guest_needs_is_allowed() -> None:
    assert allowed(GOOD) == (
        FileUse("/srv/images/web.qcow2", "devices/disk/source", "qcow2"),
        FileUse("/srv/images/vmlinuz", "os/kernel", "boot"),
    )


def with_device(device: str) -> str:
    return GOOD.replace("</devices>", f"{device}</devices>")


def in_domain(element: str, root: str = "<domain type='kvm'>") -> str:
    return GOOD.replace("<domain type='kvm'>", root + element)


QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
ESCAPES = {
    "emulator": with_device("<emulator>/tmp/evil</emulator>"),
    "qemu-commandline": in_domain(
        "<qemu:commandline><qemu:arg value='-drive'/></qemu:commandline>", f"<domain type='kvm' {QEMU}>"
    ),
    "qemu-environment": in_domain(
        "<qemu:commandline><qemu:env name='GLIBC_TUNABLES' value='glibc.pthread.rseq=0'/></qemu:commandline>",
        f"<domain type='kvm' {QEMU}>",
    ),
    "qemu-override": in_domain("<qemu:override/>", f"<domain type='kvm' {QEMU}>"),
    "default-namespace": GOOD.replace("<domain type='kvm'>", f"<domain type='kvm' {QEMU.replace(':qemu', '')}>"),
    "prefixed-attribute": GOOD.replace("<domain type='kvm'>", f"<domain type='kvm' {QEMU} qemu:type='x'>"),
    "hostdev": with_device("<hostdev mode='subsystem' type='pci'><source/></hostdev>"),
    "filesystem": with_device("<filesystem type='mount'><source dir='/'/><target dir='r'/></filesystem>"),
    "shmem": with_device("<shmem name='x'/>"),
    "redirdev": with_device("<redirdev bus='usb' type='tcp'/>"),
    "tpm": with_device("<tpm model='tpm-tis'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>"),
    "host-random": with_device("<rng model='virtio'><backend model='random'>/dev/sda</backend></rng>"),
    "egd-random": with_device("<rng model='virtio'><backend model='egd' type='tcp'/></rng>"),
    "graphics": with_device("<graphics type='vnc' listen='0.0.0.0'/>"),
    "sound": with_device("<audio id='1' type='file' path='/etc/cron.d/x'/>"),
    "nvdimm": with_device("<memory model='nvdimm'><source><path>/etc/shadow</path></source></memory>"),
    "disk-outside": GOOD.replace("/srv/images/web.qcow2", "/etc/shadow"),
    "disk-climbs": GOOD.replace("/srv/images/web.qcow2", "/srv/images/../../etc/shadow"),
    "disk-beside": GOOD.replace("/srv/images/web.qcow2", "/srv/images-of-others/web.qcow2"),
    "disk-double-slash": GOOD.replace("/srv/images/web.qcow2", "//srv/images/web.qcow2"),
    "disk-relative": GOOD.replace("/srv/images/web.qcow2", "web.qcow2"),
    "disk-prefix-itself": GOOD.replace("/srv/images/web.qcow2", "/srv/images/"),
    "disk-block": GOOD.replace("<disk type='file'", "<disk type='block'").replace("file='/srv", "dev='/srv"),
    "disk-dir": GOOD.replace("<disk type='file'", "<disk type='dir'"),
    "disk-network": GOOD.replace("<disk type='file'", "<disk type='network'"),
    "disk-lun": GOOD.replace("device='disk'", "device='lun'"),
    "disk-device-path": GOOD.replace("<source file='/srv/images/web.qcow2'/>", "<source dev='/dev/sda'/>"),
    "disk-format-guessed": GOOD.replace("<driver name='qemu' type='qcow2'/>", ""),
    "disk-other-format": GOOD.replace("type='qcow2'", "type='vmdk'"),
    "backing-store": GOOD.replace(
        "<target dev='vda'", "<backingStore type='file'><source file='/etc/shadow'/></backingStore><target dev='vda'"
    ),
    "backing-store-child": GOOD.replace(
        "<target dev='vda'", "<backingStore><format type='raw'/></backingStore><target dev='vda'"
    ),
    "mirror": GOOD.replace("<target dev='vda'", "<mirror file='/etc/x'/><target dev='vda'"),
    "disk-seclabel": GOOD.replace(
        "<source file='/srv/images/web.qcow2'/>",
        "<source file='/srv/images/web.qcow2'><seclabel model='dac' relabel='no'/></source>",
    ),
    "seclabel": in_domain("<seclabel type='none'/>"),
    "kernel-outside": GOOD.replace("/srv/images/vmlinuz", "/boot/vmlinuz"),
    "kernel-with-space": GOOD.replace("<kernel>/srv", "<kernel> /srv"),
    "initrd-outside": GOOD.replace("<cmdline>", "<initrd>/etc/shadow</initrd><cmdline>"),
    "loader": GOOD.replace("<cmdline>", "<loader type='pflash'>/etc/shadow</loader><cmdline>"),
    "nvram": GOOD.replace("<cmdline>", "<nvram template='/etc/shadow'>/etc/x</nvram><cmdline>"),
    "dtb": GOOD.replace("<cmdline>", "<dtb>/etc/shadow</dtb><cmdline>"),
    "acpi-table": GOOD.replace("<cmdline>", "<acpi><table type='slic'>/etc/shadow</table></acpi><cmdline>"),
    "firmware": GOOD.replace("<os>", "<os firmware='efi'>"),
    "interface-bridge": GOOD.replace("type='network'", "type='bridge'"),
    "interface-direct": GOOD.replace("type='network'", "type='direct'"),
    "interface-ethernet": GOOD.replace("type='network'", "type='ethernet'"),
    "interface-vhostuser": GOOD.replace("type='network'", "type='vhostuser'"),
    "interface-script": GOOD.replace("<model type='virtio'/>", "<script path='/tmp/evil'/>"),
    "interface-target": GOOD.replace("<model type='virtio'/>", "<target dev='eth0'/>"),
    "interface-backend": GOOD.replace("<model type='virtio'/>", "<backend tap='/dev/net/tun'/>"),
    "interface-filter": GOOD.replace("<model type='virtio'/>", "<filterref filter='x'/>"),
    "serial-file": GOOD.replace("<serial type='pty'/>", "<serial type='file'><source path='/etc/cron.d/x'/></serial>"),
    "serial-dev": GOOD.replace("<serial type='pty'/>", "<serial type='dev'><source path='/dev/tty0'/></serial>"),
    "serial-log": GOOD.replace("<serial type='pty'/>", "<serial type='pty'><log file='/etc/x'/></serial>"),
    "serial-tcp": GOOD.replace("<serial type='pty'/>", "<serial type='tcp'><source mode='bind'/></serial>"),
    "channel-path": GOOD.replace(
        "<channel type='unix'>", "<channel type='unix'><source mode='bind' path='/run/libvirt/libvirt-sock'/>"
    ),
    "channel-pipe": GOOD.replace("<channel type='unix'>", "<channel type='pipe'>"),
    "metadata": in_domain("<metadata><e:intent xmlns:e='urn:ebbtide:intent:1'>{}</e:intent></metadata>"),
    "resource": in_domain("<resource><partition>/machine</partition></resource>"),
    "cputune": in_domain("<cputune><emulatorpin cpuset='0'/></cputune>"),
    "huge-pages": in_domain("<memoryBacking><hugepages/></memoryBacking>"),
    "launch-security": in_domain("<launchSecurity type='sev'/>"),
    "sysinfo": in_domain("<sysinfo type='fwcfg'><entry name='x' file='/etc/shadow'/></sysinfo>"),
    "lxc": GOOD.replace("type='kvm'", "type='lxc'"),
    "text-between": GOOD.replace("<features>", "hello<features>"),
    "doctype": "<!DOCTYPE domain>" + GOOD,
    "entity": "<!DOCTYPE d [<!ENTITY x SYSTEM 'file:///etc/shadow'>]>" + GOOD.replace("A web server", "&x;"),
    "billion-laughs": "<!DOCTYPE d [<!ENTITY a 'ha'><!ENTITY b '&a;&a;'>]>" + GOOD.replace("A web server", "&b;"),
    "processing-instruction": "<?xml-stylesheet href='x'?>" + GOOD,
    "other-encoding": "<?xml version='1.0' encoding='UTF-7'?>" + GOOD,
    "not-a-domain": "<network><name>x</name></network>",
    "not-xml": "domain: web",
    "two-roots": GOOD + GOOD,
    "too-many": GOOD.replace("<features>", "<features>" + "<pae/>" * 3000),
}


@pytest.mark.parametrize("name", list(ESCAPES))
def test_each_way_out_is_refused(name: str) -> None:
    assert ESCAPES[name] != GOOD, "the escape is not in the XML"
    with pytest.raises(XMLRefused):
        allowed(ESCAPES[name])


def test_without_a_prefix_no_file_is_allowed() -> None:
    with pytest.raises(XMLRefused, match="nowhere"):
        allowed(GOOD, Rights())


def qcow2(
    path: Path, backing: str = "", features: int = 0, formats: Sequence[str] = ("raw",), version: int = 3
) -> Path:
    """The header of an image, as far as anybody reads it, with what it says of the format of its backing file."""
    # One extension before them that has nothing to do with it.
    extensions = b"".join(
        struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)
        for kind, data in [(0x6803F857, b"123"), *((0xE2792ACA, form.encode()) for form in formats), (0, b"")]
    )
    length = 104 if version == 3 else 72
    offset = length + len(extensions)
    header = b"QFI\xfb" + struct.pack(">IQI", version, offset if backing else 0, len(backing))
    header = header.ljust(72, b"\0")
    if version == 3:
        header = (header + struct.pack(">Q", features)).ljust(100, b"\0") + struct.pack(">I", length)
    path.write_bytes(header + extensions + backing.encode())
    return path


def use(path: Path, form: str = "qcow2") -> tuple[FileUse, ...]:
    return (FileUse(str(path), "devices/disk/source", form),)


def test_an_image_with_its_backing_files_below_the_prefix_is_allowed(tmp_path: Path) -> None:
    base = qcow2(tmp_path / "base.qcow2")
    overlay = qcow2(tmp_path / "web.qcow2", "base.qcow2")
    (tmp_path / "raw.img").write_bytes(b"anything")
    prefixes = [str(tmp_path)]
    assert check_files(use(base) + use(overlay) + use(tmp_path / "raw.img", "raw"), prefixes) == {str(base)}
    assert check_files(use(qcow2(tmp_path / "abs.qcow2", str(base))), prefixes) == frozenset()
    old = qcow2(tmp_path / "old.qcow2", "web.qcow2", formats=["qcow2"], version=2)
    assert check_files(use(old), prefixes) == frozenset()


@pytest.mark.parametrize("formats", [["vmdk"], ["raw", "vmdk"], ["vmdk", "raw"], ["raw" + "\0"], []])
@pytest.mark.parametrize("version", [2, 3])
def test_a_backing_file_of_a_format_that_names_further_files_is_refused(
    tmp_path: Path, formats: list[str], version: int
) -> None:
    """A descriptor of VMDK reads any file of the host by its FLAT line; without a format it would be guessed."""
    (tmp_path / "a.img").write_text('# Disk DescriptorFile\nRW 2048 FLAT "/etc/shadow" 0\n')
    image = qcow2(tmp_path / "web.qcow2", "a.img", formats=formats, version=version)
    with pytest.raises(
        XMLRefused,
        match="devices/disk/source: .* of the format" if formats else r"source: .*-F raw -b a\.img .*web\.qcow2",
    ):
        check_files(use(image), [str(tmp_path)])
    qcow2(tmp_path / "over.qcow2", "web.qcow2", formats=["qcow2"])
    with pytest.raises(XMLRefused):
        check_files(use(tmp_path / "over.qcow2"), [str(tmp_path)])


def test_a_backing_file_is_looked_for_beside_the_name_of_the_image_as_qemu_does(tmp_path: Path) -> None:
    """A link to an image deeper below the prefix had another file looked at than QEMU opens."""
    deeper = tmp_path / "images" / "deeper"
    deeper.mkdir(parents=True)
    for place in (tmp_path, tmp_path / "images"):
        (place / "secret.img").write_bytes(b"anything")
    image = qcow2(deeper / "web.qcow2", "../secret.img")
    (tmp_path / "images" / "link.qcow2").symlink_to(image)
    prefixes = [str(tmp_path / "images")]
    assert check_files(use(image), prefixes) == frozenset()
    with pytest.raises(XMLRefused, match="lies outside of"):
        check_files(use(tmp_path / "images" / "link.qcow2"), prefixes)


def test_what_qemu_img_makes_is_read_as_it_is_meant(tmp_path: Path) -> None:
    assert shutil.which("qemu-img") is not None, "it comes with `make install-test`"
    (tmp_path / "base.img").write_bytes(bytes(1 << 20))
    for form, compat in (("raw", "0.10"), ("raw", "1.1"), ("vmdk", "0.10"), ("vmdk", "1.1")):
        image = tmp_path / f"{form}-{compat}.qcow2"
        command = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", f"compat={compat}", "-u", "-F", form]
        subprocess.run([*command, "-b", "base.img", str(image), "1M"], check=True)
        if form == "raw":
            assert check_files(use(image), [str(tmp_path)]) == frozenset()
        else:
            with pytest.raises(XMLRefused, match="'vmdk'"):
                check_files(use(image), [str(tmp_path)])


@pytest.mark.parametrize(
    "backing",
    ["/etc/passwd", "../secret.img", "json:{'driver':'file','filename':'/etc/passwd'}", "nbd:localhost:10809",
     "file:/etc/passwd", "link.img", "nested.qcow2"],
)  # fmt: skip
def test_an_image_that_names_another_file_is_refused(tmp_path: Path, backing: str) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "secret.img").write_bytes(b"secret")
    (images / "link.img").symlink_to(tmp_path / "secret.img")
    qcow2(images / "nested.qcow2", "../secret.img")
    with pytest.raises(XMLRefused):
        check_files(use(qcow2(images / "web.qcow2", backing)), [str(images)])


def test_links_devices_and_what_is_not_there_are_refused(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "secret.img").write_bytes(b"secret")
    (images / "link.img").symlink_to(tmp_path / "secret.img")
    (images / "dir.img").symlink_to(tmp_path)
    os.mkfifo(images / "fifo.img")
    looping = qcow2(images / "loop.qcow2", "loop.qcow2")
    for path in (images / "link.img", images / "dir.img" / "secret.img", images / "fifo.img", images / "none.img"):
        with pytest.raises(XMLRefused):
            check_files(use(path, "raw"), [str(images)])
    with pytest.raises(XMLRefused, match="more than 16"):
        check_files(use(looping), [str(images)])
    with pytest.raises(XMLRefused, match="in another file"):
        check_files(use(qcow2(images / "data.qcow2", features=4)), [str(images)])
    whole = qcow2(images / "whole.qcow2").read_bytes()
    for bytes_left in (3, 71, 72, 103):
        (images / "short.qcow2").write_bytes(whole[:bytes_left])
        with pytest.raises(XMLRefused, match="is no qcow2"):
            check_files(use(images / "short.qcow2"), [str(images)])
    (images / "far.qcow2").write_bytes(whole[:8] + b"\xff" * 8 + whole[16:])
    with pytest.raises(XMLRefused, match="has a broken header"):
        check_files(use(images / "far.qcow2"), [str(images)])


def test_a_backing_file_outside_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    """Opening is enough for a FIFO to hold up the agent, and for a watchdog to reset the host."""
    images = tmp_path / "images"
    images.mkdir()
    os.mkfifo(outside := tmp_path / "fifo")
    holder = os.open(outside, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(holder, b"QFI\xfb")
        with pytest.raises(XMLRefused, match="lies outside of"):
            check_files(use(qcow2(images / "web.qcow2", "../fifo")), [str(images)])
        assert os.read(holder, 8) == b"QFI\xfb", "it was read"
    finally:
        os.close(holder)


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lab", "lab-dimm", "lab-net"])
def test_what_comes_with_the_agent_keeps_to_the_wider_list(name: str) -> None:
    rendered = render_domain(DomainTemplate.load(name), sample(1024, 512))
    check(parse(rendered), Rights(wide=True))
    with pytest.raises(XMLRefused):
        check(ElementTree.fromstring(rendered), RIGHTS)


def template(directory: Path, name: str = "web", xml: str | None = None, facts: str | None = None) -> Path:
    directory.chmod(0o755)
    path = directory / f"{name}.xml"
    path.write_text(xml or (PACKAGED / "lab.xml").read_text())
    path.chmod(0o644)
    if facts is not None:
        path.with_suffix(".toml").write_text(facts)
    return path


def load(directory: Path) -> TemplateLibrary:
    return TemplateLibrary.load((directory, PACKAGED), owner=os.getuid())


def test_a_library_has_the_operators_templates_before_its_own(tmp_path: Path) -> None:
    template(tmp_path, facts="description = 'a web server'\nshared_disk = true\nmost_cpu_cores = 4\n")
    library = load(tmp_path)
    assert [info.name for info in library.infos] == ["lab", "lab-dimm", "lab-net", "web"]
    web = library.infos[-1]
    assert (web.description, web.shared_disk) == ("a web server", True)
    assert web.most is not None
    assert web.most.cpu_cores == 4.0
    assert library.get("web").name == "web"
    with pytest.raises(TemplateError, match="not on this host"):
        library.get("none")


@pytest.mark.parametrize(
    "handed",
    [
        "<qemu:arg value='-drive'/>",
        "<qemu:env name='LD_PRELOAD' value='glibc.pthread.rseq=0'/>",
        "<qemu:env name='GLIBC_TUNABLES' value='glibc.pthread.rseq=0:glibc.malloc.perturb=1'/>",
    ],
)
def test_a_template_hands_qemu_one_variable_and_nothing_else(tmp_path: Path, handed: str) -> None:
    ours = (PACKAGED / "lab.xml").read_text()
    element = "<qemu:env name='GLIBC_TUNABLES' value='glibc.pthread.rseq=0'/>"
    assert element in ours
    template(tmp_path, xml=ours.replace(element, handed))
    with pytest.raises(TemplateError, match=r"web\.xml: .*(arg|env)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "device",
    [
        "<emulator>/tmp/x</emulator>",
        "<hostdev/>",
        "<filesystem/>",
        "<disk type='block'/>",
        "<interface type='direct'/>",
    ],
)
def test_a_template_with_what_is_not_allowed_keeps_the_agent_from_starting(tmp_path: Path, device: str) -> None:
    template(tmp_path, xml=(PACKAGED / "lab.xml").read_text().replace("</devices>", f"{device}</devices>"))
    with pytest.raises(TemplateError, match=r"web\.xml"):
        load(tmp_path)


def test_a_template_that_others_could_write_is_refused(tmp_path: Path) -> None:
    path = template(tmp_path)
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(TemplateError, match="can be written by others"):
            load(tmp_path)
    path.chmod(0o644)
    tmp_path.chmod(0o777)
    with pytest.raises(TemplateError, match="can be written by others"):
        load(tmp_path)
    tmp_path.chmod(0o755)
    with pytest.raises(TemplateError, match="must belong to"):
        TemplateLibrary.load((tmp_path,), owner=os.getuid() + 1)
    path.rename(tmp_path.parent / "elsewhere.xml")
    path.symlink_to(tmp_path.parent / "elsewhere.xml")
    with pytest.raises(TemplateError, match="symbolic link"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["xml", "adopted", "Web", "a_b"])
def test_names_that_mean_something_else_are_no_templates(tmp_path: Path, name: str) -> None:
    template(tmp_path, name)
    with pytest.raises(TemplateError, match="can be no template's name"):
        load(tmp_path)


@pytest.mark.parametrize("facts", ["description = 3", "shared_disk = 'yes'", "most_cpu_cores = -1", "cores = 2", "= 1"])
def test_facts_that_cannot_be_are_refused(tmp_path: Path, facts: str) -> None:
    template(tmp_path, facts=facts)
    with pytest.raises(TemplateError, match=r"web\.toml"):
        load(tmp_path)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("path", "twice"),
    [
        ("./devices/disk", "<source file='/etc/shadow'/>"),
        ("./devices/disk", "<driver type='vmdk'/>"),
        ("./devices/disk", "<driver name='qemu' type='raw'/>"),
        ("./devices/channel", "<target type='virtio' name='other'/>"),
        ("./devices/interface", "<source network='other'/>"),
        ("./devices/rng", "<backend model='random'>/dev/random</backend>"),
        ("./os", "<kernel>/srv/images/other</kernel>"),
        (".", "<devices/>"),
        (".", "<name>other</name>"),
    ],
)
def test_a_second_element_is_refused_where_libvirt_reads_one(path: str, twice: str, wide: bool) -> None:
    root = parse(GOOD)
    parent = root.find(path)
    assert parent is not None
    parent.append(ElementTree.fromstring(twice))
    rights = Rights(("/srv/images", "/etc"), wide=wide)
    with pytest.raises(XMLRefused, match=r"more than one|is not allowed"):
        check(root, rights)
