"""Which hosts a plan tries, and in which order: by their reports, by what other plans have chosen, by who has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import numpy as np
import structlog

from cluster_manager.execution.running_plans import wanted
from cluster_manager.inventory.agents import Agents
from cluster_manager.inventory.availability import Ranking
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.plans.host_wait import MovePlan
from cluster_manager.plans.live_migrations import cannot_take
from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import ChooseHosts, HostsChosen, Plan
from cluster_manager.plans.report_queries import asked_of_hosts, closed, has_template, lacks
from ebbtide.deflation.placement.fitness import HostView
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalancing import Rooms
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.vms import VMSpec

log = structlog.get_logger()

#: Hosts that a plan keeps in line; it acts on three at most.
LINE: Final = 16


class HostRanking:
    """Ranks hosts.

    :param generator: of the lots that a policy draws.
    """

    def __init__(self, agents: Agents, hosts: Hosts, generator: np.random.Generator) -> None:
        self._agents = agents
        self._hosts = hosts
        self._generator = generator

    def choose(self, state: Plan, instruction: ChooseHosts, elapsed_s: float) -> HostsChosen:
        """The hosts that a plan tries, or why there are none."""
        assert isinstance(state, PlacementPlan | MovePlan), "only these choose hosts"
        began = time.perf_counter()
        demand, purpose = wanted(state, instruction.purpose), instruction.purpose
        open_hosts = self._hosts.availability
        # A VM moves to none but another host.
        spec, home, offered = state.spec, state.home, self._with_template(state.spec, but=state.home)
        chosen: list[str] = []
        if purpose == "preempt":
            # Where the minimums leave enough and a layer failed, before where a minimum itself is in the way.
            allow = open_hosts.minimums_allow(spec.nominal.vector())
            chosen = self._in_line(demand, purpose, state.policy, lambda host: allow(host) and offered(host))
        others = self._in_line(demand, purpose, state.policy, offered)
        if purpose == "place" and isinstance(state, PlacementPlan):
            # Only then where guests would have to be waited for.
            others += self._in_line(demand, "wait", state.policy, offered)
        chosen = list(dict.fromkeys((*chosen, *others)))[:LINE]
        ms = round((time.perf_counter() - began) * 1000, 3)
        log.info("hosts ranked", plan=state.id, open=len(open_hosts), chosen=len(chosen), ms=ms)
        if chosen:
            return HostsChosen(elapsed_s, tuple(chosen))
        if not len(open_hosts):
            reports = [host.report for host in self._hosts.all() if not self._hosts.is_silent(host.report.id)][:LINE]
            reasons = ", ".join(closed(report) or f"{report.id} is {report.mode}" for report in reports)
            why = f"no host takes new VMs ({reasons})" if reasons else "no host is ready"
            return HostsChosen(elapsed_s, (), why, ready=False)
        ready = self._hosts.ready()
        if ready and not any(has_template(host.report, spec) for host in ready):
            where = ", ".join(lacks(host.report, spec) for host in ready[:LINE])
            return HostsChosen(elapsed_s, (), f"no host is ready that could make it ({where})", ready=False)
        what = "free or held by low-priority VMs" if purpose == "preempt" else "free or deflatable"
        offers = [f"{host} has {offer}" for host, offer in open_hosts.offers(purpose, LINE + 1) if host != home][:LINE]
        lacking = f"no ready host has {demand} {what} beside the VM's overhead ({', '.join(offers)})" if offers else ""
        return HostsChosen(elapsed_s, (), lacking)

    def _in_line(
        self, demand: ResourceVector, ranking: Ranking, policy: PlacementPolicy, accepts: Callable[[str], bool]
    ) -> list[str]:
        """The best hosts of those with the fewest plans in line, then the others; behind the first of them those that
        no plan has now.

        A host takes its plans one after the other, and a placement has no more than its deadline. That one plan has a
        host counts for nothing: most are done in a moment.
        """
        table, locks = self._hosts.availability, self._hosts.locks

        def best(most_in_line: int | None = None) -> list[str]:
            def near(host: str) -> bool:
                return (most_in_line is None or locks.in_line(host) <= most_in_line) and accepts(host)

            return table.rank(demand, LINE, ranking, policy, self._generator, near)

        hosts = best(1 if locks.waited_for else None)
        if not hosts and locks.waited_for:
            first = PlacementPolicy.FIRST_FIT
            able = table.rank(demand, len(table), ranking, first, self._generator, accepts)
            hosts = best(min(map(locks.in_line, able))) if able else []
        if locks.waited_for and 0 < len(hosts) < LINE:
            hosts = list(dict.fromkeys((*hosts, *best())))[:LINE]
        return hosts[:1] + sorted(hosts[1:], key=locks.is_busy)

    def choices(self, state: Plan, instruction: ChooseHosts) -> tuple[HostsChosen, list[tuple[HostView, float]]]:
        """The hosts that a placement would try now, and each as it is seen, with its fitness."""
        assert isinstance(state, PlacementPlan | MovePlan), "only these choose hosts"
        chosen, demand = self.choose(state, instruction, 0.0), wanted(state, instruction.purpose)
        seen = self._hosts.availability
        return chosen, [seen.view(host, instruction.purpose, demand) for host in chosen.hosts]

    def has_room(self, spec: VMSpec, but: Collection[str]) -> bool:
        """Whether one host besides those of ``but`` could hold all of a VM by deflation."""
        offered, demand = self._with_template(spec), asked_of_hosts(spec, "place")
        first = PlacementPolicy.FIRST_FIT
        return bool(
            self._hosts.availability.rank(
                demand, 1, "place", first, self._generator, lambda name: name not in but and offered(name)
            )
        )

    def elsewhere(self, state: PlacementPlan, host: str) -> str | None:
        """Another host that could hold a plan's VM by deflation, perhaps soon, and was not found to give too little."""
        if state.purpose != "preempt" or state.looked_again:
            return None
        offered, tried = self._with_template(state.spec), {host, *state.short_on}
        demand = asked_of_hosts(state.spec, "place")
        rankings: tuple[Ranking, ...] = ("place", "wait")
        for ranking in rankings:
            others = self._hosts.availability.rank(
                demand, 1, ranking, state.policy, self._generator, lambda name: name not in tried and offered(name)
            )
            if others:
                return others[0]
        return None

    def rooms(self, host: str) -> Rooms:
        """What the hosts besides one have that take VMs which run."""

        def takes(other: str) -> bool:
            known = self._hosts.get(other)
            return other != host and known is not None and not cannot_take(self._agents.proven(known.report))

        return self._hosts.availability.rooms(takes)

    def _with_template(self, spec: VMSpec, but: str | None = None) -> Callable[[str], bool]:
        """Whether a host, but for one, has what a VM is made of."""

        def accepts(host_id: str) -> bool:
            host = self._hosts.get(host_id)
            return host is not None and host_id != but and has_template(host.report, spec)

        return accepts
