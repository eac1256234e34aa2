"""A backup, a dump or a snapshot of a domain is its owner's: it is neither called off nor taken for a move."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import libvirt
import pytest

from hostagent.errors import HypervisorError, HypervisorTimeout
from hostagent.libvirt import jobs, saving
from hostagent.libvirt.definitions import Definitions
from hostagent.libvirt.moves import LibvirtMoves
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import LibvirtConnection

BACKUP, DUMP = libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP, libvirt.VIR_DOMAIN_JOB_OPERATION_DUMP
SAVE, OUT = libvirt.VIR_DOMAIN_JOB_OPERATION_SAVE, libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT


class Busy:
    """A running domain with a job, and the connection to it, on which no change ends in time.

    :param then: the job that follows after the first look.
    """

    def __init__(self, operation: int | None, then: int | None = None) -> None:
        self._stats = {"type": 0} if operation is None else {"type": 2, "operation": operation}
        self._then = None if then is None else {"type": 2, "operation": then}
        self.aborted = 0
        self.looks = 0
        self.comes_back = asyncio.Event()

    async def call(self, function: Callable[[Any], Any], modifies: str = "", **_limits: Any) -> Any:
        if modifies:
            await self.comes_back.wait()  # the change that was given up has the domain to itself until then
        return function(SimpleNamespace(lookupByName=lambda _: self))

    async def change(self, domain: str, function: Callable[[Any], Any], limit_s: float) -> None:
        raise HypervisorTimeout(f"libvirt did not answer within {limit_s:g} s")

    def on_open(self, _callback: Any) -> None:
        """It is open."""

    def isPersistent(self) -> bool:
        return True

    def state(self) -> tuple[int, int]:
        return libvirt.VIR_DOMAIN_RUNNING, 1

    def jobStats(self) -> dict[str, int]:
        self.looks += 1
        if self.looks == 3:
            self.comes_back.set()
        return self._then if self._then and self.looks > 1 else self._stats

    def abortJob(self) -> None:
        self.aborted += 1
        self.comes_back.set()


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CALL_OFF_EVERY_S", 0.05)


def moves(domain: Busy) -> LibvirtMoves:
    settings = LibvirtSettings("a", "", "kvm", Path("/here/image"), Path("/here/disks"))
    return LibvirtMoves(settings, cast(LibvirtConnection, domain), cast(Definitions, None))


@pytest.mark.parametrize(("operation", "aborted"), [(SAVE, 1), (BACKUP, 0), (DUMP, 0), (None, 0)])
async def test_a_save_that_takes_too_long_is_called_off_and_no_other_job(operation: int | None, aborted: int) -> None:
    domain = Busy(operation)
    with pytest.raises(HypervisorTimeout):
        await saving.save(cast(LibvirtConnection, domain), "web", Path("/nowhere"), 1.0)
    assert domain.aborted == aborted


async def test_a_save_that_waited_behind_a_snapshot_is_called_off_when_it_begins_after_its_time() -> None:
    domain = Busy(libvirt.VIR_DOMAIN_JOB_OPERATION_SNAPSHOT, then=SAVE)
    with pytest.raises(HypervisorTimeout):
        async with asyncio.timeout(10.0):
            await saving.save(cast(LibvirtConnection, domain), "web", Path("/nowhere"), 1.0)
    assert domain.aborted == 1


async def test_a_domain_of_which_a_backup_is_made_is_not_to_be_saved() -> None:
    with pytest.raises(HypervisorError, match="a backup of it by another program is under way"):
        await saving.to_save(cast(LibvirtConnection, Busy(BACKUP)), "web", Path("/nowhere"))


@pytest.mark.parametrize(
    ("operation", "where", "aborted"), [(OUT, "moving", 1), (BACKUP, "held", 0), (DUMP, "held", 0), (None, "here", 0)]
)
async def test_only_a_move_counts_as_one_and_is_called_off(operation: int | None, where: str, aborted: int) -> None:
    domain = Busy(operation)
    assert await moves(domain).whereabouts("web") == where
    await moves(domain).stop_move("web")
    assert domain.aborted == aborted


def test_of_a_libvirt_before_9_0_the_jobs_that_it_names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(libvirt, "VIR_DOMAIN_JOB_OPERATION_SNAPSHOT_DELETE")
    old = importlib.reload(jobs)
    assert old.held_by({"type": 2, "operation": BACKUP}) == "a backup of it by another program is under way"
    assert (
        old.held_by({"type": 2, "operation": 10}) == "the removal of a snapshot of it by another program is under way"
    )
