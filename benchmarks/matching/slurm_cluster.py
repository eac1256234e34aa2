"""A real Slurm cluster on loopback, in a directory of its own: munged, slurmctld and as many slurmd as wanted.

Debian's slurmd can run several times on one machine. Nothing listens beyond loopback, if this machine's own name leads
there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.host.alone import BEARS
from ebbtide.errors import EbbError
from ebbtide.lab.cluster import free_ports

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")
#: Whose tasks they are.
USER: Final = "nobody"
#: How long a daemon may take to come up, seconds.
LIMIT_S: Final = 180.0

CONFIGURATION: Final = """\
ClusterName=ebbtide
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
CommunicationParameters=NoAddrCache,NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=vcore
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=2
MessageTimeout=10
SlurmdTimeout={slurmd_timeout_s}
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_min_prio_reserve=4294967000
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP LLN={least_loaded}
{more}
"""
#: When a job's room is free again stands in slurmctld's log, why it waits in sched.log, what became of it in jobs.txt.
TELLING: Final = """\
SlurmctldDebug=debug2
SlurmSchedLogFile={directory}/sched.log
SlurmSchedLogLevel=7
JobCompType=jobcomp/filetxt
JobCompLoc={directory}/jobs.txt
MinJobAge=60
"""
NODE: Final = "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={cores} Gres=vcore:{cores}"


class SlurmError(EbbError):
    """The cluster does not come up."""


class SlurmCluster:
    """Use as a context manager; what it started is gone at the end.

    :param cores: of each node.
    :param telling: its log says of each job why it waits.
    """

    def __init__(
        self,
        nodes: int = 4,
        cores: int = 4,
        slurmd_timeout_s: int = 10,
        *,
        telling: bool = False,
        least_loaded: bool = False,
    ) -> None:
        self.names = [f"n{number:0{len(str(nodes))}}" for number in range(1, nodes + 1)]
        self._telling = telling
        #: Jobs go to the nodes with the most idle CPUs, not to those that fit best.
        self._least_loaded = least_loaded
        self.cores = cores
        self._slurmd_timeout_s = slurmd_timeout_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.directory = Path()
        self._lives = 0

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def tasks(self) -> Path:
        """The manager's directory for records and outputs."""
        return self.directory / "tasks"

    @property
    def runs(self) -> Path:
        """A directory of the user whose tasks they are."""
        return self.directory / "runs"

    def __enter__(self) -> Self:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing:
            raise SlurmError(
                f"there is no {', '.join(missing)} on this machine: scripts/install-deps.sh installs Slurm"
            )
        self.directory = Path(tempfile.mkdtemp(prefix="ebb-slurm-"))
        try:
            self._prepare()
            self.start_daemon("munged")
            self._until("munged", (self.directory / "munge/socket").exists)
            self.start_daemon("slurmctld")
            for name in self.names:
                self.start_daemon(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything, tasks as well, and remove the directory."""
        for name in ("slurmctld", *self.names):
            self.kill(name)
        _signal(self._strangers(), signal.SIGKILL)
        self.kill("munged")
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _prepare(self) -> None:
        directory, host = self.directory, socket.gethostname().partition(".")[0]
        directory.chmod(0o755)
        for name in ("munge", "state", "spool", "tasks", "runs", *(f"spool/{name}" for name in self.names)):
            (directory / name).mkdir(mode=0o755)
        shutil.chown(self.runs, USER)
        self.tasks.chmod(0o711)
        key = directory / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        ports = free_ports(len(self.names) + 1)
        nodes = [
            NODE.format(name=name, host=host, port=port, cores=self.cores)
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        self.conf.write_text(
            CONFIGURATION.format(
                host=host,
                port=ports[0],
                directory=directory,
                slurmd_timeout_s=self._slurmd_timeout_s,
                nodes="\n".join(nodes),
                names=",".join(self.names),
                least_loaded="YES" if self._least_loaded else "NO",
                more=TELLING.format(directory=directory) if self._telling else "",
            )
        )
        (directory / "gres.conf").write_text(f"Name=vcore Count={self.cores} Flags=CountOnly\n")

    def start_daemon(self, name: str) -> None:
        """``munged``, ``slurmctld`` or the slurmd of a node."""
        munge = self.directory / "munge"
        argv = {
            "munged": [
                "munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key",
                f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
            ],
            "slurmctld": ["slurmctld", "-D", "-f", str(self.conf)],
        }.get(name, ["slurmd", "-D", "-f", str(self.conf), "-N", name])  # fmt: skip
        with (self.directory / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                argv, cwd="/", env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def restart_controller(self) -> None:
        """A new slurmctld, which gives no number of a job again that an earlier one may have forgotten.

        Where it does, Slurm drains the node that knows that number ("Duplicate jobid").
        """
        self.kill("slurmctld")
        self._lives += 1
        with self.conf.open("a") as file:
            file.write(f"FirstJobId={1000 * self._lives}\n")
        self.start_daemon("slurmctld")

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's programs, which bear a benchmark's mark where there is one."""
        # Last: slurmstepd writes its title over the first of them.
        mark = {BEARS: os.environ[BEARS]} if BEARS in os.environ else {}
        return {"PATH": os.environ["PATH"], "SLURM_CONF": str(self.conf), "LC_ALL": "C", **mark}

    def kill(self, name: str) -> None:
        """``kill -9`` of one daemon; what it has started goes on."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def kill_node(self, name: str) -> None:
        """A whole node at once: its slurmd, and all that it has started."""
        self.kill(name)
        # Parents first: none sees a child end, and writes that down. Nor do they stand still first: of a session whose
        # head dies under it the kernel ends by SIGHUP what stands still, and has it go on for that.
        _signal(self._strangers(name), signal.SIGKILL)
        # What was about to begin.
        _signal(self._strangers(name), signal.SIGKILL)

    def wait_ready(self) -> None:
        """Until the controller knows every node as idle."""
        wanted = set(self.names)

        def ready() -> bool:
            for name in self.names:
                # On a busy machine slurmctld may hang up on a slurmd that registers, which ends by that.
                if self._processes[name].poll() == -signal.SIGPIPE:
                    self.start_daemon(name)
            return wanted <= self.idle()

        self._until("all nodes", ready)

    def idle(self) -> set[str]:
        """Nodes that wait for work."""
        done = self.command("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False)
        return set(done.split())

    def command(self, *argv: str, check: bool = True) -> str:
        """One of Slurm's programs."""
        done = subprocess.run(argv, env=self.environment, cwd="/", capture_output=True, text=True, timeout=LIMIT_S)
        if check and done.returncode:
            raise SlurmError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            for name, process in self._processes.items():
                if process.poll() not in (None, -signal.SIGPIPE):
                    raise SlurmError(f"{name} ended with {process.returncode}: {self._last_words(name)}")
            if time.monotonic() > deadline:
                raise SlurmError(f"{what} did not come up within {LIMIT_S:g} s: {self._last_words('slurmctld')}")
            time.sleep(0.05)

    def _last_words(self, name: str) -> str:
        logs = [self.directory / f"{name}.out", self.directory / f"slurmd.{name}.log", self.directory / f"{name}.log"]
        lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
        return " | ".join(lines[-3:])

    def _strangers(self, node: str | None = None) -> list[int]:
        """Step daemons of this cluster, of one node or of all, and what runs under them: parents before children."""
        table, roots = _processes(), set()
        spool = f"{self.directory}/spool/"
        for pid in table:
            environment = _environment(pid)
            ours = environment.get("SLURM_CONF") == str(self.conf) or any(spool in v for v in environment.values())
            if ours and node in (None, environment.get("SLURMD_NODENAME")):
                roots.add(pid)
        # The daemon of a step says its node nowhere.
        roots |= {table[pid] for pid in roots if _command(table.get(pid, 0)).startswith("slurmstepd")}
        spared = {process.pid for process in self._processes.values()} | {os.getpid()}
        found = set(roots)
        while more := {pid for pid, parent in table.items() if parent in found} - found:
            found |= more
        return sorted(found - spared, key=lambda pid: _depth(pid, table))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _processes() -> dict[int, int]:
    """The parent of every process."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                table[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return table


def _depth(pid: int, parents: dict[int, int]) -> int:
    """How many are above it."""
    above: set[int] = set()
    while (pid := parents.get(pid, 0)) not in {0, *above}:
        above.add(pid)
    return len(above)


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
