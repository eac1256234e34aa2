"""When VMs depart: a heap of slots by time, of two at the same time the one that came first."""

from __future__ import annotations

import math

from ebbtide.simulator.cluster.state import LEAVING, NOBODY, Tally, Vms
from ebbtide.simulator.compiling import inner


@inner
def sooner(vms: Vms, one: int, other: int) -> bool:
    """Whether the VM in one slot departs before that in the other."""
    if vms.departs_s[one] != vms.departs_s[other]:
        return bool(vms.departs_s[one] < vms.departs_s[other])
    return bool(vms.number[one] < vms.number[other])


@inner
def put(vms: Vms, at: int, vm: int) -> None:
    """A slot stands at a place of the heap."""
    vms.heap[at] = vm
    vms.place[vm] = at


@inner
def rise(vms: Vms, at: int) -> None:
    """Move a slot up to where it belongs."""
    vm = vms.heap[at]
    while at > 0:
        above = (at - 1) // 2
        if not sooner(vms, vm, vms.heap[above]):
            break
        put(vms, at, vms.heap[above])
        at = above
    put(vms, at, vm)


@inner
def sink(vms: Vms, at: int, length: int) -> None:
    """Move a slot down to where it belongs."""
    vm = vms.heap[at]
    while True:
        below = 2 * at + 1
        if below >= length:
            break
        if below + 1 < length and sooner(vms, vms.heap[below + 1], vms.heap[below]):
            below += 1
        if not sooner(vms, vms.heap[below], vm):
            break
        put(vms, at, vms.heap[below])
        at = below
    put(vms, at, vm)


@inner
def expect(vms: Vms, tally: Tally, vm: int) -> None:
    """A VM will depart; one that is not seen to, never."""
    if vms.departs_s[vm] == math.inf:
        vms.place[vm] = NOBODY
        return
    length = tally.state[LEAVING]
    tally.state[LEAVING] = length + 1
    put(vms, length, vm)
    rise(vms, length)


@inner
def forget(vms: Vms, tally: Tally, vm: int) -> None:
    """A VM departs or is preempted: its departure is no event any more."""
    at = vms.place[vm]
    if at == NOBODY:
        return
    length = tally.state[LEAVING] - 1
    tally.state[LEAVING] = length
    vms.place[vm] = NOBODY
    if at == length:
        return
    moved = vms.heap[length]
    put(vms, at, moved)
    rise(vms, at)
    sink(vms, vms.place[moved], length)
