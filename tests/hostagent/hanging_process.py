"""The command `ebb-hostagent` over a libvirt that hangs, as a process of its own: it can be told to end.

Usage: python -m tests.hostagent.hanging_process WHAT OPTIONS, where WHAT hangs: a call of the connection, or "reclaim".
"journal" does not hang, but is slow. It prints a line once that is under way, and one when it ends and still has its
state directory to itself.
"""

from __future__ import annotations

import fcntl
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from hostagent import main, running, threads
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.options import HostAgentOptions
from hostagent.state.journal import Journal
from tests.hostagent.libvirt_stand_in import StandIn, StandInDomain


def hang() -> None:
    threading.Event().wait()


class Hanging(StandIn):
    """:param what: hangs."""

    def __init__(self, what: str) -> None:
        super().__init__(Path())
        self._what = what

    def listAllDomains(self) -> list[StandInDomain]:
        if self._what == "listAllDomains":
            print("under way", flush=True)
            hang()
        return super().listAllDomains()

    def getAllDomainStats(self, what: int, flags: int) -> list[tuple[StandInDomain, dict[str, Any]]]:
        if self._what == "journal":
            return super().getAllDomainStats(what, flags)
        if self._what == "reclaim":
            threads.RECLAIM._pool.submit(hang)
        print("under way", flush=True)
        if self._what == "getAllDomainStats":
            hang()
        return super().getAllDomainStats(what, flags)

    def close(self) -> None:
        if self._what == "close":
            hang()


class SlowJournal(Journal):
    """One on a disk that takes its time."""

    def begin(self) -> None:
        print("under way", flush=True)
        time.sleep(2.0)
        super().begin()


def is_alone(state_dir: Path) -> bool:
    with (state_dir / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


if __name__ == "__main__":
    hanging = Hanging(what := sys.argv.pop(1))
    if what == "journal":
        vars(running)["Journal"] = SlowJournal
    vars(running)["LibvirtHypervisor"] = partial(LibvirtHypervisor, opener=lambda uri: hanging)
    options: HostAgentOptions = main.options_of(sys.argv[1:]).options
    main.main()
    print("alone" if is_alone(options.state_dir) else "not alone", flush=True)
