"""Wait of a plan for a host that does not answer, and the plans that continue it afterwards.

An operation that a client asked for ends: when a host has been waited for longer than the request's deadline, what is
left to do is handed to a plan of the manager's own. That one waits for ``gone_s``; a host that has not come back by
then may be gone for good, and the VM is its owner's again, with a sentence that says what is not known. Nothing is
started meanwhile that may be running already, and what may have been left elsewhere is waited for without a limit.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from cluster_manager.defaults import GONE_S
from cluster_manager.plans.plans import (
    AwaitHost,
    Effect,
    HostsChosen,
    Note,
    ReinflationPending,
    SetVM,
    SpawnFollowUp,
    Step,
    VMPhase,
    finish,
    instruct,
)
from cluster_manager.plans.reclaim_steps import LifecyclePlan
from cluster_manager.plans.report_queries import asked_of_hosts
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.problem_codes import ReasonCode
from ebbtide.messages.vms import VMSpec

#: Where a migration is: finding room, unsure whether the VM runs on its new host, removing what must not be there,
#: clearing away what is left on the old host, removing it from a new host that was waited for no longer. The others are
#: a live migration's: reading the old host, moving, asking both where it is, removing what was kept for it on the new
#: host.
Stage = Literal["room", "unsure", "clean", "clear", "left", "source", "moving", "doubt", "abort"]
#: At the end of the id of a plan that continues what an operation left; and of one that clears up after that.
CONTINUATION: Final = ".rest"
CLEARING: Final = ".left"
#: No VM depends on these: they wait without a limit.
UNLIMITED: Final = ("clear", "left")


class MovePlan(LifecyclePlan):
    """State of a plan that starts a VM on another host than the one it is bound to."""

    spec: VMSpec
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT
    #: Hosts still to try, best first.
    hosts_left: tuple[str, ...] = ()
    #: Hosts that were acted on.
    tried: int = 0
    stage: Stage = "room"
    #: Time for a guest's own power-off, in seconds.
    limit_s: float = 60.0
    #: Whether the VM is off, and whether it ran when this began.
    off: bool = False
    was_running: bool = True
    #: Whether what it leaves behind may be lost; if not, its host is read once it is off: it may have been suspended.
    lose_disk: bool = True
    #: Until when hosts that do not answer are waited for, as ``elapsed_s``; None: none was waited for yet.
    waits_until_s: float | None = None
    #: Why those that failed could not take it; None: none has failed yet.
    code: ReasonCode | None = None
    #: Whether it waits for room after a preemption, and goes on waiting where it is not started.
    waits: bool = False
    #: Whether this continues an operation that has ended, and for how long it waits then for a host that has its VM.
    continues: bool = False
    gone_s: float = GONE_S
    #: Why the manager moves it by itself; empty: a client has asked for it.
    why: str = ""

    @property
    def moved(self) -> str:
        """What has been done when its VM runs on its new host."""
        if self.waits:
            return f"{self.vm} is back on {self.host} after its preemption on {self.home}"
        return f"moved {self.vm} from {self.home} to {self.host}{f': {self.why}' if self.why else ''}"

    @property
    def off_phase(self) -> VMPhase:
        """What its VM is where it is off for sure and was not started."""
        return VMPhase.PREEMPTED if self.waits else VMPhase.STOPPED

    @property
    def reserved(self) -> ResourceVector | None:
        looks = self.stage in ("room", "unsure", "clean") and self.conclusion is None
        return asked_of_hosts(self.spec, "place") if looks else None

    @property
    def only_clears(self) -> bool:
        """Whether it only clears away what its VM has left on a host: no VM depends on it."""
        return self.continues and self.stage in UNLIMITED

    def failing(self, failure: str, code: ReasonCode | None) -> Self:
        """The plan after a host could not take it. That one had no room counts before what kept the others from it."""
        code = self.code if self.code is ReasonCode.NO_ROOM else code or ReasonCode.FAILED
        return self.having(failures=(*self.failures, failure), code=code)

    def having_chosen(self, event: HostsChosen) -> Self:
        """The plan with the hosts to try, or why there are none."""
        none = ReasonCode.NO_ROOM if event.ready else ReasonCode.NO_HOST_READY
        state = self.failing(event.sentence, none) if event.sentence else self
        return state.having(hosts_left=event.hosts)

    def continuation(self, host: str, stage: Stage, suffix: str = CONTINUATION) -> Self:
        """A plan of the manager's own that goes on when a host reports."""
        new_id = f"{self.id.removesuffix(CONTINUATION)}{suffix}"
        until_s = None if stage in UNLIMITED else self.gone_s
        return self.having(
            id=new_id,
            request_id=new_id,
            instruction=AwaitHost(host=host, until_s=until_s),
            step=1,
            progress=(),
            stage=stage,
            waits_until_s=until_s,
            continues=True,
            # Its span is its own.
            trace=(),
        )


def wait(state: MovePlan, why: str, stage: Stage, host: str, elapsed_s: float, rest: Stage = "clean") -> Step:
    """Wait until a host reports, or hand over what is left.

    :param stage: what is gone on with then.
    :param rest: and with what after it was handed over.
    """
    until_s = state.waits_until_s
    if until_s is None and not (state.continues and stage in UNLIMITED):
        until_s = elapsed_s + (state.gone_s if state.continues else state.deadline_s)
    state = state.having(stage=stage, waits_until_s=until_s)
    if until_s is not None and elapsed_s >= until_s:
        return hand_over(state, why, rest)
    progress = once(state.progress, f"{why}: waiting for {host}")
    return instruct(state, AwaitHost(host=host, until_s=until_s), progress=progress)


def once(said: tuple[str, ...], more: str) -> tuple[str, ...]:
    """Sentences with one more at the end, which is there once: a host may be away, and asked again, for long."""
    return (*(sentence for sentence in said if sentence != more), more)


def hand_over(state: MovePlan, why: str, rest: Stage = "clean") -> Step:
    """The end of a plan that has waited for too long, with one that does the rest when the host is back."""
    vm, home = state.vm, state.home
    assert state.host is not None, "at a host"
    if state.continues:
        return _give_back(state, state.host, why)
    if state.stage == "clear":
        sentence = f"moved {vm} from {home} to {state.host}; what is left on {home} goes when that answers"
        return finish(state, OperationState.DONE, sentence).also(SpawnFollowUp(state.continuation(home, "clear")))
    if rest == "unsure":
        sentence = f"{vm} has not moved in time ({why}): it moves when it runs on {state.host}, or stays off on {home}"
    else:
        sentence = (
            f"{vm} did not move, and may have been started on {state.host}, which does not say ({why}): it stays off "
            f"on {home}, and can be started there once {state.host} has answered and it is removed there"
        )
    phase = VMPhase.STARTING if state.kind == "start" else VMPhase.MIGRATING
    return finish(state, OperationState.FAILED, sentence, reason=ReasonCode.HOST_UNAVAILABLE).also(
        SetVM(vm, phase, home, sentence),
        Note("failed", vm, state.host, sentence),
        SpawnFollowUp(state.continuation(state.host, rest)),
    )


def _give_back(state: MovePlan, host: str, why: str) -> Step:
    """The end of the waiting itself: the VM's owner decides what comes next, and is told what is not known."""
    vm, home = state.vm, state.home
    sentence = (
        f"{vm} is off on {home}, and may run on {host}, which was waited for {state.gone_s:g} s ({why}) and is waited "
        f"for no longer: before it is started, make sure that {host} is off or has no {vm}; there it is removed as "
        f"soon as {host} answers"
    )
    effects: tuple[Effect, ...] = (ReinflationPending(host, True),) if state.reclaims else ()
    left = state.continuation(host, "left", CLEARING).having(reclaims=0)
    return finish(state, OperationState.FAILED, sentence, reason=ReasonCode.HOST_UNAVAILABLE).also(
        SetVM(vm, VMPhase.STOPPED, home, sentence), Note("failed", vm, host, sentence), *effects, SpawnFollowUp(left)
    )
