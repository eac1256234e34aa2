"""The engine: streams of jobs and of changes in, what was measured out; can be stopped, saved and gone on with."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ebbtide.simulator import archives
from ebbtide.simulator.compiling import announced, chosen_by_type, compiled
from ebbtide.simulator.errors import ConservationBroken, InvalidParameter
from ebbtide.simulator.inputs.batches import CapacityBatch, JobBatch
from ebbtide.simulator.jobs import columns as c
from ebbtide.simulator.jobs import loop, nodes, passes, state
from ebbtide.simulator.jobs.columns import Floats, State
from ebbtide.simulator.jobs.intake import Demands, change_rows, job_rows, skipped
from ebbtide.simulator.jobs.policy import HOOKS, Policy, kernel_of, register
from ebbtide.simulator.jobs.results import Results, results
from ebbtide.simulator.jobs.settings import DISCIPLINES, KILLS, LOOKS, REQUEUE, Settings
from ebbtide.simulator.jobs.validation import RULES

#: Events between two looks at the clock of the outside: progress, Ctrl-C.
_EVENTS: Final = 1 << 18
#: Tasks taken in at a time: what a processor's larger caches hold.
_PORTION: Final = 1 << 15
#: Of files with a saved engine.
_VERSION: Final = 11


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that are there from the start on and keep their size.

    :param memory_mib: of each; None: as much as anybody wants.
    :raises InvalidParameter: fewer than none, or sizes that are not positive.
    """

    count: int
    cpu_cores: int
    memory_mib: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("cpu_cores", 1)):
            if getattr(self, name) < least:
                raise InvalidParameter(name, f"must be at least {least}, but is {getattr(self, name)}")
        if self.memory_mib is not None and self.memory_mib < 0:
            raise InvalidParameter("memory_mib", f"must not be negative, but is {self.memory_mib}")


Advance = Callable[[State, Any, int], int]
#: The compiled loops, by the classes of policies' arrays.
_COMPILED: Final[dict[type[Any], Advance]] = {}
#: Takes rows with columns c.DONE_COLUMNS (of jobs that are done) or c.ATTEMPT_COLUMNS (of attempts that ended).
Sink = Callable[[Floats], None]


class Engine:
    """One run: jobs on machines under a policy.

    Jobs and changes are taken from their streams as time comes to them, so that memory is bounded by what is alive and
    by the largest batch.

    :param jobs: batches in the order of submission.
    :param machines: those that keep their size; the machines of ``changes`` come after them.
    :param changes: what becomes of others: each machine is there from its first change on.
    :param policy: see `Policy`; a text names one of `nodes.KINDS`.
    :param seed: of the policy's chance.
    :param elastic: so many machines more, after those of ``machines``, which begin without cores: the policy gives them
        what it puts on them, and takes it away again (`simulator.jobs.machines`). They do not go with ``changes``.
    :param most_cores, most_mib: no machine will ever have more cores or memory: jobs that want more are refused and
        counted. Defaults: known where there are no changes (and no elastic machines, for memory); else such jobs wait.
    :param done: takes a row for each job that is done, ``attempts`` one for each attempt that ends; some at a time.
    :param compile: see `build`.
    :raises InvalidParameter: names the parameter.
    """

    def __init__(
        self,
        jobs: Iterable[JobBatch],
        machines: Machines | None = None,
        changes: Iterable[CapacityBatch] | None = None,
        *,
        policy: Policy | str = "best-fit",
        settings: Settings | None = None,
        seed: int = 0,
        most_cores: int | None = None,
        most_mib: int | None = None,
        elastic: int = 0,
        done: Sink | None = None,
        attempts: Sink | None = None,
        compile: bool = True,
    ) -> None:
        if machines is None and changes is None:
            raise InvalidParameter("machines", "are missing, and so are changes: there is nothing to run on")
        if elastic and (machines is None or changes is not None):
            raise InvalidParameter("elastic", "machines go with machines that keep their size only")
        self.settings = settings or Settings()
        self.policy = nodes.policy(policy) if isinstance(policy, str) else policy
        self.machine_numbers: dict[str, int] = {}
        self._seed = seed
        self._jobs: Iterator[JobBatch] = (part for batch in jobs for part in batch.portions(_PORTION))
        self._changes = iter(changes if changes is not None else ())
        self._demands = Demands()
        self._sinks = (done, attempts)
        self._advance = build(self.policy, compile)
        self._rows = {"jobs": 0, "changes": 0}
        self._last_s = {"jobs": -math.inf, "changes": -math.inf}
        self._begun = False
        self._most = machines.cpu_cores if machines is not None else 1
        if most_cores is None and changes is None and machines is not None:
            most_cores = machines.cpu_cores
        if most_mib is None and changes is None and machines is not None and not elastic:
            most_mib = machines.memory_mib
        if most_mib is None or not self.settings.memory:
            most_mib = c.UNLIMITED_MIB
        self.state = self._fresh(most_cores or 0, most_mib)
        if machines is not None and machines.count:
            self.state = state.with_machines(self.state, machines.count, 0.0)
            self.machine_numbers = {f"machine-{i}": i for i in range(machines.count)}
            self.state.machines[:, c.MACHINE.cores] = machines.cpu_cores
            memory_mib = machines.memory_mib if self.settings.memory else None
            self.state.machines[:, c.MACHINE.memory] = c.UNLIMITED_MIB if memory_mib is None else memory_mib
            self.state.counts[c.COUNT.all_cores] = machines.count * machines.cpu_cores
        if elastic:
            self.state = state.with_machines(self.state, len(self.machine_numbers) + elastic, 0.0)
        self.policy_state: Any = self.policy.resized(self.state, None, self._most, seed)
        #: What a saved engine must have been told, too. Schemes of one policy differ in what its arrays begin with.
        self._told: dict[str, Any] = {
            "version": _VERSION,
            "policy": self.policy.name,
            "settings": {k: str(v) for k, v in asdict(self.settings).items()},
            "seed": seed,
            "machines": None if machines is None else list(astuple(machines)),
            "elastic": elastic,
            "most_cores": most_cores,
            "most_mib": most_mib,
            "options": {name: _digest(a) for name, a in state.as_mapping(self.policy_state, "").items()},
        }

    def run(self, progress: Callable[[float], None] | None = None) -> Results:
        """To the end: all jobs are done, or nothing happens any more.

        :param progress: called now and then with the time of the simulation; s.
        :raises InvalidParameter: an input that cannot be.
        :raises ConservationBroken: an error of the engine or of a policy.
        """
        self.advance(math.inf, progress)
        return self.results()

    def advance(self, until_s: float, progress: Callable[[float], None] | None = None) -> bool:
        """Let everything happen up to ``until_s``, included; whether the run has ended.

        :raises InvalidParameter: as `run`; ConservationBroken: as `run`.
        """
        self.state.sums[c.SUM.until] = until_s
        serve = {c.NEEDS_JOBS: self._next_jobs, c.NEEDS_CHANGES: self._next_changes, c.NEEDS_ROOM: self._grow}
        while True:
            why = self._advance(self.state, self.policy_state, _EVENTS)
            if why == c.BROKEN:
                rule = RULES[int(self.state.counts[c.COUNT.broken])]
                raise ConservationBroken(f"at {self.now_s:.12g} s: {rule}")
            serve.get(why, self._write)()
            if why in (c.FINISHED, c.REACHED):
                return bool(why == c.FINISHED)
            if progress is not None:
                progress(self.now_s)

    @property
    def now_s(self) -> float:
        """The time of the simulation."""
        return float(self.state.sums[c.SUM.now])

    def results(self) -> Results:
        """What was measured so far."""
        return results(self.state)

    def save(self, path: Path) -> None:
        """All that is known as .npz; it appears whole or not at all.

        :raises OSError: as from writing a file.
        """
        facts = {
            "told": self._told,
            "rows": self._rows,
            "last_s": {k: v for k, v in self._last_s.items() if math.isfinite(v)},
            "begun": self._begun,
            "most": self._most,
            "names": list(self.machine_numbers),
        }
        arrays = state.as_mapping(self.state, "state.") | state.as_mapping(self.policy_state, "policy.")
        archives.write(path, {"facts": np.array(json.dumps(facts)), **arrays})

    def load(self, path: Path) -> None:
        """Go on where `save` was called: of a new engine with the same parameters and streams from their beginnings.

        What streams out (done, attempts) is what comes from now on.

        :raises InvalidParameter: it was saved with another policy, options of it, seed, settings or machines, or is no
            such file.
        """
        try:
            arrays = archives.read(path)
            facts = json.loads(str(arrays["facts"]))
            self._judge(path, facts.get("told", {}))
            loaded = state.from_mapping(State, arrays, "state.")
            policy_state = state.from_mapping(self.policy.state, arrays, "policy.")
        except InvalidParameter:
            raise
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise InvalidParameter("path", f"{path} is no saved engine: {error}") from error
        sinks = [c.OPTION.done, c.OPTION.attempts]
        if (loaded.options[sinks] != self.state.options[sinks]).any():
            # Who wants rows is said by the sinks of this engine.
            loaded.options[sinks] = self.state.options[sinks]
            loaded = state.with_rows(loaded)
        self.state, self.policy_state = loaded, policy_state
        self._demands = Demands()
        self._demands.restore(self.state.queues[:, [c.QUEUE.rank, c.QUEUE.cores, c.QUEUE.memory]])
        self._rows = facts["rows"]
        self._last_s = {"jobs": -math.inf, "changes": -math.inf} | facts["last_s"]
        self._begun, self._most = facts["begun"], facts["most"]
        self.machine_numbers = {name: i for i, name in enumerate(facts["names"])}
        self._jobs = skipped(self._jobs, self._rows["jobs"])
        self._changes = skipped(self._changes, self._rows["changes"])

    def _judge(self, path: Path, told: dict[str, Any]) -> None:
        """Whether a saved engine was told what this one is. Raises InvalidParameter."""
        for name, ours in self._told.items():
            theirs = told.get(name)
            if ours == theirs:
                continue
            if name != "options":
                raise InvalidParameter(name, f"is {ours!r} here, and was {theirs!r} when {path} was saved")
            differ = [part for part in ours if not isinstance(theirs, dict) or theirs.get(part) != ours[part]]
            raise InvalidParameter(
                "policy", f"has other options here than when {path} was saved: its {', '.join(differ)} begin otherwise"
            )

    def _fresh(self, most_cores: int, most_mib: int) -> State:
        given, s = self.settings, state.empty_state()
        s.options[c.OPTION.discipline] = DISCIPLINES[given.discipline]
        s.options[c.OPTION.kills] = KILLS[given.kills]
        s.options[c.OPTION.requeue] = REQUEUE[given.requeue]
        s.options[c.OPTION.looks] = LOOKS[given.looks]
        s.options[c.OPTION.depth] = given.depth
        s.options[c.OPTION.validate] = given.validate
        s.options[c.OPTION.replicas] = given.replicas
        s.options[c.OPTION.checkpointed] = given.checkpointed
        s.options[c.OPTION.by_demand] = self.policy.by_demand
        s.options[c.OPTION.done] = self._sinks[0] is not None
        s.options[c.OPTION.attempts] = self._sinks[1] is not None
        s.options[[c.OPTION.most_cores, c.OPTION.most_mib]] = most_cores, most_mib
        s.sums[c.SUM.checkpoint_every] = given.checkpoint_every_s
        s.sums[c.SUM.checkpoint_cost] = given.checkpoint_cost_s
        s.sums[c.SUM.from_s], s.sums[c.SUM.to_s] = given.from_s, given.to_s
        s.sums[c.SUM.short] = given.short_s
        s.counts[[c.COUNT.more_jobs, c.COUNT.more_changes, c.COUNT.unsettled]] = 1
        return state.with_rows(s)

    def _next_jobs(self) -> None:
        batch = _next(self._jobs)
        s = self.state
        if batch is None:
            s.counts[c.COUNT.more_jobs] = 0
            return
        rows = job_rows(batch, self.settings, self._demands, self._last_s["jobs"])
        if len(rows.demands):
            s = state.with_queues(s, rows.demands)
        s.counts[c.COUNT.next_job] = 0
        s.counts[c.COUNT.first_job] = self._rows["jobs"]
        self._rows["jobs"] += len(batch)
        self._last_s["jobs"] = float(rows.in_at[-1])
        self.state = s._replace(
            in_at=rows.in_at,
            in_queue=rows.in_queue,
            in_offsets=rows.in_offsets,
            in_runtime=rows.in_runtime,
            in_estimate=rows.in_estimate,
        )
        self._begin()

    def _next_changes(self) -> None:
        batch = _next(self._changes)
        s = self.state
        if batch is None:
            s.counts[c.COUNT.more_changes] = 0
            self._begin()
            return
        at_s, rows = change_rows(batch, self.settings, self.machine_numbers, self._last_s["changes"])
        s.counts[c.COUNT.next_change] = 0
        self._rows["changes"] += len(batch)
        self._last_s["changes"] = float(at_s[-1])
        s = s._replace(change_at=at_s, changes=rows)
        most = max(self._most, int(rows[:, 1].max()))
        if len(self.machine_numbers) > len(s.machines) or most > self._most:
            s = state.with_machines(s, max(len(self.machine_numbers), len(s.machines)), float(at_s[0]))
            self._most = most
            self.policy_state = self.policy.resized(s, self.policy_state, most, self._seed)
            s.counts[c.COUNT.unsettled] = 1
        self.state = s
        self._begin()

    def _begin(self) -> None:
        """Time begins with the first thing that happens; machines that keep their size are there since then."""
        s = self.state
        if self._begun or (s.counts[c.COUNT.more_changes] and not len(s.change_at)):
            return
        firsts = [float(times[0]) for times in (s.in_at, s.change_at) if len(times)]
        if firsts:
            self._begun = True
            s.sums[[c.SUM.now, c.SUM.cores_since]] = min(firsts)
            s.machine_times[s.machines[:, c.MACHINE.cores] > 0, c.MACHINE_TIME.changed] = min(firsts)

    def _grow(self) -> None:
        s = self.state
        wanted = int(s.counts[c.COUNT.wanted])
        if s.counts[c.COUNT.task_room] < wanted:
            s = state.with_tasks(s, max(2 * len(s.tasks), len(s.tasks) + wanted))
        if s.counts[c.COUNT.job_room] < 1:
            s = state.with_jobs(s, 2 * len(s.jobs))
        self.state = s

    def _write(self) -> None:
        for sink, rows, place in (
            (self._sinks[0], self.state.done, c.COUNT.done_rows),
            (self._sinks[1], self.state.attempts, c.COUNT.attempt_rows),
        ):
            count = int(self.state.counts[place])
            self.state.counts[place] = 0
            if sink is not None and count:
                sink(rows[:count].copy())


def build(policy: Policy, compile: bool = True) -> Advance:
    """The loop for a policy: `loop.advance`, whose hooks call the policy's kernels.

    :param compile: with numba; else the very same functions, interpreted: slow, for tests.
    :raises InvalidParameter: kernels that `policy.register` refuses.
    :raises MissingExtra: numba is not installed.
    """
    register(policy, passes.schedule)
    if not compile:
        return loop.advance
    if policy.state not in _COMPILED:
        for name, hook in HOOKS.items():
            chosen_by_type(hook, 1, functools.partial(kernel_of, hook=name))
        kernels = [kernel_of(policy.state, hook) for hook in HOOKS]
        # Counting who holds thirty arrays costs ten times the work; where it must be, one large function takes minutes
        # to compile.
        options: dict[str, Any] = {"_nrt": policy.allocates, "forceinline": not policy.allocates}
        options["error_model"] = "numpy"
        _COMPILED[policy.state] = announced(compiled(loop.run, kernels, **options), policy.name)
    return _COMPILED[policy.state]


def _digest(array: NDArray[Any]) -> str:
    """What an array holds, in one word."""
    form = f"{array.dtype} {array.shape} ".encode()
    return hashlib.blake2b(form + array.tobytes(), digest_size=8).hexdigest()


def _next(batches: Iterator[Any]) -> Any:
    """The next batch that is not empty; None at the end."""
    return next((batch for batch in batches if len(batch)), None)
