"""Allow-list of domain XML in requests, and in templates that a host's owner supplies. Pure: no file is touched.

What is not named here is refused: an ``<emulator>``, a host file or an argument of QEMU's is root on the host
(docs/internals/contracts.md, trust). Elements: https://libvirt.org/formatdomain.html. Whether the paths that are found
lead where they seem to is looked at in `hostagent.domain_xml.image_paths`.
"""

from __future__ import annotations

import posixpath
import re
import xml.etree.ElementTree as ElementTree
import xml.parsers.expat as expat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from hostagent.errors import HostAgentError

MOST_ELEMENTS: Final = 2000
DEEPEST: Final = 12
#: What may be there more than once beside the children of ``<devices>``. Of all others what is checked and what libvirt
#: reads could be two.
_REPEATED: Final = {
    "domain/os/boot",
    "domain/clock/timer",
    "domain/cpu/feature",
    "domain/cpu/numa/cell",
    "domain/vcpus/vcpu",
}


class XMLRefused(HostAgentError):
    """The XML has something that is not allowed; the text names it."""


@dataclass(frozen=True, slots=True)
class FileUse:
    """A host file that the XML names, where, and as what it is read ("raw", "qcow2" or "boot")."""

    path: str
    where: str
    format: str


@dataclass(frozen=True, slots=True)
class Rights:
    """What a piece of XML may do.

    :param prefixes: absolute directories below which files may lie.
    :param wide: of a template that root put on the host: files anywhere, taps, bridges, a console in a file.
    """

    prefixes: tuple[str, ...] = ()
    wide: bool = False


_Pattern = re.Pattern[str]


def _re(pattern: str) -> _Pattern:
    return re.compile(pattern, re.ASCII)


_WORD: Final = _re(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_TEXT: Final = _re(r"[^\x00-\x08\x0b-\x1f<>]{0,2000}")
_NUMBER: Final = _re(r"\s*[0-9]{1,12}\s*")
_HEX: Final = _re(r"(0x)?[0-9a-fA-F]{1,8}")
_YES: Final = _re(r"yes|no|on|off")
_UNIT: Final = _re(r"b|bytes|KB|k|KiB|MB|M|MiB|GB|G|GiB|TB|T|TiB")
_MAC: Final = _re(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")
_UUID: Final = _re(r"[0-9a-fA-F-]{32,36}")
_DEVICE: Final = _re(r"[a-zA-Z][a-zA-Z0-9_.-]{0,14}")
#: Checked by the prefixes, not by a pattern.
_PATH: Final = _re(r"/[^\x00-\x1f]*")
_CPUS: Final = _re(r"[0-9,^-]{1,200}")
_BLANK: Final = _re(r"\s*")


@dataclass(frozen=True, slots=True)
class Rule:
    """What an element may have."""

    attributes: Mapping[str, _Pattern] = field(default_factory=dict)
    children: Mapping[str, Rule] = field(default_factory=dict)
    text: _Pattern = _BLANK
    #: Looked at besides, with the rights; says what is wrong.
    also: Callable[[ElementTree.Element, Rights], str] | None = None
    #: Allowed with wide rights only.
    wide: bool = False


def _only(*words: str) -> _Pattern:
    return _re("|".join(re.escape(word) for word in words))


def _interface(element: ElementTree.Element, rights: Rights) -> str:
    allowed = ("network", "user", "bridge", "ethernet") if rights.wide else ("network", "user")
    kind = element.get("type")
    return "" if kind in allowed else f"an interface of type {kind} (allowed: {', '.join(allowed)})"


def _disk(element: ElementTree.Element, rights: Rights) -> str:
    if element.get("type") != "file":
        return f"a disk of type {element.get('type')} (allowed: file)"
    driver = element.find("driver")
    if driver is None or driver.get("type") not in ("raw", "qcow2"):
        return "a disk without <driver type='raw'> or <driver type='qcow2'>: its format would be guessed"
    return ""


def _character(element: ElementTree.Element, rights: Rights) -> str:
    """A console, serial line or channel: no file, socket or device of the host behind it."""
    kind, source = element.get("type"), element.find("source")
    if element.tag == "channel":
        if kind not in ("unix", "spicevmc"):
            return f"a channel of type {kind} (allowed: unix)"
        target = element.find("target")
        if target is None or target.get("type") != "virtio":
            return "a channel that is not virtio"
    elif kind not in (("pty", "file") if rights.wide else ("pty",)):
        return f"a {element.tag} of type {kind}"
    if source is not None and not rights.wide:
        return f"a {element.tag} with a <source>"
    return ""


_ADDRESS: Final = Rule(
    {
        "type": _only("pci", "drive", "virtio-serial", "ccid", "usb", "dimm"),
        **dict.fromkeys(("domain", "bus", "slot", "function", "controller", "target", "unit", "port", "base"), _HEX),
        "multifunction": _YES,
    }
)
_ALIAS: Final = Rule({"name": _re(r"ua-[A-Za-z0-9_-]{1,60}")})
_SIZE: Final = Rule({"unit": _UNIT}, text=_NUMBER)
_DEVICE_PARTS: Final = {"address": _ADDRESS, "alias": _ALIAS}
_BOOT: Final = Rule({"order": _NUMBER})
_SOURCE_OF_CHARACTER: Final = Rule({"path": _PATH, "append": _YES, "mode": _only("bind")}, wide=True)
_CHARACTER: Final = Rule(
    {"type": _WORD},
    {
        "source": _SOURCE_OF_CHARACTER,
        "target": Rule(
            {"type": _WORD, "port": _NUMBER, "name": _re(r"[a-z0-9._-]{1,100}")}, {"model": Rule({"name": _WORD})}
        ),
        "protocol": Rule({"type": _only("raw")}),
        **_DEVICE_PARTS,
    },
    also=_character,
)
_DISK: Final = Rule(
    {"type": _WORD, "device": _only("disk", "cdrom")},
    {
        "driver": Rule(
            {
                "name": _only("qemu"),
                "type": _only("raw", "qcow2"),
                "cache": _only("none", "writeback", "writethrough", "directsync", "unsafe", "default"),
                "io": _only("threads", "native", "io_uring"),
                "discard": _only("unmap", "ignore"),
                "detect_zeroes": _only("off", "on", "unmap"),
                "queues": _NUMBER,
            }
        ),
        "source": Rule({"file": _PATH}),
        "backingStore": Rule(),
        "target": Rule({"dev": _DEVICE, "bus": _only("virtio", "scsi", "sata", "ide", "usb")}),
        "readonly": Rule(),
        "serial": Rule(text=_WORD),
        "boot": _BOOT,
        **_DEVICE_PARTS,
    },
    also=_disk,
)
_INTERFACE: Final = Rule(
    {"type": _WORD},
    {
        "source": Rule({"network": _WORD, "bridge": _DEVICE}),
        "mac": Rule({"address": _MAC}),
        "model": Rule({"type": _only("virtio", "e1000", "e1000e", "rtl8139")}),
        "target": Rule({"dev": _DEVICE, "managed": _YES}, wide=True),
        "boot": _BOOT,
        **_DEVICE_PARTS,
    },
    also=_interface,
)
_DEVICES: Final = Rule(
    children={
        "disk": _DISK,
        "interface": _INTERFACE,
        "serial": _CHARACTER,
        "console": _CHARACTER,
        "channel": _CHARACTER,
        "controller": Rule(
            {"type": _WORD, "index": _NUMBER, "model": _WORD, "ports": _NUMBER, "vectors": _NUMBER},
            {"model": Rule({"name": _WORD}), "target": Rule({"chassis": _NUMBER, "port": _HEX}), **_DEVICE_PARTS},
        ),
        "input": Rule(
            {"type": _only("mouse", "keyboard", "tablet"), "bus": _only("virtio", "usb", "ps2")}, _DEVICE_PARTS
        ),
        "video": Rule(
            children={
                "model": Rule(
                    {
                        "type": _only("none", "virtio", "vga", "bochs", "cirrus"),
                        "vram": _NUMBER,
                        "heads": _NUMBER,
                        "primary": _YES,
                    }
                ),
                **_DEVICE_PARTS,
            }
        ),
        "memballoon": Rule(
            {"model": _only("virtio", "none"), "autodeflate": _YES, "freePageReporting": _YES},
            {"stats": Rule({"period": _NUMBER}), **_DEVICE_PARTS},
        ),
        "memory": Rule(
            {"model": _only("dimm", "virtio-mem")},
            {
                "target": Rule(
                    children={
                        "size": _SIZE,
                        "block": _SIZE,
                        "requested": _SIZE,
                        "current": _SIZE,
                        "node": Rule(text=_NUMBER),
                    }
                ),
                **_DEVICE_PARTS,
            },
        ),
        "rng": Rule(
            {"model": _only("virtio")},
            {"backend": Rule({"model": _only("random")}, text=_only("/dev/urandom", "/dev/random")), **_DEVICE_PARTS},
        ),
        "watchdog": Rule(
            {"model": _only("i6300esb", "itco"), "action": _only("reset", "poweroff", "none", "shutdown")},
            _DEVICE_PARTS,
        ),
        "panic": Rule({"model": _only("isa", "pvpanic")}, _DEVICE_PARTS),
    }
)
_CPU: Final = Rule(
    {
        "mode": _only("host-passthrough", "host-model", "maximum", "custom"),
        "match": _only("exact", "minimum", "strict"),
        "check": _only("none", "partial", "full"),
        "migratable": _YES,
    },
    {
        "model": Rule({"fallback": _only("allow", "forbid")}, text=_WORD),
        "feature": Rule({"policy": _only("force", "require", "optional", "disable", "forbid"), "name": _WORD}),
        "topology": Rule(dict.fromkeys(("sockets", "dies", "cores", "threads"), _NUMBER)),
        "numa": Rule(children={"cell": Rule({"id": _NUMBER, "cpus": _CPUS, "memory": _NUMBER, "unit": _UNIT})}),
    },
)
_SWITCH: Final = Rule({"state": _YES})
#: Of what QEMU can be handed, the one variable that our templates set (docs/internals/host-memory.md).
_QEMU: Final = "{http://libvirt.org/schemas/domain/qemu/1.0}"
_COMMANDLINE: Final = Rule(
    children={f"{_QEMU}env": Rule({"name": _only("GLIBC_TUNABLES"), "value": _only("glibc.pthread.rseq=0")})}, wide=True
)
_ON: Final = _only("destroy", "restart", "preserve", "rename-restart")
_DOMAIN: Final = Rule(
    {"type": _only("kvm", "qemu")},
    {
        "name": Rule(text=_re(r"\s*[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\s*")),
        "uuid": Rule(text=_re(rf"\s*{_UUID.pattern}\s*")),
        "title": Rule(text=_TEXT),
        "description": Rule(text=_TEXT),
        "memory": _SIZE,
        "currentMemory": _SIZE,
        "maxMemory": Rule({"unit": _UNIT, "slots": _NUMBER}, text=_NUMBER),
        "vcpu": Rule({"placement": _only("static"), "current": _NUMBER}, text=_NUMBER),
        "vcpus": Rule(
            children={"vcpu": Rule({"id": _NUMBER, "enabled": _YES, "hotpluggable": _YES, "order": _NUMBER})}
        ),
        "os": Rule(
            children={
                "type": Rule({"arch": _only("x86_64"), "machine": _WORD}, text=_only("hvm")),
                "boot": Rule({"dev": _only("hd", "cdrom", "network")}),
                "kernel": Rule(text=_PATH),
                "initrd": Rule(text=_PATH),
                "cmdline": Rule(text=_TEXT),
                "bootmenu": Rule({"enable": _YES, "timeout": _NUMBER}),
            }
        ),
        "features": Rule(
            children={
                **dict.fromkeys(("acpi", "apic", "pae", "vmport", "pvspinlock", "smm"), _SWITCH),
                "tcg": Rule(children={"tb-cache": _SIZE}),
            }
        ),
        "cpu": _CPU,
        "clock": Rule(
            {"offset": _only("utc", "localtime")},
            {"timer": Rule({"name": _WORD, "tickpolicy": _WORD, "present": _YES})},
        ),
        "on_poweroff": Rule(text=_ON),
        "on_reboot": Rule(text=_ON),
        "on_crash": Rule(text=_ON),
        "devices": _DEVICES,
        f"{_QEMU}commandline": _COMMANDLINE,
    },
)


def parse(text: str) -> ElementTree.Element:
    """The document's root, read without any document type, entity or processing instruction.

    :raises XMLRefused: it has one of these, or is no XML.
    """
    parser = expat.ParserCreate()

    def refuse(*_: object) -> NoReturn:
        raise XMLRefused("the XML has a document type, an entity or a processing instruction")

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.ProcessingInstructionHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    try:
        # As bytes of one encoding: a declaration of another one is refused by the parser.
        encoded = text.encode("utf-8")
        if re.match(rb"\s*<\?xml[^>]*encoding\s*=\s*[\"'](?!utf-8[\"'])", encoded, re.IGNORECASE):
            raise XMLRefused("the XML names another encoding than UTF-8")
        parser.Parse(encoded, True)
        return ElementTree.fromstring(encoded)
    except (expat.ExpatError, ElementTree.ParseError, UnicodeEncodeError, ValueError) as error:
        raise XMLRefused(f"the XML is not well-formed: {error}") from error


def check(root: ElementTree.Element, rights: Rights) -> tuple[FileUse, ...]:
    """Hold a domain against the list.

    :returns: the host files that it names, each below a prefix by its name.
    :raises XMLRefused: something that is not allowed; the sentence names it.
    """
    if root.tag != "domain":
        raise XMLRefused(f"the XML is a <{root.tag}>, not a <domain>")
    if sum(1 for _ in root.iter()) > MOST_ELEMENTS:
        raise XMLRefused(f"the XML has more than {MOST_ELEMENTS} elements")
    _check(root, _DOMAIN, rights, "domain", 0)
    uses = []
    for disk in root.findall("./devices/disk"):
        driver, source = disk.find("driver"), disk.find("source")
        if source is not None and driver is not None:
            uses.append(FileUse(source.get("file") or "", "devices/disk/source", driver.get("type") or ""))
    for tag in ("kernel", "initrd"):
        uses += [FileUse(e.text or "", f"os/{tag}", "boot") for e in root.findall(f"./os/{tag}")]
    for use in uses:
        if not rights.wide:
            _below(use, rights)
    return tuple(uses)


def _check(element: ElementTree.Element, rule: Rule, rights: Rights, path: str, depth: int) -> None:
    if depth > DEEPEST:
        raise XMLRefused(f"{path} is too deep")
    for name, value in element.attrib.items():
        pattern = rule.attributes.get(name)
        if pattern is None:
            raise XMLRefused(f"{path} has the attribute {_short(name)}, which is not allowed")
        if not pattern.fullmatch(value):
            raise XMLRefused(f"{path}: {name}={_short(value)} is not allowed")
    if not rule.text.fullmatch((element.text or "").strip() if rule.text is not _BLANK else element.text or ""):
        raise XMLRefused(f"{path} has the text {_short(element.text or '')}, which is not allowed")
    seen: set[str] = set()
    for child in element:
        if not isinstance(child.tag, str) or child.tag not in rule.children:
            name = _short(str(child.tag))
            if rights.wide and path == "domain" and child.tag == "metadata":
                continue
            raise XMLRefused(f"{path} has <{name}>, which is not allowed")
        below = rule.children[child.tag]
        if child.tag in seen and path != "domain/devices" and f"{path}/{child.tag}" not in _REPEATED:
            raise XMLRefused(f"{path} has more than one <{child.tag}>, which is not allowed")
        seen.add(child.tag)
        if below.wide and not rights.wide:
            raise XMLRefused(f"{path} has <{child.tag}>, which is not allowed in a request")
        _check(child, below, rights, f"{path}/{child.tag}", depth + 1)
        if (child.tail or "").strip():
            raise XMLRefused(f"{path} has text between its elements")
    if rule.also is not None and (why := rule.also(element, rights)):
        raise XMLRefused(f"{path}: {why} is not allowed")


def _below(use: FileUse, rights: Rights) -> None:
    """Whether a path lies below a prefix as it is written: nothing in it may climb out."""
    path = use.path
    if not path.startswith("/") or posixpath.normpath(path) != path:
        raise XMLRefused(f"{use.where}: {_short(path)} is not a plain absolute path")
    for prefix in rights.prefixes:
        if path.startswith(prefix.rstrip("/") + "/"):
            return
    where = " or ".join(rights.prefixes) or "nowhere: this host takes no files of a request"
    raise XMLRefused(f"{use.where}: {_short(path)} must lie below {where}")


def _short(text: str) -> str:
    text = repr(text)
    return text if len(text) <= 80 else f"{text[:76]}...'"
