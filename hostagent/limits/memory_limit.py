"""A limit on QEMU's memory that the host's swap backs: set step by step, never unless backed, lifted when it is not.

What the arithmetic is and why: docs/internals/host-memory.md. The limit goes through libvirt, so that libvirt knows of
it; the files of the cgroup are read for usage, swap and refaults, and written where libvirt has no call:
`memory.reclaim` (v2), `memory.oom_control` (v1), and where it must happen at once: to lift a limit, or to have a
process that waits at it try again.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import libvirt
import structlog

from ebbtide.deflation.cascade.backing import Footprint, unbacked
from ebbtide.deflation.cascade.reclaim_pace import Pace, PaceReading, Stop, next_pace
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout
from hostagent.libvirt_connection import CALL_LIMIT_S, LibvirtConnection
from hostagent.limits.cgroups import MIB, CgroupError, MemoryGroup
from hostagent.limits.footprints import PID_FILES, UNLIMITED_KIB, LimitedVM, host_swap, look, look_again, qemu_pid
from hostagent.threads import LIMITS, RECLAIM, Threads

#: Domains whose limits count on the host's swap: those of all agents on it.
OURS: Final = "ebb-"
#: After each step, how long pressure and refaults are watched.
OBSERVE_S: Final = 0.25
#: On cgroup v2, how far above the usage a limit is left that could not be brought where it was to be.
MARGIN_MIB: Final = 16.0
#: For each look at limits that stand, seconds: at one of another VM a process may be killed meanwhile.
CHECK_LIMIT_S: Final = 5.0
#: So long a look waits until libvirt knows which limits were lifted.
TOLD_WITHIN_S: Final = 1.0
#: How far the limit of a VM that stands still at it is raised for a moment: its process then tries again.
NUDGE_MIB: Final = 16.0
T = TypeVar("T")

log = structlog.get_logger()


class MemoryLimits:
    """The limits of the domains behind one connection. File and libvirt work runs in threads.

    :param pid_files: where libvirt keeps ``NAME.pid`` of its QEMU processes.
    """

    def __init__(self, connection: LibvirtConnection, pid_files: Path = PID_FILES) -> None:
        self._connection = connection
        self._pid_files = pid_files
        #: Swap claimed by limits that are on their way, MiB by domain.
        self._claims: dict[str, float] = {}
        self._claiming = asyncio.Lock()
        #: Domains whose limits are on their way, and why the watch has lifted one meanwhile; empty: it has not.
        self._approached: dict[str, str] = {}
        #: The same by limits that were given up while libvirt may still set them.
        self._late: dict[str, float] = {}
        self._ending: set[asyncio.Task[None]] = set()
        #: The group of each running domain, and which run of it that is.
        self._groups: dict[str, tuple[tuple[int, int], MemoryGroup]] = {}
        #: Domains that stood still at their limits when they were last looked at.
        self._still: set[str] = set()
        #: Domains as they were looked at last: what counts while libvirt does not answer.
        self._seen: dict[str, LimitedVM] = {}
        #: When libvirt last did not answer in time for a domain that it has said nothing of since (monotonic seconds).
        self._timed_out: dict[str, float] = {}
        #: libvirt is told that a limit is lifted.
        self._telling: set[asyncio.Task[None]] = set()

    async def set(self, domain: str, limit_mib: float | None, limit_s: float) -> str:
        """See `hostagent.libvirt.hypervisor.DomainSizes.set_limit`."""
        if limit_mib is None:
            await self.lift(domain)
            return ""
        until = time.monotonic() + limit_s
        vm = await self._look(domain)
        if limit_mib >= vm.footprint.touchable_mib:
            await self.lift(domain)
            return ""
        if vm.limit_mib is not None and limit_mib >= vm.limit_mib:
            await self._write(domain, limit_mib + vm.allowance_mib)  # higher than it was: always possible
            return ""
        if why := await self._file(vm.group.why_no_reclaim):
            return f"no memory limit of {limit_mib:.0f} MiB: {why}"
        # One after another: two limits must not count on the same swap.
        async with self._claiming:
            if reason := await self._unbacked(domain, vm.footprint, limit_mib, strict=True):
                return reason
            self._claims[domain] = claim_mib = vm.footprint.claim_mib(limit_mib)
        self._approached[domain] = ""
        try:
            return await self._approach(domain, vm, limit_mib, until)
        except (HypervisorTimeout, asyncio.CancelledError):
            self._claim_late(domain, claim_mib)
            raise
        finally:
            self._claims.pop(domain, None)
            self._approached.pop(domain, None)

    def _claim_late(self, domain: str, claim_mib: float) -> None:
        """Have no other limit count on swap that one may need which libvirt may still set, until it has or will not."""
        is_waited_for = domain in self._late
        self._late[domain] = max(self._late.get(domain, 0.0), claim_mib)
        if is_waited_for:
            return

        async def until_ended() -> None:
            try:
                await self._connection.ended(domain)
            finally:
                del self._late[domain]

        task = asyncio.create_task(until_ended(), name=f"a late limit of {domain}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def lift(self, domain: str) -> None:
        """Take the limit away: in the cgroup at once, then in libvirt, whose domain may be busy.

        :raises HypervisorError: neither worked.
        """
        await self._tell_lifted(domain, await LIMITS.run(self._lift_in_cgroup, domain))

    async def _tell_lifted(self, domain: str, lifted: bool) -> None:
        """:param lifted: whether the limit is gone from the cgroup."""
        try:
            await self._write(domain, None)
        except DomainGone:
            raise
        except HypervisorError as error:
            if not lifted:
                raise
            log.warning("the memory limit is lifted, but libvirt does not know", domain=domain, why=str(error))

    async def check(self, prefix: str) -> dict[str, str]:
        """Lift every limit that swap does not back any more, or at which a VM stands still.

        A process that waits at its limit (v1) tries again only when the limit is raised: it is, for a moment, and
        lifted if the VM stands still at the next look, too.

        Cheap where nothing is limited: a few small files are read for each domain. While libvirt does not answer, what
        it said last counts, with what the files of the cgroups say now.

        :param prefix: of the names of the domains that may be touched.
        :returns: why, by domain, for those whose limit was lifted.
        """
        lifted: dict[str, str] = {}
        telling: list[str] = []
        limited = await LIMITS.run(self._limited, OURS)
        self._seen = {domain: seen for domain, seen in self._seen.items() if domain in self._groups}
        self._timed_out = {domain: at for domain, at in self._timed_out.items() if domain in self._groups}
        ours = [domain for domain in limited if domain.startswith(prefix)]
        if not ours:
            return {}

        async def lift(domain: str, reason: str) -> None:
            log.warning("the memory limit is lifted", domain=domain, why=reason)
            if domain in self._approached:
                self._approached[domain] = reason  # else the next step would bring it back
            if await LIMITS.run(self._lift_in_cgroup, domain):
                telling.append(domain)
            else:
                await self._tell_lifted(domain, False)
            lifted[domain] = reason

        async def tell(domain: str) -> None:
            with _logged(domain):
                await self._tell_lifted(domain, True)

        for domain in ours:
            with _logged(domain):
                # First, and by the files alone: the monitor of one that stands still does not answer.
                if reason := await self._stands_still(domain, limited[domain]):
                    await lift(domain, reason)
        known = await self._known({domain: group for domain, group in limited.items() if domain not in lifted})
        for domain in ours:
            vm = known.get(domain)
            if vm is None or vm.limit_mib is None or vm.limit_mib >= vm.footprint.touchable_mib:
                continue
            with _logged(domain):
                claims = self._claimed()
                if reason := await self._why_unbacked(domain, vm.footprint, vm.limit_mib, known, claims, lifted):
                    await lift(domain, reason)
        # No limit that must go waits for a libvirt that does not answer, nor does the next look.
        for domain in telling:
            task = asyncio.create_task(tell(domain), name=f"the limit of {domain} is lifted")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        if self._telling:
            await asyncio.wait(self._telling, timeout=TOLD_WITHIN_S)
        return lifted

    async def close(self) -> None:
        """Nothing is told or waited for any more."""
        tasks = [*self._telling, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stands_still(self, domain: str, group: MemoryGroup) -> str:
        """Why the limit must go, if the VM stood still at it before; the first time it is made to try again."""
        await self._file(lambda: _have_it_wait(group))
        if not await self._file(group.stands_still):
            self._still.discard(domain)
            return ""
        if domain in self._still:
            self._still.discard(domain)
            return "the VM stands still: what it needs at its limit cannot be reclaimed"
        self._still.add(domain)
        log.warning("a VM waits at its memory limit; it is made to try again", domain=domain)
        limit = await self._file(group.limit)
        if limit is not None:
            raised = limit + int(NUDGE_MIB * MIB)

            def put_back() -> None:
                if group.limit() == raised:  # else it was lifted or set meanwhile
                    group.hold_at_limit(True)
                    group.set_limit(limit)

            await self._file(lambda: group.set_limit(raised))
            await asyncio.sleep(OBSERVE_S)
            await self._file(put_back, RECLAIM)
        return ""

    # --- the way down --------------------------------------------------------------------------------------------

    async def _approach(self, domain: str, vm: LimitedVM, limit_mib: float, until: float) -> str:
        hard_mib = limit_mib + vm.allowance_mib
        pace, why = Pace(), ""
        while not why and not self._approached[domain]:
            began = time.monotonic()
            if began >= until:
                why = "its time was up"
                break
            before_mib = await self._usage_mib(vm)
            reached = await self._step(domain, vm, before_mib, hard_mib, pace.step_mib)
            if self._approached[domain]:
                break
            if reached:
                return ""
            seconds = time.monotonic() - began
            after_mib = await self._usage_mib(vm)
            pressure_percent, refaults_s = await self._observe(vm)
            following = next_pace(pace, PaceReading(pressure_percent, refaults_s, before_mib - after_mib, seconds))
            if isinstance(following, Stop):
                why = following.reason
            else:
                pace = following
                why = await self._no_longer_backed(domain, limit_mib)
        return await self._settle(domain, limit_mib, why)

    async def _step(self, domain: str, vm: LimitedVM, usage_mib: float, hard_mib: float, step_mib: float) -> bool:
        """One step towards the limit; whether it is reached."""
        if vm.group.version == 1:
            # The kernel reclaims down to a limit that is written, or refuses it; either way it kills nothing.
            next_mib = max(hard_mib, usage_mib - step_mib)
            return await self._write(domain, next_mib) and next_mib <= hard_mib
        if usage_mib <= hard_mib:
            return await self._write(domain, hard_mib)
        amount = int(min(step_mib, usage_mib - hard_mib) * MIB) + MIB
        await self._file(lambda: vm.group.reclaim(amount), RECLAIM)
        return False

    async def _observe(self, vm: LimitedVM) -> tuple[float, float]:
        """Pressure (percent) and refaults a second, over a moment in which nothing of ours reclaims.

        Of a kernel without PSI the refaults tell alone.
        """

        def stalled_us() -> int | None:
            try:
                return vm.group.stalled_us()
            except CgroupError:
                return None

        def look() -> tuple[float, int | None, int]:
            return time.monotonic(), stalled_us(), vm.group.refaults()

        began, stalled_before, refaults_before = await self._file(look)
        await asyncio.sleep(OBSERVE_S)
        ended, stalled_after, refaults_after = await self._file(look)
        seconds = max(ended - began, 1e-3)
        stalled = 0 if stalled_before is None or stalled_after is None else stalled_after - stalled_before
        return stalled / seconds / 1e4, (refaults_after - refaults_before) / seconds

    async def _no_longer_backed(self, domain: str, limit_mib: float) -> str:
        vm = await self._look(domain, measure=False)
        return await self._unbacked(domain, vm.footprint, limit_mib)

    async def _settle(self, domain: str, limit_mib: float, why: str) -> str:
        """Leave the limit where it got to, or none where that would not be backed or limit nothing."""
        if reason := self._approached[domain]:
            # What a step on its way may have set after that goes as well.
            await self.lift(domain)
            return f"no memory limit of {limit_mib:.0f} MiB: it was lifted meanwhile: {reason}"
        vm = await self._look(domain)
        reached = vm.limit_mib
        if vm.group.version == 2:
            # Not below what was asked for, however little is in use, nor above a limit that was there before.
            lower_mib = max(await self._usage_mib(vm) + MARGIN_MIB - vm.allowance_mib, limit_mib)
            limits = lower_mib < min(vm.held_mib, math.inf if reached is None else reached)
            if limits and await self._write(domain, lower_mib + vm.allowance_mib):
                reached = lower_mib
        if reached is None or reached >= vm.held_mib or await self._unbacked(domain, vm.footprint, reached):
            await self.lift(domain)
            return f"no memory limit of {limit_mib:.0f} MiB: {why}"
        if reached <= limit_mib:
            return ""
        return f"the memory limit stopped at {reached:.0f} MiB instead of {limit_mib:.0f}: {why}"

    # --- readings ------------------------------------------------------------------------------------------------

    async def _look(self, domain: str, measure: bool = True, limit_s: float = CALL_LIMIT_S) -> LimitedVM:
        with _as_hypervisor_error():
            found = await self._connection.call(
                lambda connection: look(connection, domain, self._pid_files, measure), limit_s=limit_s
            )
        self._seen[domain] = found
        return found

    async def _known(self, limited: Mapping[str, MemoryGroup]) -> dict[str, LimitedVM]:
        """What domains with limits may come to need, each looked at once; those of which that is not known are missing.

        Of those that libvirt says nothing of, what it said last counts, with what their files say now.
        """
        known: dict[str, LimitedVM] = {}
        silent = False
        for domain in sorted(limited, key=lambda domain: self._timed_out.get(domain, 0.0)):
            seen = self._seen.get(domain)
            if seen is not None and seen.group.pid != limited[domain].pid:
                seen = None
            with _logged(domain):
                try:
                    # One that is waited for in vain is enough; what hangs is asked last, so that it hides no other.
                    if seen is None or not silent:
                        known[domain] = await self._look(domain, measure=False, limit_s=CHECK_LIMIT_S)
                        self._timed_out.pop(domain, None)
                        continue
                except HypervisorError as error:
                    if isinstance(error, HypervisorTimeout):
                        silent = True
                        self._timed_out[domain] = time.monotonic()
                    if seen is None or isinstance(error, DomainGone):
                        raise
                known[domain] = await self._file(partial(look_again, seen))
        return known

    async def _usage_mib(self, vm: LimitedVM) -> float:
        return await self._file(vm.group.usage) / MIB

    async def _unbacked(self, domain: str, vm: Footprint, limit_mib: float, strict: bool = False) -> str:
        """Why swap does not back a limit; empty if it does.

        :param strict: the limit is a new one: what others count on must be known.
        :raises HypervisorError: it is not known.
        """
        # First: one that comes into force while the others are looked at is among the ones or the others.
        claims = self._claimed()
        limited = await LIMITS.run(self._limited, OURS)
        limited.pop(domain, None)
        if not strict:
            return await self._why_unbacked(domain, vm, limit_mib, await self._known(limited), claims)
        known: dict[str, LimitedVM] = {}
        for other in limited:
            try:
                known[other] = await self._look(other, measure=False)
            except HypervisorError:
                if other in await LIMITS.run(self._limited, OURS):
                    raise  # else it has just ended
        return await self._why_unbacked(domain, vm, limit_mib, known, claims)

    def _claimed(self) -> dict[str, float]:
        """Swap claimed by limits that are on their way, or may still be, MiB by domain."""
        return {name: max(self._claims.get(name, 0.0), self._late.get(name, 0.0)) for name in self._claims | self._late}

    async def _why_unbacked(
        self,
        domain: str,
        vm: Footprint,
        limit_mib: float,
        known: Mapping[str, LimitedVM],
        claims: Mapping[str, float],
        without: Collection[str] = (),
    ) -> str:
        others = dict(claims)
        for other, its in known.items():
            if its.limit_mib is not None:
                claim = its.footprint.claim_mib(its.limit_mib)
                others[other] = max(others.get(other, 0.0), claim)
        needed = sum(claim for other, claim in others.items() if other != domain and other not in without)
        return unbacked(vm, limit_mib, await LIMITS.run(host_swap), needed)

    def _limited(self, prefix: str) -> dict[str, MemoryGroup]:
        """Running domains of ours that have a memory limit, by the files of their cgroups."""
        found: dict[str, MemoryGroup] = {}
        # A group is looked for once in a domain's run: it takes ten times as long as to read its limit.
        known, groups = self._groups, {}
        for file in sorted(self._pid_files.glob(f"{prefix}*.pid")):
            try:
                stat = file.stat()
                run = (stat.st_ino, stat.st_mtime_ns)
                before = known.get(file.stem)
                group = before[1] if before is not None and before[0] == run else None
                group = group or MemoryGroup(qemu_pid(file.stem, self._pid_files))
                if group.limit() is not None:
                    found[file.stem] = group
                groups[file.stem] = run, group
            except (CgroupError, OSError):
                continue  # it has ended
        self._groups = groups
        return found

    # --- changes -------------------------------------------------------------------------------------------------

    async def _write(self, domain: str, hard_mib: float | None) -> bool:
        """The hard limit through libvirt, of the running domain only: it must not outlive it.

        :returns: False if the usage is above it and could not be brought below.
        """
        kib = UNLIMITED_KIB if hard_mib is None else round(hard_mib * 1024)

        def write(connection: Any) -> bool:
            group: MemoryGroup | None = None
            try:
                found = connection.lookupByName(domain)
                if hard_mib is not None:
                    group = MemoryGroup(qemu_pid(domain, self._pid_files))
                    group.check_ours()
                    if group.version == 2 and group.usage() >= kib * 1024:
                        return False  # there a limit below the usage could kill
                    # Before each: one that was lifted at any moment has taken it away.
                    group.hold_at_limit(True)
                found.setMemoryParameters({"hard_limit": kib}, libvirt.VIR_DOMAIN_AFFECT_LIVE)
                if group is not None:
                    # And behind: lifted between the two, it would stand without.
                    group.hold_at_limit(True)
            except libvirt.libvirtError as error:
                if error.get_error_code() == libvirt.VIR_ERR_SYSTEM_ERROR and error.get_int1() == errno.EBUSY:
                    return False
                raise
            return True

        with _as_hypervisor_error():
            return await self._connection.call(write, modifies=domain, limit_s=30.0)

    def _lift_in_cgroup(self, domain: str) -> bool:
        try:
            group = MemoryGroup(qemu_pid(domain, self._pid_files))
            group.set_limit(None)
            group.hold_at_limit(False)
        except CgroupError as error:
            log.warning("the memory limit could not be lifted in the cgroup", domain=domain, why=str(error))
            return False
        return True

    async def _file(self, work: Callable[[], T], threads: Threads = LIMITS) -> T:
        with _as_hypervisor_error():
            return await threads.run(work)


def _have_it_wait(group: MemoryGroup) -> None:
    """Have a process wait at a limit that we have not set: it came back with a snapshot, or memory saved past us."""
    if group.version == 1 and not group.holds_at_limit():
        group.hold_at_limit(True)
        if group.limit() is None:  # it was lifted meanwhile
            group.hold_at_limit(False)


@contextmanager
def _logged(domain: str) -> Iterator[None]:
    """A limit that cannot be checked holds up no other."""
    try:
        yield
    except HypervisorError as error:
        log.warning("the memory limit could not be checked", domain=domain, why=str(error))


@contextmanager
def _as_hypervisor_error() -> Iterator[None]:
    try:
        yield
    except CgroupError as error:
        raise HypervisorError(str(error)) from error
