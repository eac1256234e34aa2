"""From the size of the VM to the sizes of its applications. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from guestagent.messages import MemoryStatus, SizeRange


@dataclass(frozen=True)
class Share:
    """What one application can have: resident MiB now, at least, and at most."""

    current_mib: float
    minimum_mib: float
    maximum_mib: float


def believable(range_: SizeRange, ceiling: float) -> SizeRange:
    """Sizes as an application gives them, as far as they can be: it neither holds nor needs more than there is."""
    current, minimum = min(range_.current, ceiling), min(range_.minimum, ceiling)
    return SizeRange(current, minimum, max(range_.maximum, current, minimum), range_.step)


def guest_target_mib(total_mib: float, bound_mib: float, target_mib: float) -> float:
    """MemTotal that the guest will have: what it has now less the fall of the bound. Both are to be of one moment."""
    return total_mib - (bound_mib - target_mib)


def application_budget_mib(memory: MemoryStatus, resident_mib: float, guest_target_mib: float) -> float:
    """MiB that all applications may hold together once the guest has its target memory.

    That less what is not the applications' own, less the reserve. The rest of the guest is what is neither theirs nor
    available, so kernel memory is in it; the guest's floor then ends at exactly its target memory. It is asked before
    anything is unplugged: what is free now says nothing.

    Sizes that are more than what is in use count some of it twice: two hooks of one process, pages that processes share
    or that are available all the same. Then nothing has to shrink while all that is in use has room, and where it has
    not, each gives in the proportion in which that has to fall.
    """
    used_mib = max(memory.total_mib - memory.available_mib, 1.0)
    room_mib = max(guest_target_mib - memory.reserve_mib, 0.0)
    if resident_mib <= used_mib:
        return max(room_mib - (used_mib - resident_mib), 0.0)
    return resident_mib + room_mib - used_mib if room_mib >= used_mib else resident_mib * room_mib / used_mib


def cores(maximum: float, target_cores: float, full_cores: float) -> float:
    """Cores that an application is set up for once the VM has its target: in proportion to those at full size.

    Cores are shared, unlike memory: each of several applications may use them all, and does so also when there are
    fewer.
    """
    return min(maximum * target_cores / max(full_cores, 0.01), maximum)


def split(total_mib: float, shares: list[Share]) -> list[float]:
    """Sizes in proportion to the resident sizes, each within its bounds, together `total_mib` where those allow it."""
    sizes = [0.0] * len(shares)
    open_ = set(range(len(shares)))
    rest = total_mib
    while open_:
        weights = {i: max(shares[i].current_mib, 1.0) for i in open_}
        scale = max(rest, 0.0) / sum(weights.values())
        below = {i: shares[i].minimum_mib for i in open_ if scale * weights[i] < shares[i].minimum_mib}
        above = {i: shares[i].maximum_mib for i in open_ if scale * weights[i] > shares[i].maximum_mib}
        if not below and not above:
            for i in open_:
                sizes[i] = scale * weights[i]
            break
        # Settle the side that is farther out; the other side may come into its bounds by that.
        lack = sum(minimum - scale * weights[i] for i, minimum in below.items())
        excess = sum(scale * weights[i] - maximum for i, maximum in above.items())
        for i, bound in (below if lack >= excess else above).items():
            sizes[i] = bound
            rest -= bound
            open_.discard(i)
    return sizes
