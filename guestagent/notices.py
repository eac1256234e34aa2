"""Notices of the guest to its host (tasks wait for memory, a service asks for more), and the directory of its files."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Callable

from guestagent.errors import GuestFailure
from guestagent.memory import Memory
from guestagent.messages import PressureNotice, RequestNotice
from guestagent.rpc import notification_line

if TYPE_CHECKING:
    from guestagent.requests import RequestSocket

# Before the local socket is tried again.
LISTEN_AGAIN_S = 1.0
# The least time between two notifications of a kind.
NOTICE_S = 1.0
# Some task stalled for 150 ms within 1 s. The kernel wakes us once per window at most (Linux: psi.rst).
TRIGGER = b"some 150000 1000000\0"


class PressureTrigger:
    """A trigger of the kernel for tasks that wait for memory; wait for `EVENTS` on `fileno()`.

    Raises: OSError where the kernel has no pressure stall information or lets us set no trigger.
    """

    EVENTS = select.POLLPRI | select.POLLERR

    def __init__(self, procfs: str = "/proc") -> None:
        self._fd = os.open(os.path.join(procfs, "pressure", "memory"), os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(self._fd, TRIGGER)
        except OSError:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """File descriptor, for poll()."""
        return self._fd

    def close(self) -> None:
        """Remove the trigger."""
        os.close(self._fd)


class Notices:
    """Notifications, one a second of each kind at most.

    `say` sends a line to the host, or returns False where there is none. `trigger` is waited for in the agent's loop
    and closed here; the requests come in a thread of their own, from root and the group `group_id` (-1: root's), as
    do questions for the `status`.
    """

    def __init__(
        self,
        say: Callable[[bytes], bool],
        log: Callable[[str], None],
        memory: Memory,
        boot_id: Callable[[], str],
        trigger: PressureTrigger | None,
        group_id: int,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._say = say
        self._log = log
        self._memory = memory
        self._boot_id = boot_id
        self._trigger = trigger
        self._group_id = group_id
        self._status = status
        self._socket: RequestSocket | None = None
        self._listen_at = 0.0
        self._complaint = ""
        self._pressure_at: float | None = None
        self._request_lock = threading.Lock()
        self._request_at: float | None = None

    def register(self, poller: select.poll) -> None:
        """Have the loop woken by stalls."""
        if self._trigger is not None:
            poller.register(self._trigger.fileno(), PressureTrigger.EVENTS)

    def handle(self, poller: select.poll, events: dict[int, int]) -> None:
        """Tell of a stall that has woken the loop; a trigger that is broken is given up."""
        fired = events.get(self._trigger.fileno(), 0) if self._trigger is not None else 0
        if self._trigger is not None and fired & ~select.POLLPRI:
            poller.unregister(self._trigger.fileno())
            self.close()
        elif fired:
            self._tell_pressure()

    def close(self) -> None:
        """Remove the trigger."""
        if self._trigger is not None:
            self._trigger.close()
            self._trigger = None

    def listen(self, run_dir: str) -> None:
        """Take local requests from now on. Without the socket all else goes on, and it is tried again by a later call:
        another guest agent that has it may end."""
        from guestagent.requests import RequestSocket

        if self._socket is not None or time.monotonic() < self._listen_at:
            return
        self._listen_at = time.monotonic() + LISTEN_AGAIN_S
        try:
            make_run_dir(run_dir)
            self._socket = RequestSocket(run_dir, self._group_id, self._pass_on, self._status)
        except OSError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._log(f"services in the guest cannot ask for more: {error}")

    def stop_listening(self) -> None:
        """Take no more local requests."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell_pressure(self) -> None:
        now = time.monotonic()
        if self._pressure_at is not None and now - self._pressure_at < NOTICE_S:
            return
        try:
            line = notification_line("pressure", asdict(self._notice()))
        except GuestFailure as error:
            self._log(f"pressure could not be told: {error}")
            return
        if self._say(line):
            self._pressure_at = now

    def _notice(self) -> PressureNotice:
        return PressureNotice(boot_id=self._boot_id(), **memory_state(self._memory))

    def _pass_on(self, notice: RequestNotice) -> None:
        """Send a request to the host; called in the socket's thread. Raises: GuestFailure with why it was not."""
        with self._request_lock:
            now = time.monotonic()
            if self._request_at is not None and now - self._request_at < NOTICE_S:
                raise GuestFailure(f"there was a request less than {NOTICE_S:g} s ago; ask again later")
            if not self._say(notification_line("request", asdict(notice))):
                raise GuestFailure("the host is not connected; ask again later")
            self._request_at = now


def memory_state(memory: Memory) -> dict[str, Any]:
    """The fields of memory that `status` and `pressure` have in common.

    Raises: GuestFailure.
    """
    paging = memory.paging()
    return {
        "memory": memory.status(),
        "pressure": memory.pressure(),
        "major_faults": paging.major_faults,
        "swap_in_pages": paging.swap_in_pages,
        "swap_out_pages": paging.swap_out_pages,
    }


def make_run_dir(path: str) -> None:
    """The directory of token and socket. Raises: OSError."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.chmod(path, 0o755)


def replace(path: str, text: str, mode: int, uid: int = -1) -> None:
    """Put a whole file into a place, so that no part of one is read; links are not followed. Raises: OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".new")
    fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        os.fchown(fd, uid, -1)
        os.fchmod(fd, mode)
    os.rename(path + ".new", path)
