"""What stands between an agent and all that lasts: its death, and faults of hypervisor and disk."""

from __future__ import annotations

from pathlib import Path

from ebbtide.deflation.resources import ResourceVector
from hostagent.errors import HypervisorError, JournalError
from hostagent.state.journal import Journal

#: What a killed agent's calls end with.
KILLED = "this agent has been killed"


class Fence:
    """Between an agent and all that lasts: after its death nothing of what it does comes through.

    :attr:`calls_left` counts down at every durable call; at 0 the agent dies, before or after the call's effect.
    """

    def __init__(self) -> None:
        self.dead = False
        self.calls_left: int | None = None
        self.after_effect = False

    def before(self) -> None:
        self._check()
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0 and not self.after_effect:
                self.dead = True
        self._check()

    def after(self) -> None:
        if self.calls_left is not None and self.calls_left <= 0:
            self.dead = True
        self._check()

    def _check(self) -> None:
        if self.dead:
            raise HypervisorError(KILLED)


class FencedJournal(Journal):
    """The journal of an agent that may die at any call; a full disk is an error of each."""

    def __init__(self, directory: Path, fence: Fence, faults: Faults) -> None:
        super().__init__(directory)
        self._fence = fence
        self._faults = faults

    def add(self, machine: str, host: str, at: float, before: float, after: float, cause: str) -> None:
        self._fence.before()
        if self._faults.disk_full:
            raise JournalError("a core change could not be written: No space left on device")
        super().add(machine, host, at, before, after, cause)
        self._fence.after()

    def add_deleted(self, request_id: str) -> None:
        self._fence.before()
        super().add_deleted(request_id)
        self._fence.after()

    def add_carried_out(self, request_id: str) -> None:
        self._fence.before()
        if self._faults.disk_full:
            raise JournalError("the end of an operation could not be written: No space left on device")
        super().add_carried_out(request_id)
        self._fence.after()

    def add_failed(self, request_id: str) -> None:
        self._fence.before()
        if self._faults.disk_full:
            raise JournalError("a failure could not be written: No space left on device")
        super().add_failed(request_id)
        self._fence.after()

    def grant(self, number: int, room: ResourceVector) -> None:
        self._fence.before()
        super().grant(number, room)
        self._fence.after()

    def revoke_budget(self) -> None:
        self._fence.before()
        super().revoke_budget()
        self._fence.after()

    def raise_epoch(self, epoch: int) -> None:
        self._fence.before()
        super().raise_epoch(epoch)
        self._fence.after()


class Faults:
    """What is wrong with the hypervisor."""

    def __init__(self) -> None:
        self.disk_full = False
        #: Until then every call fails: libvirtd is being restarted.
        self.down_until = 0.0
        #: So many calls of a method fail before they do anything, or time out and are carried out later.
        self.refused: dict[str, int] = {}
        self.late: dict[str, int] = {}

    def clear(self) -> None:
        self.disk_full, self.down_until = False, 0.0
        self.refused.clear()
        self.late.clear()

    @property
    def any(self) -> bool:
        return self.disk_full or bool(self.refused or self.late or self.down_until)

    @staticmethod
    def take(counts: dict[str, int], method: str) -> bool:
        if method not in counts:
            return False
        counts[method] -= 1
        if counts[method] <= 0:
            del counts[method]
        return True
