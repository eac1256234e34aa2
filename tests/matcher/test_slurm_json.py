"""What Slurm's programs print, in the form of 22.05 and in the newer one, where states are lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.engines.slurm import Slurm
from ebbtide.matcher.engines.slurm_json import document, jobs_of, machines_of
from ebbtide.matcher.errors import EngineUnreachable
from ebbtide.matcher.match.attempts import AttemptState, EngineMachine


def job(state: Any, **more: Any) -> dict[str, Any]:
    row = {"job_id": 7, "name": "ebb.train.0a.1", "job_state": state, "nodes": "n1", "cpus": 2, **more}
    return document("squeue", json.dumps({"jobs": [row]}))


@pytest.mark.parametrize(
    ("state", "more", "seen", "code"),
    [
        ("RUNNING", {}, AttemptState.RUNNING, None),
        (["RUNNING"], {}, AttemptState.RUNNING, None),
        # It ends, and its processes are still there: 22.05 says COMPLETING alone.
        (["CANCELLED", "COMPLETING"], {}, AttemptState.RUNNING, None),
        (["PENDING"], {"priority": {"set": True, "number": 0}}, AttemptState.HELD, None),
        (["COMPLETED"], {"exit_code": {"return_code": {"set": True, "number": 0}}}, AttemptState.ENDED, 0),
        (["FAILED"], {"exit_code": {"return_code": {"set": True, "number": 7}}}, AttemptState.ENDED, 7),
        ([], {}, AttemptState.ENDED, None),
        ([None, 7], {}, AttemptState.ENDED, None),
    ],
)
def test_the_state_of_a_job_is_a_word_or_a_list_of_words(
    state: Any, more: dict[str, Any], seen: AttemptState, code: int | None
) -> None:
    (found,) = jobs_of(job(state, **more))
    assert (found.seen.state, found.seen.exit_code) == (seen, code)
    assert found.held_cores == ({"n1": 2} if seen is AttemptState.RUNNING else {})


@pytest.mark.parametrize(
    ("state", "code", "unrecorded"), [("FAILED", 98, True), ("FAILED", 7, False), ("TIMEOUT", 98, False)]
)
def test_a_job_that_could_not_write_its_record_is_known_by_its_code(state: str, code: int, unrecorded: bool) -> None:
    (found,) = jobs_of(job(state, exit_code=code << 8))
    assert (found.seen.unrecorded, found.seen.machine) == (unrecorded, "n1")


def test_what_a_job_holds_or_will_hold_is_known_as_long_as_it_lives() -> None:
    (runs,) = jobs_of(job("RUNNING"))
    (released,) = jobs_of(job("PENDING", priority=7, required_nodes="n2"))
    (held,) = jobs_of(job("PENDING", priority=0, required_nodes="n2"))
    (silent,) = jobs_of(job("RUNNING", cpus=None))
    shown = [(one.seen.machine, one.seen.cores) for one in (runs, released, held, silent)]
    assert shown == [("n1", 2), ("n2", 2), (None, None), ("n1", None)]


def test_a_job_whose_user_is_not_said_is_nobodys_and_not_roots() -> None:
    found = [jobs_of(job("RUNNING", **more))[0].user for more in ({"user_id": 1007}, {"user_id": {"number": 7}}, {})]
    assert found == [1007, 7, -1]


def test_a_job_that_slurm_has_not_begun_is_known_to_wait_for_it() -> None:
    (runs,) = jobs_of(job("RUNNING"))
    (pending,) = jobs_of(job("PENDING", priority=7, required_nodes="n2"))
    assert (runs.seen.queued, pending.seen.queued) == (False, True)


def cores_of_22_05(name: str, *sockets: int) -> dict[str, Any]:
    """A node's part of a job, as 22.05 prints it: so many of the cores of each socket."""
    held = {str(n): {"cores": {str(core): "allocated" for core in range(count)}} for n, count in enumerate(sockets)}
    return {"nodename": name, "sockets": held, "cpus_used": 0, "memory_used": 0, "memory_allocated": 0}


def cores_of_newer(name: str, count: int, *statuses: str) -> dict[str, Any]:
    cores = [{"index": n, "status": [status]} for n, status in enumerate(statuses)]
    return {"name": name, "cpus": {"count": count, "used": 0}, "sockets": [{"index": 0, "cores": cores}]}


@pytest.mark.parametrize(
    ("resources", "cpus", "held"),
    [
        ({"nodes": "n[1-2]", "allocated_nodes": [cores_of_22_05("n1", 2, 2), cores_of_22_05("n2", 1)]}, 5, (4, 1)),
        # Two CPUs of each core.
        ({"nodes": "n[1-2]", "allocated_nodes": [cores_of_22_05("n1", 2), cores_of_22_05("n2", 1)]}, 6, (4, 2)),
        ({"nodes": {"allocation": [cores_of_newer("n1", 4), cores_of_newer("n2", 1)]}}, {"number": 5}, (4, 1)),
        (
            {
                "nodes": {
                    "allocation": [
                        cores_of_newer("n1", 0, "ALLOCATED", "IN_USE", "UNALLOCATED"),
                        cores_of_newer("n2", 0, "ALLOCATED"),
                    ]
                }
            },
            3,
            (2, 1),
        ),
        ({"allocated_nodes": [{"nodename": "n1", "cpus_used": 2}, {"nodename": "n2", "cpus_used": 2}]}, 4, (2, 2)),
        (
            {"allocated_nodes": {"0": {"nodename": "n1", "cores": {"0": "x"}}, "1": {"nodename": "n2", "cpus": 3}}},
            4,
            (1, 3),
        ),
        # Nobody says how many are where.
        ({"allocated_nodes": [{"nodename": "n1"}, {"nodename": "n2"}]}, 4, (4, 4)),
    ],
)
def test_the_cores_of_a_job_on_several_nodes_are_known_in_all_forms(
    resources: dict[str, Any], cpus: Any, held: tuple[int, int]
) -> None:
    (found,) = jobs_of(job("RUNNING", nodes="n[1-2]", cpus=cpus, job_resources=resources))
    assert found.held_cores == dict(zip(("n1", "n2"), held, strict=True))


@pytest.mark.parametrize(
    ("priority", "reason", "never"), [(0, "BadConstraints", True), (7, "BadConstraints", False), (7, "Priority", False)]
)
def test_a_job_that_can_never_begin_where_it_was_released_to_is_not_held(
    priority: int, reason: str, never: bool
) -> None:
    (found,) = jobs_of(job("PENDING", priority=priority, state_reason=reason, required_nodes="n3"))
    assert (found.seen.state, found.seen.machine, found.seen.never) == (AttemptState.RELEASED, "n3", never)


def test_a_job_that_is_suspended_runs_and_is_known_to_stand_still() -> None:
    for state in ("SUSPENDED", ["RUNNING", "SUSPENDED"], ["STOPPED"]):
        (found,) = jobs_of(job(state))
        assert found.seen.state is AttemptState.RUNNING
    (found,) = jobs_of(job(["SUSPENDED"]))
    assert found.seen.suspended


@pytest.mark.parametrize(
    ("node", "up", "drained"),
    [
        ({"state": "idle", "state_flags": []}, True, ""),
        ({"state": "idle", "state_flags": ["DRAIN"], "reason": "new disks"}, True, "new disks"),
        ({"state": ["IDLE"]}, True, ""),
        ({"state": ["MIXED", "DRAIN"], "reason": "new disks"}, True, "new disks"),
        ({"state": ["DOWN", "NOT_RESPONDING"]}, False, ""),
        ({"state": ["IDLE", "NOT_RESPONDING"]}, False, ""),
    ],
)
def test_the_state_of_a_node_is_a_word_with_flags_or_one_list(node: dict[str, Any], up: bool, drained: str) -> None:
    printed = json.dumps({"nodes": [{"name": "n1", "cpus": 4, "gres": "vcore:4", **node}]})
    (found,) = machines_of(document("sinfo", printed))
    assert (found.up, found.drained, found.usable_cores) == (up, drained, 4)


#: What newer versions print: sinfo nodes by partition and state, scontrol each node.
BY_STATE = {
    "sinfo": [
        {
            "node": {"state": ["IDLE"]},
            "nodes": {"allocated": 0, "idle": 1, "other": 0, "total": 1, "hostnames": ["n1"], "nodes": ["n1"]},
            "cpus": {"allocated": 0, "idle": 4, "other": 0, "total": 4, "minimum": 4, "maximum": 4},
            "gres": {"total": "vcore:3", "used": "vcore:0"},
            "partition": {"name": "main"},
        }
    ],
    "errors": [],
    "warnings": [],
}
EACH = {
    "nodes": [{"name": "n1", "cpus": 4, "gres": "vcore:3", "state": ["IDLE"], "reason": ""}],
    "last_update": {"set": True, "infinite": False, "number": 1700000000},
    "errors": [],
    "warnings": [],
}


@pytest.mark.parametrize(
    ("printed", "asked"),
    [
        ({"sinfo": {"nodes": [{"name": "n1", "cpus": 4, "gres": "vcore:3", "state": "idle"}]}}, ["sinfo --all --json"]),
        ({"sinfo": BY_STATE, "scontrol": EACH}, ["sinfo --all --json", "scontrol --all show nodes --json"]),
    ],
)
async def test_nodes_are_read_of_the_program_that_lists_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: dict[str, Any], asked: list[str]
) -> None:
    for name, content in {"squeue": {"jobs": []}, **printed}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/asked\ncat {tmp_path}/{name}.json\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    look = await Slurm(EngineSettings(engine="slurm", directory=tmp_path)).look([])
    assert look.machines == {"n1": EngineMachine("n1", 4, 3)}
    assert (tmp_path / "asked").read_text().splitlines() == ["squeue --all --states=all --json", *asked]


ROW = {"job_id": 7, "name": "a", "nodes": "n1", "account": "x"}


@pytest.mark.parametrize(
    "printed",
    [
        {"jobs": [ROW, 3, None, [ROW]], "errors": [], "last": {"jobs": [ROW]}, "sinfo": [ROW]},
        {"meta": {"slurm": {"version": {"major": "22"}}}, "nodes": [], "warnings": [{"source": "x"}]},
        {"jobs": None},
        {"jobs": {"jobs": [ROW]}},
        {"nodes": [ROW], '\N{SNOWMAN}"': "]}"},
        {},
    ],
)
@pytest.mark.parametrize("indent", [None, 1, "\r\n\t "])
def test_a_document_is_read_in_pieces_as_at_once_but_for_what_nobody_reads(
    printed: dict[str, Any], indent: int | str | None
) -> None:
    kept = {
        name: [{k: v for k, v in row.items() if k != "account"} if isinstance(row, dict) else row for row in value]
        if name in ("jobs", "nodes") and isinstance(value, list)
        else value
        for name, value in printed.items()
    }
    assert document("squeue", f" {json.dumps(printed, indent=indent)}\n") == kept
    for end in ("", '{"jobs": [{"job_id": 1}]}'):
        with pytest.raises(EngineUnreachable, match="squeue printed no JSON"):
            document("squeue", json.dumps(printed, indent=indent)[: -1 if not end else None] + end)


@pytest.mark.parametrize(
    "printed",
    [
        *("", "{", "}", '{"jobs"}', '{"jobs", []}', '{"jobs": [}', '{"jobs": [1 2]}', '{"jobs": [1,]}', '{"jobs": [1}'),
        *('{"jobs": [1],}', '{"jobs": [1] "errors": []}', '{"jobs": [:1]}', '{"jobs": [1]]', '{"a": 1, 2: 3}', "[1"),
        '{"jobs": ' + "[" * 100_000,
    ],
)
def test_what_is_no_json_is_slurmctld_that_does_not_answer(printed: str) -> None:
    with pytest.raises(EngineUnreachable, match="squeue printed no JSON"):
        document("squeue", printed)


def test_no_call_of_the_interpreter_reads_more_than_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """In such a call no other thread of the process runs: not the manager's proof that it leads, either."""
    longest = [0]

    class Watched(json.JSONDecoder):
        def raw_decode(self, text: str, idx: int = 0) -> tuple[Any, int]:
            found, end = super().raw_decode(text, idx)
            longest[0] = max(longest[0], end - idx)
            return found, end

    monkeypatch.setattr(json, "JSONDecoder", Watched)
    monkeypatch.setattr(json, "_default_decoder", Watched())
    row = {**ROW, "comment": "x" * 1000}
    assert len(jobs_of(document("squeue", json.dumps({"jobs": [row] * 100, "errors": []})))) == 100
    assert 0 < longest[0] < 1200


def test_a_document_without_what_was_asked_for_is_no_empty_cluster() -> None:
    with pytest.raises(EngineUnreachable, match="sinfo printed another JSON"):
        machines_of(BY_STATE)
    with pytest.raises(EngineUnreachable, match="squeue printed another JSON"):
        jobs_of({"errors": []})
    assert machines_of({"nodes": []}) == []
    assert jobs_of({"jobs": []}) == []
