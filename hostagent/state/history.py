"""History of the agent's decisions with their inputs, and of each VM's latest resizes. Bounded, in memory.

Every decision is also one line of the log. What has to outlive the agent is in the VMs' intents, not here.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from ebbtide.deflation.cascade.instructions import Mode
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.explanations import Decision, DecisionKind, PastResize
from ebbtide.messages.operations import VMOutcome
from hostagent.state.intents import Cause

#: Decisions that are remembered of the host with all its VMs, and of each VM.
HOST_REMEMBERED: Final = 2000
VM_REMEMBERED: Final = 100
#: Resizes that are remembered of each VM, with their ledgers.
RESIZES_REMEMBERED: Final = 5
#: VMs, present or gone, of which anything is remembered; the one that was longest silent is forgotten first.
VMS_REMEMBERED: Final = 512
#: How the requests of steady mode begin.
STEADY: Final = "steady-"
#: The longest text among a decision's inputs.
TEXT: Final = 200

log = structlog.get_logger()


class _Decisions(deque[Decision]):
    """The latest so many."""

    #: The highest number that is remembered no more.
    dropped = 0

    def append(self, decision: Decision) -> None:
        if len(self) == self.maxlen:
            self.dropped = self[0].number
        super().append(decision)


@dataclass(slots=True)
class _OfVM:
    decisions: _Decisions = field(default_factory=lambda: _Decisions(maxlen=VM_REMEMBERED))
    resizes: deque[PastResize] = field(default_factory=lambda: deque(maxlen=RESIZES_REMEMBERED))


class History:
    """The latest decisions, numbered from 1 in the order in which they were made.

    :param clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._all = _Decisions(maxlen=HOST_REMEMBERED)
        self._vms: OrderedDict[str, _OfVM] = OrderedDict()
        #: The number of the latest decision; 0 where there is none.
        self.newest = 0
        #: How many of each kind were made, repetitions included.
        self.made: Counter[str] = Counter()

    def note(
        self,
        vm: str | None,
        kind: DecisionKind,
        sentence: str,
        inputs: Mapping[str, object] | None = None,
        outcome: str | None = None,
    ) -> Decision:
        """Write down a decision, and log it.

        What is decided again, with nothing between, is counted and not repeated: a VM that is looked at every two
        seconds must not push everything else out.

        :param inputs: what it was decided by; names carry units, a mapping counts as one input for each of its names.
        """
        self.made[str(kind)] += 1
        latest = self._latest(vm)
        if latest is not None and (latest.kind, latest.sentence) == (kind, sentence):
            return self._again(latest)
        self.newest += 1
        decision = Decision(
            number=self.newest,
            at=self._clock(),
            vm=vm,
            kind=str(kind),
            sentence=sentence,
            inputs=flat(inputs or {}),
            outcome=outcome,
        )
        self._all.append(decision)
        if vm is not None:
            self._of(vm).decisions.append(decision)
        log.info(decision.kind, vm=vm, why=sentence, inputs=decision.inputs, decision=decision.number)
        return decision

    def resized(self, cause: Cause | None, outcome: VMOutcome, deadline_s: float, mode: Mode) -> None:
        """Remember how a resize ended, with its ledger.

        :param cause: the operation that it was for.
        """
        request_id = cause.request_id if cause is not None else "resize"
        past = PastResize(at=self._clock(), request_id=request_id, outcome=outcome)
        resizes, gently = self._of(outcome.name).resizes, cause is not None and cause.gently
        if gently and resizes and resizes[-1].request_id.startswith(STEADY):
            resizes.pop()  # many small steps must not push out what others did
        resizes.append(past)
        before, target = outcome.before.vector(), outcome.target.vector()
        kind = DecisionKind.RESIZE
        if not before.fits_in(target):
            kind = DecisionKind.DEFLATE
        elif not target.fits_in(before):
            kind = DecisionKind.REINFLATE
        short = outcome.shortfall.vector()
        if gently and not outcome.errors:
            return  # steady mode tells of what it does itself, once and not at each step
        inputs = {"before": sizes(before), "target": sizes(target), "deadline_s": deadline_s, "mode": mode}
        what = f"{cause.kind} {request_id}" if cause is not None else request_id
        self.note(
            outcome.name,
            kind,
            f"{what}: {outcome.sentence}",
            inputs,
            "done" if short.is_zero() else f"short of {short}",
        )

    def resizes(self, vm: str) -> tuple[PastResize, ...]:
        """The latest of a VM, oldest first."""
        return tuple(self._vms[vm].resizes) if vm in self._vms else ()

    def decisions(self, vm: str | None = None, since: int | None = None, limit: int = 100) -> tuple[Decision, ...]:
        """Oldest first: the first ``limit`` after number ``since``; without it, the latest ``limit``."""
        rows: Iterable[Decision] = self._all
        if vm is not None:
            rows = self._vms[vm].decisions if vm in self._vms else ()
        if since is None:
            return tuple(rows)[-limit:]
        return tuple(decision for decision in rows if decision.number > since)[:limit]

    def forgotten(self, vm: str | None = None, since: int | None = None) -> bool:
        """Whether decisions after number ``since`` are remembered no more."""
        rows = self._all if vm is None or vm not in self._vms else self._vms[vm].decisions
        return since is not None and since < rows.dropped

    def _latest(self, vm: str | None) -> Decision | None:
        """The latest decision about the same VM; of the host as a whole, where it is about that."""
        rows: Iterable[Decision] = reversed(self._all)
        if vm is not None:
            rows = reversed(self._vms[vm].decisions) if vm in self._vms else ()
        return next((decision for decision in rows if decision.vm == vm), None)

    def _again(self, latest: Decision) -> Decision:
        counted = latest.model_copy(update={"repeated": latest.repeated + 1})
        rows = [self._all] if latest.vm is None else [self._all, self._of(latest.vm).decisions]
        for decisions in rows:
            # From the end: what is repeated is recent. In the host's list it may have been pushed out by others.
            for place in range(len(decisions) - 1, -1, -1):
                if decisions[place].number <= latest.number:
                    if decisions[place].number == latest.number:
                        decisions[place] = counted
                    break
        log.debug(latest.kind, vm=latest.vm, why=latest.sentence, decision=latest.number, again=counted.repeated)
        return counted

    def _of(self, vm: str) -> _OfVM:
        found = self._vms.setdefault(vm, _OfVM())
        self._vms.move_to_end(vm)
        while len(self._vms) > VMS_REMEMBERED:
            self._vms.popitem(last=False)
        return found


def flat(inputs: Mapping[str, object]) -> dict[str, float | str]:
    """Inputs as a decision carries them: numbers and short texts by name."""
    rows: dict[str, float | str] = {}
    for name, value in inputs.items():
        match value:
            case Mapping():
                rows |= flat({f"{name}_{inner}": part for inner, part in value.items()})
            case bool() | str():
                rows[name] = str(value).lower() if isinstance(value, bool) else value[:TEXT]
            case int() | float():
                rows[name] = round(float(value), 4)
            case _:
                rows[name] = str(value)[:TEXT]
    return rows


def sizes(vector: ResourceVector) -> dict[str, float]:
    """A vector as an input; disk and network only where they are declared."""
    rows = vector.as_dict().items()
    return {name: value for name, value in rows if value > 0 or name in ("cpu_cores", "memory_mib")}
