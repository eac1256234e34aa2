"""The commands to host agents that a VM's lifecycle needs: where each goes, with what, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster_manager.plans.plans import Adopt, Arrive, Commanding, Depart, Preempt, Release, Respec, Start, Stop
from cluster_manager.settings import AgentLimits
from ebbtide.deflation.sharing.suspension import RESTORE_MIB_S
from ebbtide.messages.commands import (
    AdoptCommand,
    Command,
    ReleaseCommand,
    SpecCommand,
    StartCommand,
    StopCommand,
)
from ebbtide.messages.migrations import ArrivalCommand, DepartureCommand
from ebbtide.messages.vms import VMStatus

#: For giving an adopted domain back what was taken, seconds.
RELEASE_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Sending:
    """One command."""

    method: str
    path: str
    body: Command
    limit_s: float
    #: Fields that an agent of an earlier version does not know, and can do without here.
    without: frozenset[str] = frozenset()


def lifecycle_command(
    instruction: Commanding,
    request_id: str,
    epoch: int,
    order: int,
    limits: AgentLimits,
    reported: Callable[[str, str], VMStatus | None] = lambda host, name: None,
) -> Sending:
    """How an instruction is sent.

    :param order: of the commands of this manager to its hosts (`deflation.fencing`).
    :param reported: a VM by its host's last report.
    :raises TypeError: it is none of a VM's lifecycle.
    """
    stamp: dict[str, Any] = {"request_id": request_id, "epoch": epoch, "order": order}
    match instruction:
        case Stop(vm=vm, limit_s=limit_s):
            stop = StopCommand(**stamp, limit_s=limit_s)
            return Sending("POST", f"/v1/vms/{vm}/stop", stop, limit_s + limits.start_stop_s)
        case Preempt(vm=vm, reason=reason, notice_s=notice_s, suspend=suspend):
            # By value: what is stored and compared is the word.
            preempt = StopCommand(**stamp, limit_s=notice_s, reason=reason.value, suspend=suspend)
            return Sending("POST", f"/v1/vms/{vm}/stop", preempt, notice_s + limits.start_stop_s)
        case Start(vm=vm, start_size=start_size):
            start = StartCommand(**stamp, start_size=start_size)
            found = reported(instruction.host, vm)
            # Its host gives it as much longer to read what was saved.
            saved_s = (found.saved_mib or 0.0) / RESTORE_MIB_S if found is not None else 0.0
            # One of an earlier version starts it with the size that it had last, which is told with what is off.
            last = found.start_size if found is not None else None
            has_room = start_size is not None and last is not None and last.vector().fits_in(start_size.vector())
            without = frozenset({"start_size"}) if has_room else frozenset()
            return Sending("POST", f"/v1/vms/{vm}/start", start, limits.start_stop_s + saved_s, without)
        case Respec(vm=vm, spec=spec, deadline_s=deadline_s):
            # XML was for making it; its host keeps what came of it.
            sold = spec.model_copy(update={"xml": None})
            resize = SpecCommand(**stamp, spec=sold, deadline_s=deadline_s)
            return Sending("PUT", f"/v1/vms/{vm}/spec", resize, deadline_s + limits.grace_s)
        case Adopt(vm=vm, domain=domain, priority=priority, minimum=minimum):
            adopt = AdoptCommand(**stamp, domain=domain, name=vm, priority=priority, minimum=minimum)
            return Sending("POST", "/v1/adoptions", adopt, limits.start_stop_s)
        case Release(vm=vm):
            release = ReleaseCommand(**stamp, deadline_s=RELEASE_DEADLINE_S)
            return Sending("POST", f"/v1/vms/{vm}/release", release, RELEASE_DEADLINE_S + limits.grace_s)
        case Arrive(spec=spec, size=size, boot_memory_mib=boot_mib, generation=generation, uuid=uuid):
            arrive = ArrivalCommand(
                **stamp,
                vm=spec.model_copy(update={"xml": None}),
                size=size,
                boot_memory_mib=boot_mib,
                generation=generation,
                uuid=uuid,
            )
            return Sending("POST", f"/v1/vms/{spec.name}/arrival", arrive, limits.start_stop_s)
        case Depart(vm=vm, deadline_s=deadline_s):
            depart = DepartureCommand(
                **stamp,
                to=instruction.to,
                address=instruction.address,
                copy_storage=instruction.copy_storage,
                bandwidth_mib_s=instruction.bandwidth_mib_s,
                deadline_s=deadline_s,
                size=instruction.size,
            )
            return Sending("POST", f"/v1/vms/{vm}/departure", depart, deadline_s + limits.start_stop_s)
    raise TypeError(f"{type(instruction).__name__} sends no command")
