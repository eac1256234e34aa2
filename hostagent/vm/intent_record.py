"""Record of one VM's intent: what this process holds of it, and what the domain's metadata hold.

The order of writes makes a kill at any instruction harmless (rule 7): the intent is stored before the first action,
``committed`` is raised before anything is given and lowered only after the fall of the bound was measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ebbtide.deflation.allocations import Allocation
from ebbtide.deflation.resources import ZERO, ResourceVector
from ebbtide.messages.common import Vector
from hostagent.errors import HypervisorError
from hostagent.libvirt.hypervisor import Hypervisor
from hostagent.state.intents import Cause, Intent, Phase


class IntentRecord:
    """The intent of one domain. All that changes it runs under the VM's lock.

    :param overhead_mib: memory that a VM costs besides its size.
    """

    def __init__(self, domain: str, intent: Intent, hypervisor: Hypervisor, overhead_mib: float) -> None:
        self.intent = intent
        self._domain = domain
        self._hypervisor = hypervisor
        self._overhead_mib = overhead_mib
        self._unplanned = intent
        #: Whether the domain may hold another intent than ours: a write that took too long can still be carried out.
        self.uncertain = False
        #: The largest size that such a write would commit: the VM is charged with it until the domain holds ours.
        self._attempted = ZERO
        #: What it may hold that is more than is committed, as it was read while its guest was silent: it is charged
        #: with it until it is measured again.
        self.beyond = ZERO
        #: The row, and what it was made of: it is asked for far more often than it changes.
        self._row: tuple[tuple[Intent, ResourceVector], Allocation] | None = None

    def allocation(self) -> Allocation:
        """The row that policies read, the same until it changes; its current size is committed, or may yet be."""
        made_of = self.intent, self.beyond.larger(self._attempted) if self.uncertain else self.beyond
        if self._row is None or self._row[0] != made_of:
            self._row = made_of, self._allocation(made_of[1])
        return self._row[1]

    def _allocation(self, most: ResourceVector) -> Allocation:
        """:param most: what it may hold besides what is committed."""
        if self.intent.phase is Phase.STOPPED:
            return self.intent.spec.allocation(ZERO)
        row = self.intent.spec.allocation(self.intent.committed.vector(), self._overhead_mib)
        if most.fits_in(row.current):
            return row
        # It may also be more than it is sold: what it may hold is charged all the same.
        size = row.current.larger(most)
        if row.ceiling is not None:
            return replace(row, current=size, ceiling=row.ceiling.larger(size))
        return replace(row, current=size, nominal=row.nominal.larger(size))

    @property
    def upper(self) -> ResourceVector:
        """The most that the VM is sold."""
        return _upper(self.intent)

    async def store(self, **fields: object) -> None:
        """Change the intent: in the domain's metadata first, then here.

        :raises HypervisorError: it could not be stored; all is as it was.
        """
        intent = self.intent.changed(**fields)
        await self._write(intent)
        self.intent = intent

    async def charge(self, **fields: object) -> None:
        """Change the intent here first, so that what it takes is charged while it is being stored.

        :raises HypervisorError: it could not be stored; all is as it was.
        """
        before, self.intent = self.intent, self.intent.changed(**fields)
        try:
            await self.persist()
        except HypervisorError:
            self.intent = before
            raise

    def plan(self, target: ResourceVector, cause: Cause, generation: int | None = None, **fields: object) -> None:
        """Decide what is going to happen; `persist` it before anything does.

        What will be given is committed at once, so that no other operation counts on it.

        :param fields: what else changes with it.
        """
        committed = self.intent.committed.vector()
        # What the row is charged with can be more, see `allocation`.
        target = target.smaller(_upper(self.intent.changed(**fields)))
        grows = any(wanted > has for wanted, has in zip(target, committed, strict=True))
        shrinks = any(wanted < has for wanted, has in zip(target, committed, strict=True))
        self._unplanned = self.intent
        self.intent = self.intent.changed(
            generation=self.intent.generation + 1 if generation is None else generation,
            phase=Phase.DEFLATING if shrinks or not grows else Phase.REINFLATING,
            target=Vector.of(target),
            committed=Vector.of(committed.larger(target)),
            cause=cause,
            given_up=False,
            **fields,
        )

    async def unplan(self) -> None:
        """Take back a plan of which nothing was carried out."""
        self.intent = self._unplanned
        with contextlib.suppress(HypervisorError):
            await self.persist()

    async def persist(self) -> None:
        """Store the intent durably as it is here.

        :raises HypervisorError: it could not be stored.
        """
        await self._write(self.intent)

    async def _write(self, intent: Intent) -> None:
        attempted = ZERO if intent.phase is Phase.STOPPED else intent.committed.vector()
        if intent.phase is Phase.STOPPED:
            self.beyond = ZERO
        self._attempted = self._attempted.larger(attempted) if self.uncertain else attempted
        self.uncertain = True
        await self._hypervisor.write_intent(self._domain, intent)
        self.uncertain = False


def _upper(intent: Intent) -> ResourceVector:
    return (intent.spec.ceiling or intent.spec.nominal).vector()
