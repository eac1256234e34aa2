"""Journal of the agent: unacknowledged core changes, epoch, mode, budget and boot times.

No domain's metadata can hold these.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from ebbtide.deflation.cascade.readiness import BootTimes
from ebbtide.deflation.modes import HostMode
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.machines import CoreChange
from hostagent.errors import JournalError
from hostagent.state.files import replace as _replace
from hostagent.state.files import sync_names

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoredMode:
    """What an operator has the host do."""

    mode: HostMode = HostMode.ACTIVE
    reason: str = ""
    #: Seconds since the epoch; None: it was never changed.
    since: float | None = None


@dataclass(frozen=True, slots=True)
class StoredBudget:
    """What the harvest VMs may grow to hold together above their minimums."""

    number: int = 0
    #: As the manager granted it, and what of it is in force: nothing once it was revoked.
    granted: ResourceVector = ZERO
    room: ResourceVector = ZERO


@dataclass(frozen=True, slots=True)
class StoredSteady:
    """Steady mode as an operator has set it, and what it has learned."""

    enabled: bool = False
    #: Memory to keep free, MiB; None: as learned.
    reserve_mib: float | None = None
    #: See `ebbtide.deflation.sharing.reserve`; seconds since the epoch, MiB.
    refill_s: float | None = None
    arrivals: tuple[tuple[float, float], ...] = ()


#: Deletions that are remembered, failed operations, and preemptions that were called off.
MOST_ENDED: Final = 200
#: Stops and deletions whose end is remembered: a definition that is put back names one of its time.
MOST_CARRIED_OUT: Final = 1000
#: Machines without cores whose last change is remembered.
MOST_GONE: Final = 300
#: Core changes that are kept where no manager ever acknowledges them; up to twice as many, so that the file is seldom
#: written anew.
MOST_UNTOLD: Final = 1000


class Journal:
    """Two small files in the agent's state directory, written so that a kill at any instruction loses no change.

    Methods that write block: call them in a thread.

    :param told: whether there is a manager that acknowledges core changes; else only the latest are kept.
    """

    def __init__(self, directory: Path, told: bool = True) -> None:
        self._told = told
        directory.mkdir(parents=True, exist_ok=True)
        self._changes_path = directory / "core-changes.jsonl"
        self._state_path = directory / "state.json"
        self.changes: list[CoreChange] = []
        self._lock = threading.Lock()
        #: Whether there is a line that cannot be read: nothing is appended before the file is written anew.
        self._broken = False
        self.epoch = 0
        self.mode = StoredMode()
        self.budget = StoredBudget()
        self.steady = StoredSteady()
        #: How long guests took to boot.
        self.boots = BootTimes()
        self._sequence = 0
        #: The last change of each machine, as (cause, cores after): one that a kill made us repeat is known by it.
        self._last: dict[str, tuple[str, float]] = {}
        #: Request ids of the latest deletions, and of operations that were answered as failed: not carried out later.
        self.deleted: list[str] = []
        self.failed: list[str] = []
        #: Request ids of preemptions that were called off.
        self.withdrawn: list[str] = []
        #: The boot of the host in which an agent was here last; empty: by an agent that did not note it.
        self.boot_id = ""
        #: Request ids of the latest stops and deletions that have come to their end: not carried out again.
        self.carried_out: list[str] = []
        if self._state_path.exists():
            try:
                self._read(json.loads(self._state_path.read_text()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise JournalError(
                    f"{self._state_path} cannot be read ({type(error).__name__}: {error}): move it away, and start the "
                    "agent, before `ebb-hostagent release` or a removal of the package, too, which else find nothing "
                    "to give back. The host is active then and has no budget, it follows a manager of any epoch, and "
                    "what was answered as failed may be gone on with"
                ) from error
        if self._changes_path.exists():
            text = self._changes_path.read_bytes()
            lines = text.splitlines()
            for number, line in enumerate(lines, 1):
                try:
                    self.changes.append(CoreChange.model_validate_json(line))
                except ValueError:
                    if number < len(lines):
                        log.warning(
                            "a core change cannot be read, and is lost", file=str(self._changes_path), line=number
                        )
                    # Else it is the last one, cut short by a kill: its operation is resumed and writes it again.
            self._broken = len(self.changes) < len(lines) or text[-1:] not in (b"", b"\n")
            if self._broken:
                try:
                    self._replace_changes(self.changes)
                except JournalError as error:
                    log.warning("core changes are read only until the disk has room", why=str(error))
        if self.changes:
            self._sequence = max(self._sequence, *(change.sequence for change in self.changes))
            for change in self.changes:
                self._remember(change)

    def _read(self, state: dict[str, Any]) -> None:
        """Take over what was stored. Raises what a document in another form raises."""
        self.epoch, self._sequence = int(state["epoch"]), int(state["sequence"])
        self._last = {machine: (cause, after) for machine, (cause, after) in state.get("last", {}).items()}
        self.deleted = list(state.get("deleted", []))
        self.failed = list(state.get("failed", []))
        self.withdrawn = list(state.get("withdrawn", []))
        self.carried_out = list(state.get("carried_out", []))
        if "mode" in state:
            mode, reason, since = state["mode"]
            self.mode = StoredMode(HostMode(mode), reason, since)
        if "budget" in state:
            number, granted, room = state["budget"]
            self.budget = StoredBudget(number, ResourceVector.of(granted), ResourceVector.of(room))
        if "steady" in state:
            enabled, reserve_mib, refill_s, arrivals = state["steady"]
            seen = tuple((float(at), float(mib)) for at, mib in arrivals)
            self.steady = StoredSteady(enabled, reserve_mib, refill_s, seen)
        self.boots = BootTimes(state.get("boots"))
        self.boot_id = str(state.get("boot", ""))

    def begin(self) -> None:
        """Have a state on disk, however little there is to remember: by it `ebb-hostagent release` knows of an agent.

        :raises JournalError: it could not be written.
        """
        with self._lock:
            if not self._state_path.exists():
                self._change_state("the state")

    def add(self, machine: str, host: str, at: float, before: float, after: float, cause: str) -> None:
        """Append a change, durably; one that equals the machine's last in cause and outcome is not repeated.

        :raises JournalError: it could not be written; nothing has changed.
        """
        with self._lock:
            if self.has_told(machine, cause, after):
                return
            if self._broken:
                self._replace_changes(self.changes)
            self._sequence += 1
            change = CoreChange(
                sequence=self._sequence,
                machine=machine,
                host=host,
                at=at,
                cores_before=before,
                cores_after=after,
                cause=cause,
            )
            size = _size(self._changes_path)
            try:
                _append(self._changes_path, _lines([change]))
            except OSError as error:
                self._sequence -= 1
                # Where it could not be cut off again either, the next line would be joined to it.
                self._broken = size is None or _size(self._changes_path) != size
                raise JournalError(f"a core change could not be written: {error}") from error
            self.changes.append(change)
            self._remember(change)
            if not self._told and len(self.changes) > 2 * MOST_UNTOLD:
                try:
                    self._forget_up_to(self.changes[-MOST_UNTOLD - 1].sequence)
                except JournalError as error:
                    log.warning("core changes that nobody wants are kept", why=str(error))

    def _remember(self, change: CoreChange) -> None:
        """The latest of a machine is the last one in order; of those that are gone for long nothing is kept."""
        self._last.pop(change.machine, None)
        self._last[change.machine] = (change.cause, change.cores_after)
        gone = [machine for machine, (_, after) in self._last.items() if not after]
        for machine in gone[:-MOST_GONE]:
            del self._last[machine]

    def last_cores(self, machine: str) -> float:
        """What a machine had after its last change; 0 where none is known."""
        return self._last.get(machine, ("", 0.0))[1]

    def has_told(self, machine: str, cause: str, after: float) -> bool:
        """Whether a machine's last change is this one."""
        return self._last.get(machine) == (cause, after)

    def acknowledge(self, sequence: int) -> None:
        """Forget the changes that the manager has.

        A manager that has more than we ever counted knew an agent whose state was lost: we go on above its count.

        :raises JournalError: it could not be written; they are sent again.
        """
        with self._lock:
            if sequence > self._sequence:
                kept = [
                    change.model_copy(update={"sequence": number})
                    for number, change in enumerate(self.changes, start=sequence + 1)
                ]
                # The changes first: the sequence follows from them, and under their old numbers they would count as
                # acknowledged.
                self._replace_changes(kept)
                self._sequence = sequence + len(kept)
                self._change_state("the acknowledged sequence")
                return
            self._forget_up_to(sequence)

    def _forget_up_to(self, sequence: int) -> None:
        kept = [change for change in self.changes if change.sequence > sequence]
        if len(kept) < len(self.changes):
            # The state first: it holds each machine's last change.
            self._change_state("the acknowledged sequence")
            self._replace_changes(kept)

    def add_deleted(self, request_id: str) -> None:
        """Remember a deletion, so that its repetition after a restart does not hit a new VM of the name.

        :raises JournalError: it could not be written.
        """
        with self._lock:
            self._change_state("a deletion", deleted=[*self.deleted[1 - MOST_ENDED :], request_id])

    def add_failed(self, request_id: str) -> None:
        """Remember that an operation is answered as failed: a later agent does not go on with what it finds of it.

        :raises JournalError: it could not be written.
        """
        with self._lock:
            if request_id not in self.failed:
                # A request about many VMs is no reason to forget others.
                self._change_state("a failure", failed=[*self.failed[1 - MOST_ENDED :], request_id])

    def add_withdrawn(self, request_id: str) -> None:
        """Remember that a preemption is called off: a later agent does not go on with it.

        :raises JournalError: it could not be written.
        """
        with self._lock:
            self._change_state("a withdrawal", withdrawn=[*self.withdrawn[1 - MOST_ENDED :], request_id])

    def add_carried_out(self, request_id: str) -> None:
        """Remember that a stop or deletion has come to its end: a domain that is put back is not ended by it again.

        :raises JournalError: it could not be written.
        """
        with self._lock:
            if request_id not in self.carried_out:
                kept = self.carried_out[1 - MOST_CARRIED_OUT :]
                self._change_state("the end of an operation", carried_out=[*kept, request_id])

    def has_failed(self, kind: str, request_id: str) -> bool:
        """Whether an operation was answered as failed, or was called off: it is not carried out any more."""
        # An earlier version kept all that had failed but deletions among those.
        earlier = kind != "delete" and request_id in self.deleted
        return request_id in self.failed or request_id in self.withdrawn or earlier

    def raise_epoch(self, epoch: int) -> None:
        """Remember the highest epoch of a manager that was seen.

        :raises JournalError: it could not be written; the epoch is as before.
        """
        with self._lock:
            if epoch > self.epoch:
                self._change_state("the manager's epoch", epoch=epoch)

    def forget_epoch(self) -> None:
        """Follow the next manager that commands, whichever: for operators, while the agent is stopped.

        :raises JournalError: it could not be written; the epoch is as before.
        """
        with self._lock:
            self._change_state("the manager's epoch", epoch=0)

    def set_mode(self, mode: HostMode, reason: str, since: float | None) -> None:
        """Remember what an operator has the host do.

        :raises JournalError: it could not be written; the mode is as before.
        """
        with self._lock:
            self._change_state("the mode", mode=StoredMode(mode, reason, since))

    def set_steady(self, steady: StoredSteady) -> None:
        """Remember the setting of steady mode and what it has learned.

        :raises JournalError: it could not be written; all is as before.
        """
        with self._lock:
            self._change_state("steady mode", steady=steady)

    def set_boot(self, boot_id: str) -> None:
        """Remember the boot of the host in which an agent is here.

        :raises JournalError: it could not be written; the one before counts.
        """
        with self._lock:
            self._change_state("the host's boot", boot_id=boot_id)

    def add_boot(self, vm: str, seconds: float) -> None:
        """Remember how long a guest took to boot.

        :raises JournalError: it could not be written; nothing was learned.
        """
        with self._lock:
            self._change_state("a boot", boots=self.boots.with_boot(vm, seconds))

    def grant(self, number: int, room: ResourceVector) -> None:
        """Remember a budget.

        :raises JournalError: it could not be written; the budget is as before.
        """
        with self._lock:
            self._change_state("the budget", budget=StoredBudget(number, room, room))

    def revoke_budget(self) -> None:
        """Remember that the budget is not in force any more; its number stays taken. Raises as `grant`."""
        with self._lock:
            self._change_state("the budget", budget=StoredBudget(self.budget.number, self.budget.granted))

    def _replace_changes(self, kept: list[CoreChange]) -> None:
        try:
            _replace(self._changes_path, _lines(kept))
        except OSError as error:
            raise JournalError(f"the core changes could not be written: {error}") from error
        self.changes, self._broken = kept, False

    def _change_state(self, what: str, **fields: object) -> None:
        """Change some of what is stored beside the core changes, durably or not at all. Under the lock.

        :param what: in words, for the error.
        :raises JournalError: it could not be written; all is as before.
        """
        before = {name: getattr(self, name) for name in fields}
        for name, value in fields.items():
            setattr(self, name, value)
        try:
            self._save_state()
        except OSError as error:
            for name, value in before.items():
                setattr(self, name, value)
            raise JournalError(f"{what} could not be written: {error}") from error

    def _save_state(self) -> None:
        state = {
            "epoch": self.epoch,
            "sequence": self._sequence,
            "last": self._last,
            "deleted": self.deleted,
            "failed": self.failed,
            "withdrawn": self.withdrawn,
            "carried_out": self.carried_out,
            "mode": (self.mode.mode, self.mode.reason, self.mode.since),
            "budget": (self.budget.number, self.budget.granted.as_dict(), self.budget.room.as_dict()),
            "steady": (self.steady.enabled, self.steady.reserve_mib, self.steady.refill_s, self.steady.arrivals),
            "boots": self.boots.seen,
            "boot": self.boot_id,
        }
        _replace(self._state_path, json.dumps(state))


def _append(path: Path, text: str) -> None:
    """Append durably, or leave the file as it was."""
    new = not path.exists()
    # Unbuffered: what a full disk does not take would be written when the file is closed.
    with path.open("ab", buffering=0) as file:
        before, left = file.tell(), text.encode()
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            if new:
                sync_names(path.parent)
        except OSError:
            os.truncate(path, before)
            raise


def _size(path: Path) -> int | None:
    """Bytes of a file; None: that cannot be found out."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def _lines(changes: list[CoreChange]) -> str:
    return "".join(change.model_dump_json() + "\n" for change in changes)
