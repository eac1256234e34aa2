"""`ebb-adapter spark-worker`: the hook of a VM with Spark Workers, one a slot, which are started and given up here.

What is asked of the VM is passed on to the service beside the master, and its decision is the answer: VM-level is a
refusal, so that the guest's kernel and the hypervisor take over.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import time

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.registry import Ready, amount
from app_adapters.spark.master import url
from app_adapters.spark.policy import Deflation
from app_adapters.spark.relay import Relay
from app_adapters.spark.slots import Nominal, lost, slots
from app_adapters.spark.workers import Workers

# Not in /run: a machine that starts again may still be at a deflated size.
STATE_FILE = "/var/lib/ebbtide/spark-worker.json"
# Where an earlier version has it, for as long as the machine runs: the Workers that it names do, too.
EARLIER_STATE_FILE = "/run/ebbtide/spark-worker.json"
MEMORY_MIB = 1536.0
#: The guest agent gives a hook 2.5 s for its answer, of which the way there and back takes a part.
DECISION_LIMIT_S = 2.3
GRACE_S = 10.0
GRACE_SHARE = 0.4  # of the deadline, at most, for tasks that run to end by themselves
END_S = 8.0  # about what it takes to end executors that do not end by themselves, and to start a Worker
REGISTER_S = 30.0
LOOK_S = 0.2


class SparkWorkerAdapter(Adapter):
    """The Workers of this VM. `grace_s`: how long the executors of slots that are given up may finish their tasks and
    move their blocks before they are ended.

    The Workers go on when the adapter ends.
    """

    components = ("memory_mib", "cpu_cores")

    def __init__(self, workers: Workers, relay: Relay, nominal: Nominal, grace_s: float = GRACE_S) -> None:
        self._workers = workers
        self._relay = relay
        self._nominal = nominal
        self._grace_s = grace_s

    def begin(self) -> None:
        """Start the Workers that do not run, but not those that a deflation took: the VM may not hold them now.

        Raises: ApplicationError where one cannot be started.
        """
        self._workers.start(slots(self._workers.sizes, self._nominal))

    def capabilities(self) -> Capabilities:
        """Cores of the Workers that take work; PSS of all their processes."""
        now_mib, cores = round(self._workers.resident_mib(), 3), self._workers.cores
        memory = SizeRange(now_mib, 0.0, max(self._nominal.memory_mib, now_mib), 1.0)
        cpu = SizeRange(float(cores), 0.0, float(self._nominal.cores), 1.0)
        resources = {"memory_mib": memory, "cpu_cores": cpu}
        return Capabilities("spark-worker", __version__, resources, self._grace_s + END_S, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Ask the cluster, unless forced; promise the slots that are too many, and their part of the memory."""
        cores, now_mib = self._workers.cores, self._workers.resident_mib()
        left = min(slots({**self._workers.sizes, **target}, self._nominal), cores)
        wanted = self._size(left, lost(target, now_mib, self._nominal))
        if cores == 0:
            return Refusal("no Worker runs on this VM", None, dict.fromkeys(target, 0.0))
        if left == cores and (wanted.vm <= 0 or not self._workers.idle):
            reason = f"its {cores} slots fit into what the VM is to have"
            if wanted.vm > 0:
                self._told(wanted)
                return Refusal(f"{cores} slots cannot be fewer", None, {"cpu_cores": float(cores)})
            return Promise(dict.fromkeys(target, 0.0), 0.1, lambda: self._nothing(target, reason), reason)
        reason = "forced: tasks are killed"
        if mode != "force":
            own, reason = self._relay.ask(wanted, min(DECISION_LIMIT_S, deadline.remaining_s))
            if not own:
                return Refusal(reason, None, {"cpu_cores": float(cores), "memory_mib": round(now_mib, 3)})
        promised = {"cpu_cores": float(cores - left), "memory_mib": round(now_mib * (cores - left) / cores, 3)}
        return Promise(
            {name: promised[name] for name in target},
            END_S if mode == "force" else self._grace_s + END_S,
            lambda: self._shrink(left, target, mode, deadline, reason),
            reason,
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Start Workers for the slots that have room again; what runs is not touched."""
        cores, sizes = self._workers.cores, {**self._workers.sizes, **target}
        more = slots(sizes, self._nominal)
        vm = lost(target, 0.0, self._nominal)
        if more <= cores:
            return Promise({}, 0.1, lambda: self._unchanged(sizes, vm, f"{cores} slots stay"), f"{cores} slots stay")
        return Promise({}, END_S, lambda: self._grow(more, sizes, deadline), f"{cores} to {more} slots")

    def _shrink(self, left: int, target: dict[str, float], mode: str, deadline: Deadline, reason: str) -> Release:
        before, before_mib = self._workers.cores, self._workers.resident_mib()
        self._workers.fit({**self._workers.sizes, **target})
        notes: list[str] = []
        if mode == "force":
            self._workers.kill(before - left)
        else:
            notes += filter(None, [self._workers.decommission(before - left)])
            notes += self._drain(deadline)
            if deadline.called_off:
                self._workers.take_deaf_back()
            else:
                self._workers.end_deaf()
        registered, by, more_notes = self._registered(left, target, deadline)
        notes += more_notes + self._told(self._size(left))
        after_mib = self._workers.resident_mib()
        released = {
            "cpu_cores": float(max(before - registered, 0)),
            "memory_mib": round(max(before_mib - after_mib, 0.0), 3),
        }
        parts = [f"{before} to {registered} slots, {before_mib:.0f} to {after_mib:.0f} MiB", reason, *notes]
        return Release(
            {name: released[name] for name in target}, f"PSS of the Workers' processes, {by}", "; ".join(parts)
        )

    def _grow(self, more: int, sizes: dict[str, float], deadline: Deadline) -> Release:
        before = self._workers.cores
        self._workers.fit(sizes)
        self._workers.start(more)
        registered, by, notes = self._registered(more, {}, deadline)
        notes += self._told(self._size(more))
        reason = "; ".join([f"{before} to {registered} slots", *notes])
        return Release({}, by, reason, complete=registered >= more)

    def _nothing(self, target: dict[str, float], reason: str) -> Release:
        self._workers.fit({**self._workers.sizes, **target})
        return Release(dict.fromkeys(target, 0.0), "nothing", reason)

    def _unchanged(self, sizes: dict[str, float], vm: float, reason: str) -> Release:
        self._workers.fit(sizes)
        notes = self._told(self._size(self._workers.cores, vm))
        return Release({}, "nothing", "; ".join([reason, *notes]))

    def _drain(self, deadline: Deadline) -> list[str]:
        """Wait for the executors of given-up slots to end by themselves, for a while; returns notes."""
        end = time.monotonic() + min(self._grace_s, deadline.remaining_s * GRACE_SHARE)
        while self._workers.executors():
            if deadline.called_off:
                return ["called off: executors of given-up slots end by themselves, when their tasks have"]
            if time.monotonic() > end or deadline.passed:
                self._workers.end_executors()
                return ["executors were still at their tasks, or moved blocks, and were ended"]
            deadline.wait(LOOK_S)
        return []

    def _registered(self, count: int, target: dict[str, float], deadline: Deadline) -> tuple[int, str, list[str]]:
        """Wait until the master has so many cores of this host: how many it has, by what that is known, and notes.

        Workers of given-up slots are ended on the way where nobody misses their host's shuffle files, or the target
        has no room for them.
        """
        end = time.monotonic() + min(REGISTER_S, max(deadline.remaining_s, 1.0))
        notes: list[str] = []
        try:
            state = self._relay.state()
            while state.cores != count:
                if time.monotonic() > end or deadline.called_off:
                    notes = [f"the master does not have {count} cores of this host yet"]
                    break
                time.sleep(LOOK_S)
                state = self._relay.state()
            cores, by, applications = state.cores, "cores registered at the master", state.applications
        except ApplicationError as error:
            cores, by, applications = self._workers.cores, "Workers that run (the master could not be asked)", 1
            notes = [str(error)]
        fits = self._workers.resident_mib() <= target.get("memory_mib", math.inf)
        needed = applications and self._workers.cores
        keeps = deadline.called_off or (fits and needed)
        self._workers.end_idle(keep=self._nominal.cores if keeps else 0)
        return cores, by, notes

    def _told(self, size: Deflation) -> list[str]:
        try:
            self._relay.tell(size)
        except ApplicationError as error:
            return [f"the cluster was not told: {error}"]
        return []

    def _size(self, cores: int, vm: float = 0.0) -> Deflation:
        return Deflation(vm, 1 - cores / self._nominal.cores, float(self._nominal.cores))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service", type=url, required=True, metavar="URL", help="the service beside the master")
    parser.add_argument(
        "--cluster-token-file",
        default="/etc/ebbtide/spark-token",
        metavar="FILE",
        help="token of the cluster (default: %(default)s)",
    )
    parser.add_argument("--host", required=True, metavar="NAME", help="as the Workers' own --host: of this VM alone")
    parser.add_argument(
        "--worker-command", required=True, metavar="COMMAND", help="starts one Worker, with --cores 1; no shell"
    )
    parser.add_argument(
        "--cores", type=amount, default=float(os.cpu_count() or 1), metavar="N", help="slots (default: all CPUs)"
    )
    parser.add_argument(
        "--memory-mib",
        type=amount,
        default=MEMORY_MIB,
        metavar="N",
        help="resident MiB that all Workers and executors may grow to (default: %(default)g)",
    )
    parser.add_argument(
        "--grace-s", type=amount, default=GRACE_S, metavar="N", help="for tasks and blocks (default: %(default)g)"
    )
    parser.add_argument(
        "--state-file", default="", metavar="FILE", help=f"default: {STATE_FILE}, with --name spark-worker-NAME.json"
    )
    parser.add_argument("--log", default=os.devnull, metavar="FILE", help="the Workers' output (default: %(default)s)")


def _build(options: argparse.Namespace) -> SparkWorkerAdapter:
    try:
        command = shlex.split(options.worker_command)
    except ValueError as error:
        raise AdapterError(f"--worker-command: {error}") from None
    if ("--cores", "1") not in zip(command, command[1:]):
        raise AdapterError("--worker-command: needs --cores 1: each slot is a Worker of its own")
    if options.cores < 1 or options.cores != int(options.cores):
        raise AdapterError("--cores: must be a whole number of at least 1")
    if options.memory_mib <= 0:
        raise AdapterError("--memory-mib: must be more than 0")
    if not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", options.host):
        raise AdapterError(f"--host: {options.host} is no host name")
    relay = Relay(options.service, options.cluster_token_file, options.host)
    nominal = Nominal(int(options.cores), options.memory_mib)
    own = STATE_FILE if options.name == "spark-worker" else STATE_FILE.replace(".json", f"-{options.name}.json")
    state_file = options.state_file or own
    if state_file == STATE_FILE and os.path.exists(EARLIER_STATE_FILE):
        state_file = EARLIER_STATE_FILE
    return SparkWorkerAdapter(Workers(command, state_file, options.log), relay, nominal, options.grace_s)


READY = Ready(
    "Spark Workers on this machine, one a slot, started by the adapter",
    """Starts a Spark Worker of one core for each slot and serves the hook of its VM: it gives slots and their memory up
when the service beside the master (`ebb-adapter spark`) decides that, and refuses when the VM is better throttled. The
Workers go on when the adapter ends, and are found again by its state file.

example:
  ebb-adapter spark-worker --service http://10.0.0.5:7079 --host 10.0.0.11 --cores 4 --memory-mib 4800 \\
    --worker-command '/opt/spark/bin/spark-class org.apache.spark.deploy.worker.Worker --host 10.0.0.11
    --webui-port 0 --cores 1 --memory 1g spark://10.0.0.5:7077'""",
    _options,
    _build,
)
