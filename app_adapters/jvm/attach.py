"""HotSpot's attach protocol, without a JDK (JDK sources: attachListener_posix.cpp, VirtualMachineImpl.java for Linux).

The JVM opens a socket /tmp/.java_pidN when it gets SIGQUIT while a file .attach_pidN lies in its working directory or
in /tmp, N being its pid in its own namespace. A request is "1", a command and three arguments, each ended by a zero
byte; the answer is a result code on a line of its own, and text.

Run as a program (`attach.py SECONDS WAKE_SECONDS PID COMMAND [ARGUMENT ...]`) it prints the answer. That is how another
user's JVM is asked: older ones take only a peer of their own user and group, and a process cannot change those for one
thread alone.
Imports nothing of this package, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from typing import Callable, Iterator

ARGUMENTS = 3
ANSWER_BYTES = 4 * 1024 * 1024
LOOK_S = 0.01
#: What a JVM may take to open its attach socket.
WAKE_S = 5.0
FAILED, ASLEEP = 1, 2
DISABLED = "-XX:+DisableAttachMechanism"
_CAUGHT_QUIT = 1 << (signal.SIGQUIT - 1)


class AttachError(Exception):
    """The JVM cannot be asked, or did not do what it was asked; one sentence."""


class AsleepError(AttachError):
    """Its attach socket is not there, and did not come where it was woken."""


def ask(pid: int, words: list[str], limit_s: float, wake_s: float = WAKE_S) -> str:
    """The JVM's answer to a command and its arguments, as its own user where this one may become that.

    One whose socket is not there is woken by a signal and has `wake_s` to open it; 0: it is not woken. The signal is
    for once: a JVM that does not open it, or only later, writes all its threads to its standard output instead.

    Raises: AttachError, AsleepError (one of them) where there is no socket.
    """
    uid, gid, _ = identity(pid)
    if (uid, gid) == (os.geteuid(), os.getegid()):
        return request(pid, words, limit_s, wake_s)
    if os.geteuid() != 0:
        raise AttachError(f"process {pid} belongs to user {uid}, and only that user or root may ask it")
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(limit_s), str(wake_s), str(pid), *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s + wake_s + 5)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AttachError(f"process {pid} could not be asked as its own user: {error}") from None
    if done.returncode:
        kind = AsleepError if done.returncode == ASLEEP else AttachError
        raise kind(done.stderr.decode("utf-8", "replace").strip() or f"attach ended with {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def request(pid: int, words: list[str], limit_s: float, wake_s: float, as_owner: bool = False) -> str:
    """The same from this very process. `as_owner` turns it, for good, into one of the JVM's user and group.

    Raises: AttachError.
    """
    end = time.monotonic() + limit_s
    uid, gid, own_pid = identity(pid)
    # In the JVM's own /tmp: it may be in a container, or have a private one. Opened before its owner's rights are
    # taken on, who may not be allowed to look there.
    try:
        directory = os.open(f"/proc/{pid}/root/tmp", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise AttachError(f"/tmp of process {pid} cannot be reached: {error.strerror}") from None
    try:
        if as_owner:
            _become(uid, gid)
        with _connected(pid, own_pid, directory, end, wake_s) as connection:
            end = time.monotonic() + limit_s if wake_s else end
            connection.sendall(_encoded(words))
            code, text = _answer(connection, pid, end)
    except OSError as error:
        raise AttachError(f"process {pid} broke off: {error}") from None
    finally:
        os.close(directory)
    if code:
        raise AttachError(f"process {pid} answered {words[0]} {' '.join(words[1:])} with {code}: {text.strip()[:300]}")
    return text


def identity(pid: int) -> tuple[int, int, int]:
    """Effective user and group of a process, and its pid in its own namespace. Raises: AttachError."""
    fields = _status(pid)
    inner = fields.get("NSpid", str(pid)).split()
    return int(fields["Uid"].split()[1]), int(fields["Gid"].split()[1]), int(inner[-1])


def catches_quit(pid: int) -> bool:
    """Whether SIGQUIT can be sent: it ends a JVM that is only just starting, or has -Xrs, and what is no JVM.

    A JVM with -Xrs opens its socket by itself. Raises: AttachError.
    """
    return bool(int(_status(pid).get("SigCgt", "0"), 16) & _CAUGHT_QUIT)


def refuses_attach(pid: int) -> bool:
    """Whether its command line says that it opens no attach socket; of several words the last one counts."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return False
    return [word for word in words if word in (DISABLED, DISABLED.replace("+", "-"))][-1:] == [DISABLED]


def _status(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            return dict(line.split(":", 1) for line in file if ":" in line)
    except OSError as error:
        raise AttachError(f"process {pid} cannot be seen here: {error.strerror}") from None


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _encoded(words: list[str]) -> bytes:
    """Raises: AttachError where a word cannot be sent."""
    if len(words) > 1 + ARGUMENTS or any("\0" in word for word in words):
        raise AttachError("a request has at most three arguments, without zero bytes")
    padded = [*words, *[""] * (1 + ARGUMENTS - len(words))]
    return b"".join(word.encode("utf-8") + b"\0" for word in ["1", *padded])


@contextlib.contextmanager
def _connected(pid: int, own_pid: int, directory: int, end: float, wake_s: float) -> Iterator[socket.socket]:
    """A connection to the JVM's attach socket, which it opens if need be."""
    # A path of its own for any length of /proc/PID/root/tmp; only this process can use it.
    path = f"/proc/self/fd/{directory}/.java_pid{own_pid}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        if not _connect(connection, path, pid, end):
            if wake_s <= 0:
                raise AsleepError(f"process {pid} has not opened its attach socket")
            end = time.monotonic() + wake_s
            _wake(pid, own_pid, directory, lambda: _connect(connection, path, pid, end), end)
        yield connection


def _connect(connection: socket.socket, path: str, pid: int, end: float) -> bool:
    """Whether the socket is there and the JVM's own: every user can write to /tmp, and files of dead processes stay."""
    connection.settimeout(max(end - time.monotonic(), 0.01))
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    if peer != pid:
        raise AttachError(f"/tmp/.java_pid* of process {pid} is served by process {peer}")
    return True


def _wake(pid: int, own_pid: int, directory: int, is_awake: Callable[[], bool], end: float) -> None:
    """Have the JVM open its attach socket. Raises: AttachError."""
    if not catches_quit(pid):
        raise AttachError(f"process {pid} does not catch SIGQUIT, it is perhaps only just starting")
    if not _has_jvm(pid):
        raise AttachError(f"process {pid} is no JVM")
    if refuses_attach(pid):
        raise AttachError(f"process {pid} runs with {DISABLED}")
    name = f".attach_pid{own_pid}"
    with contextlib.suppress(FileExistsError):
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=directory))
    try:
        os.kill(pid, signal.SIGQUIT)
        while not is_awake():
            if time.monotonic() >= end:
                raise AsleepError(f"process {pid} did not open its attach socket ({DISABLED}, or busy)")
            time.sleep(LOOK_S)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def _has_jvm(pid: int) -> bool:
    """A pid may be another's by now, and most others that catch SIGQUIT end by it. True where it cannot be seen."""
    try:
        with open(f"/proc/{pid}/maps", errors="replace") as file:
            return any("/libjvm.so" in line for line in file)
    except OSError:
        return True


def _answer(connection: socket.socket, pid: int, end: float) -> tuple[int, str]:
    data = bytearray()
    while len(data) < ANSWER_BYTES:
        connection.settimeout(max(end - time.monotonic(), 0.01))
        try:
            part = connection.recv(65536)
        except socket.timeout:
            raise AttachError(f"process {pid} did not answer in time") from None
        if not part:
            break
        data += part
    code, _, text = bytes(data).partition(b"\n")
    try:
        return int(code), text.decode("utf-8", "replace")
    except ValueError:
        raise AttachError(f"process {pid} did not answer a result code but {code[:60]!r}") from None


if __name__ == "__main__":
    try:
        seconds, wake_seconds, process = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
        sys.stdout.write(request(process, sys.argv[4:], seconds, wake_seconds, as_owner=True))
    except AttachError as problem:
        sys.stderr.write(f"{problem}\n")
        sys.exit(ASLEEP if isinstance(problem, AsleepError) else FAILED)
