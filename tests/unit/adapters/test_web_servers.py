"""What is read from configurations, command lines and process tables of gunicorn and nginx."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest

from app_adapters.errors import ApplicationError
from app_adapters.processes.process_memory import cpus_possible, measured_together, read_pid
from app_adapters.web.gunicorn import handles, workers_option
from app_adapters.web.gunicorn_control import GunicornControl, find_control
from app_adapters.web.nginx import missing


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["gunicorn", "app:app"], ""),
        (["gunicorn", "-w", "4", "app:app"], "4"),
        (["gunicorn", "-w4"], "4"),
        (["gunicorn", "--workers", "3", "--workers=5"], "5"),
        (["gunicorn", "-w"], ""),
        (["gunicorn", "--worker-class", "gthread"], ""),
    ],
)
def test_the_workers_of_a_command_line(words: list[str], value: str) -> None:
    assert workers_option(words) == value


def dump(*files: tuple[str, str]) -> str:
    return "".join(f"# configuration file {name}:\n{text}\n" for name, text in files)


def test_a_configuration_that_includes_the_file_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "w.conf")
    text = dump(("/etc/nginx/nginx.conf", "include w.conf;"), (str(tmp_path / "link"), "worker_processes 2;"))
    assert missing(text, str(tmp_path / "w.conf")) == ""


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("user x;\nworker_processes  auto;\nevents {}", "instead of 'worker_processes  auto;' (/n.conf, line 2)"),
        ("# worker_processes 3;\nevents {}", "into /n.conf, at its top"),
    ],
)
def test_the_line_to_add_is_told_with_its_place(text: str, advice: str) -> None:
    reason = missing(dump(("/n.conf", text), ("/mime.types", "types {}")), "/w.conf")
    assert "put the line 'include /w.conf;' into /n.conf" in reason
    assert advice in reason


def test_no_configuration_at_all_is_told() -> None:
    assert "printed no configuration" in missing("", "/w.conf")


def test_a_pid_file_holds_a_pid(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    path.write_text("123\n")
    assert read_pid(str(path)) == 123
    for text in ("", "x", "-1", "0", "1 2"):
        path.write_text(text)
        with pytest.raises(ApplicationError, match="holds no process id"):
            read_pid(str(path))


@pytest.mark.parametrize(("text", "count"), [("0-3\n", 4), ("0\n", 1), ("0-1,4-7\n", 6)])
def test_cpus_that_a_machine_can_have_are_counted(tmp_path: Path, text: str, count: int) -> None:
    path = tmp_path / "possible"
    path.write_text(text)
    assert cpus_possible(str(path)) == count
    assert cpus_possible(str(tmp_path / "none")) >= 1


def test_only_processes_with_their_own_handlers_would_survive_the_signals() -> None:
    assert handles(os.getpid(), signal.SIGINT)
    assert not handles(os.getpid(), signal.SIGINT, signal.SIGTTOU)
    assert not handles(2**30, signal.SIGINT)


def test_memory_is_that_of_living_processes() -> None:
    found = measured_together([os.getpid(), 2**30])
    assert list(found) == [os.getpid()]
    assert 0 < found[os.getpid()].private_mib <= found[os.getpid()].proportional_mib


def answering(path: Path, answer: bytes) -> None:
    """One answer on a control socket that says something unexpected."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)

    def serve() -> None:
        with server, server.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()


def framed(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"\0",
        framed(b"{"),
        framed(b"[]"),
        framed(b'{"status": "error", "error": "Unknown command"}'),
        framed(b'{"status": "ok", "data": {"pid": "x"}}'),
        b"\xff\xff\xff\xff",
    ],
)
def test_answers_that_are_none_are_errors(tmp_path: Path, answer: bytes) -> None:
    answering(tmp_path / "c.ctl", answer)
    with pytest.raises(ApplicationError, match=r"c\.ctl"):
        GunicornControl(str(tmp_path / "c.ctl")).stats()


def test_a_socket_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="control socket"):
        GunicornControl(str(tmp_path / "c.ctl")).stats()


def test_the_control_socket_is_found_by_its_ending_among_those_listened_on(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, socket.socket(socket.AF_UNIX) as control:
        other.bind(str(tmp_path / "http.sock"))
        other.listen(1)
        assert find_control(os.getpid()) is None
        control.bind(str(tmp_path / "my app.ctl"))
        assert find_control(os.getpid()) is None
        control.listen(1)
        found = find_control(os.getpid())
    assert found is not None
    assert found.path == str(tmp_path / "my app.ctl")
    assert find_control(2**30) is None
