"""Ways to talk to a HotSpot JVM: its attach socket, the program jattach, or JMX. All take the same commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Callable

from app_adapters.errors import ApplicationError
from app_adapters.jvm.attach import (
    DISABLED,
    WAKE_S,
    AsleepError,
    AttachError,
    ask,
    catches_quit,
    identity,
    refuses_attach,
)
from app_adapters.processes.process import started

#: What the JVM of the JMX helper may take to start on a busy machine.
START_S = 30.0
#: When a JVM that did not open its attach socket is woken again: it writes all its threads to its log each time.
WAKE_AGAIN_S = 600.0


class Transport(ABC):
    """`command` runs one of jcmd's commands, `set_flag` sets a manageable flag. Both raise ApplicationError."""

    #: How old the JVM's figures may be when only sizes are asked for: some ways are slow.
    age_s = 2.0

    @abstractmethod
    def command(self, pid: int, text: str, limit_s: float) -> str:
        """What the command printed."""

    @abstractmethod
    def set_flag(self, pid: int, name: str, value: str, limit_s: float) -> None:
        """Set a manageable flag."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what talking has taken."""


class Wakes:
    """Which JVM is being woken, or was in vain, and when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: tuple[int, int | None, float] | None = None

    def begin(self, pid: int) -> None:
        """Raises: ApplicationError where it is too early to wake it again."""
        with self._lock:
            last, now_s = self._last, self._clock()
            if last is not None and last[:2] == (pid, started(pid)) and now_s - last[2] < WAKE_AGAIN_S:
                raise ApplicationError(
                    f"process {pid} has not opened its attach socket ({DISABLED}, or busy); it is woken again "
                    f"{WAKE_AGAIN_S / 60:g} minutes after the last time"
                )
            self._last = pid, started(pid), now_s

    def over(self) -> None:
        """It is awake, or was not woken after all."""
        with self._lock:
            self._last = None


class Attach(Transport):
    """The attach socket, without any program (attach.py)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._wakes = Wakes(clock)

    def command(self, pid: int, text: str, limit_s: float) -> str:
        return self._ask(pid, ["jcmd", text], limit_s)

    def set_flag(self, pid: int, name: str, value: str, limit_s: float) -> None:
        self._ask(pid, ["setflag", name, value], limit_s)

    def _ask(self, pid: int, words: list[str], limit_s: float) -> str:
        try:
            with contextlib.suppress(AsleepError):
                return ask(pid, words, limit_s, 0.0)
            self._wakes.begin(pid)
            try:
                answer = ask(pid, words, limit_s, WAKE_S)
            except AttachError as error:
                if not isinstance(error, AsleepError):  # it is awake, or was sent no signal
                    self._wakes.over()
                raise
            self._wakes.over()
            return answer
        except AttachError as error:
            raise ApplicationError(str(error)) from None


class Jattach(Transport):
    """The program jattach (Debian: jattach), for JVMs whose attach socket our own code does not get on with."""

    def __init__(self, program: str = "jattach") -> None:
        self._program = program
        self._wakes = Wakes()

    def command(self, pid: int, text: str, limit_s: float) -> str:
        return self._run(pid, ["jcmd", text], limit_s)

    def set_flag(self, pid: int, name: str, value: str, limit_s: float) -> None:
        self._run(pid, ["setflag", name, value], limit_s)

    def _run(self, pid: int, words: list[str], limit_s: float) -> str:
        try:
            # Where there is no socket yet jattach sends the signal without a look.
            if not os.path.exists(f"/proc/{pid}/root/tmp/.java_pid{identity(pid)[2]}"):
                if not catches_quit(pid):
                    raise ApplicationError(f"process {pid} does not catch SIGQUIT, it is perhaps only just starting")
                if refuses_attach(pid):
                    raise ApplicationError(f"process {pid} runs with {DISABLED}")
                self._wakes.begin(pid)
                limit_s += WAKE_S
            done = subprocess.run(
                [self._program, str(pid), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise ApplicationError(f"{self._program} did not answer within {limit_s:g} s") from None
        except (OSError, AttachError) as error:
            self._wakes.over()  # nothing was sent
            raise ApplicationError(f"{self._program}: {error}") from None
        text = done.stdout.decode("utf-8", "replace")
        if done.returncode:
            said = (done.stderr.decode("utf-8", "replace") + text).strip()
            raise ApplicationError(f"{self._program} {' '.join(words)} ended with {done.returncode}: {said[:300]}")
        self._wakes.over()
        return text.partition("\nJVM response code = ")[2].partition("\n")[2]


class JMX(Transport):
    """The JVM's own remote management port. Java speaks it, so a second JVM runs in a child while it is used (jmx.py).

    The child is kept through an operation and ended after it.
    """

    age_s = 60.0

    def __init__(self, host: str, port: int) -> None:
        self._address = f"{host}:{port}"
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def command(self, pid: int, text: str, limit_s: float) -> str:
        return self._ask(pid, {"command": text.split()}, limit_s)

    def set_flag(self, pid: int, name: str, value: str, limit_s: float) -> None:
        self._ask(pid, {"set": [name, value]}, limit_s)

    def _ask(self, pid: int, request: dict[str, Any], limit_s: float) -> str:
        try:
            request["pid"] = identity(pid)[2]
        except AttachError as error:
            raise ApplicationError(str(error)) from None
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                limit_s += START_S
                program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jmx.py")
                child = self._child = subprocess.Popen(
                    [sys.executable, "-I", program, self._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            # Reading has no time limit of its own: a JVM that is late is ended, and the read with it.
            late = threading.Timer(limit_s, child.kill)
            late.start()
            try:
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(json.dumps(request).encode("ascii") + b"\n")
                child.stdin.flush()
                answer = json.loads(child.stdout.readline() or b'{"error": "its helper ended, or was too late"}')
            except (OSError, ValueError) as error:
                answer = {"error": str(error)}
            finally:
                late.cancel()
        if "error" in answer:
            self.close()
            raise ApplicationError(f"JMX at {self._address}: {answer['error']}")
        return str(answer.get("text", ""))

    def close(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()
