"""A random sequence of arrivals, departures and kills on a `tests.cluster.cluster`, and what must be true of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from cluster_manager.plans.placements import PlacementPlan
from cluster_manager.plans.plans import Effect, Note, Plan
from ebbtide.deflation.resources import ZERO, ResourceVector
from hostagent.state.intents import Phase
from tests.chaos.checks import unsettled
from tests.chaos.workload import Client, Request
from tests.cluster.cluster import OVERHEAD_MIB, URL, FakedCluster, FakedHost
from tests.cluster.exact import STEP, Least, fewest_moves
from tests.cluster.wire import Connector
from tests.hostagent.local_world import Domain
from tests.manager.cluster import TOKEN

CAPACITIES = (ResourceVector(6, 3600), ResourceVector(4, 2600), ResourceVector(8, 4600))
#: Of VMs at their minimums so many might be moved instead of a preemption; today none is.
MOVES = 0
#: In sequences from this number on many arrive at once, and some are called off again.
HERDS = 2000
#: A host, and a manager, that has run for so long knows what there is, in seconds.
KNOWN_S = 4.0
#: By when everything that was asked for has ended, and preempted VMs are back, in faked seconds.
PATIENCE_S = 1800.0


class Sequence:
    """One sequence; its choices follow from its seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = Random(seed)
        self.kills = self.chance.random() < 0.7
        self.crowds = (1, 1, 1, 2, 3) if seed < HERDS else (1, 2, 5, 8)
        hosts = self.chance.sample(CAPACITIES, self.chance.choice((2, 2, 3)))
        named = {f"host-{name}": has for name, has in zip("abc", hosts, strict=False)}
        self.cluster = FakedCluster(directory, named, seed)
        self.cluster.watchers.append(self._judge)
        self.violations: list[str] = []
        self.happened: Counter[str] = Counter()
        self.asked_at: dict[str, float] = {}
        #: VMs whose placement has ended.
        self.settled: set[str] = set()
        self.specs: dict[str, dict[str, Any]] = {}
        self.diary: list[str] = []
        self.client: Client

    def play(self, steps: int) -> None:
        """The whole sequence: its steps, calm, and the return of all for whom there is room then."""
        cluster = self.cluster
        with cluster.patched():
            try:
                cluster.start()
                cluster.run(self._open())
                cluster.pass_time(KNOWN_S + 1.0)
                for _ in range(steps):
                    self._step()
                self._calm()
                self._room_appears()
                cluster.run(self.client.session.close())
            finally:
                cluster.close()

    # --- what happens ------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        timeout = aiohttp.ClientTimeout(total=30.0)
        session = aiohttp.ClientSession(connector=Connector(self.cluster.wire), headers=headers, timeout=timeout)
        self.client = Client(self.chance, URL, session)

    def _step(self) -> None:
        chance, cluster = self.chance, self.cluster
        if chance.random() < 0.6:
            self._revive()
        kills = 1.2 if self.kills else 0.0
        what = chance.choices(("arrive", "depart", "kill the manager", "kill an agent"), (6, 2, kills, kills))[0]
        self._note(what)
        if what == "kill the manager":
            if chance.random() < 0.3:
                cluster.kill_manager()
            elif cluster.manager is not None:
                cluster.records_left, cluster.stores_last = chance.randint(1, 7), chance.random() < 0.5
            what = chance.choice(("arrive", "depart", ""))
        elif what == "kill an agent":
            host = chance.choice(list(cluster.hosts.values()))
            if host.agent is not None and chance.random() < 0.3:
                cluster.kill_agent(host)
            else:
                host.fence.calls_left, host.fence.after_effect = chance.randint(1, 25), chance.random() < 0.5
            what = chance.choice(("arrive", "depart", ""))
        if what == "arrive":
            for _ in range(chance.choice(self.crowds)):
                self._send(self._arrival())
                if self.crowds[-1] > 3 and chance.random() < 0.15:
                    self._pass(chance.choice((0.0, 0.5, 3.0)))
                    self._delete(self.client.requests[-1].vm)
        elif what == "depart" and (names := self.client.names):
            self._delete(chance.choice(names))
        self._pass(chance.choice((0.0, 0.5, 3.0, 30.0, 60.0)))

    def _arrival(self) -> Request:
        chance, number = self.chance, len(self.client.requests)
        name = f"vm-{number}" + ("-stubborn" if chance.random() < 0.15 else "")
        priority = chance.choices(("fixed", "deflatable", "harvest"), (5, 6, 1))[0]
        cores, mib = chance.choice((1.0, 1.5, 2.0, 3.0)), chance.choice((512.0, 768.0, 1024.0))
        nominal = {"cpu_cores": cores, "memory_mib": mib}
        spec: dict[str, Any] = {"name": name, "priority": priority, "nominal": nominal}
        if priority != "fixed":
            share = chance.choice((0.25, 0.5, 0.75))
            spec["minimum"] = {key: round(value * share, 2) for key, value in nominal.items()}
            spec["on_preemption"] = chance.choice(("stop", "stop", "suspend", "delete"))
            spec["preemption_notice_s"] = chance.choice((0.0, 5.0, 30.0))
            spec["start"] = chance.choice(("nominal", "deflated"))
        if priority == "harvest":
            spec["ceiling"] = {key: value * 2 for key, value in nominal.items()}
        self.specs[name] = spec
        body = {"request_id": f"r-{number}", "vm": spec, "deadline_s": chance.choice((20.0, 60.0))}
        self.client.priority[name] = priority
        return Request(f"r-{number}", "create", name, "POST", "/v1/vms", body)

    def _send(self, request: Request) -> None:
        self.client.requests.append(request)
        self.asked_at[request.vm] = self.cluster.loop.time()
        self._note(f"{request.kind} {request.vm} {self.specs.get(request.vm, '') if request.kind == 'create' else ''}")
        self.cluster.run(self.client.send(request))

    def _revive(self) -> None:
        cluster = self.cluster
        cluster.bury()
        if cluster.manager is None:
            self._note("the manager starts")
            cluster.start_manager()
        for host in cluster.hosts.values():
            if host.agent is None:
                self._note(f"the agent of {host.id} starts")
                cluster.start_agent(host)

    def _pass(self, seconds: float) -> None:
        self.cluster.pass_time(seconds)
        self._look()

    def _calm(self) -> None:
        """Everybody lives, everything ends, and the whole story is true."""
        self._note("calm")
        self.cluster.records_left = None
        for host in self.cluster.hosts.values():
            host.fence.calls_left = None
        self._revive()
        self.cluster.run(self.client.finish(PATIENCE_S))
        self._until(lambda: not unsettled(self.cluster.directory / "manager.sqlite"), "plans are unfinished")
        self._until(lambda: not self._stuck(), "preempted VMs stay off though there is room: {}", self._stuck)
        # A return may be under way, or begin while reports come in.
        self._pass(5.0)
        self._until(lambda: not unsettled(self.cluster.directory / "manager.sqlite"), "plans are unfinished")
        self._compare()

    def _room_appears(self) -> None:
        """All fixed VMs go: whoever was preempted and now has room comes back."""
        for name in [name for name in self.client.names if self.client.priority[name] == "fixed"]:
            self._delete(name)
        self._calm()

    def _delete(self, name: str) -> None:
        number = len(self.client.requests)
        self._send(Request(f"r-{number}", "delete", name, "DELETE", f"/v1/vms/{name}?request_id=r-{number}", None))

    def _until(self, condition: Any, what: str, more: Any = None) -> None:
        until = self.cluster.loop.time() + PATIENCE_S
        while not condition():
            if self.cluster.loop.time() > until:
                self.violations.append(what.format(more()) if more else what)
                return
            self._pass(5.0)

    # --- what must be true -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """At every moment: no VM is in two places, no host is overfull, nothing broke."""
        places = Counter(name for host in self.cluster.hosts.values() for name in _domains(host))
        self.violations += [f"{name} is in {count} places" for name, count in places.items() if count > 1]
        for host in self.cluster.hosts.values():
            if host.agent is not None:
                charged = sum((vm.allocation().charge for vm in host.agent.host.vms.values()), ZERO)
                if not charged.fits_in(host.capacity + STEP):
                    self.violations.append(f"{host.id} is charged {charged} of {host.capacity}")
        # What nobody heard of a program that was dead already.
        complaints = [one for one in self.cluster.loop.complaints if "has been killed" not in one]
        self.violations += complaints + self.client.violations
        assert not self.violations, "\n".join([*self.violations, *self.diary])

    def _compare(self) -> None:
        """Nothing is lost: what was placed and not deleted is there, on one host, as the manager says."""
        rows = {row["name"]: row for row in self.cluster.run(self.client.vms())}
        hosts = self.cluster.hosts.values()
        there = {name: (host, domain) for host in hosts for name, domain in _domains(host).items()}
        asked = [request for request in self.client.requests if request.kind == "delete" and request.accepted]
        # One that failed because its host was away is carried out later, or was not taken on.
        doomed = {request.vm for request in asked}
        deleted = {request.vm for request in asked if request.end and request.end["state"] == "done"}
        events = self.cluster.run(self._events())
        gone = {row["vm"] for row in events if row["kind"] == "preempted"}
        gone = {name for name in gone if self.specs[name].get("on_preemption") == "delete"}
        placed = {r.vm for r in self.client.requests if r.kind == "create" and r.end and r.end["state"] == "done"}
        found = self.violations
        found += [f"{name} is lost" for name in sorted(placed - doomed - gone - there.keys())]
        found += [f"{name} is there, though it has gone" for name in sorted((deleted | gone) & there.keys())]
        for name, (host, domain) in there.items():
            row = rows.get(name)
            state = "running" if domain.state == "running" else "preempted"
            if row is None or (row["host"], row["state"]) != (host.id, state):
                shown = (row["host"], row["state"], row["sentence"]) if row else "not there"
                found.append(f"{name} is {state} on {host.id}, and shown as {shown}")
        found += [f"{n} is shown on {row['host']}" for n, row in rows.items() if row["host"] and n not in there]
        self.happened["returned"] = sum(row["kind"] == "returned" for row in events)
        assert not found, "\n".join([*found, *self.diary])

    async def _events(self) -> list[dict[str, Any]]:
        async with self.client.session.get(f"{URL}/v1/events?limit=1000") as response:
            rows: list[dict[str, Any]] = (await response.json())["events"]
            return rows

    def _stuck(self) -> list[str]:
        """Preempted VMs that could run at the least size with which they start, all others at their minimums."""
        stuck = []
        for host in self.cluster.hosts.values():
            domains = _domains(host)
            used = sum((self._least(domain) for domain in domains.values() if domain.state == "running"), ZERO)
            for name, domain in domains.items():
                boots = ResourceVector(memory_mib=domain.boot_mib)
                # One whose memory is saved goes on with what it had.
                saved = domain.intent.committed.vector() if domain.saved_mib is not None else ZERO
                least = domain.allocation.minimum.larger(boots).larger(saved)
                least += ResourceVector(memory_mib=OVERHEAD_MIB)
                if domain.state == "stopped" and (used + least).fits_in(host.capacity):
                    stuck.append(f"{name} on {host.id}")
        return stuck

    def _judge(self, state: Plan, effects: Iterable[Effect]) -> None:
        """At the record of each preemption: could a host have held all?"""
        if isinstance(state, PlacementPlan) and state.finished:
            self.settled.add(state.vm)
        for effect in effects:
            if isinstance(effect, Note):
                self._note(f"{effect.kind}: {effect.sentence}")
            if not isinstance(effect, Note) or effect.kind != "preempting":
                continue
            self.happened["preempted"] += 1
            self.happened[f"preempted: {self.specs[effect.vm or ''].get('on_preemption')}"] += 1
            assert isinstance(state, PlacementPlan)
            if effect.vm is None or "stubborn" in str(state.failed_layer):
                continue
            moves = self._moves_instead(state)
            self.happened[f"{moves} moves"] += 1
            if moves is not None and moves <= MOVES:
                self.violations.append(f"{effect.vm} is preempted, though {moves} moves would do: {effect.sentence}")

    def _moves_instead(self, state: PlacementPlan) -> int | None:
        """How many moves would have made room for all, as far as the manager could have known of it."""
        cluster, began = self.cluster, self.asked_at[state.vm]
        capacity, vms = {}, [Least(state.spec.nominal.vector() + ResourceVector(memory_mib=OVERHEAD_MIB), None, False)]
        for host in cluster.hosts.values():
            known = host.agent is not None and not host.fence.dead and host.up_since < began - KNOWN_S
            if not (known and cluster.manager_since < began - KNOWN_S):
                continue
            capacity[host.id] = host.capacity
            for name, domain in _domains(host).items():
                if domain.intent.phase is not Phase.STOPPED and name != state.vm:
                    vms.append(Least(self._least(domain), host.id))
        # Others that are looking for a place may have chosen any.
        for request in self.client.requests:
            if request.kind == "create" and request.vm not in {state.vm, *self.settled}:
                size = ResourceVector.of(self.specs[request.vm]["nominal"]) + ResourceVector(memory_mib=OVERHEAD_MIB)
                vms += [Least(size, host, False) for host in capacity]
        self.happened["judged with all hosts"] += len(capacity) == len(cluster.hosts)
        return fewest_moves(capacity, vms, MOVES + 1)

    def _least(self, domain: Domain) -> ResourceVector:
        """The least that a VM can be brought to, if its guest, where that boots, is waited for."""
        allocation = domain.allocation
        gives = domain.state == "running" and not allocation.name.endswith("stubborn")
        least = allocation.minimum if gives else allocation.upper
        return least + ResourceVector(memory_mib=OVERHEAD_MIB)

    def _note(self, what: str) -> None:
        self.diary.append(f"{self.cluster.loop.time():.2f} s: {what}")


def _domains(host: FakedHost) -> dict[str, Domain]:
    """By the names of their VMs."""
    return {domain.intent.spec.name: domain for domain in host.world.domains.values()}
