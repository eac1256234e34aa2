"""Other programs that an adapter runs, within limits of time and size; nothing of them is left behind."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from typing import Any, Callable, Sequence

from app_adapters.errors import ApplicationError
from app_adapters.messages import reject_constant

#: The guest agent gives a hook 2.5 s for its answer, and some of these calls come before it.
CALL_LIMIT_S = 1.5
OUTPUT_BYTES = 65536
STDERR_TAIL_BYTES = 2048
#: How often it is looked whether the program has ended or is to be ended, in seconds.
LOOK_S = 0.05
#: Between SIGTERM and SIGKILL, in seconds.
GRACE_S = 0.5
SENTENCE_LENGTH = 300

#: What runs. Threads that wait for it are daemons: where the adapter ends, they end with it.
_running: set[subprocess.Popen[bytes]] = set()


def run(words: list[str], limit_s: float = CALL_LIMIT_S) -> str:
    """Run a command without a shell; returns what it printed, both ways together.

    Raises: ApplicationError where it fails, with its last lines, or takes too long; its process group is then ended.
    """
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise ApplicationError(f"{words[0]} cannot be run: {error}") from None
    with process:
        _running.add(process)
        try:
            output = process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            raise ApplicationError(f"{words[0]} took longer than {limit_s:g} s") from None
        finally:
            # Not reaped, so the group is still its own. What outlives the command may be the service that it started.
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
            _running.discard(process)
    text = output.decode("utf-8", "replace")
    if process.returncode != 0:
        # The last line alone is often a summary, such as nginx's "test failed".
        said = "; ".join(text.strip().splitlines()[-2:])[-400:]
        raise ApplicationError(f"{words[0]} failed with status {process.returncode}: {said}")
    return text


def ask_program(argv: Sequence[str], question: dict[str, Any], limit_s: float, over: Callable[[], bool]) -> Any:
    """The JSON object that the program writes to its standard output, given `question` on its standard input.

    It runs without a shell, in a process group of its own. The whole group is ended when the program has ended, or
    after `limit_s` seconds, or when `over` is true: SIGTERM, then SIGKILL.

    Raises: ApplicationError where it cannot be started, fails, is too slow or writes too much or no JSON object.
    """
    name = os.path.basename(argv[0])
    try:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise ApplicationError(f"{argv[0]} cannot be started: {getattr(error, 'strerror', '') or error}") from None
    _running.add(process)
    end = time.monotonic() + limit_s
    talk = _Talk(process, json.dumps(question, allow_nan=False).encode("ascii"))
    problem = ""
    try:
        while not problem and not talk.ended():
            talk.step(LOOK_S)
            if len(talk.output) > OUTPUT_BYTES:
                problem = f"wrote more than {OUTPUT_BYTES} bytes"
            elif time.monotonic() > end:
                problem = f"did not answer within {limit_s:.1f} s"
            elif over():
                problem = "was called off"
    finally:
        _end(process)
        _running.discard(process)
        talk.close()
    if not problem and process.returncode != 0:
        status = process.returncode
        problem = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    answer = None
    if not problem:
        try:
            answer = json.loads(talk.output.decode("utf-8"), parse_constant=reject_constant)
        except (ValueError, RecursionError):
            problem = "did not write JSON"
        else:
            problem = "" if isinstance(answer, dict) else "did not write a JSON object"
    if problem:
        said = " ".join(talk.errors.decode("utf-8", "replace").split())[-SENTENCE_LENGTH:]
        raise ApplicationError(f"{name} {question.get('method')}: {problem}" + (f": {said}" if said else ""))
    return answer


class _Talk:
    """What goes in and comes out, without ever waiting for the program."""

    def __init__(self, process: subprocess.Popen[bytes], text: bytes) -> None:
        self.output = b""
        self.errors = b""
        self._process = process
        self._rest = text
        self._selector = selectors.DefaultSelector()
        self._pipes = [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
            events = selectors.EVENT_WRITE if pipe is process.stdin else selectors.EVENT_READ
            self._selector.register(pipe, events)

    def step(self, wait_s: float) -> None:
        """Pass on what is there, after at most `wait_s` seconds."""
        if not self._selector.get_map():
            time.sleep(wait_s / 10)  # it has closed all, and is about to end
            return
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._process.stdin:
                self._write()
            else:
                self._read(key)

    def ended(self) -> bool:
        """Whether the program has ended and all that it wrote is here. It is not reaped: its pid stays its own."""
        # WNOWAIT: once it is reaped, its process group could be another program's.
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # A child of it may hold the pipes for ever: what is in them now is all.
        while len(self.output) <= OUTPUT_BYTES:
            ready = [key for key, _ in self._selector.select(0) if key.fileobj is not self._process.stdin]
            if not ready:
                break
            for key in ready:
                self._read(key)
        return True

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # of its input, what was never read
                pipe.close()

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            self._rest = self._rest[os.write(stdin.fileno(), self._rest) :]
        except BlockingIOError:
            return
        except OSError:  # it does not care for its input
            self._rest = b""
        if not self._rest:
            self._selector.unregister(stdin)
            stdin.close()

    def _read(self, key: selectors.SelectorKey) -> None:
        try:
            data = os.read(key.fd, OUTPUT_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(key.fileobj)
        elif key.fileobj is self._process.stdout:
            self.output += data
        else:
            self.errors = (self.errors + data)[-STDERR_TAIL_BYTES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the program's process group; it has not been reaped, so the group is still its own."""
    _signal(process, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < end:
        time.sleep(0.01)
    _signal(process, signal.SIGKILL)
    process.wait()


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):  # it is empty
        os.killpg(process.pid, number)
