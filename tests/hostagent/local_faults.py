"""What can befall a VM or the hypervisor of a `tests.hostagent.local_world.LocalWorld`, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hostagent.state.intents import Phase
from tests.hostagent.local_guest import Application, Manner
from tests.hostagent.local_hypervisor import Faults
from tests.hostagent.local_world import Domain, LocalWorld

Fault = Callable[[LocalWorld, Faults, str], None]
#: Calls that can fail or come too late.
MODIFYING: Final = (
    "set_quota",
    "set_balloon",
    "set_plugged",
    "write_intent",
    "set_disk",
    "create",
    "resume",
    "destroy",
)


def _manner(manner: Manner) -> Fault:
    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        world.domains[name].guest.manner = manner

    return befall


def _application(application: Application) -> Fault:
    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        world.domains[name].guest.application = application

    return befall


def _filled(world: LocalWorld, faults: Faults, name: str) -> None:
    world.fill(world.domains[name], 600.0)


def _pinned(world: LocalWorld, faults: Faults, name: str) -> None:
    guest = world.domains[name].guest
    guest.pinned = set(sorted(guest.online)[1:2])


def _boasting(world: LocalWorld, faults: Faults, name: str) -> None:
    world.domains[name].guest.boast_mib = 300.0


def _secret_cpu(world: LocalWorld, faults: Faults, name: str) -> None:
    domain = world.domains[name]
    domain.guest.secret = {domain.vcpus - 1} - {0}
    domain.guest.online |= domain.guest.secret
    domain.disturbed = True


def _slow(world: LocalWorld, faults: Faults, name: str) -> None:
    world.domains[name].speed_mib_s = 15.0


def _half_way(world: LocalWorld, faults: Faults, name: str) -> None:
    domain = world.domains[name]
    domain.plugged_stuck_mib, domain.balloon_stuck_mib = domain.plugged_mib * 0.7, domain.balloon_mib * 0.9


def _reboot(world: LocalWorld, faults: Faults, name: str) -> None:
    domain = world.domains[name]
    if domain.state == "running":
        domain.reset(world.now())
        domain.disturbed = True
        world.request_check(name)


def _foreign(change: Callable[[Domain], None]) -> Fault:
    """Somebody else changes what a running domain has."""

    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        domain = world.domains[name]
        if domain.state == "running":
            change(domain)
            domain.disturbed = True

    return befall


def _lift_quota(domain: Domain) -> None:
    domain.quota = domain.cap = None


def _cpus_on(domain: Domain) -> None:
    domain.guest.online = set(range(domain.vcpus))


def _plug_all(domain: Domain) -> None:
    domain.plugged_wanted_mib = domain.intent.spec.nominal.memory_mib - domain.boot_mib


def _deflate_balloon(domain: Domain) -> None:
    domain.balloon_wanted_mib = domain.boot_mib


def _lift_bandwidth(domain: Domain) -> None:
    domain.disk_mib_s = domain.network_mib_s = None


def _stopped(world: LocalWorld, faults: Faults, name: str) -> None:
    domain = world.domains[name]
    if domain.state == "running" and domain.intent.phase is not Phase.CREATING:
        domain.state, domain.disturbed = "stopped", True
        domain.hang_up()
        world.request_check(name)


def started(world: LocalWorld, faults: Faults, name: str) -> None:
    """Somebody else starts a stopped domain."""
    domain = world.domains[name]
    if domain.state == "stopped":
        domain.start(world.now())
        domain.state, domain.disturbed = "running", True
        world.request_check(name)


def _removed(world: LocalWorld, faults: Faults, name: str) -> None:
    world.domains.pop(name).hang_up()
    world.request_check(name)


def _taken_over(world: LocalWorld, faults: Faults, name: str) -> None:
    domain = world.domains[name]
    domain.intent = domain.intent.changed(owner="host-b")
    domain.taken_at = world.now()


def _hung_up(world: LocalWorld, faults: Faults, name: str) -> None:
    world.domains[name].hang_up()


def _down(seconds: float) -> Fault:
    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        faults.down_until = world.now() + seconds

    return befall


def _refused(method: str, times: int) -> Fault:
    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        faults.refused[method] = times

    return befall


def _late(method: str) -> Fault:
    def befall(world: LocalWorld, faults: Faults, name: str) -> None:
        faults.late[method] = 1

    return befall


def _disk_full(world: LocalWorld, faults: Faults, name: str) -> None:
    faults.disk_full = True


def _pressed(world: LocalWorld, faults: Faults, name: str) -> None:
    world.domains[name].guest.pressed_at = world.now()


def _asks(world: LocalWorld, faults: Faults, name: str) -> None:
    for conversation in world.domains[name].conversations:
        conversation.ask_for_more(200.0)


def _shares(domain: Domain) -> None:
    domain.shares = 100


FAULTS: Final[dict[str, Fault]] = {
    **{f"the guest agent is {manner.value}": _manner(manner) for manner in Manner},
    **{f"the application: {application.value}": _application(application) for application in Application},
    "the application takes memory": _filled,
    "a task is pinned": _pinned,
    "the guest is under pressure": _pressed,
    "the guest asks for more": _asks,
    "the guest boasts": _boasting,
    "a CPU runs in secret": _secret_cpu,
    "memory moves slowly": _slow,
    "memory stops half way": _half_way,
    "the guest reboots": _reboot,
    "the conversation breaks off": _hung_up,
    "foreign: quota lifted": _foreign(_lift_quota),
    "foreign: CPUs on line": _foreign(_cpus_on),
    "foreign: all plugged": _foreign(_plug_all),
    "foreign: balloon deflated": _foreign(_deflate_balloon),
    "foreign: bandwidth lifted": _foreign(_lift_bandwidth),
    "foreign: shares": _foreign(_shares),
    "foreign: stopped": _stopped,
    "foreign: started": started,
    "foreign: removed": _removed,
    "foreign: taken over": _taken_over,
    "libvirtd restarts": _down(3.0),
    "libvirtd is away": _down(25.0),
    **{f"{method} fails": _refused(method, 1) for method in ("read", "domains", "survey", "findings", *MODIFYING)},
    **{f"{method} fails and fails": _refused(method, 12) for method in ("read", *MODIFYING)},
    **{f"{method} comes late": _late(method) for method in MODIFYING},
    "the disk of the journal is full": _disk_full,
}
