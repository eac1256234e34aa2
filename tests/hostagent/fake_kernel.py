"""Fake of ``tc`` and ``ip``, for the commands of `hostagent.limits.tc`, with failures where a test wants them.

The real ones are in tests/hostagent/limits/test_tc.py and tests/guests/test_bandwidth.py; here every command can fail
in turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hostagent.errors import TrafficControlError


@dataclass
class FakeKernel:
    """The devices of one network namespace, by name, each with its qdiscs."""

    #: Root qdisc of each device: (kind, handle, bytes/s).
    devices: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    #: Taps with an ingress qdisc, and where it redirects to ("police" and a rate: libvirt's).
    ingress: dict[str, str] = field(default_factory=dict)
    #: Devices with a qdisc in a class of their root.
    leaves: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    #: Commands that change something, in order.
    commands: list[str] = field(default_factory=list)
    #: Which of them fails, counted from 0, and whether it has done its work all the same.
    fails: int | None = None
    done_nevertheless: bool = False
    #: tc is older than iproute2 5.18: its JSON of a u32 filter is none.
    old: bool = False

    def state(self) -> tuple[dict[str, Any], dict[str, str]]:
        return dict(self.devices), dict(self.ingress)

    async def run(self, argv: Sequence[str], text: str = "") -> str:
        words = [word for word in argv if word not in ("-json", "-details")]
        if words[1:3] == ["-n", "other"]:
            words = [words[0], *words[3:]]
        line = " ".join(words)
        if "show" in words or "-batch" in words:
            return self._show(line, text)
        self.commands.append(line)
        broken = len(self.commands) - 1 == self.fails
        if not broken or self.done_nevertheless:
            self._change(line)
        if broken:
            raise TrafficControlError(f"{line} failed: no memory")
        return ""

    def _change(self, line: str) -> None:
        if found := re.fullmatch(r"ip link add (\S+) txqueuelen \d+ type ifb", line):
            self._refuse(found[1] in self.devices, "File exists")
            self.devices[found[1]] = ("pfifo_fast", "0:", 0)
        elif found := re.fullmatch(r"ip link del (\S+)", line):
            self._refuse(found[1] not in self.devices, "Cannot find device")
            del self.devices[found[1]]
        elif found := re.fullmatch(r"ip link set (\S+) alias (.*)", line):
            self.aliases[found[1]] = found[2]
        elif found := re.fullmatch(r"ip link set (\S+) (addrgenmode none|up)", line):
            assert found[1] in self.devices
        elif found := re.match(r"tc qdisc replace dev (\S+) root (handle (\S+) tbf rate (\d+)bps|noqueue)", line):
            self._refuse(found[1] not in self.devices, "Cannot find device")
            limited = found[2] != "noqueue"
            self.devices[found[1]] = ("tbf", found[3], int(found[4])) if limited else ("noqueue", "8001:", 0)
        elif found := re.fullmatch(r"tc qdisc add dev (\S+) handle ffff: ingress", line):
            self._refuse(found[1] in self.ingress, "Exclusivity flag on")
            self.ingress[found[1]] = ""
        elif found := re.fullmatch(r"tc qdisc del dev (\S+) ingress", line):
            self._refuse(found[1] not in self.ingress, "Invalid handle")
            del self.ingress[found[1]]
        elif found := re.fullmatch(r"tc filter add dev (\S+) parent ffff: .* redirect dev (\S+)", line):
            self.ingress[found[1]] = found[2]
        else:
            raise AssertionError(f"unknown command {line}")

    def _refuse(self, when: bool, why: str) -> None:
        if when:
            raise TrafficControlError(why)

    def _show(self, line: str, text: str) -> str:
        if line.startswith("ip link show"):
            every = [{"ifname": name, "ifalias": self.aliases.get(name, "")} for name in self.devices]
            return json.dumps(every)
        if found := re.match(r"tc class show dev (\S+)", line):
            rate = self.devices[found[1]][2] * 8 // 1000
            return f"class htb 1:1 root prio 0 rate {rate}Kbit ceil {rate}Kbit burst 1589b cburst 1589b \n"
        if found := re.match(r"tc filter show dev (\S+)", line):
            done = self.ingress.get(found[1], "")
            if done and "police" not in done:
                done = f"\taction order 1: mirred (Egress Redirect to device {done}) stolen\n"
            said = f"filter protocol all pref 49152 u32 chain 0 \n  match 00000000/00000000 at 0\n {done} \n"
            return said if done else ""
        tap = text.split()[-3]
        self._refuse(tap not in self.devices, f'Cannot find device "{tap}"')
        qdiscs: list[dict[str, Any]] = [
            {"kind": kind, "handle": handle, "dev": name, "root": True, "options": {"rate": rate, "default": "0x1"}}
            for name, (kind, handle, rate) in self.devices.items()
        ]
        qdiscs += [{"kind": "ingress", "handle": "ffff:", "dev": name, "options": {}} for name in self.ingress]
        qdiscs += [{"kind": "sfq", "handle": "2:", "dev": name, "parent": "1:1"} for name in self.leaves]
        to = self.ingress.get(tap, "")
        actions = [{"order": 1, "kind": "mirred", "to_dev": to}] if to and "police" not in to else []
        filters = [{"protocol": "all", "kind": "u32"}, {"protocol": "all", "options": {"actions": actions}}]
        said = json.dumps(filters if to else [])
        if self.old and to:
            said = '[{"protocol":"all","kind":"u32","chain":0,"options": {fh 800: ht divisor 1 }}]'
        return json.dumps(qdiscs) + "\n" + said
