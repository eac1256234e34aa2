"""`ebb-adapter spark-worker`: the hook of a VM with a Spark Worker, which is started, shrunk and ended here.

What is asked of the VM is passed on to the service beside the master, and its decision is the answer: VM-level is a
refusal, so that the guest's kernel and the hypervisor take over.
"""

from __future__ import annotations

import argparse
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
from app_adapters.spark.relay import Relay, Undecided
from app_adapters.spark.slots import Nominal, lost, slots
from app_adapters.spark.worker_process import WorkerProcess

MEMORY_MIB = 1536.0
#: The guest agent gives a hook 2.5 s for its answer, of which the way there and back takes a part.
DECISION_LIMIT_S = 2.3
GRACE_S = 10.0
GRACE_SHARE = 0.4  # of the deadline, at most, for tasks that run to end by themselves
REGISTER_S = 30.0
SETTLE_S = 10.0
SETTLED_SHARE = 0.03
SETTLED_LOOK_S = 0.5
LOOK_S = 0.2


class SparkWorkerAdapter(Adapter):
    """A Worker of this VM. `grace_s`: how long tasks that run may go on before their executor is ended.

    The Worker goes on when the adapter ends.
    """

    components = ("memory_mib", "cpu_cores")

    def __init__(self, process: WorkerProcess, relay: Relay, nominal: Nominal, grace_s: float = GRACE_S) -> None:
        self._process = process
        self._relay = relay
        self._nominal = nominal
        self._grace_s = grace_s

    def begin(self) -> None:
        """Start the Worker, unless it runs or was ended by a deflation: the VM may not hold it now.

        Raises: ApplicationError where it cannot be started.
        """
        if not self._process.running and not self._process.given_up:
            self._process.start(self._nominal.cores)

    def capabilities(self) -> Capabilities:
        """Cores of the Worker that runs, 0 for none; PSS of its processes."""
        now_mib, cores = round(self._process.resident_mib(), 3), self._process.cores
        memory = SizeRange(now_mib, 0.0, max(self._nominal.memory_mib, now_mib), 1.0)
        cpu = SizeRange(float(cores), 0.0, float(self._nominal.cores), 1.0)
        resources = {"memory_mib": memory, "cpu_cores": cpu}
        return Capabilities("spark-worker", __version__, resources, self._grace_s + 8.0, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Ask the cluster, unless forced; promise the slots that are too many, and what their executor holds."""
        cores, now_mib = self._process.cores, self._process.resident_mib()
        left = min(slots(target, self._nominal), cores)
        wanted = Deflation(lost(target, now_mib, self._nominal), self._own(left), float(self._nominal.cores))
        if cores == 0:
            return Refusal("no Worker runs on this VM", None, dict.fromkeys(target, 0.0))
        if left == cores:
            reason = f"its {cores} slots fit into what the VM is to have"
            if wanted.vm > 0:
                self._told(Deflation(wanted.vm, self._own(cores), float(self._nominal.cores)))
                return Refusal(f"{cores} slots cannot be fewer", None, {"cpu_cores": float(cores)})
            return Promise(dict.fromkeys(target, 0.0), 0.1, lambda: self._nothing(target, reason), reason)
        reason = "forced: tasks are killed"
        if mode != "force":
            try:
                own, reason = self._relay.ask(wanted, min(DECISION_LIMIT_S, deadline.remaining_s))
            except Undecided as error:
                return Refusal(str(error), error.retry_after_s)
            if not own:
                return Refusal(reason, None, {"cpu_cores": float(cores), "memory_mib": round(now_mib, 3)})
        promised = {"cpu_cores": float(cores - left)}
        # A new executor with fewer cores grows again, up to what the VM still holds.
        promised["memory_mib"] = round(now_mib if left == 0 else max(now_mib - self._nominal.memory_mib, 0.0), 3)
        return Promise(
            {name: promised[name] for name in target},
            (0.0 if mode == "force" else self._grace_s) + 8.0,
            lambda: self._shrink(left, target, mode, deadline, reason),
            reason,
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Register the Worker with more cores; what runs on it may end first."""
        cores = self._process.cores
        # A Worker that runs holds its memory already; one that memory has ended comes back with it.
        wanted = {"cpu_cores": target.get("cpu_cores", float(cores))} if cores else target
        more = slots(wanted, self._nominal)
        vm = lost(target, 0.0, self._nominal)
        if more <= cores:
            return Promise({}, 0.1, lambda: self._unchanged(vm, f"{cores} slots stay"), f"{cores} slots stay")
        reason = f"{cores} to {more} slots"
        return Promise({}, self._grace_s + 8.0, lambda: self._grow(more, deadline), reason)

    def _shrink(self, left: int, target: dict[str, float], mode: str, deadline: Deadline, reason: str) -> Release:
        before_cores, before_mib = self._process.cores, self._process.resident_mib()
        tree = self._process.pids()
        notes = [] if mode == "force" else self._drain(deadline)
        notes += self._replace(left, tree, deadline, settle="memory_mib" in target)
        notes += self._told(Deflation(0.0, self._own(left), float(self._nominal.cores)))
        registered, by = self._registered()
        after_mib = self._process.resident_mib()
        if self._process.cores and notes:
            # What was started takes them as soon as the master knows it, and its executors' memory with them.
            registered = max(registered, self._process.cores)
            after_mib = max(after_mib, min(before_mib, self._nominal.memory_mib))
        released = {
            "cpu_cores": float(max(before_cores - registered, 0)),
            "memory_mib": round(max(before_mib - after_mib, 0.0), 3),
        }
        parts = [f"{before_cores} to {registered} slots, {before_mib:.0f} to {after_mib:.0f} MiB", reason, *notes]
        return Release(
            {name: released[name] for name in target}, f"PSS of the Worker's processes, {by}", "; ".join(parts)
        )

    def _grow(self, more: int, deadline: Deadline) -> Release:
        before = self._process.cores
        tree = self._process.pids()
        notes = self._drain(deadline) if before else []
        notes += self._replace(more, tree, deadline, settle=False)
        notes += self._told(Deflation(0.0, self._own(more), float(self._nominal.cores)))
        registered, by = self._registered()
        reason = "; ".join([f"{before} to {registered} slots", *notes])
        return Release({}, by, reason, complete=registered >= more)

    def _nothing(self, target: dict[str, float], reason: str) -> Release:
        return Release(dict.fromkeys(target, 0.0), "nothing", reason)

    def _unchanged(self, vm: float, reason: str) -> Release:
        notes = self._told(Deflation(vm, self._own(self._process.cores), float(self._nominal.cores)))
        return Release({}, "nothing", "; ".join([reason, *notes]))

    def _drain(self, deadline: Deadline) -> list[str]:
        """No new tasks, and a while for those that run; returns notes."""
        end = time.monotonic() + min(self._grace_s, deadline.remaining_s * GRACE_SHARE)
        try:
            self._relay.decommission()
            while True:
                tasks = self._relay.state().active_tasks
                if tasks == 0:
                    return []
                if time.monotonic() > end or deadline.passed:
                    return [f"{'some' if tasks is None else tasks} tasks were still running and are killed"]
                deadline.wait(LOOK_S)
        except ApplicationError as error:
            return [f"tasks are killed: {error}"]

    def _replace(self, cores: int, tree: dict[int, int], deadline: Deadline, settle: bool) -> list[str]:
        """End the Worker, start one with so many cores, and wait until the master knows; returns notes."""
        self._process.stop(tree)
        if cores > 0:
            self._process.start(cores)
        end = time.monotonic() + min(REGISTER_S, max(deadline.remaining_s, 1.0))
        try:
            while self._relay.state().cores != cores:
                if time.monotonic() > end:
                    return [f"the master does not have {cores} cores of this host yet"]
                time.sleep(LOOK_S)
        except ApplicationError as error:
            return [str(error)]
        if settle and cores > 0:
            self._settle(min(SETTLE_S, deadline.remaining_s))
        return []

    def _settle(self, limit_s: float) -> None:
        """Wait until the new executors have grown to their first size."""
        end = time.monotonic() + limit_s
        size_mib = 0.0
        while time.monotonic() < end:
            last_mib, size_mib = size_mib, self._process.resident_mib()
            if abs(size_mib - last_mib) < SETTLED_SHARE * size_mib and len(self._process.pids()) > 1:
                return
            time.sleep(min(SETTLED_LOOK_S, max(end - time.monotonic(), 0.0)))

    def _registered(self) -> tuple[int, str]:
        """Cores that the master has for this host, and by what that is known."""
        try:
            return self._relay.state().cores, "cores registered at the master"
        except ApplicationError:
            return self._process.cores, "cores of the running Worker (the master could not be asked)"

    def _told(self, size: Deflation) -> list[str]:
        try:
            self._relay.tell(size)
        except ApplicationError as error:
            return [f"the cluster was not told: {error}"]
        return []

    def _own(self, cores: int) -> float:
        return 1 - cores / self._nominal.cores


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service", type=url, required=True, metavar="URL", help="the service beside the master")
    parser.add_argument(
        "--cluster-token-file",
        default="/etc/ebbtide/spark-token",
        metavar="FILE",
        help="token of the cluster (default: %(default)s)",
    )
    parser.add_argument("--host", required=True, metavar="NAME", help="as the Worker's own --host: one Worker a host")
    parser.add_argument(
        "--worker-command", required=True, metavar="COMMAND", help="starts the Worker; {cores} is put in; no shell"
    )
    parser.add_argument(
        "--cores", type=amount, default=float(os.cpu_count() or 1), metavar="N", help="at full size (default: all CPUs)"
    )
    parser.add_argument(
        "--memory-mib",
        type=amount,
        default=MEMORY_MIB,
        metavar="N",
        help="resident MiB that Worker and executors may grow to (default: %(default)g)",
    )
    parser.add_argument(
        "--grace-s", type=amount, default=GRACE_S, metavar="N", help="for tasks that run (default: %(default)g)"
    )
    parser.add_argument(
        "--state-file", default="/run/ebbtide/spark-worker.json", metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--log", default=os.devnull, metavar="FILE", help="the Worker's output (default: %(default)s)")


def _build(options: argparse.Namespace) -> SparkWorkerAdapter:
    try:
        command = shlex.split(options.worker_command)
    except ValueError as error:
        raise AdapterError(f"--worker-command: {error}") from None
    if not any("{cores}" in word for word in command):
        raise AdapterError("--worker-command: needs {cores} where the number of cores goes")
    if options.cores < 1 or options.cores != int(options.cores):
        raise AdapterError("--cores: must be a whole number of at least 1")
    if options.memory_mib <= 0:
        raise AdapterError("--memory-mib: must be more than 0")
    if not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", options.host):
        raise AdapterError(f"--host: {options.host} is no host name")
    relay = Relay(options.service, options.cluster_token_file, options.host)
    nominal = Nominal(int(options.cores), options.memory_mib)
    return SparkWorkerAdapter(WorkerProcess(command, options.state_file, options.log), relay, nominal, options.grace_s)


READY = Ready(
    "a Spark Worker on this machine, started by the adapter",
    """Starts a Spark Worker and serves the hook of its VM: it gives cores (and the memory of its executors) up when the
service beside the master (`ebb-adapter spark`) decides that, and refuses when the VM is better throttled. The Worker
goes on when the adapter ends, and is found again by its state file.

example:
  ebb-adapter spark-worker --service http://10.0.0.5:7079 --host 10.0.0.11 --cores 4 --memory-mib 3000 \\
    --worker-command '/opt/spark/bin/spark-class org.apache.spark.deploy.worker.Worker --host 10.0.0.11
    --cores {cores} --memory 2g spark://10.0.0.5:7077'""",
    _options,
    _build,
)
