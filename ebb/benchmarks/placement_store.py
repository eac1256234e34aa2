"""`placement`: a manager's database as it would be after years: many hosts, their VMs, and what became of them."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import create_engine, insert, text

from cluster_manager import schema
from cluster_manager.placements import start_placement
from cluster_manager.plans import Finish, VMPhase
from deflation.messages import OperationState, Vector, VMSpec
from deflation.placement_policies import PlacementPolicy
from deflation.resources import ResourceVector
from ebb.benchmarks.placement_hosts import NUMBER, VMS, host_name, report_template

_BATCH = 500


def fill(path: Path, hosts: int, port: int) -> None:
    """Make a database of so many hosts with 20 running VMs each; of each VM its plan, an event and a core change.

    :param port: where the hosts' agents listen.
    """
    engine = create_engine(f"sqlite:///{path}")
    report = report_template(port, 0.0)
    mark = NUMBER.decode()
    spec = VMSpec(name=f"vm-{mark}-0", nominal=Vector.of(ResourceVector(4, 8192, 100, 50)), minimum=Vector())
    spec_json = spec.model_dump_json()
    plan = start_placement(f"create-{mark}", f"request-{mark}", spec, 60.0, PlacementPolicy.BEST_FIT)
    sentence = f"placed {spec.name} ({spec.nominal.vector()}) on host-{mark} in free room"
    plan_json = plan.model_copy(
        update={"instruction": Finish(state=OperationState.DONE, sentence=sentence), "progress": (sentence,) * 3}
    ).model_dump_json()
    now = time.time()
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            schema.migrate(connection)
            for first in range(0, hosts, _BATCH):
                numbers = range(first, min(first + _BATCH, hosts))
                connection.execute(
                    insert(schema.hosts),
                    [
                        {
                            "id": host_name(number),
                            "seen_at": now,
                            "report": report.replace(NUMBER, f"{number:06d}".encode()).decode(),
                            "owes_reinflation": 0,
                        }
                        for number in numbers
                    ],
                )
                machines = [(f"{number:06d}", vm, number * VMS + vm + 1) for number in numbers for vm in range(VMS)]
                connection.execute(
                    insert(schema.vms),
                    [
                        {
                            "name": f"vm-{number}-{vm}",
                            "host": f"host-{number}",
                            "phase": VMPhase.RUNNING.value,
                            "spec": spec_json.replace(spec.name, f"vm-{number}-{vm}"),
                            "sentence": sentence.replace(mark, number),
                            "owes_removal": 0,
                            "request_id": f"request-{key}",
                            "generation": 0,
                            "deleted_by_owner": 0,
                        }
                        for number, vm, key in machines
                    ],
                )
                connection.execute(
                    insert(schema.plans),
                    [
                        {
                            "id": f"create-{key}",
                            "request_id": f"request-{key}",
                            "fingerprint": spec_json,
                            "state": plan_json.replace(mark, str(key)),
                            "finished": 1,
                            "internal": 0,
                            "number": key,
                            "started_at": now,
                            "updated_at": now,
                        }
                        for _, _, key in machines
                    ],
                )
                connection.execute(
                    insert(schema.events),
                    [
                        {
                            "at": now,
                            "plan": f"create-{key}",
                            "vm": f"vm-{number}-{vm}",
                            "host": f"host-{number}",
                            "kind": "placed",
                            "sentence": sentence,
                        }
                        for number, vm, key in machines
                    ],
                )
                connection.execute(
                    insert(schema.core_changes),
                    [
                        {
                            "host": f"host-{number}",
                            "sequence": vm + 1,
                            "machine": f"vm-{number}-{vm}",
                            "at": now - 100,
                            "cores_before": 0.0,
                            "cores_after": 4.0,
                            "cause": f"request-{key}",
                            "variable": 1,
                            "by_owner": 0,
                        }
                        for number, vm, key in machines
                    ],
                )
        with engine.connect() as connection:
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))
    finally:
        engine.dispose()
