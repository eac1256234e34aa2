"""Outcome of a deflation: its ledger and its sentence, from the bounds before and after and the layers' accounts."""

from __future__ import annotations

from collections.abc import Mapping

from ebbtide.deflation.bounds import Bound, Reclaimed, reclaimed
from ebbtide.deflation.cascade.instructions import Outcome
from ebbtide.deflation.ledger import Layer, LayerAccount, LedgerEntry
from ebbtide.deflation.resources import COMPONENTS, TOLERANCE, ResourceVector

Accounts = Mapping[Layer, LayerAccount]


def deflation_outcome(
    before: Bound,
    after: Bound,
    target: ResourceVector,
    accounts: Accounts,
    relinquished: ResourceVector,
    freed_mib: float,
    seconds: float,
    stopped: str = "",
    errors: tuple[str, ...] = (),
) -> Outcome:
    """The outcome of a cascade.

    :param relinquished: what the application says it gave up; it counts only as the part of the guest layer's that it
        made possible.
    :param freed_mib: what the guest says of its cold pages that became free; it counts in the same way, for what the
        application does not account for.
    :param stopped: why it was called off; empty if it was not.
    :param errors: calls that failed; where nothing is missing in the end they do not matter.
    """
    missing = beyond_rounding(after.size.less(target))
    given = reclaimed(before, after)
    return Outcome(
        before=before,
        after=after,
        target=target,
        ledger=_ledger(before, target, given, accounts, relinquished, freed_mib),
        shortfall=missing,
        seconds=seconds,
        sentence=_sentence(before, after, target, given, accounts, seconds, stopped),
        errors=errors if not missing.is_zero() else (),
    )


def _ledger(
    before: Bound,
    target: ResourceVector,
    given: Reclaimed,
    accounts: Accounts,
    relinquished: ResourceVector,
    freed_mib: float,
) -> tuple[LedgerEntry, ...]:
    enabled = relinquished.smaller(given.guest)
    cold = ResourceVector(memory_mib=freed_mib).smaller(given.guest.less(enabled))
    verified = {
        Layer.APPLICATION: enabled,
        Layer.COLD: cold,
        Layer.GUEST: given.guest,
        Layer.HYPERVISOR: given.hypervisor,
    }
    wanted = before.size.less(target)
    return tuple(
        LedgerEntry(
            layer=layer,
            resource=component,
            asked=round(account.asked[component], 2),
            promised=round(account.promised[component], 2),
            verified=round(verified[layer][component], 4),
            seconds=round(account.seconds(component), 3),
            reason=_reason(account, layer, component),
        )
        for layer, account in accounts.items()
        for component in COMPONENTS
        if wanted[component] > TOLERANCE and (layer is not Layer.COLD or _tells_of_cold(account, component))
    )


def _reason(account: LayerAccount, layer: Layer, component: str) -> str:
    if layer is Layer.APPLICATION and account.promised[component] == 0 < max(account.promised):
        return f"promised no {component}"
    return "; ".join(account.reasons)


def _tells_of_cold(account: LayerAccount, component: str) -> bool:
    """Whether the cold pages have a row: memory only, and nothing where the host does not have them go first."""
    return component == "memory_mib" and bool(account.reasons or account.asked.memory_mib)


def _sentence(
    before: Bound,
    after: Bound,
    target: ResourceVector,
    given: Reclaimed,
    accounts: Accounts,
    seconds: float,
    stopped: str,
) -> str:
    asked, missing = before.size.less(target), beyond_rounding(after.size.less(target))
    if beyond_rounding(asked).is_zero():
        return "nothing to take: the VM is at or below the target already"
    parts = f"took {given.total} of {asked} in {seconds:.1f} s"
    parts += f" (guest {given.guest}; hypervisor {given.hypervisor})"
    if not missing.is_zero():
        # One failure may have stopped several layers: it is told once.
        told = (why for layer, account in accounts.items() if layer is not Layer.COLD for why in account.reasons)
        reasons = dict.fromkeys(part for why in told for part in why.split("; "))
        parts += f"; short of {missing}" + (f", because {'; '.join(reasons)}" if reasons else "")
    return f"{parts}; stopped: {stopped}" if stopped else parts


def beyond_rounding(vector: ResourceVector) -> ResourceVector:
    """Drop what is less than a step of a size: 0.005 cores, 1 MiB (a balloon moves in pages, virtio-mem in blocks)."""
    return ResourceVector(*(v if v >= limit else 0.0 for v, limit in zip(vector, (0.005, 1.0, 0.5, 0.5), strict=True)))
