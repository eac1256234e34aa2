"""`placement`: a manager's database as it would be after years: many hosts, their VMs, and what became of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import create_engine, insert, text

from benchmarks.placing.placement_hosts import NUMBER, VMS, host_name, report_template
from cluster_manager.plans.placements import start_placement
from cluster_manager.plans.plans import Finish, VMPhase
from cluster_manager.store import schema
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.resources import ResourceVector
from ebbtide.messages.common import Vector
from ebbtide.messages.operations import OperationState
from ebbtide.messages.vms import VMSpec

_BATCH = 500


def fill(path: Path, hosts: int, port: int) -> None:
    """Make a database of so many hosts with 20 running VMs each; of each VM its plan, an event and a core change.

    :param port: where the hosts' agents listen.
    """
    engine = create_engine(f"sqlite:///{path}")
    filler = _Filler(port)
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            schema.migrate(connection)
            for first in range(0, hosts, _BATCH):
                numbers = range(first, min(first + _BATCH, hosts))
                connection.execute(insert(schema.hosts), [filler.host(number) for number in numbers])
                vms = [_VM(f"{number:06d}", vm, number * VMS + vm + 1) for number in numbers for vm in range(VMS)]
                for table, row in (
                    (schema.vms, filler.vm),
                    (schema.plans, filler.plan),
                    (schema.events, filler.event),
                    (schema.core_changes, filler.core_change),
                ):
                    connection.execute(insert(table), [row(vm) for vm in vms])
        with engine.connect() as connection:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    finally:
        engine.dispose()


def upgrade(path: Path) -> None:
    """Bring the database to the newest version of its tables, as a manager does at its start."""
    engine, more = create_engine(f"sqlite:///{path}"), True
    try:
        while more:
            with engine.begin() as connection:
                more = schema.migrate(connection)
    finally:
        engine.dispose()


class _VM(NamedTuple):
    """One VM: the number of its host, its place there, and its number over all hosts."""

    host: str
    place: int
    key: int

    @property
    def name(self) -> str:
        return f"vm-{self.host}-{self.place}"


class _Filler:
    """Rows of the tables, from texts that are made once and have a number put in."""

    def __init__(self, port: int) -> None:
        mark = NUMBER.decode()
        self._now = time.time()
        self._mark = mark
        self._report = report_template(port, 0.0)
        self._spec = VMSpec(name=f"vm-{mark}-0", nominal=Vector.of(ResourceVector(4, 8192, 100, 50)), minimum=Vector())
        self._spec_json = self._spec.model_dump_json()
        self._sentence = f"placed {self._spec.name} ({self._spec.nominal.vector()}) on host-{mark} in free room"
        plan = start_placement(f"create-{mark}", f"request-{mark}", self._spec, 60.0, PlacementPolicy.BEST_FIT)
        done = Finish(state=OperationState.DONE, sentence=self._sentence)
        self._plan_json = plan.model_copy(
            update={"instruction": done, "progress": (self._sentence,) * 3}
        ).model_dump_json()

    def host(self, number: int) -> dict[str, object]:
        report = self._report.replace(NUMBER, f"{number:06d}".encode()).decode()
        return {"id": host_name(number), "seen_at": self._now, "report": report, "owes_reinflation": 0}

    def vm(self, vm: _VM) -> dict[str, object]:
        return {
            "name": vm.name,
            "host": f"host-{vm.host}",
            "phase": VMPhase.RUNNING.value,
            "spec": self._spec_json.replace(self._spec.name, vm.name),
            "sentence": self._sentence.replace(self._mark, vm.host),
            "owes_removal": 0,
            "request_id": f"request-{vm.key}",
            "generation": 0,
            "deleted_by_owner": 0,
        }

    def plan(self, vm: _VM) -> dict[str, object]:
        return {
            "id": f"create-{vm.key}",
            "request_id": f"request-{vm.key}",
            "fingerprint": self._spec_json,
            "state": self._plan_json.replace(self._mark, str(vm.key)),
            "finished": 1,
            "internal": 0,
            "number": vm.key,
            "started_at": self._now,
            "updated_at": self._now,
        }

    def event(self, vm: _VM) -> dict[str, object]:
        return {
            "at": self._now,
            "plan": f"create-{vm.key}",
            "vm": vm.name,
            "host": f"host-{vm.host}",
            "kind": "placed",
            "sentence": self._sentence,
        }

    def core_change(self, vm: _VM) -> dict[str, object]:
        return {
            "host": f"host-{vm.host}",
            "sequence": vm.place + 1,
            "machine": vm.name,
            "at": self._now - 100,
            "cores_before": 0.0,
            "cores_after": 4.0,
            "cause": f"request-{vm.key}",
            "variable": 1,
            "by_owner": 0,
        }
