"""Calls to libvirt: bounded, limited in time, off the event loop. Against libvirt's own test driver."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.deflation.cascade.mechanisms import Mechanism
from ebbtide.deflation.cascade.reconcile import cap_of, quota_of
from ebbtide.messages.common import Vector
from ebbtide.messages.vms import VMSpec
from hostagent.errors import DomainGone, HypervisorError, HypervisorTimeout
from hostagent.libvirt.libvirt_hypervisor import LibvirtHypervisor
from hostagent.libvirt.libvirt_readings import LEAST_QUOTA_US, limit_cores, limit_cpu, quota_parameters
from hostagent.libvirt.settings import LibvirtSettings
from hostagent.libvirt_connection import IN_FLIGHT, LibvirtConnection, start_event_thread
from hostagent.mechanisms import host_facts
from hostagent.state.intents import Intent, Phase, from_element, to_element, to_qualified_element


@pytest.fixture
async def connection() -> AsyncIterator[LibvirtConnection]:
    start_event_thread()
    made = LibvirtConnection("test:///default")
    yield made
    await made.close()


async def test_a_call_runs_in_another_thread(connection: LibvirtConnection) -> None:
    thread, names = await connection.call(
        lambda c: (threading.current_thread(), [domain.name() for domain in c.listAllDomains()])
    )
    assert thread is not threading.current_thread()
    assert names == ["test"]


async def test_an_unknown_domain_is_told_from_other_errors(connection: LibvirtConnection) -> None:
    with pytest.raises(DomainGone):
        await connection.call(lambda c: c.lookupByName("nobody"))
    with pytest.raises(HypervisorError, match="Start Tag") as caught:
        await connection.call(lambda c: c.defineXML("<nonsense"))
    assert not isinstance(caught.value, DomainGone)


async def test_a_connection_that_cannot_be_opened_is_an_error_of_the_hypervisor() -> None:
    start_event_thread()
    broken = LibvirtConnection("qemu+unix:///system?socket=/nonexistent")
    with pytest.raises(HypervisorError):
        await broken.call(lambda c: c.getVersion())
    await broken.close()


async def test_a_call_that_hangs_is_given_up_but_keeps_its_domain_until_it_returns(
    connection: LibvirtConnection,
) -> None:
    release = threading.Event()
    with pytest.raises(HypervisorTimeout, match="did not answer"):
        await connection.call(lambda c: release.wait(20), modifies="low-1", limit_s=0.1)
    with pytest.raises(HypervisorTimeout, match="an earlier libvirt call"):
        await connection.call(lambda c: None, modifies="low-1", limit_s=0.1)
    # Another domain's call, and a reading, go through meanwhile.
    assert await connection.call(lambda c: "other", modifies="low-2", limit_s=5.0) == "other"
    release.set()
    assert await connection.call(lambda c: "again", modifies="low-1", limit_s=5.0) == "again"


async def test_a_caller_that_is_cancelled_while_it_waits_leaves_nothing_locked(connection: LibvirtConnection) -> None:
    release = threading.Event()
    busy = [asyncio.create_task(connection.call(lambda c: release.wait(20))) for _ in range(IN_FLIGHT)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(connection.call(lambda c: None, modifies="low-1"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    release.set()
    await asyncio.gather(*busy)
    assert await connection.call(lambda c: "through", modifies="low-1", limit_s=5.0) == "through"


async def test_modifying_calls_on_one_domain_never_overlap(connection: LibvirtConnection) -> None:
    running, most = 0, 0

    def work(_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    await asyncio.gather(*(connection.call(work, modifies="low-1") for _ in range(8)))
    assert most == 1


async def test_at_most_four_calls_are_in_flight_on_one_connection(connection: LibvirtConnection) -> None:
    lock = threading.Lock()
    used: dict[int, int] = {}
    most = 0

    def work(c: Any) -> None:
        nonlocal most
        with lock:
            used[id(c)] = used.get(id(c), 0) + 1
            most = max(most, used[id(c)])
        time.sleep(0.05)
        with lock:
            used[id(c)] -= 1

    await asyncio.gather(*(connection.call(work) for _ in range(12)))
    assert most <= IN_FLIGHT
    assert len(used) == 3, "all at once, on as many connections as that takes"


async def test_a_busy_domain_leaves_the_others_connections_to_work_on(connection: LibvirtConnection) -> None:
    release = threading.Event()
    stuck = [asyncio.create_task(connection.call(lambda c: release.wait(20))) for _ in range(IN_FLIGHT + 1)]
    await asyncio.sleep(0)
    assert await connection.call(lambda c: c.getVersion(), limit_s=5.0) > 0
    release.set()
    await asyncio.gather(*stuck)


async def test_the_loop_goes_on_while_libvirt_hangs(connection: LibvirtConnection) -> None:
    loop, turned = asyncio.get_running_loop(), threading.Event()

    def hang(_: Any) -> bool:
        loop.call_soon_threadsafe(turned.set)
        return turned.wait(20)

    assert await connection.call(hang, limit_s=30.0)


@given(st.floats(min_value=0.0001, max_value=64))
def test_a_quota_is_never_one_that_libvirt_refuses_or_ignores(cores: float) -> None:
    parameters = quota_parameters(cores)
    quota, period = parameters["vcpu_quota"], parameters["vcpu_period"]
    if cores >= 1:
        assert quota == -1
        return
    assert LEAST_QUOTA_US <= quota <= period <= 1_000_000
    assert quota / period <= max(cores, LEAST_QUOTA_US / 1_000_000)
    assert quota / period >= cores - 1e-4


@pytest.mark.parametrize(("quota", "cores"), [(-1, None), (17592186044415, None), (51500, 0.515)])
def test_no_limit_is_none_under_both_versions_of_control_groups(quota: int, cores: float | None) -> None:
    assert limit_cores({"global_quota": quota, "global_period": 100_000}, "global") == cores


class Groups:
    """The groups of a domain as cgroup v1 has them: no vCPU's quota is above the cap of them all."""

    def __init__(self) -> None:
        self.limits: dict[str, Any] = {"vcpu_quota": -1, "global_quota": -1}
        self.caps: list[float | None] = []

    def schedulerParametersFlags(self, flags: int) -> dict[str, Any]:  # libvirt's name
        return dict(self.limits)

    def setSchedulerParametersFlags(self, given: dict[str, Any], flags: int) -> None:  # libvirt's name
        self.limits |= given
        quota, cap = (limit_cores(self.limits, whose) for whose in ("vcpu", "global"))
        assert quota is None or cap is None or quota <= cap + 1e-4, "the kernel refuses it"
        if "global_quota" in given:
            self.caps.append(cap)


@given(st.lists(st.tuples(st.floats(min_value=0.05, max_value=4), st.integers(min_value=1, max_value=4)), min_size=2))
def test_a_cap_is_not_lifted_for_another_one_and_written_only_where_it_changes(
    sizes: list[tuple[float, int]],
) -> None:
    groups = Groups()
    for cores, online in sizes:
        quota, cap = quota_of(cores, online), cap_of(cores, 4)
        before, groups.caps = limit_cores(groups.limits, "global"), []
        limit_cpu(groups, quota, cap, 0)
        assert limit_cores(groups.limits, "global") == pytest.approx(cap, abs=1e-4)
        assert limit_cores(groups.limits, "vcpu") == pytest.approx(quota, abs=1e-3)
        after = limit_cores(groups.limits, "global")
        assert groups.caps == ([] if after == before else [after])


def intent(**fields: Any) -> Intent:
    spec = VMSpec(name="low-1", nominal=Vector(cpu_cores=3, memory_mib=1024))
    base = Intent(
        owner="host-a", spec=spec, boot_mib=512, phase=Phase.SETTLED, target=spec.nominal, committed=spec.nominal
    )
    return base.changed(**fields)


def test_an_intent_comes_back_from_its_metadata_as_it_was() -> None:
    stored = intent(generation=7, phase=Phase.DEFLATING)
    assert from_element(to_element(stored, "u")) == stored
    assert from_element(to_qualified_element(stored)) == stored


@pytest.mark.parametrize("text", ["<intent>{}</intent>", "<intent/>", "<intent>", "", "<intent>[1</intent>"])
def test_metadata_that_does_not_hold_together_is_no_intent(text: str) -> None:
    assert from_element(text) is None


async def test_metadata_that_cannot_be_read_are_told_once_and_again_after_they_could(tmp_path: Path) -> None:
    later, known = "<intent>{}</intent>", to_element(intent(), "u")
    domain = MagicMock()
    domain.name.return_value = "ebb-host-a.low-1"
    hypervisor = LibvirtHypervisor(LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path))
    try:
        with structlog.testing.capture_logs() as logged:
            for text, told in ((later, 1), (later, 1), (known, 1), (later, 2)):
                domain.metadata.return_value = text
                assert (hypervisor._ours(domain)[0] is None) == (text is later)
                assert [line["domain"] for line in logged] == ["ebb-host-a.low-1"] * told
    finally:
        await hypervisor.close()


async def test_an_intent_survives_in_a_domain_of_libvirt(connection: LibvirtConnection) -> None:
    stored = intent(generation=3)

    def write_and_read(c: Any) -> str:
        domain = c.lookupByName("test")
        domain.setMetadata(2, to_element(stored, domain.UUIDString()), "ebb", "urn:ebbtide:intent:1", 0)
        return str(domain.metadata(2, "urn:ebbtide:intent:1"))

    assert from_element(await connection.call(write_and_read)) == stored


async def test_findings_of_a_domain_come_from_a_pool_thread_with_versions_asked_once_per_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[threading.Thread] = []
    versions = host_facts.Versions.of

    def counted(connection: Any) -> host_facts.Versions:
        asked.append(threading.current_thread())
        return versions(connection)

    monkeypatch.setattr(host_facts.Versions, "of", counted)
    hypervisor = LibvirtHypervisor(LibvirtSettings("host-a", "test:///default", "qemu", tmp_path, tmp_path))
    try:
        found = await hypervisor.sizes.findings("test")
        assert await hypervisor.sizes.findings("test") == found
        with pytest.raises(DomainGone):
            await hypervisor.sizes.findings("nobody")
    finally:
        await hypervisor.close()
    assert [finding.mechanism for finding in found] == list(Mechanism)
    assert {f.mechanism: f.reason for f in found}[Mechanism.DISK] == "on all disks together"
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()
