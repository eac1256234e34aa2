"""Slurm as an engine, by its own programs: held jobs, a required node and release, usable cores as ``Gres=vcore``.

Each attempt is a job of its own that Slurm may not requeue: a job runs once at the most, and who begins it again is the
tasks' state machine. slurm.conf needs ``GresTypes=vcore`` and ``Gres=vcore:N`` with each node
(docs/reference/tasks.md).
"""

from __future__ import annotations

import os
import pwd
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ebbtide.matcher.engines.records import Records, batch_script, exit_code_of, merged
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm_programs import SlurmPrograms
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.matcher.match.attempts import RECOUNTED, AttemptState, Claim, EngineMachine, Look, Seen, task_of
from ebbtide.matcher.match.tasks import TaskOrder

_GRES: Final = re.compile(r"(?:^|,)(?:gres[:/])?vcore(?::[a-z_]\w*)?[:=](\d+)")
_RUNNING: Final = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED"}
_DOWN: Final = {"DOWN", "FAIL", "FAILING", "ERROR", "FUTURE", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "UNKNOWN"}
#: With this reason Slurm drains a node that registers while its jobs hold cores whose number was changed by us.
_MISTRUSTED: Final = "gres/vcore count changed"
_STANDING_STILL: Final = {"DRAIN", "MAINTENANCE", "MAINT"}
#: Of two jobs with one attempt's name: the one that says more.
_RANK: Final = {
    AttemptState.RUNNING: 3,
    AttemptState.RELEASED: 2,
    AttemptState.HELD: 1,
    AttemptState.ENDED: 0,
    AttemptState.GONE: -1,
}


class Slurm:
    """One cluster."""

    kind = "slurm"

    def __init__(self, settings: EngineSettings) -> None:
        if settings.directory is None:
            raise EngineSettingsError("directory must be given")
        self._settings = settings
        self._directory: Path = settings.directory
        self._records = Records(settings.directory)
        self._programs = SlurmPrograms(settings.slurm_conf, settings.answer_s)
        #: Ids of our living jobs, by attempt.
        self._jobs: dict[str, list[int]] = {}
        #: Cores that others' jobs hold, by node.
        self._foreign: Counter[str] = Counter()

    async def start(self) -> None:
        await self._records.check()

    async def stop(self) -> None:
        """Nothing is held open."""

    async def look(self, wanted: Collection[str]) -> Look:
        before = await self._records.read(wanted)
        jobs = await self._ours()
        machines = await self._machines(self._foreign)
        after = await self._records.read({*wanted, *jobs})
        return Look(machines, merged(jobs, before, after))

    async def submit(self, attempt: str, order: TaskOrder) -> None:
        await self._ours()
        if self._jobs.get(attempt):
            return
        user = order.user or self._settings.user
        await self._records.prepare(attempt, user)
        output = await self._programs.run(
            "sbatch",
            "--parsable",
            "--hold",
            "--no-requeue",
            f"--job-name={attempt}",
            f"--comment={attempt}",
            f"--cpus-per-task={order.cores}",
            f"--gres=vcore:{order.cores}",
            "--nodes=1",
            "--ntasks=1",
            "--output=/dev/null",
            f"--chdir={self._directory}",
            *_identity(user),
            text=batch_script(self._directory, attempt, order.command, "$SLURMD_NODENAME"),
        )
        number = output.strip().partition(";")[0]
        if number.isdigit():
            self._jobs[attempt] = [int(number)]

    async def release(self, attempt: str, machine: str) -> None:
        if attempt not in self._jobs:
            await self._ours()
        for number in self._jobs.get(attempt, [])[:1]:
            await self._scontrol("update", f"JobId={number}", f"ReqNodeList={machine}")
            await self._scontrol("release", str(number))

    async def cancel(self, attempt: str, begun_too: bool = True) -> None:
        record = await self._records.seal(attempt)
        if record.claim is Claim.SEALED or begun_too:
            # By name: a slurmctld that has lost its state gives the same ids to others.
            await self._programs.run("scancel", f"--name={attempt}")

    async def forget(self, attempt: str) -> None:
        """Slurm forgets by itself."""

    async def set_usable_cores(self, machine: str, cores: int) -> None:
        await self._scontrol("update", f"NodeName={machine}", f"Gres=vcore:{cores}")

    async def drain(self, machine: str, reason: str) -> None:
        await self._scontrol("update", f"NodeName={machine}", "State=DRAIN", f"Reason={reason}")

    async def undrain(self, machine: str) -> None:
        await self._scontrol("update", f"NodeName={machine}", "State=UNDRAIN")

    async def _scontrol(self, *words: str) -> None:
        await self._programs.run("scontrol", *words)

    async def _ours(self) -> dict[str, Seen]:
        """Our jobs by attempt, and their ids. A job of an attempt's name that is another user's is foreign: every user
        of a cluster can read the names of jobs, and give them to its own.
        """
        found = await self._programs.json("squeue", "--states=all")
        names = {str(job.get("name") or "") for job in found.get("jobs") or []}
        owners = await self._records.owners([name for name in names if task_of(name, self._settings.label) is not None])
        seen: dict[str, Seen] = {}
        jobs: dict[str, list[int]] = {}
        foreign: Counter[str] = Counter()
        # Ids rise: the newest comes last, and first in the list of an attempt.
        for job in sorted(found.get("jobs") or [], key=lambda job: int(job["job_id"])):
            attempt = str(job.get("name") or "")
            if attempt not in owners or owners[attempt] != _number(job.get("user_id")):
                foreign.update(_held_cores(job))
                continue
            one = _seen(job)
            if one.lives:
                jobs[attempt] = [int(job["job_id"]), *jobs.get(attempt, [])]
            if attempt not in seen or _RANK[one.state] >= _RANK[seen[attempt].state]:
                seen[attempt] = one
        self._jobs, self._foreign = jobs, foreign
        return seen

    async def _machines(self, foreign: Mapping[str, int]) -> dict[str, EngineMachine]:
        found = await self._programs.json("sinfo")
        machines = (_machine(node) for node in found.get("nodes") or [])
        return {made.name: replace(made, foreign_cores=foreign.get(made.name, 0)) for made in machines}


def _identity(user: str | None) -> list[str]:
    """Options that have a job be this user's; None: the manager's own."""
    if user is None or os.geteuid() != 0:
        return []
    # With the user alone the group stays root's.
    return [f"--uid={user}", f"--gid={pwd.getpwnam(user).pw_gid}"]


def _seen(job: Mapping[str, Any]) -> Seen:
    """A job of ``squeue --json``."""
    state = str(job.get("job_state") or "")
    reason = str(job.get("state_reason") or "")
    machine = str(job.get("nodes") or "") or None
    if state == "PENDING":
        held = _number(job.get("priority")) == 0 or reason.startswith("JobHeld")
        required = str(job.get("required_nodes") or "") or None
        return Seen(AttemptState.HELD if held else AttemptState.RELEASED, None if held else required, reason=reason)
    if state in _RUNNING:
        return Seen(AttemptState.RUNNING, machine)
    words = " ".join(word for word in (state.lower().replace("_", " "), reason) if word and word != "None")
    code = _exit_code(job.get("exit_code"))
    if code and state == "FAILED":
        words += f", exit code {code}"
    # Other states are Slurm's own doing: it ends a job with the code of a signal, or with none.
    told = {"COMPLETED": 0, "FAILED": exit_code_of(code) or None}.get(state)
    return Seen(AttemptState.ENDED, machine, exit_code=told, reason=words)


def _exit_code(value: Any) -> int:
    """A wait status, or what newer versions make of it."""
    if isinstance(value, Mapping) and "return_code" in value:
        return _number(value["return_code"])
    return _number(value) >> 8


def _machine(node: Mapping[str, Any]) -> EngineMachine:
    """A node of ``sinfo --json``."""
    flags = {str(flag) for flag in node.get("state_flags") or []}
    state = str(node.get("state") or "").upper()
    up = state not in _DOWN and not flags & _DOWN
    drained = str(node.get("reason") or "it is drained") if flags & _STANDING_STILL else ""
    if drained.startswith(_MISTRUSTED) and "INVALID_REG" not in flags:
        # It has registered since: only the mark is left.
        drained = RECOUNTED
    most = int(_number(node.get("cpus")))
    return EngineMachine(
        name=str(node["name"]),
        most_cores=most,
        usable_cores=_vcores(str(node.get("gres") or "")),
        up=up,
        drained=drained,
    )


def _held_cores(job: Mapping[str, Any]) -> dict[str, int]:
    """Cores that a running job holds, by node."""
    if job.get("job_state") not in _RUNNING:
        return {}
    nodes = str(job.get("nodes") or "")
    if nodes and not set("[,") & set(nodes):
        return {nodes: _number(job.get("cpus"))}
    resources = job.get("job_resources") or {}
    allocated = resources.get("allocated_nodes") or {}
    rows = allocated.values() if isinstance(allocated, Mapping) else allocated
    return {str(row.get("nodename")): len(row.get("cores") or ()) for row in rows if isinstance(row, Mapping)}


def _vcores(gres: str) -> int:
    return sum(int(number) for number in _GRES.findall(gres))


def _number(value: Any) -> int:
    """A number, which newer versions wrap together with whether it is set."""
    if isinstance(value, Mapping):
        value = value.get("number")
    return int(value) if isinstance(value, int | float) else 0
