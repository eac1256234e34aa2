"""Slurm as an engine, by its own programs: held jobs, a required node and release, usable cores as ``Gres=vcore``.

Each attempt is a job of its own that Slurm may not requeue: a job runs once at the most, and who begins it again is the
tasks' state machine. slurm.conf needs ``GresTypes=vcore`` and ``Gres=vcore:N`` with each node
(docs/reference/tasks.md).
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ebbtide.matcher.engines.records import Records, batch_script, merged
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm_json import jobs_of, machines_of, other_gres_of
from ebbtide.matcher.engines.slurm_programs import SlurmPrograms
from ebbtide.matcher.errors import EngineFull, EngineRefused, EngineSettingsError
from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen, task_of
from ebbtide.matcher.match.tasks import TaskOrder

#: Of two jobs with one attempt's name: the one that says more.
_RANK: Final = {
    AttemptState.RUNNING: 3,
    AttemptState.RELEASED: 2,
    AttemptState.HELD: 1,
    AttemptState.ENDED: 0,
    AttemptState.GONE: -1,
}
#: What slurmctld says of a job that was submitted a moment ago, and how long is waited between tries, seconds.
_LATER: Final = "try again in a bit"
_PAUSES_S: Final = (0.1, 0.2, 0.4, 0.8)
#: And where somebody is to change a node who may not.
_NO_ADMINISTRATOR: Final = "invalid user id"


class Slurm:
    """One cluster."""

    kind = "slurm"

    def __init__(self, settings: EngineSettings) -> None:
        if settings.directory is None:
            raise EngineSettingsError("directory must be given")
        self._settings = settings
        self._directory: Path = settings.directory
        self._records = Records(settings.directory, settings.answer_s)
        self._programs = SlurmPrograms(settings.slurm_conf, settings.answer_s)
        #: Ids of our living jobs, by attempt.
        self._jobs: dict[str, list[int]] = {}
        #: Whether they are known, but for attempts whose submission was not answered.
        self._asked = False
        self._unanswered: set[str] = set()
        #: Cores that others' jobs hold, by node.
        self._foreign: Counter[str] = Counter()
        #: Generic resources other than ours, by node.
        self._other_gres: dict[str, str] = {}

    async def start(self) -> None:
        await self._records.check()

    async def stop(self) -> None:
        """Nothing is held open."""

    async def look(self, wanted: Collection[str], begun: Collection[str] = ()) -> Look:
        self._unanswered.intersection_update(wanted)
        before = await self._records.read(wanted, begun)
        jobs = await self._ours({attempt for attempt, record in before.items() if record.anew})
        machines = await self._machines(self._foreign)
        after = await self._records.read({*wanted, *jobs}, begun)
        return Look(machines, merged(jobs, before, after))

    async def submit(self, attempt: str, order: TaskOrder) -> None:
        if not self._asked or attempt in self._unanswered:
            await self._ours()
        if self._jobs.get(attempt):
            self._unanswered.discard(attempt)
            return
        user = order.user or self._settings.user
        await self._records.prepare(attempt, user)
        # It may ask a directory service, which may hang.
        identity = await self._records.in_thread(lambda: _identity(user))
        # Until it is answered: it may be a job whatever becomes of this call.
        self._unanswered.add(attempt)
        try:
            output = await self._sbatch(attempt, order, identity)
        except EngineRefused:
            self._unanswered.discard(attempt)
            raise
        number = output.strip().partition(";")[0]
        if number.isdigit():
            self._jobs[attempt] = [int(number)]
            self._unanswered.discard(attempt)

    async def _sbatch(self, attempt: str, order: TaskOrder, identity: list[str]) -> str:
        return await self._programs.run(
            "sbatch",
            *self._settings.slurm_options,
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
            # As a Dask worker does: files of relative names, and what removes them, are not among the records.
            "--chdir=/",
            *identity,
            text=batch_script(self._directory, attempt, order.command, "$SLURMD_NODENAME"),
        )

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

    async def signal(self, attempt: str, signal: str, notice: str) -> None:
        if not await self._records.told(attempt, notice):
            # The attempt's shell passes it on.
            await self._programs.run("scancel", "--batch", f"--signal={signal}", "--state=RUNNING", f"--name={attempt}")
            await self._records.tell(attempt, notice)

    async def forget(self, attempt: str) -> None:
        """Slurm forgets by itself."""

    async def set_usable_cores(self, machine: str, cores: int) -> None:
        if machine not in self._other_gres:
            await self._machines({})
        # Slurm would take away for good what is left out.
        others = self._other_gres.get(machine, "")
        await self._update_node(machine, f"Gres=vcore:{cores}" + (f",{others}" if others else ""))

    async def drain(self, machine: str, reason: str) -> None:
        await self._update_node(machine, "State=DRAIN", f"Reason={reason}")

    async def undrain(self, machine: str) -> None:
        await self._update_node(machine, "State=UNDRAIN")

    async def _update_node(self, machine: str, *words: str) -> None:
        try:
            await self._scontrol("update", f"NodeName={machine}", *words)
        except EngineRefused as error:
            if _NO_ADMINISTRATOR in str(error).lower():
                who = "only SlurmUser, root and users with AdminLevel=Admin may change nodes"
                raise EngineRefused(f"{error}: {who}") from error
            raise

    async def _scontrol(self, *words: str) -> None:
        for pause_s in _PAUSES_S:
            try:
                await self._programs.run("scontrol", *words)
                return
            except EngineRefused as error:
                if _LATER not in str(error):
                    raise
            await asyncio.sleep(pause_s)
        await self._programs.run("scontrol", *words)

    async def _ours(self, anew: Collection[str] = ()) -> dict[str, Seen]:
        """Our jobs by attempt, and their ids. A job of an attempt's name that is another user's is foreign: every user
        of a cluster can read the names of jobs, and give them to its own.

        :param anew: attempts that were sealed where they had no directory (any more).
        """
        found = await asyncio.to_thread(jobs_of, await self._programs.json("squeue", "--all", "--states=all"))
        names = {job.name for job in found}
        owners = await self._records.owners([name for name in names if task_of(name, self._settings.label) is not None])
        seen: dict[str, Seen] = {}
        jobs: dict[str, list[int]] = {}
        foreign: Counter[str] = Counter()
        # The newest comes last, and first in the list of an attempt.
        for job in found:
            attempt = job.name
            # Where its directory was lost, sealing has made another, which does not say whose a job is that root has
            # submitted. So any job of its name has to end first; what it ended with counts for nothing.
            remade = attempt in anew and os.geteuid() == 0 and job.seen.lives
            if owners.get(attempt) != job.user and not remade:
                foreign.update(job.held_cores)
                continue
            if job.seen.lives:
                jobs[attempt] = [job.number, *jobs.get(attempt, [])]
            if attempt not in seen or _RANK[job.seen.state] >= _RANK[seen[attempt].state]:
                seen[attempt] = job.seen
        self._jobs, self._foreign, self._asked = jobs, foreign, True
        return seen

    async def _machines(self, foreign: Mapping[str, int]) -> dict[str, EngineMachine]:
        program, found = "sinfo", await self._programs.json("sinfo", "--all")
        if "sinfo" in found and "nodes" not in found:
            # Newer versions group nodes by partition and state there.
            program, found = "scontrol", await self._programs.json("scontrol", "--all", "show", "nodes")
        machines, self._other_gres = machines_of(found, program), other_gres_of(found, program)
        return {made.name: replace(made, foreign_cores=foreign.get(made.name, 0)) for made in machines}


def _identity(user: str | None) -> list[str]:
    """Options that have a job be this user's; None: the manager's own."""
    if user is None or os.geteuid() != 0:
        return []
    try:
        # With the user alone the group stays root's.
        return [f"--uid={user}", f"--gid={pwd.getpwnam(user).pw_gid}"]
    except KeyError as error:
        raise EngineFull(f"there is no user {user} on the manager's machine") from error
