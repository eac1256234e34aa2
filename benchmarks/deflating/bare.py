"""The operations of a deflation without an agent: plain libvirt-python and guest calls, and the same waits.

What the agent's own time is held against: no intent is written, nothing is read before or after a step; a device is
looked at often enough that the wait is the device's own time. Steps overlap as the agent's did: each begins when those
have ended that had ended before it began there. Where the agent took the guest's word that it has given a step, so does
this. A guest is asked no more often than the agent asks it: under emulation each answer takes time from what the guest
has to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchmarkFailed
from benchmarks.host.recorder import Replayable, Step
from ebbtide.deflation.cascade.cascade import POLL_S
from ebbtide.deflation.cascade.memory_lane import SLACK_MIB
from ebbtide.lab.guest_link import channel_path
from ebbtide.lab.services import open_libvirt
from ebbtide.messages.guest import ApplicationPromise, ApplicationRelease, CpusSet
from hostagent.libvirt.libvirt_hypervisor import GUEST_CHANNEL
from hostagent.libvirt.libvirt_readings import limit_cpu
from hostagent.vm.executor import guest_status
from hostagent.vm.guest_link import GuestLink

LOOK_S = 0.02
STALLED_S = 10.0
GUEST_LIMIT_S = 30.0


class Stalled(BenchmarkFailed):
    """A device did not get to where the agent had brought it: this run cannot be compared."""


class FellShort(Stalled):
    """It was the agent that did not get all that it was to take."""


class Bare:
    """One domain, moved by hand."""

    def __init__(self, connection: Any, domain: Any, link: GuestLink) -> None:
        self._connection = connection
        self._domain = domain
        self._link = link
        #: What is plugged by the guest's word; None: as libvirt says.
        self._plugged_at_mib: float | None = None

    async def replay(self, steps: Sequence[Replayable]) -> float:
        """Carry out what was recorded, each step once those before it have ended; returns the seconds it took.

        Raises Stalled, LabError or an error of the guest link.
        """
        request_id = f"bare-{uuid.uuid4().hex[:12]}"
        ended = [asyncio.Event() for _ in steps]

        async def in_turn(one: Replayable, end: asyncio.Event) -> None:
            for before in one.after:
                await ended[before].wait()
            await self._carry_out(one.step, request_id)
            end.set()

        began_s = time.perf_counter()
        pairs = zip(steps, ended, strict=True)
        tasks = [asyncio.create_task(in_turn(one, end), name=f"bare:{one.step.name}") for one, end in pairs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return time.perf_counter() - began_s

    async def _carry_out(self, step: Step, request_id: str) -> None:
        if "." in step.name:
            await self._in_guest(step, request_id)
        elif step.name == "ask_plugged":
            await self._given(step.arguments[0])
        else:
            await asyncio.to_thread(self._resize, step)

    async def _in_guest(self, step: Step, request_id: str) -> None:
        params = dict(step.arguments[0])
        if "request_id" in params:
            params["request_id"] = request_id
        if step.name == "cpus.set":
            await self._link.call(step.name, params, CpusSet, GUEST_LIMIT_S)
        elif step.name == "application.status":
            await self._released(params)
        else:
            await self._link.call(step.name, params, ApplicationPromise, GUEST_LIMIT_S)

    async def _released(self, params: dict[str, Any]) -> None:
        """Until so much is released as the agent had found, or the application has done what it can."""
        until_mib = params.get("until_released_mib", 0.0)  # none: the agent had no answer
        while True:
            asked_s = time.monotonic()
            report = await self._link.call("application.status", params, ApplicationRelease, GUEST_LIMIT_S)
            if report.state != "running" or report.released.memory_mib >= until_mib:
                return
            await asyncio.sleep(asked_s + POLL_S - time.monotonic())

    async def _given(self, goal_mib: float) -> None:
        """A step of plugged memory that the agent took the guest's word for."""
        if self._plugged_at_mib is None:
            self._plugged_at_mib = await asyncio.to_thread(self._plugged_mib)
        until_mib = await self._total_mib() - (self._plugged_at_mib - goal_mib) + SLACK_MIB
        await asyncio.to_thread(self._plug, goal_mib)
        moved_s, least_mib = time.monotonic(), float("inf")
        while (total_mib := await self._total_mib(until_mib)) > until_mib:
            if total_mib < least_mib:
                moved_s, least_mib = time.monotonic(), total_mib
            elif time.monotonic() - moved_s > STALLED_S:
                raise Stalled(f"the guest did not say that it has given all but {goal_mib:g} MiB")
        self._plugged_at_mib = goal_mib

    async def _total_mib(self, until_mib: float | None = None) -> float:
        """The guest's own word; it answers once it has no more than ``until_mib``, or after a while."""
        status = await guest_status(self._link, True, GUEST_LIMIT_S, until_mib)
        if status is None:
            raise Stalled("the guest does not answer")
        return status.memory.total_mib

    def _plug(self, size_mib: float) -> None:
        import libvirt

        device = _device(self._domain.XMLDesc())
        requested = device.find("target/requested")
        if requested is None:
            raise BenchmarkFailed("the domain has no virtio-mem device")
        requested.set("unit", "KiB")
        requested.text = str(round(size_mib * 1024))
        xml = ElementTree.tostring(device, encoding="unicode")
        self._domain.updateDeviceFlags(xml, libvirt.VIR_DOMAIN_AFFECT_LIVE)

    def _resize(self, step: Step) -> None:
        import libvirt

        live, size = libvirt.VIR_DOMAIN_AFFECT_LIVE, step.arguments[0]
        if step.name == "set_quota":
            limit_cpu(self._domain, size, step.arguments[1], live)
        elif step.name == "set_balloon":
            self._domain.setMemoryFlags(round(size * 1024), live)
            self._wait(self._balloon_mib, size)
        elif step.name == "set_plugged":
            self._plug(size)
            self._wait(self._plugged_mib, size)
            self._plugged_at_mib = None
        else:
            # The agent made up for what a device did not give, which it does not do in every turn.
            raise Stalled(f"{step.name} cannot be done bare")

    def _wait(self, size_mib: Any, goal_mib: float) -> None:
        moved_s, last_mib = time.monotonic(), size_mib()
        while abs(last_mib - goal_mib) >= 0.5:
            if time.monotonic() - moved_s > STALLED_S:
                raise Stalled(f"a device stopped at {last_mib:g} MiB instead of {goal_mib:g}")
            time.sleep(LOOK_S)
            latest_mib = size_mib()
            if latest_mib != last_mib:
                moved_s, last_mib = time.monotonic(), latest_mib

    def _balloon_mib(self) -> float:
        return float(self._domain.memoryStats()["actual"]) / 1024

    def _plugged_mib(self) -> float:
        return float(_device(self._domain.XMLDesc()).findtext("target/current", "0")) / 1024


@contextlib.asynccontextmanager
async def bare(uri: str, name: str) -> AsyncIterator[Bare]:
    """Take a domain in hand that no agent looks after now. Raises LabError, BenchmarkFailed."""
    connection = await asyncio.to_thread(open_libvirt, uri)
    greeted = asyncio.Event()

    async def channel() -> Path | None:
        return channel_path(await asyncio.to_thread(domain.XMLDesc), GUEST_CHANNEL)

    try:
        domain = await asyncio.to_thread(connection.lookupByName, name)
        link = GuestLink(name, channel, lambda hello: greeted.set())
        talking = asyncio.create_task(link.run(), name=f"bare:{name}")
        try:
            async with asyncio.timeout(GUEST_LIMIT_S):
                await greeted.wait()
            yield Bare(connection, domain, link)
        except TimeoutError as error:
            raise BenchmarkFailed(f"the guest of {name} does not answer") from error
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
    finally:
        await asyncio.to_thread(connection.close)


def _device(xml: str) -> ElementTree.Element:
    device = ElementTree.fromstring(xml).find("./devices/memory[@model='virtio-mem']")
    if device is None:
        raise BenchmarkFailed("the domain has no virtio-mem device")
    return device
