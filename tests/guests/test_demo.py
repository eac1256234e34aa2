"""`ebb demo -o json` against a real lab, its document held against readings that the test takes itself.

While the demo runs, a thread of the test looks at libvirt (by virsh), at cgroup files and at smaps; it shares no code
with what the demo reads by.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ebbtide.cli.schemas import schema_of
from tests.guests.conftest import RunningLab

pytestmark = [pytest.mark.guest, pytest.mark.timeout(900)]

NAMES = ("low-1", "low-2")
BLOCK_MIB = 2.0
CPU = 0.011


@dataclass(frozen=True)
class Sample:
    """What the host shows of one domain, at one moment."""

    balloon_mib: float
    plugged_mib: float
    quotas: tuple[float | None, ...]
    resident_mib: float

    @property
    def memory_mib(self) -> float:
        return self.balloon_mib + self.plugged_mib


@dataclass
class Sampler:
    """Samples the domains of the demo for as long as it runs."""

    host: str
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {name: [] for name in NAMES})
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, name="sampler")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for name in NAMES:
                sample = take_sample(f"ebb-{self.host}.{name}")
                if sample is not None:
                    self.samples[name].append(sample)


def virsh(*words: str) -> str | None:
    done = subprocess.run(["virsh", "-q", *words], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else None


def take_sample(domain: str) -> Sample | None:
    """None while the domain does not run, or while it comes or goes."""
    xml, stats = virsh("dumpxml", domain), virsh("dommemstat", domain)
    if xml is None or stats is None:
        return None
    try:
        pid = int(Path(f"/run/libvirt/qemu/{domain}.pid").read_text())
        root = ElementTree.fromstring(xml)
        sizes = {int(cell.attrib["memory"]) for cell in root.iterfind("./cpu/numa/cell")}
        device = root.find("./devices/memory[@model='virtio-mem']/target")
        assert device is not None
        sizes.add(int(device.findtext("size", "0")))
        found = re.search(r"^actual (\d+)", stats, re.MULTILINE)
        assert found
        return Sample(
            balloon_mib=int(found[1]) / 1024,
            plugged_mib=int(device.findtext("current", "0")) / 1024,
            quotas=quotas_of(pid),
            resident_mib=resident_of(pid, sizes),
        )
    except (OSError, ValueError):
        return None


def quotas_of(pid: int) -> tuple[float | None, ...]:
    """From the cgroup of QEMU's emulator thread: those of the vCPUs are its neighbours."""
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    v1 = next((group for names, group in groups.items() if "cpu" in names.split(",")), None)
    if v1 is not None:
        home = (Path("/sys/fs/cgroup/cpu") / v1.lstrip("/")).parent
        files = sorted(home.glob("vcpu[0-9]*/cpu.cfs_quota_us"))
        numbers = [(int(f.read_text()), int(f.with_name("cpu.cfs_period_us").read_text())) for f in files]
        return tuple(None if quota < 0 else quota / period for quota, period in numbers)
    home = (Path("/sys/fs/cgroup") / groups[""].lstrip("/")).parent
    words = [file.read_text().split() for file in sorted(home.glob("vcpu[0-9]*/cpu.max"))]
    return tuple(None if quota == "max" else int(quota) / int(period) for quota, period in words)


def resident_of(pid: int, sizes_kib: set[int]) -> float:
    text = Path(f"/proc/{pid}/smaps").read_text()
    blocks = re.findall(r"^\S+ rw-p \S+ \S+ 0 *\nSize: +(\d+) kB\n(?:.*\n)*?Rss: +(\d+) kB", text, re.MULTILINE)
    return sum(int(rss) for size, rss in blocks if int(size) in sizes_kib) / 1024


@pytest.fixture(scope="module")
def run(lab: RunningLab) -> tuple[dict[str, Any], Sampler]:
    """One run of the demo for all tests of this file."""
    with Sampler(lab.state.hosts[0].id) as sampler:
        done = subprocess.run(
            [sys.executable, "-m", "ebbtide.cli.main", "demo", "--output", "json"],
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
            env=lab.environment,
        )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, schema_of("demo"))
    failed = [check for check in document["checks"] if not check["ok"]]
    assert done.returncode == (1 if failed else 0), done.stderr
    return document, sampler


def vm_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(vm for vm in document["vms"] if vm["name"] == name)


def least(sampler: Sampler, name: str) -> Sample:
    """The sample at the smallest bound; among equals the last, when all had settled."""
    samples = sampler.samples[name]
    assert samples, f"{name} was never seen"
    smallest = min(sample.memory_mib for sample in samples)
    return [sample for sample in samples if sample.memory_mib == smallest][-1]


def test_the_document_has_the_promised_shape(run: tuple[dict[str, Any], Sampler]) -> None:
    document, _ = run
    assert set(document) == {"accelerator", "seconds", "vms", "core_changes", "ranking", "checks"}
    assert document["accelerator"] in ("kvm", "qemu")
    for vm in document["vms"]:
        assert set(vm) == {"name", "priority", "nominal", "deflated", "restored", "ledger", "readings"}
        assert set(vm["readings"]) == {"before", "deflated", "restored"}
        for row in vm["ledger"]:
            assert set(row) == {"layer", "resource", "asked", "promised", "verified", "seconds", "reason"}
    assert [vm["name"] for vm in document["vms"]] == list(NAMES)


def test_every_check_of_the_demo_passes(run: tuple[dict[str, Any], Sampler]) -> None:
    document, _ = run
    assert len(document["checks"]) >= 15
    assert [check for check in document["checks"] if not check["ok"]] == []


def test_each_layer_gives_a_tenth_of_what_some_vm_was_asked_for(run: tuple[dict[str, Any], Sampler]) -> None:
    document, _ = run
    best = dict.fromkeys(("application", "guest", "hypervisor"), 0.0)
    for vm in document["vms"]:
        for resource in ("cpu_cores", "memory_mib"):
            asked = vm["nominal"][resource] - vm["deflated"][resource]
            assert asked > 0
            for row in vm["ledger"]:
                if row["resource"] == resource and row["layer"] in best:
                    best[row["layer"]] = max(best[row["layer"]], row["verified"] / asked)
    assert min(best.values()) >= 0.1, best


@pytest.mark.parametrize("name", NAMES)
def test_the_ledger_adds_up_to_the_fall_of_the_bound_that_the_host_shows(
    run: tuple[dict[str, Any], Sampler], name: str
) -> None:
    document, sampler = run
    vm, low = vm_of(document, name), least(sampler, name)
    given = {
        resource: sum(
            row["verified"]
            for row in vm["ledger"]
            if row["resource"] == resource and row["layer"] in ("guest", "hypervisor")
        )
        for resource in ("cpu_cores", "memory_mib")
    }
    before = max(sample.memory_mib for sample in sampler.samples[name])
    assert before == pytest.approx(vm["nominal"]["memory_mib"], abs=BLOCK_MIB)
    assert given["memory_mib"] == pytest.approx(before - low.memory_mib, abs=BLOCK_MIB)
    online = vm["readings"]["deflated"]["cpus_online"]
    # Memory may be down before the quota is set: of all samples at that size the one with the least.
    there = [sample for sample in sampler.samples[name] if sample.memory_mib <= low.memory_mib + BLOCK_MIB]
    quotas = [[sample.quotas[number] for number in online] for sample in there]
    cpu = min(sum(1.0 if quota is None else quota for quota in each) for each in quotas)
    assert given["cpu_cores"] == pytest.approx(vm["nominal"]["cpu_cores"] - min(cpu, len(online)), abs=CPU)


@pytest.mark.parametrize("name", NAMES)
def test_the_demos_readings_are_those_that_the_host_shows(run: tuple[dict[str, Any], Sampler], name: str) -> None:
    document, sampler = run
    reading, low = vm_of(document, name)["readings"]["deflated"], least(sampler, name)
    assert reading["balloon_actual_mib"] == pytest.approx(low.balloon_mib, abs=BLOCK_MIB)
    assert reading["virtio_mem_current_mib"] == pytest.approx(low.plugged_mib, abs=BLOCK_MIB)


@pytest.mark.parametrize("name", NAMES)
def test_resident_memory_falls_to_the_bound_and_at_most_a_twentieth_more(
    run: tuple[dict[str, Any], Sampler], name: str
) -> None:
    document, sampler = run
    low = least(sampler, name)
    before = vm_of(document, name)["readings"]["before"]
    assert max(sample.resident_mib for sample in sampler.samples[name]) > low.resident_mib
    assert before["resident_mib"] > low.memory_mib * 1.05, "nothing would have had to fall"
    assert low.resident_mib <= low.memory_mib * 1.05


@pytest.mark.parametrize("name", NAMES)
def test_memcached_really_shrank_and_is_back_with_everything_else(
    run: tuple[dict[str, Any], Sampler], name: str
) -> None:
    document, sampler = run
    vm = vm_of(document, name)
    before, deflated, restored = (vm["readings"][when] for when in ("before", "deflated", "restored"))
    assert before["memcached_rss_mib"] >= 250
    assert deflated["memcached_limit_mib"] < before["memcached_limit_mib"]
    assert deflated["memcached_rss_mib"] <= deflated["memcached_limit_mib"] + 10 + BLOCK_MIB
    assert len(deflated["cpus_online"]) < len(before["cpus_online"])
    assert vm["restored"] == vm["nominal"]
    for reading in ("memcached_limit_mib", "cpus_online", "virtio_mem_current_mib", "balloon_actual_mib"):
        assert restored[reading] == pytest.approx(before[reading], abs=BLOCK_MIB), reading
    assert restored["memcached_rss_mib"] >= 0.9 * before["memcached_rss_mib"]
    last = sampler.samples[name][-1]
    assert last.memory_mib == pytest.approx(vm["nominal"]["memory_mib"], abs=BLOCK_MIB)
    assert all(quota is None or quota >= 1 - CPU for quota in last.quotas)


@pytest.mark.parametrize("name", NAMES)
def test_the_matcher_heard_of_both_changes_and_ranks_the_machine(
    run: tuple[dict[str, Any], Sampler], name: str
) -> None:
    document, _ = run
    changes = sorted((c for c in document["core_changes"] if c["machine"] == name), key=lambda c: c["sequence"])
    assert any(change["cores_after"] < change["cores_before"] for change in changes)
    assert changes[-1]["cores_after"] == vm_of(document, name)["nominal"]["cpu_cores"]
    row = next(row for row in document["ranking"] if row["machine"] == name)
    assert (row["cores"], row["last_change"]) == (3, "growth")
    assert row["completion_probability"] is None or 0 <= row["completion_probability"] <= 1


def test_the_demo_leaves_no_vm_behind(run: tuple[dict[str, Any], Sampler], lab: RunningLab) -> None:
    left = (virsh("list", "--all", "--name") or "").split()
    assert [name for name in left if name.startswith(f"ebb-{lab.state.hosts[0].id}.")] == []
