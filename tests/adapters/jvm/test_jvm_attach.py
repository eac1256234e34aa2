"""Ways to reach a JVM: our own attach protocol, jattach, JMX; other users and namespaces; who must not be asked."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app_adapters.errors import ApplicationError
from app_adapters.jvm import transports
from app_adapters.jvm.attach import AttachError, ask, catches_quit
from app_adapters.jvm.flags import collector, parse_flags
from app_adapters.jvm.heap import parse_heap
from app_adapters.jvm.processes import Choice, Finder
from app_adapters.jvm.transports import JMX, Attach, Jattach, Transport
from tests.adapters.cache import free_port
from tests.adapters.jvm_service import (
    JAVA_17,
    LIMIT_S,
    LIVE_MIB,
    SERIAL,
    SHENANDOAH,
    Service,
    compiled,
    flags,
    hooked,
    java_25,
)
from tests.adapters.rest import Rest
from tests.waiting import until_sync

pytestmark = pytest.mark.service

NOBODY = 65534
Start = Callable[..., Service]


@pytest.fixture(scope="module")
def classes() -> Iterator[Path]:
    with compiled() as directory:
        yield directory


@pytest.fixture
def start(classes: Path) -> Iterator[Start]:
    services: list[Service] = []

    def one(*arguments: object, **options: object) -> Service:
        services.append(Service(classes, *arguments, **{"cache_mib": 10, **options}))  # type: ignore[arg-type]
        return services[-1]

    yield one
    for service in services:
        service.stop()


def check(service: Service, transport: Transport) -> None:
    """Reads, sets and is refused."""
    try:
        assert "JDK" in transport.command(service.pid, "VM.version", LIMIT_S)
        found = parse_flags(transport.command(service.pid, "VM.flags -all", LIMIT_S))
        assert collector(found) == "Shenandoah"
        assert found["SoftMaxHeapSize"].manageable
        assert not found["MaxHeapSize"].manageable
        transport.command(service.pid, "GC.run", LIMIT_S)
        heap = parse_heap(transport.command(service.pid, "GC.heap_info", LIMIT_S))
        assert LIVE_MIB < heap.used_mib < LIVE_MIB + 60
        transport.set_flag(service.pid, "SoftMaxHeapSize", str(100 * 2**20), LIMIT_S)
        found = parse_flags(transport.command(service.pid, "VM.flags -all", LIMIT_S))
        assert found["SoftMaxHeapSize"].value == str(100 * 2**20)
        with pytest.raises(ApplicationError):
            transport.set_flag(service.pid, "MaxHeapSize", "1", LIMIT_S)
        with pytest.raises(ApplicationError):
            transport.set_flag(service.pid, "SoftMaxHeapSize", "not-a-number", LIMIT_S)
    finally:
        transport.close()


@pytest.mark.parametrize("java", ["", "25"])
def test_our_own_protocol_speaks_with_a_jvm(java: str, start: Start) -> None:
    service = start(SHENANDOAH, java_25() if java else JAVA_17)
    check(service, Attach())
    assert not Path(f"/tmp/.attach_pid{service.pid}").exists()


def test_jattach_is_another_way(start: Start) -> None:
    check(start(SHENANDOAH), Jattach())


def managed(port: int) -> tuple[str, ...]:
    """Options of a JVM with a remote management port."""
    remote = "-Dcom.sun.management.jmxremote"
    options = (f"{remote}.port={port}", f"{remote}.rmi.port={port}", f"{remote}.host=127.0.0.1")
    return (*options, f"{remote}.authenticate=false", f"{remote}.ssl=false", "-Djava.rmi.server.hostname=127.0.0.1")


def test_jmx_is_another_way_and_its_helper_ends(start: Start, tmp_path: Path) -> None:
    port = free_port()
    # This one cannot be reached by the attach socket.
    service = start((*SHENANDOAH, *managed(port), "-XX:+DisableAttachMechanism"))
    for one in (Attach(), Jattach()):
        with pytest.raises(ApplicationError, match=r"runs with -XX:\+DisableAttachMechanism"):
            one.command(service.pid, "VM.version", 1.0)
    transport = JMX("127.0.0.1", port)
    transport.command(service.pid, "VM.version", LIMIT_S)
    child = transport._child
    assert child is not None
    check(service, transport)
    assert child.poll() is not None
    with hooked(service, tmp_path, transport) as rest:
        service.say("cache 200")
        service.say("cache 0")
        before_mib = service.pss_mib()
        status, answer = rest.target("down", "deflate", 110)
        assert status == 202, answer
        done = rest.finished("down")
        assert done["released"]["memory_mib"] == pytest.approx(before_mib - service.pss_mib(), rel=0.1, abs=15), done
        assert service.pss_mib() <= 135
    assert service.process.stdout is not None
    os.set_blocking(service.process.stdout.fileno(), False)
    assert service.process.stdout.read() is None  # no dump of its threads: it was not sent SIGQUIT


def test_a_jvm_that_listens_at_the_port_of_another_is_left_alone(start: Start) -> None:
    port = free_port()
    service = start((*SHENANDOAH, *managed(port)))
    before = flags(service, "SoftMaxHeapSize")
    transport = JMX("127.0.0.1", port)
    with pytest.raises(ApplicationError, match=f"process {service.pid} listens there, not {os.getpid()}$"):
        transport.set_flag(os.getpid(), "SoftMaxHeapSize", str(100 * 2**20), LIMIT_S)
    assert flags(service, "SoftMaxHeapSize") == before


def test_jmx_without_a_jvm_behind_it_is_an_error() -> None:
    with pytest.raises(ApplicationError, match="JMX at 127"):
        JMX("127.0.0.1", free_port()).command(os.getpid(), "VM.version", LIMIT_S)


def test_root_asks_the_jvm_of_another_user_as_that_user(start: Start) -> None:
    service = start(SHENANDOAH, user=NOBODY)
    check(service, Attach())
    assert os.geteuid() == 0


def test_a_user_cannot_ask_the_jvm_of_root(start: Start) -> None:
    service = start(SHENANDOAH)
    # Become that user once all is imported: it may not read this interpreter's files.
    code = f"""
import os, app_adapters.jvm.attach as attach, subprocess
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
attach.ask({service.pid}, ['jcmd', 'VM.version'], 5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "only that user or root" in done.stderr


def test_a_jvm_in_namespaces_of_its_own_is_reached(classes: Path) -> None:
    inside = f'mount --bind {classes} /mnt && mount -t tmpfs none /tmp && exec "$@"'
    before = ("unshare", "--pid", "--mount", "--fork", "--mount-proc", "sh", "-c", inside, "sh")
    service = Service(Path("/mnt"), cache_mib=10, before=before)
    try:
        assert service.pid != service.process.pid
        check(service, Attach())
        assert not Path(f"/tmp/.java_pid{service.pid}").exists()
    finally:
        service.stop()


def test_a_jvm_that_the_signal_would_end_is_asked_without_it(start: Start) -> None:
    service = start(("-XX:+UseSerialGC", "-Xrs"))
    assert not catches_quit(service.pid)
    for transport in (Attach(), Jattach()):
        assert "JDK" in transport.command(service.pid, "VM.version", LIMIT_S)
    # Now it would have to be woken.
    Path(f"/tmp/.java_pid{service.pid}").unlink()
    for transport in (Attach(), Jattach()):
        with pytest.raises(ApplicationError, match="does not catch SIGQUIT"):
            transport.command(service.pid, "VM.version", 5.0)
    service.say("get")


#: What seems to be a JVM: `quit` is what it does at SIGQUIT.
STAND_IN = """
import mmap, os, signal, socket, sys, time
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 1)
def quit(*_): {quit}
signal.signal(signal.SIGQUIT, quit)
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"asked\\n"))
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""


@contextlib.contextmanager
def stand_in(tmp_path: Path, quit: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], bytes]]]:
    library = tmp_path / "libjvm.so"
    library.write_bytes(b"x")
    command = [sys.executable, "-c", STAND_IN.format(quit=quit), str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process, process.stdout.readline
        finally:
            process.kill()
            Path(f"/tmp/.java_pid{process.pid}").unlink(missing_ok=True)


def test_a_jvm_that_opens_no_socket_is_signalled_once_in_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "WAKE_S", 0.1)
    now_s = [0.0]
    transport = Attach(lambda: now_s[0])

    def ask_at(at_s: float) -> None:
        now_s[0] = at_s
        with pytest.raises(ApplicationError, match="its attach socket"):
            transport.command(process.pid, "VM.version", 5.0)

    with stand_in(tmp_path, 'os.write(1, b"dump\\n")') as (process, line):
        ask_at(0.0)
        assert line() == b"dump\n"
        ask_at(30.0)
        ask_at(599.0)
        process.send_signal(signal.SIGUSR1)
        assert line() == b"asked\n"
        ask_at(600.0)
        assert line() == b"dump\n"


def test_a_slow_jvm_has_longer_to_open_its_socket_than_to_answer(tmp_path: Path) -> None:
    quit = """
    time.sleep(1.5)
    if os.path.exists(f"/tmp/.attach_pid{os.getpid()}"):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/tmp/.java_pid{os.getpid()}")
            server.listen()
            connection = server.accept()[0]
            connection.recv(1000)
            connection.sendall(b"0\\nawake")
            connection.close()
"""
    with stand_in(tmp_path, quit) as (process, _):
        assert Attach().command(process.pid, "VM.version", 1.0) == "awake"


def test_another_process_behind_the_socket_is_not_believed(start: Start) -> None:
    service = start(SHENANDOAH)
    impostor = Path(f"/tmp/.java_pid{service.pid}")
    code = f"""
import socket, time
s = socket.socket(socket.AF_UNIX); s.bind({str(impostor)!r}); s.listen(); print(flush=True); time.sleep(600)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(AttachError, match="is served by process"):
            ask(service.pid, ["jcmd", "VM.version"], 5)
    finally:
        other.kill()
        other.communicate()
    # The file is still there; nobody listens any more.
    assert impostor.exists()
    assert "JDK" in ask(service.pid, ["jcmd", "VM.version"], LIMIT_S)


def test_what_is_no_jvm_is_not_sent_a_signal(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            with pytest.raises(ApplicationError, match="is no JVM"):
                Finder(Choice(pid=sleeper.pid)).find()
            with pytest.raises(AttachError, match="does not catch SIGQUIT"):
                ask(sleeper.pid, ["jcmd", "VM.version"], 5)
            assert sleeper.poll() is None
        finally:
            sleeper.kill()


def test_a_jvm_is_found_by_its_command_line_and_after_a_restart(start: Start, tmp_path: Path) -> None:
    mark = f"-Dmark={tmp_path.name}"
    finders = [Finder(Choice(match=f"mark={tmp_path.name} ")), Finder(Choice(pid_file=str(tmp_path / "pid")))]
    with pytest.raises(ApplicationError, match="no JVM matches"):
        finders[0].find()
    first = start((*SERIAL, mark))
    (tmp_path / "pid").write_text(f"{first.pid}\n")
    assert [finder.find().pid for finder in finders] == [first.pid, first.pid]
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(LIMIT_S)
    second = start((*SERIAL, mark))
    (tmp_path / "pid").write_text(f"{second.pid}\n")
    assert [finder.find().pid for finder in finders] == [second.pid, second.pid]
    start((*SERIAL, mark))
    with pytest.raises(ApplicationError, match="several JVMs match"):
        Finder(Choice(match=f"mark={tmp_path.name} ")).find()


def test_the_command_serves_and_ends_on_sigterm(start: Start, tmp_path: Path) -> None:
    service = start(SHENANDOAH)
    (tmp_path / "token").write_text("t")
    port = free_port()
    command = [sys.executable, "-m", "app_adapters", "jvm", "--pid", str(service.pid), "--minimum-mib", "20"]
    command += ["--listen", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
    process = subprocess.Popen([*command, "--state-dir", str(tmp_path / "state")], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert b"jvm on 127.0.0.1" in process.stderr.readline()
        rest = Rest(("127.0.0.1", port), "t")
        assert rest.capabilities()["resources"]["memory_mib"]["current"] == pytest.approx(service.pss_mib(), abs=15)
        status, sizes = rest.send("GET", "/deflation/v1/status")
        assert status == 200
        assert sizes["sizes"]["memory_mib"] == pytest.approx(service.pss_mib(), abs=15)
        service.stop()
        until_sync(lambda: rest.send("GET", "/deflation/v1/capabilities")[0] == 503, "a JVM that is gone is an error")
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()
