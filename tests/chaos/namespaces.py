"""Network namespaces of the tests' own: one for the manager, one for each agent, a link from the one to the others.

All links are between these namespaces: nothing is ever added to the machine's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: As of every namespace of the tests.
PREFIX = "ebbtide-test-"
PORT = 7000
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> str:
    done = subprocess.run(("ip", *words), capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Network:
    """A star: the manager in the middle, and an agent at the end of each link."""

    tag: str
    agents: tuple[str, ...]

    @property
    def manager(self) -> str:
        return f"{PREFIX}{self.tag}-m"

    def namespace(self, agent: str) -> str:
        return f"{PREFIX}{self.tag}-{agent}"

    def address(self, agent: str) -> str:
        return f"10.77.{self.agents.index(agent)}.2"

    def manager_address(self, agent: str) -> str:
        """Of the manager, as this agent sees it."""
        return f"10.77.{self.agents.index(agent)}.1"

    def make(self) -> None:
        ip("netns", "add", self.manager)
        ip("-n", self.manager, "link", "set", "lo", "up")
        for agent in self.agents:
            inside, number = self.namespace(agent), self.agents.index(agent)
            ip("netns", "add", inside)
            ip("-n", inside, "link", "set", "lo", "up")
            link = ("type", "veth", "peer", "name", "up0", "netns", inside)
            ip("link", "add", f"down{number}", "netns", self.manager, *link)
            ip("-n", self.manager, "address", "add", f"{self.manager_address(agent)}/24", "dev", f"down{number}")
            ip("-n", self.manager, "link", "set", f"down{number}", "up")
            ip("-n", inside, "address", "add", f"{self.address(agent)}/24", "dev", "up0")
            ip("-n", inside, "link", "set", "up0", "up")

    def cut(self, agent: str) -> None:
        """From now on nothing passes in either direction, and nobody is told."""
        ip("-n", self.namespace(agent), "link", "set", "up0", "down")

    def mend(self, agent: str) -> None:
        ip("-n", self.namespace(agent), "link", "set", "up0", "up")

    def remove(self) -> None:
        """The links go with their namespaces; what is not there is not missed."""
        present = {path.name for path in Path("/run/netns").iterdir()}
        for name in [self.manager, *map(self.namespace, self.agents)]:
            if name in present:
                ip("netns", "del", name)


@contextlib.contextmanager
def network(agents: Sequence[str]) -> Iterator[Network]:
    """Gone afterwards, whatever happened; where the test itself was killed, with the next that is made."""
    sweep()
    made = Network(f"{os.getpid()}-{secrets.token_hex(3)}", tuple(agents))
    try:
        made.make()
        yield made
    finally:
        made.remove()


def sweep() -> None:
    """Remove the namespaces of processes that are no more."""
    for path in Path("/run/netns").glob(f"{PREFIX}*-*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            subprocess.run(("ip", "netns", "del", path.name), capture_output=True, timeout=30, check=False)


def sockets_in(namespace: str) -> Any:
    """A factory of sockets that live in a namespace, for aiohttp's connector: the process itself stays outside."""

    def factory(info: Any) -> socket.socket:
        family, kind, protocol = info[:3]
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(f"/run/netns/{namespace}")
            try:
                made = socket.socket(family, kind, protocol)
            finally:
                enter(f"/proc/self/fd/{here}")
        finally:
            os.close(here)
        made.setblocking(False)
        return made

    return factory


def enter(path: str) -> None:
    """This thread is in the network namespace of a file from now on."""
    with open(path) as file:
        if _LIBC.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", path)
