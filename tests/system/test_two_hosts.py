"""Your own two hosts: Debian 12 with systemd, the packages, what is printed typed in, and real VMs that shrink.

All of it is emulated, and the VMs are emulated inside: what takes a second elsewhere takes a minute here, so that the
tests wait for what is said, never for a time. They build on one another, in the order of this file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.debian_guest import DebianGuest
from tests.rest.test_units import EXPOSURE
from tests.system.machines import Machines, machines

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
pytestmark = [pytest.mark.system, pytest.mark.timeout(5400)]
#: How long anything may take that ends at once on a machine of one's own.
LIMIT_S = 1200.0
INSTALL = "cd /root/packages && DEBIAN_FRONTEND=noninteractive apt-get -q -y install ./ebbtide_*.deb"
#: A start takes a minute of an emulated CPU; systemd gives up after 90 s.
PATIENT = r"mkdir -p /etc/systemd/system.conf.d; printf '[Manager]\nDefaultTimeoutStartSec=1200\n' >$_/slow.conf"
WORDS = "EBB_MANAGER=https://10.0.0.1:7100 EBB_TOKEN_FILE=/etc/ebbtide/token EBB_CA=/etc/ebbtide/tls/ca.pem"
TLS = """
ebb certificates /etc/ebbtide/tls --manager 10.0.0.1
chgrp -R ebbtide /etc/ebbtide/tls && chmod 750 /etc/ebbtide/tls && chmod 640 /etc/ebbtide/tls/*.key
cat >>/etc/ebbtide/manager.toml <<'END'
listen = "10.0.0.1:7100"
tls_certificate = "/etc/ebbtide/tls/ebb-manager.pem"
tls_key = "/etc/ebbtide/tls/ebb-manager.key"
client_ca = "/etc/ebbtide/tls/ca.pem"
ca_key = "/etc/ebbtide/tls/ca.key"
END
systemctl enable --now ebb-manager
"""
TEMPLATES = """
mkdir -p /etc/ebbtide/templates && cp /root/packages/small.xml /etc/ebbtide/templates/
echo 'templates = ["/etc/ebbtide/templates"]' >>/etc/ebbtide/hostagent.toml
mkdir -p /var/lib/ebbtide/image && qemu-img create -q -f qcow2 /var/lib/ebbtide/image/base.qcow2 16M
"""
GROUP = "/sys/fs/cgroup/machine.slice/machine-qemu*{}.scope/libvirt"


@dataclass
class Cluster:
    """The manager's machine, the host's, and what was typed into them."""

    manager: DebianGuest
    host: DebianGuest
    begin_s: float = field(default_factory=time.monotonic)
    said: list[str] = field(default_factory=list)

    def type(self, guest: DebianGuest, script: str, code: int | None = 0) -> str:
        """Run it, and write down when, where and what was said."""
        begin_s = time.monotonic() - self.begin_s
        text = guest.run(script, code, LIMIT_S)
        where = "manager" if guest is self.manager else "host"
        self.said.append(f"[{begin_s / 60:.1f} min] {where}# {script.strip()}\n{text}")
        print(self.said[-1], flush=True)
        return text

    def ebb(self, words: str, code: int | None = 0) -> str:
        return self.type(self.manager, f"{WORDS} ebb {words}", code)

    def target(self, vm: str, words: str, reached: str) -> None:
        """Ask for a size until it is reached: under emulation a call of libvirt may take longer than the agent waits.

        :param reached: as `ebb vm list` has it.
        """
        for _ in range(4):
            self.ebb(f"vm target {vm} {words} --deadline-s 600", code=None)
            if re.search(rf"^{vm} .*{reached}", self.ebb("vm list"), re.MULTILINE):
                return
        raise AssertionError(f"{vm} does not reach {reached}:\n{self.host.run('journalctl -u ebb-hostagent -n 40')}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    dist = tmp_path_factory.mktemp("system") / "dist"
    subprocess.run(["bash", ROOT / "scripts/packages.sh", sys.executable, dist], check=True)
    (package,) = dist.glob("ebbtide_*.deb")
    with machines([package, *(HERE / name for name in ("small.xml", "small-vm.sh", "web.xml"))]) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(pair: Machines) -> Iterator[Cluster]:
    """Both installed, the manager up; on the host a VM that nobody has told of Ebbtide is booting."""
    made = Cluster(pair.a, pair.b)
    try:
        with ThreadPoolExecutor() as threads:
            for done in [threads.submit(made.type, guest, f"{PATIENT}; {INSTALL}") for guest in (pair.a, pair.b)]:
                done.result()
        made.type(pair.b, "bash /root/packages/small-vm.sh && virsh define /root/packages/web.xml && virsh start web")
        made.type(pair.a, TLS)
        yield made
    finally:
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build/two-hosts.txt").write_text("\n".join(made.said))


def test_a_daemon_whose_options_cannot_be_is_not_started_again(cluster: Cluster) -> None:
    said = cluster.type(cluster.host, "systemctl start ebb-hostagent", code=1)
    assert "failed because the control process exited" in said
    cluster.type(cluster.host, "sleep 5; journalctl -u ebb-hostagent --no-pager -n 5")
    assert properties(cluster.host, "ebb-hostagent", "NRestarts", "SubState", "ExecMainStatus") == ["0", "failed", "2"]


def test_the_manager_is_ready_and_says_what_it_does(cluster: Cluster) -> None:
    said = cluster.type(cluster.manager, "systemctl status --no-pager ebb-manager")
    assert "active (running)" in said
    assert 'Status: "leads with epoch 1: 0 of 0 hosts ready"' in said


def test_the_host_joins_by_the_line_that_is_printed(cluster: Cluster) -> None:
    line = cluster.ebb("host invite").strip()
    assert line.startswith("ebb-hostagent join https://10.0.0.1:7100 ")
    said = cluster.type(cluster.host, f"{TEMPLATES}{line}")
    assert "the service ebb-hostagent runs" in said
    assert 'templates = ["/etc/ebbtide/templates"]' in cluster.host.run("cat /etc/ebbtide/hostagent.toml")
    cluster.manager.eventually(f"{WORDS} ebb host list", r"host-b +ready +active", LIMIT_S)
    said = cluster.type(cluster.host, "systemctl status --no-pager ebb-hostagent")
    assert re.search(r'Status: "host-b is active: .*; 0 VMs"', said)
    again = cluster.type(cluster.host, line, code=1)
    assert "this host has joined a cluster" in again


def test_a_vm_that_ran_before_is_deflated(cluster: Cluster) -> None:
    cluster.ebb("vm adopt web --host host-b --minimum-cpu-cores 0.25 --minimum-memory-mib 192")
    # Nothing that has no limit is put right for having one.
    assert "a cap of" not in cluster.host.run("journalctl -u ebb-hostagent --no-pager")
    cluster.target("web", "--cpu-cores 0.5", r"0\.5 cores, 384 MiB +0\.25 cores")
    minutes = (time.monotonic() - cluster.begin_s) / 60
    cluster.said.append(f"from the packages to the first deflation: {minutes:.1f} min\n")
    held = cluster.type(cluster.host, f"cat {GROUP.format('web')}/vcpu0/cpu.max; virsh schedinfo web | grep _quota")
    assert held.startswith("50000 100000\n")
    assert re.search(r"vcpu_quota *: 50000\n", held)


def test_a_vm_is_deployed_and_deflated_by_cpu_and_balloon(cluster: Cluster) -> None:
    cluster.ebb("vm create batch --template small --cpu-cores 1 --memory-mib 384 --minimum-share 0.4 --deadline-s 600")
    cluster.host.eventually("virsh dommemstat ebb-host-b.batch", r"usable (?!0\n)\d", LIMIT_S)
    cluster.target("batch", "--memory-mib 256", "1 cores, 256 MiB")
    cluster.target("batch", "--cpu-cores 0.5", r"0\.5 cores, 256 MiB")
    held = cluster.type(
        cluster.host,
        "virsh list; virsh dommemstat ebb-host-b.batch; cd {}; cat vcpu0/cpu.max cpu.max".format(GROUP.format("batch")),
    )
    assert re.search(r"^actual (\d+)$", held, re.MULTILINE)[1] == str(256 * 1024)  # type: ignore[index]  # fails then
    assert re.search(r"^50000 100000\n51500 100000$", held, re.MULTILINE)


def test_the_figures_of_systemd_are_those_of_the_page(cluster: Cluster) -> None:
    page = (ROOT / "docs/how-to/run-as-a-service.md").read_text()
    for unit, most in EXPOSURE.items():
        if unit == "ebb-guestagent":
            continue
        said = cluster.type(cluster.host, f"systemd-analyze security --no-pager {unit} | tail -1")
        found = re.search(r"exposure level for \S+: ([0-9.]+)", said)
        assert found is not None
        assert re.search(rf"\| `{unit}` \| [0-9.]+ \| {re.escape(found[1])} \|", page)
        assert float(found[1]) <= most


def test_a_reload_counts_at_once_and_restarts_nothing(cluster: Cluster) -> None:
    before = properties(cluster.manager, "ebb-manager", "MainPID")
    cluster.type(
        cluster.manager, "echo 'log_level = \"debug\"' >>/etc/ebbtide/manager.toml; systemctl reload ebb-manager"
    )
    cluster.manager.eventually("journalctl -u ebb-manager --no-pager", "event=reloaded what=.*log_level", LIMIT_S)
    assert properties(cluster.manager, "ebb-manager", "MainPID") == before


def test_a_loop_that_hangs_is_killed_and_started_again(cluster: Cluster) -> None:
    cluster.type(cluster.manager, "kill -STOP $(systemctl show -P MainPID ebb-manager)")
    cluster.manager.eventually("systemctl show -P NRestarts ebb-manager", r"^[1-9]", LIMIT_S)
    said = cluster.manager.eventually("systemctl status --no-pager ebb-manager", "leads with epoch 2", LIMIT_S)
    cluster.said.append(said)
    assert "Watchdog timeout" in cluster.type(
        cluster.manager, "journalctl -u ebb-manager --no-pager | grep -i watchdog"
    )
    cluster.manager.eventually(f"{WORDS} ebb host list", r"host-b +ready +active", LIMIT_S)


def test_an_agent_that_is_killed_in_a_deflation_ends_it(cluster: Cluster) -> None:
    # What is asked for comes through, or is given back: what the agent says holds is what libvirt and the kernel hold.
    cluster.ebb("vm target batch --cpu-cores 1 --memory-mib 384 --deadline-s 600", code=None)
    cluster.type(
        cluster.manager,
        f"nohup env {WORDS} ebb vm target batch --memory-mib 250 --deadline-s 600 >/run/target.txt 2>&1 &\nsleep 1",
    )
    cluster.host.eventually("virsh dommemstat ebb-host-b.batch | head -1", r"actual (?!393216)", LIMIT_S)
    cluster.type(cluster.host, "systemctl kill -s KILL ebb-hostagent; virsh dommemstat ebb-host-b.batch | head -1")
    cluster.host.eventually("systemctl show -P NRestarts,SubState ebb-hostagent", r"1\s+running", LIMIT_S)
    cluster.manager.eventually("cat /run/target.txt; pgrep -f 'ebb vm target' || echo ended", "ended", LIMIT_S)
    cluster.type(cluster.manager, "cat /run/target.txt")
    said = cluster.ebb("vm list")
    size = re.search(r"^batch .*1 cores, 384 MiB +[0-9.]+ cores, ([0-9.]+) MiB", said, re.MULTILINE)
    assert size is not None, said
    actual = cluster.host.run("virsh dommemstat ebb-host-b.batch | head -1").split()[1]
    assert abs(int(actual) / 1024 - float(size[1])) <= 2


def test_stopped_it_leaves_vms_as_they_are(cluster: Cluster) -> None:
    look = f"virsh list --name; virsh dommemstat ebb-host-b.batch | head -1; cat {GROUP.format('web')}/vcpu0/cpu.max"
    before = cluster.type(cluster.host, look)
    cluster.type(cluster.host, "systemctl stop ebb-hostagent")
    assert properties(cluster.host, "ebb-hostagent", "SubState", "Result") == ["dead", "success"]
    assert cluster.type(cluster.host, look) == before


def properties(guest: DebianGuest, unit: str, *names: str) -> list[str]:
    return [guest.run(f"systemctl show -P {name} {unit}", limit_s=LIMIT_S).strip() for name in names]
