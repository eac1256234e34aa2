"""A hand inside a real guest, over the lab channel: it kills, stops, pins, fills and lies for the tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from ebbtide.lab.errors import LabError
from ebbtide.lab.guest_link import LabLink
from ebbtide.lab.readings import cpu_list

INSIDE = Path(__file__).parent / "inside"
#: Below it, what the tests put into a guest; gone with its next boot.
HOME = "/run/faults"
BOOT_S = 240.0
LOOK_S = 0.1


class GuestHand:
    """Works in one guest. ``socket``: the lab channel's."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._link: LabLink | None = None

    async def link(self) -> LabLink:
        if self._link is None:
            self._link = await LabLink.connect(self._socket, BOOT_S)
        return self._link

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def read(self, path: str) -> str:
        result = await (await self.link()).call("read", path=path)
        return str(result["text"])

    async def run(self, *argv: str, limit_s: float = 30.0) -> str:
        """Run a program to its end; what it printed.

        :raises AssertionError: it failed.
        """
        result = await (await self.link()).call("exec", argv=list(argv), timeout_s=limit_s)
        assert result["returncode"] == 0, f"{argv}: {result['stderr']}"
        return str(result["stdout"])

    async def shell(self, script: str, *arguments: str) -> str:
        """Run a script of busybox's shell."""
        return await self.run("busybox", "sh", "-c", script, "sh", *arguments)

    async def put(self, path: str, text: str) -> None:
        await self.shell('busybox mkdir -p "${2%/*}" && printf %s "$1" > "$2"', text, path)

    async def leave(self, script: str) -> None:
        """Run a script of the shell that the guest does not survive."""
        with contextlib.suppress(LabError):
            link = await self.link()
            argv = ["busybox", "sh", "-c", script]
            await link.call("exec", argv=argv, timeout_s=5, reply_timeout_s=2.0)
        await self.close()

    # --- processes -----------------------------------------------------------------------------------------------

    async def pids(self, word: str) -> list[int]:
        """Processes of Python that have this word on their command line."""
        listed = await self.shell(
            "for p in /proc/[0-9]*; do busybox tr '\\0' ' ' < $p/cmdline 2>/dev/null |"
            ' busybox grep -q "^python3 .*$1" && echo "${p#/proc/}"; done; true',
            word,
        )
        return [int(pid) for pid in listed.split()]

    async def pid(self, word: str) -> int:
        """The one process of Python with this word; waits until there is one."""
        async with asyncio.timeout(60):
            while not (found := await self.pids(word)):
                await asyncio.sleep(LOOK_S)
        return found[0]

    async def signal(self, name: str, *pids: int) -> None:
        await self.shell(f"busybox kill -{name} " + " ".join(map(str, pids)) + " 2>/dev/null; true")

    async def start(self, name: str, *arguments: str) -> int:
        """Start a script of `tests.faults.inside` in the background and wait until it says that it is ready."""
        program, log = f"{HOME}/{name}.py", f"{HOME}/{name}.log"
        await self.put(program, (INSIDE / f"{name}.py").read_text())
        words = " ".join(f"'{argument}'" for argument in arguments)
        pid = int(await self.shell(f"python3 -S {program} {words} </dev/null >{log} 2>&1 & echo $!"))
        async with asyncio.timeout(60):
            while "ready" not in (text := await self.read(log)):
                assert await self.alive(pid), f"{name} ended: {text}"
                await asyncio.sleep(LOOK_S)
        return pid

    async def alive(self, pid: int) -> bool:
        """Whether it runs; a zombie does not."""
        with contextlib.suppress(LabError):
            return (await self.read(f"/proc/{pid}/stat")).rpartition(")")[2].split()[0] != "Z"
        return False

    async def end(self, pid: int) -> None:
        await self.signal("KILL", pid)
        async with asyncio.timeout(30):
            while await self.alive(pid):
                await asyncio.sleep(LOOK_S)

    @contextlib.asynccontextmanager
    async def running(self, name: str, *arguments: str) -> AsyncIterator[int]:
        """A script of ours for a while."""
        pid = await self.start(name, *arguments)
        try:
            yield pid
        finally:
            await self.end(pid)

    # --- the guest agent -----------------------------------------------------------------------------------------

    async def restart_agent(self) -> None:
        """Kill the guest agent; its supervisor starts it at once."""
        await self.signal("KILL", await self.pid("-m guestagent"))
        await self.awaken_agent()

    async def awaken_agent(self) -> None:
        """Have the guest agent's supervisor, which waits longer every time, start it at once."""
        async with asyncio.timeout(120):
            while not await self.pids("-m guestagent"):
                await self.shell(
                    "for p in /proc/[0-9]*; do busybox tr '\\0' ' ' < $p/cmdline 2>/dev/null |"
                    ' busybox grep -q "^busybox sleep [0-9]" && busybox kill "${p#/proc/}"; done; true'
                )
                await asyncio.sleep(LOOK_S)

    @contextlib.asynccontextmanager
    async def impostor(self, name: str, *arguments: str) -> AsyncIterator[int]:
        """A script of ours on the guest agent's channel, in its place, for a while."""
        supervisor = int(
            await self.shell(
                'busybox awk "/^PPid/ {print \\$2}" "/proc/$1/status"', str(await self.pid("-m guestagent"))
            )
        )
        await self.signal("STOP", supervisor)
        await self.signal("KILL", await self.pid("-m guestagent"))
        try:
            async with self.running(name, *arguments) as pid:
                yield pid
        finally:
            await self.signal("CONT", supervisor)

    # --- applications --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def application(self, mode: str, size_mib: int) -> AsyncIterator[int]:
        """An application of this size as the guest's only one, with a hook that behaves badly."""
        drop_ins = "/etc/ebbtide/adapters.d"
        await self.put(f"{drop_ins}/hook.json", '{"name": "hook", "url": "http://127.0.0.1:7071"}')
        await self.shell("busybox mv $1/memcached.json $1/memcached.off", drop_ins)
        try:
            async with self.running("hook", mode, str(size_mib)) as pid:
                yield pid
        finally:
            await self.shell("busybox mv $1/memcached.off $1/memcached.json; busybox rm -f $1/hook.json", drop_ins)

    # --- figures -------------------------------------------------------------------------------------------------

    async def online(self) -> tuple[int, ...]:
        return cpu_list(await self.read("/sys/devices/system/cpu/online"))

    async def available_mib(self) -> float:
        return _field(await self.read("/proc/meminfo"), "MemAvailable:") / 1024

    async def oom_kills(self) -> int:
        return int(_field(await self.read("/proc/vmstat"), "oom_kill"))

    async def boot_id(self) -> str:
        return (await self.read("/proc/sys/kernel/random/boot_id")).strip()


def _field(text: str, name: str) -> float:
    for line in text.splitlines():
        words = line.split()
        if words and words[0] == name:
            return float(words[1])
    raise AssertionError(f"the guest tells no {name}")
