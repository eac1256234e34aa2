"""A guest made of files, the host's end of a port, and an agent between them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guestagent.agent import Agent
from guestagent.cold.pages import ColdPages
from guestagent.cpus import Cpus, parse_cpu_list
from guestagent.memory import Memory
from guestagent.notices import PressureTrigger

BOOT_ID = "6f1c7a52-0000-4000-8000-000000000001"
TOKEN = "secret-of-this-vm"


class GuestTree:
    """Files of sysfs and procfs as the agent reads them, for a guest with `cpus` CPUs and 1 GiB."""

    def __init__(self, root: Path, cpus: int = 4) -> None:
        self.sysfs, self.procfs = root / "sys", root / "proc"
        self.cpu_root = self.sysfs / "devices/system/cpu"
        self.write(self.cpu_root / "present", f"0-{cpus - 1}\n")
        self.write(self.cpu_root / "possible", f"0-{cpus - 1}\n")
        for cpu in range(cpus):
            (self.cpu_root / f"cpu{cpu}").mkdir()
            if cpu:
                self.write(self.cpu_root / f"cpu{cpu}/online", "1\n")
        self.meminfo(1024, 600)
        self.write(self.procfs / "vmstat", "pgfault 999\npgmajfault 17\npswpin 5\npswpout 6\n")
        self.write(self.procfs / "uptime", "12.50 40.00\n")
        self.write(self.procfs / "sys/kernel/random/boot_id", BOOT_ID + "\n")
        some_full = (
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=123456\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=65432\n"
        )
        for resource in ("memory", "cpu"):
            self.write(self.procfs / "pressure" / resource, some_full)
        self.ticks(dict.fromkeys(range(cpus), (0, 100)))

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole at any moment, as the kernel's are: the agent may be looking.
        new = path.with_name(f"{path.name}.new")
        new.write_text(text)
        new.replace(path)

    def meminfo(self, total_mib: int, available_mib: int) -> None:
        text = f"MemTotal: {total_mib * 1024} kB\nMemFree: 1024 kB\nMemAvailable: {available_mib * 1024} kB\n"
        self.write(self.procfs / "meminfo", text)

    def ticks(self, cpus: dict[int, tuple[int, int]]) -> None:
        """(busy, idle) ticks of each CPU since boot."""
        lines = [f"cpu{cpu} {busy} 0 0 {idle} 0 0 0 0 0 0" for cpu, (busy, idle) in cpus.items()]
        self.write(self.procfs / "stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 0 0", *lines, "intr 1"]) + "\n")

    def task(self, pid: int, name: str, allowed: str, ppid: int = 1, threads: dict[int, str] | None = None) -> None:
        """A process bound to `allowed`; `threads` binds further threads of its own."""
        tasks = {pid: allowed, **(threads or {})}
        for tid, cpus in tasks.items():
            text = (
                f"Name:\t{name}\nState:\tS (sleeping)\nPid:\t{tid}\nPPid:\t{ppid}\n"
                f"Threads:\t{len(tasks)}\nCpus_allowed_list:\t{cpus}\n"
            )
            self.write(self.procfs / f"{pid}/task/{tid}/status", text)

    def cpuset(self, name: str, cpus: str, options: str = "rw,nosuid,cpuset") -> None:
        """A cpuset of cgroup v1, which is mounted with these options."""
        root = self.sysfs / "fs/cgroup/cpuset"
        self.write(self.procfs / "mounts", f"proc /proc proc rw 0 0\ncgroup {root} cgroup {options} 0 0\n")
        self.write(root / "cpuset.cpus", "0-3\n")
        self.write(root / name / "cpuset.cpus", f"{cpus}\n")

    def affinity(self, tid: int) -> list[int]:
        """As the kernel says it: of a task that is there, without CPUs that are off line."""
        found = list(self.procfs.glob(f"*/task/{tid}/status"))
        if not found:
            raise ProcessLookupError
        (allowed,) = re.findall(r"Cpus_allowed_list:\t(.*)", found[0].read_text())
        return [cpu for cpu in parse_cpu_list(allowed) if cpu in self.online()]

    def online(self) -> list[int]:
        return [0] + [
            int(path.parent.name[3:])
            for path in sorted(self.cpu_root.glob("cpu*/online"))
            if path.read_text().strip() == "1"
        ]


class Host:
    """The host's end: a connection over which lines go out and JSON comes in."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(60)
        self._lines = connection.makefile("rb")
        self._ids = itertools.count(1)

    def send(self, line: bytes) -> None:
        self.connection.sendall(line + b"\n")

    def receive(self) -> dict[str, Any]:
        message = json.loads(self._lines.readline())
        assert isinstance(message, dict)
        return message

    def ask(self, method: str, **params: Any) -> int:
        id_ = next(self._ids)
        self.send(json.dumps({"jsonrpc": "2.0", "id": id_, "method": method, "params": params}).encode())
        return id_

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The whole answer."""
        id_ = self.ask(method, **params)
        answer = self.receive()
        assert answer["id"] == id_
        return answer

    def result(self, method: str, **params: Any) -> dict[str, Any]:
        answer = self.call(method, **params)
        assert "result" in answer, answer
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def error(self, method: str, **params: Any) -> tuple[int, str]:
        answer = self.call(method, **params)
        return answer["error"]["code"], answer["error"]["message"]

    def hello(self, nonce: str = "n1", token: str = TOKEN) -> dict[str, Any]:
        return self.result("hello", protocol=1, nonce=nonce, vm="vm1", token=token)

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


class Bench:
    """An agent in a thread, on a unix socket that the host listens on."""

    def __init__(self, root: Path, tree: GuestTree, trigger: PressureTrigger | None = None) -> None:
        self.tree = tree
        self.run_dir = root / "run"
        self.adapters_dir = root / "adapters.d"
        self.adapters_dir.mkdir(mode=0o755)
        self.preempt_dir = root / "preempt.d"
        self.preempt_dir.mkdir(mode=0o755)
        self.told_people: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(root / "port"))
        self._listener.listen()
        self._listener.settimeout(20)
        memory = Memory(str(tree.procfs))
        self.agent = Agent(
            find=lambda: str(root / "port"),
            cpus=Cpus(str(tree.sysfs), str(tree.procfs), tree.affinity),
            memory=memory,
            adapters_dir=str(self.adapters_dir),
            run_dir=str(self.run_dir),
            procfs=str(tree.procfs),
            owner_uid=os.getuid(),
            trigger=trigger,
            preempt_dir=str(self.preempt_dir),
            tell_people=self.told_people.append,
            cold=ColdPages(memory, str(tree.sysfs)),
        )
        self._thread = threading.Thread(target=self.agent.run, name="agent")
        self._hosts: list[Host] = []

    def host(self) -> Host:
        """The next connection of the agent."""
        connection, _ = self._listener.accept()
        self._hosts.append(Host(connection))
        return self._hosts[-1]

    def register(self, name: str, port: int) -> None:
        """A drop-in file for an adapter."""
        self.register_url(name, f"http://127.0.0.1:{port}")

    def register_url(self, name: str, url: str) -> None:
        path = self.adapters_dir / f"{name}.json"
        path.write_text(json.dumps({"name": name, "url": url}))
        path.chmod(0o644)

    def start(self) -> Bench:
        self._thread.start()
        return self

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.agent.close()
        for host in self._hosts:
            with contextlib.suppress(OSError):
                host.close()
        self._listener.close()


@contextlib.contextmanager
def bench(root: Path, cpus: int = 4, trigger: PressureTrigger | None = None) -> Iterator[Bench]:
    made = Bench(root, GuestTree(root, cpus), trigger).start()
    try:
        yield made
    finally:
        made.stop()
