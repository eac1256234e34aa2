"""What Slurm's programs print with ``--json``, read strictly in its form: its users choose some of the words in it.

A document in another form than Slurm's is refused as a whole, as if slurmctld did not answer: jobs and nodes that
cannot be read are unknown, not gone. Words and numbers within it are cleaned and bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ebbtide.matcher.engines.records import UNRECORDED, exit_code_of
from ebbtide.matcher.errors import EngineUnreachable
from ebbtide.matcher.match.attempts import RECOUNTED, AttemptState, EngineMachine, Seen

_GRES: Final = re.compile(r"(?:^|,)(?:gres[:/])?vcore(?::[a-z_]\w*)?[:=](\d{1,9})(?!\d)(?:\([^()]*\))?", re.ASCII)
#: Words of such a list, brackets and all, and those that a change of cores replaces.
_GRES_WORDS: Final = re.compile(r"(?:\([^()]*\)|\[[^][]*\]|[^,])+")
_OURS: Final = re.compile(r"(?:gres[:/])?vcore(?:[:=(]|$)|\(null\)$")
_RUNNING: Final = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "STOPPED"}
_SUSPENDED: Final = {"SUSPENDED", "STOPPED"}
_DOWN: Final = {"DOWN", "FAIL", "FAILING", "ERROR", "FUTURE", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN", "UNKNOWN"}
#: With this reason Slurm drains a node that registers while its jobs hold cores whose number was changed by us.
_MISTRUSTED: Final = "gres/vcore count changed"
_STANDING_STILL: Final = {"DRAIN", "MAINTENANCE", "MAINT"}
#: The lists that are long, and what is read of each row in them.
_LISTS: Final = {"jobs", "nodes"}
_READ: Final = (
    *("job_id", "name", "user_id", "job_state", "state_reason", "nodes", "cpus", "priority", "required_nodes"),
    *("exit_code", "job_resources", "state", "state_flags", "reason", "gres"),
)
_OPENED: Final = re.compile(r'[ \t\n\r]*\{[ \t\n\r]*(?=")')
_EMPTY: Final = re.compile(r"\[[ \t\n\r]*\]")
_MARK: Final = re.compile(r"[ \t\n\r]*([,:\[\]}])[ \t\n\r]*")
#: Characters of a word, and what no number exceeds.
_LONGEST: Final = 1000
_LARGEST: Final = 2**53


def document(program: str, output: str) -> dict[str, Any]:
    """What a program printed.

    :raises EngineUnreachable: no JSON object, or one that says that slurmctld does not answer (with an exit code of 0).
    """
    try:
        found = _in_pieces(output)
    except (ValueError, RecursionError) as error:
        raise EngineUnreachable(f"{program} printed no JSON") from error
    if not isinstance(found, dict):
        raise _unexpected(program)
    problems = found.get("errors") or []
    for problem in problems if isinstance(problems, list) else [problems]:
        said = (problem.get("error") or problem.get("description")) if isinstance(problem, Mapping) else problem
        raise EngineUnreachable(f"{program}: {_word(said) or 'an error without a word'}")
    return found


def _in_pieces(text: str) -> Any:
    """JSON, whose jobs and nodes are read one by one: all of them were one call of the interpreter, which, though in a
    thread, keeps all others from running. Only what is read here is kept of each.

    :raises ValueError, RecursionError: it is none.
    """
    decoder = json.JSONDecoder()
    if (begin := _OPENED.match(text)) is None:
        return decoder.decode(text)
    found, mark, at = {}, ",", begin.end()
    while mark == ",":
        key, at = decoder.raw_decode(text, at)
        mark, at = _mark(text, at)
        if mark != ":" or not isinstance(key, str):
            raise ValueError(f"no name and value before {at}")
        if key in _LISTS and text.startswith("[", at):
            found[key], at = _rows_at(decoder, text, at)
        else:
            found[key], at = decoder.raw_decode(text, at)
        mark, at = _mark(text, at)
    if mark != "}" or at != len(text):
        raise ValueError(f"no end at {at}")
    return found


def _rows_at(decoder: json.JSONDecoder, text: str, at: int) -> tuple[list[Any], int]:
    """A list and the place behind it. Raises as `_in_pieces`."""
    if (empty := _EMPTY.match(text, at)) is not None:
        return [], empty.end()
    rows, mark, at = [], ",", _mark(text, at)[1]
    while mark == ",":
        row, at = decoder.raw_decode(text, at)
        rows.append({name: row[name] for name in _READ if name in row} if isinstance(row, dict) else row)
        mark, at = _mark(text, at)
    if mark != "]":
        raise ValueError(f"no end of a list at {at}")
    return rows, at


def _mark(text: str, at: int) -> tuple[str, int]:
    """The next mark, and the place behind it and the space around it. Raises ValueError: there is none."""
    if (found := _MARK.match(text, at)) is None:
        raise ValueError(f"no mark at {at}")
    return found[1], found.end()


@dataclass(frozen=True, slots=True)
class Job:
    """A job of ``squeue --json``: whose it is, what it would be as an attempt, the cores that it holds by node."""

    number: int
    name: str
    user: int
    seen: Seen
    held_cores: Mapping[str, int]


def jobs_of(found: Mapping[str, Any]) -> list[Job]:
    """All jobs; ids rise, so the newest comes last. Raises `EngineUnreachable`."""
    jobs = []
    for row in _rows(found, "jobs", "squeue"):
        number = _number(row.get("job_id"))
        if number <= 0:
            raise _unexpected("squeue")
        # Another user's where it is not said: 0 would be root.
        user = _number(row["user_id"]) if "user_id" in row else -1
        jobs.append(Job(number, _word(row.get("name")), user, _seen(row), _held_cores(row)))
    return sorted(jobs, key=lambda job: job.number)


def machines_of(found: Mapping[str, Any], program: str = "sinfo") -> list[EngineMachine]:
    """All nodes of ``sinfo --json`` of 22.05, or of ``scontrol show nodes --json``. Raises `EngineUnreachable`."""
    machines = [_machine(row) for row in _rows(found, "nodes", program)]
    if not all(machine.name for machine in machines):
        raise _unexpected(program)
    return machines


def other_gres_of(found: Mapping[str, Any], program: str = "sinfo") -> dict[str, str]:
    """The generic resources of each node but for ``vcore``, as ``scontrol`` takes them. Raises as `machines_of`."""
    others = {}
    for row in _rows(found, "nodes", program):
        words = _GRES_WORDS.findall(_word(row.get("gres"), None))
        others[_word(row.get("name"))] = ",".join(word for word in words if not _OURS.match(word))
    return others


def _rows(found: Mapping[str, Any], key: str, program: str) -> Iterator[Mapping[str, Any]]:
    if key not in found:
        raise _unexpected(program)
    rows = found[key] or []
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise _unexpected(program)
    return iter(rows)


def _unexpected(program: str) -> EngineUnreachable:
    return EngineUnreachable(f"{program} printed another JSON than expected")


def _seen(job: Mapping[str, Any]) -> Seen:
    state, reason = _state(job), _word(job.get("state_reason"))
    machine = _word(job.get("nodes")) or None
    cores = max(_number(job.get("cpus")), 0) or None
    if state == "PENDING":
        # What cannot begin where it was released to gets that priority, too: it is not held, and is to be taken back.
        stands = _number(job.get("priority")) == 0
        never = stands and reason == "BadConstraints"
        if (stands and not never) or reason.startswith("JobHeld"):
            return Seen(AttemptState.HELD, reason=reason)
        required = _word(job.get("required_nodes")) or None
        return Seen(AttemptState.RELEASED, required, reason=reason, cores=cores, queued=True, never=never)
    if state in _RUNNING:
        return Seen(AttemptState.RUNNING, machine, suspended=state in _SUSPENDED, cores=cores)
    words = " ".join(word for word in (state.lower().replace("_", " "), reason) if word and word != "None")
    code = _exit_code(job.get("exit_code"))
    if code and state == "FAILED":
        words += f", exit code {code}"
    # Other states are Slurm's own doing: it ends a job with the code of a signal, or with none.
    told = {"COMPLETED": 0, "FAILED": exit_code_of(code) or None}.get(state)
    unrecorded = state == "FAILED" and code == UNRECORDED
    return Seen(AttemptState.ENDED, machine, exit_code=told, reason=words, unrecorded=unrecorded)


def _state(job: Mapping[str, Any]) -> str:
    """The word for a job's state; newer versions list it with its flags, of which one that it is still there counts."""
    found = job.get("job_state")
    words = [_word(word) for word in (found if isinstance(found, list) else [found])]
    return next((word for word in words if word in _RUNNING), words[0] if words else "")


def _exit_code(value: Any) -> int:
    """A wait status, or what newer versions make of it."""
    if isinstance(value, Mapping) and "return_code" in value:
        return _number(value["return_code"])
    return _number(value) >> 8


def _machine(node: Mapping[str, Any]) -> EngineMachine:
    # Newer versions list the flags with the state.
    states = _list(node.get("state"))
    flags = {_word(flag) for flag in (*_list(node.get("state_flags")), *states)}
    state = _word(states[0] if states else node.get("state")).upper()
    up = state not in _DOWN and not flags & _DOWN
    drained = (_word(node.get("reason")) or "it is drained") if flags & _STANDING_STILL else ""
    if drained.startswith(_MISTRUSTED) and "INVALID_REG" not in flags:
        # It has registered since: only the mark is left.
        drained = RECOUNTED
    return EngineMachine(
        name=_word(node.get("name")),
        most_cores=max(_number(node.get("cpus")), 0),
        usable_cores=sum(map(int, _GRES.findall(_word(node.get("gres"), None)))),
        up=up,
        drained=drained,
    )


def _held_cores(job: Mapping[str, Any]) -> dict[str, int]:
    """Cores that a running job holds, by node."""
    if _state(job) not in _RUNNING:
        return {}
    nodes = _word(job.get("nodes"))
    if nodes and not set("[,") & set(nodes):
        return {nodes: max(_number(job.get("cpus")), 0)}
    cores = {name: _allocated(row) for name, row in _allocated_nodes(job.get("job_resources"))}
    every, cpus = sum(cores.values()), max(_number(job.get("cpus")), 0)
    # A core may be several CPUs; where nobody says how many are where, all may be anywhere.
    return {name: -(-count * max(cpus, every) // every) if every else cpus for name, count in cores.items()}


def _allocated_nodes(resources: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a job has of each node, by its name."""
    found = resources if isinstance(resources, Mapping) else {}
    nodes = found.get("nodes")
    # The latter in newer versions.
    rows = found.get("allocated_nodes") or (nodes.get("allocation") if isinstance(nodes, Mapping) else None)
    for row in rows.values() if isinstance(rows, Mapping) else _list(rows):
        if isinstance(row, Mapping):
            yield _word(row.get("nodename")) or _word(row.get("name")), row


def _allocated(row: Mapping[str, Any]) -> int:
    """Cores of a node, or CPUs where these are said; 0: neither is."""
    cpus = row.get("cpus")
    if told := _number(cpus.get("count") if isinstance(cpus, Mapping) else cpus):
        return max(told, 0)
    sockets = row.get("sockets")
    parts = [row, *(sockets.values() if isinstance(sockets, Mapping) else _list(sockets))]
    cores = [part["cores"] for part in parts if isinstance(part, Mapping) and "cores" in part]
    found = [core for some in cores for core in (some.values() if isinstance(some, Mapping) else _list(some))]
    free = sum(isinstance(core, Mapping) and "UNALLOCATED" in _list(core.get("status")) for core in found)
    return len(found) - free or max(_number(row.get("cpus_used")), 0)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _word(value: Any, longest: int | None = _LONGEST) -> str:
    """A text in characters that can be stored and shown."""
    text = value[:longest] if isinstance(value, str) else ""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _number(value: Any) -> int:
    """A number, which newer versions wrap together with whether it is set."""
    if isinstance(value, Mapping):
        value = value.get("number")
    # Neither infinite nor NaN, which no comparison lets through.
    return int(value) if isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST else 0
