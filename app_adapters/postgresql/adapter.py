"""PostgreSQL: what a running server can change, which is little memory and its parallel workers.

`shared_buffers` stay: no released version can resize them in a running server. Memory settings and parallel workers go
down by ALTER SYSTEM and a reload, so that it does not grow where it would have grown. What really comes free is
measured: little, but for idle sessions, which are ended only where that is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass
from typing import Any

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.postgresql.client import NoAnswer, Psql
from app_adapters.postgresql.plan import (
    CORE_SETTINGS,
    HIDING_SOURCES,
    MEMORY_SETTINGS,
    PER_SESSION_MIB,
    WORKERS,
    allowed_mib,
    core_settings,
    in_kib,
    lowered,
    memory_settings,
    ours,
    raised,
    restoring,
    server_wide,
    sessions_to_end,
    share_of,
    statements,
    written,
    wrote,
)
from app_adapters.processes.process import children, started
from app_adapters.processes.state_file import StateFile
from app_adapters.registry import Ready, amount

# Not in /run: ALTER SYSTEM outlives a restart of the machine, and so must what undoes it.
STATE_DIRECTORY = "/var/lib/ebbtide"
NAMES = (*MEMORY_SETTINGS, *CORE_SETTINGS)
READ = (*NAMES, "shared_buffers", "shared_memory_size", "max_connections", "autovacuum_max_workers")
LOOK_AGE_S = 10.0
RELOAD_S = 5.0
AVAILABLE_SHARE = 0.8
SHARED = ("RssShmem", "RssFile")  # of /proc/PID/status
LOOK = """SELECT json_build_object(
 'superuser', current_setting('is_superuser') = 'on', 'user', current_user,
 'forbidden', current_setting('allow_alter_system', true) = 'off',
 'system', (SELECT system_identifier::text FROM pg_control_system()), 'loaded', pg_conf_load_time()::text,
 'settings', (SELECT json_object_agg(name, json_build_array(setting, unit, source)) FROM pg_settings
              WHERE name IN ({})),
 'checkpointer', (SELECT max(pid) FROM pg_stat_activity WHERE backend_type = 'checkpointer'),
 'sessions', (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
 'workers', (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'parallel worker'))""".format(
    ", ".join(f"'{name}'" for name in READ)
)
# Only a superuser may read this.
EARLIER = """SELECT json_build_object(
 'values', coalesce(json_object_agg(name, setting) FILTER (WHERE sourcefile LIKE '%/postgresql.auto.conf'
                                                           AND name IN ({})), '{{}}'),
 'error', max(format('%s, line %s: %s', sourcefile, sourceline, error)) FILTER (WHERE name IS NULL))
 FROM pg_file_settings""".format(", ".join(f"'{name}'" for name in NAMES))
IDLE = """SELECT coalesce(json_agg(pid), '[]') FROM pg_stat_activity WHERE backend_type = 'client backend'
 AND state = 'idle' AND pid <> pg_backend_pid() AND state_change < now() - interval '{:f} seconds'"""
END = """SELECT coalesce(json_agg(pid) FILTER (WHERE pg_terminate_backend(pid)), '[]') FROM pg_stat_activity
 WHERE pid IN ({}) AND state = 'idle' AND state_change < now() - interval '{:f} seconds'"""


@dataclass(frozen=True)
class _Look:
    """What the server said: settings as integers (memory in kB), where they come from, and its parent process.

    `loaded`: when it last took over what its files say.
    """

    settings: dict[str, int]
    sources: dict[str, str]
    sessions: int
    workers: int
    system: str
    postmaster: int
    began: int | None
    obstacle: str
    loaded: str


class PostgresqlAdapter(Adapter):
    """A PostgreSQL on this machine. `maximum_mib` is its size with all settings used (0: reckoned from them).

    `{system}` in `state_file` stands for the cluster's system identifier. `terminate_idle_s`: sessions that are idle
    for longer may be ended; None: never.
    """

    components = ("memory_mib", "cpu_cores")

    def __init__(
        self, psql: Psql, state_file: str, maximum_mib: float = 0.0, terminate_idle_s: float | None = None
    ) -> None:
        self._psql = psql
        self._state_path = state_file
        self._maximum_mib = maximum_mib
        self._terminate_idle_s = terminate_idle_s
        self._last: tuple[float, _Look] | None = None
        self._first_maximum_mib = 0.0

    def capabilities(self) -> Capabilities:
        """Resident size of all its processes, what they share once; parallel workers as cores."""
        look = self._recent()
        state = self._known(look)
        current_mib = _size_mib(look)
        maximum_mib = self._full_mib(look, current_mib, state)
        memory = SizeRange(round(current_mib, 3), round(_minimum_mib(look, current_mib), 3), round(maximum_mib, 3), 1.0)
        most = max(look.settings[WORKERS], state["originals"][WORKERS] if state else 0)
        least = look.settings[WORKERS] if look.sources[WORKERS] in HIDING_SOURCES else min(1, look.settings[WORKERS])
        cores = SizeRange(float(look.settings[WORKERS]), float(least), float(most), 1.0)
        resources = {"memory_mib": memory, "cpu_cores": cores}
        return Capabilities("postgresql", __version__, resources, 1.0, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise what idle sessions hold, where they may be ended, and the parallel workers."""
        look = self._fresh()
        if look.obstacle:
            return Refusal(look.obstacle, floor={"memory_mib": round(_size_mib(look), 3)})
        state = self._first_state(look)
        known = self._known(look)
        if known is not None:  # of what is not ours, the values of now count: an operator may have changed them
            own = ours(known, state["earlier"])
            for name in own:
                state["earlier"][name], state["originals"][name] = known["earlier"].get(name), known["originals"][name]
            state["written"] = {name: texts for name, texts in known["written"].items() if name in own}
            state.update(changed=own, maximum_mib=known["maximum_mib"])
        promised: dict[str, float] = {}
        wanted: dict[str, int] = {}
        ends: list[int] = []
        if "memory_mib" in target:
            current_mib = _size_mib(look)
            full_mib = self._full_mib(look, current_mib, state)
            state["maximum_mib"] = float(full_mib)
            share = share_of(target["memory_mib"], _minimum_mib(look, current_mib), full_mib)
            original = {name: state["originals"][name] for name in MEMORY_SETTINGS}
            wanted = lowered(look.settings, memory_settings(original, share))
            idle_mib = self._idle_mib(look)
            ends = sessions_to_end(idle_mib, current_mib - target["memory_mib"])
            promised["memory_mib"] = round(sum(idle_mib[pid] for pid in ends), 3)
        if "cpu_cores" in target:
            wanted.update(lowered(look.settings, core_settings(state["originals"], target["cpu_cores"])))
        changes = server_wide(wanted, look.sources)
        obstacle = self._of_another(look) if changes else ""
        if obstacle:
            return Refusal(obstacle, floor={"memory_mib": round(_size_mib(look), 3)})
        if "cpu_cores" in target:
            promised["cpu_cores"] = float(look.settings[WORKERS] - changes.get(WORKERS, look.settings[WORKERS]))
        hidden = [f"{name} stays {look.settings[name]}, by {look.sources[name]}" for name in wanted.keys() - changes]
        described = ", ".join(f"{name} {value}" for name, value in changes.items()) or "no setting changes"
        reason = "; ".join([described, f"{len(ends)} idle sessions to end", *hidden])
        work = lambda: self._shrink(look, state, set(target), changes, ends, deadline, hidden)  # noqa: E731
        return Promise(promised, 2.0, work, reason)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Raise the settings; at full size postgresql.auto.conf is as it was before."""
        look = self._fresh()
        state = self._known(look)
        if state is None:
            return Promise({}, 0.0, lambda: _nothing(target), "nothing had been taken")
        if look.obstacle:
            return Refusal(look.obstacle)
        wanted: dict[str, int] = {}
        back: list[str] = []
        if "memory_mib" in target:
            share = share_of(target["memory_mib"], _minimum_mib(look, _size_mib(look)), state["maximum_mib"])
            if share == 1.0:
                back += MEMORY_SETTINGS
            else:
                wanted.update(memory_settings({name: state["originals"][name] for name in MEMORY_SETTINGS}, share))
        if "cpu_cores" in target:
            if target["cpu_cores"] >= state["originals"][WORKERS]:
                back += CORE_SETTINGS
            else:
                wanted.update(core_settings(state["originals"], target["cpu_cores"]))
        # Others are not ours: an operator may have changed them since.
        back = [name for name in back if name in state["changed"]]
        wanted = {name: value for name, value in wanted.items() if name in state["changed"]}
        changes = server_wide(raised(look.settings, wanted), look.sources)
        known, file = state, self._file(look.system)

        def grow() -> Release:
            stands = self._earlier()
            own = ours(known, stands)
            restored = {name: known["earlier"].get(name) for name in back if name in own}
            more = {name: value for name, value in changes.items() if name in own}
            if more:
                known["written"] = wrote(known["written"], more, stands)
                file.save(known)
            note = self._change(more, restored, deadline)
            note += [f"{name} is left as it was set meanwhile" for name in known["changed"] if name not in own]
            known["changed"] = sorted(set(own).difference(restored))
            if known["changed"]:
                file.save(known)
            else:
                file.remove()
            now = self._last[1] if self._last is not None else look
            note += [
                f"{name} was {known['originals'][name]} and is {now.settings[name]}, by {now.sources[name]}"
                for name in restored
                if now.settings[name] != known["originals"][name]
            ]
            reason = "; ".join([f"{len(restored)} settings as before, {len(more)} raised", *note])
            return Release(dict.fromkeys(target, 0.0), "pg_settings", reason)

        return Promise({}, 1.0, grow, f"{len(back)} settings as before, {len(changes)} raised")

    def _fresh(self) -> _Look:
        answer = self._psql.query(LOOK)
        obstacle = ""
        if not answer["superuser"]:
            obstacle = f"the role {answer['user']} is no superuser, and so may not use ALTER SYSTEM here"
        elif answer["forbidden"]:  # since PostgreSQL 17
            obstacle = "this server takes no ALTER SYSTEM (allow_alter_system is off)"
        if answer["checkpointer"] is None:
            raise ApplicationError(
                obstacle or "its checkpointer is not to be seen, so its processes cannot be measured"
            )
        settings, sources = {}, {}
        for name, (setting, unit, source) in answer["settings"].items():
            sizes = name in MEMORY_SETTINGS or name.startswith("shared_")
            settings[name], sources[name] = in_kib(setting, unit) if sizes else int(setting), source
        postmaster = _parent(answer["checkpointer"])
        look = _Look(
            settings,
            sources,
            answer["sessions"],
            answer["workers"],
            str(int(answer["system"])),  # it becomes a part of a file's name
            postmaster,
            started(postmaster),
            obstacle,
            answer["loaded"],
        )
        self._last = (time.monotonic(), look)
        return look

    def _recent(self) -> _Look:
        """A look that need not be new: the size is asked for every few seconds, and a psql costs something."""
        if self._last is not None:
            at, look = self._last
            if time.monotonic() - at < LOOK_AGE_S and started(look.postmaster) == look.began is not None:
                return look
        return self._fresh()

    def _full_mib(self, look: _Look, current_mib: float, state: dict[str, Any] | None) -> float:
        """With all settings used, at most a part of what the machine had to spare when this was first seen."""
        if state is not None and state.get("maximum_mib"):
            return max(float(state["maximum_mib"]), current_mib)
        if self._maximum_mib:
            return max(self._maximum_mib, current_mib)
        if not self._first_maximum_mib:
            settings = look.settings
            private_mib = allowed_mib(settings, settings["max_connections"], settings["autovacuum_max_workers"])
            room_mib = AVAILABLE_SHARE * (_available_mib() + current_mib)
            self._first_maximum_mib = min(_shared_mib(look) + private_mib, room_mib)
        return max(self._first_maximum_mib, current_mib)

    def _file(self, system: str) -> StateFile:
        """Of this cluster alone: another one may be found at the same port, and have something to be put back."""
        earlier = StateFile(self._state_path.replace("-{system}", ""))  # as an earlier version named it
        if (earlier.load() or {}).get("system") == system:
            return earlier
        return StateFile(self._state_path.replace("{system}", system))

    def _of_another(self, look: _Look) -> str:
        """Why the state file cannot be written now, empty where it can."""
        file = self._file(look.system)
        state = file.load() or {}
        if state.get("system") == look.system or not state.get("changed"):
            return ""
        return (
            f"{file.path} has what another cluster is to have back: name another --state-file, or remove it where that "
            "cluster is gone"
        )

    def _known(self, look: _Look) -> dict[str, Any] | None:
        """What was noted before the first change of this very cluster."""
        file = self._file(look.system)
        state = file.load()
        if state is None or state.get("system") != look.system:
            return None
        state.setdefault("written", {})  # an earlier version has none
        kinds = {"earlier": dict, "originals": dict, "changed": list, "written": dict, "maximum_mib": float}
        for name, kind in kinds.items():
            if not isinstance(state.get(name), kind):
                raise ApplicationError(f"the state file {file.path} is damaged: {name} is no {kind.__name__}")
        return state

    def _first_state(self, look: _Look) -> dict[str, Any]:
        earlier = self._earlier()
        return {
            "system": look.system,
            "earlier": {name: earlier.get(name) for name in NAMES},
            "originals": {name: look.settings[name] for name in NAMES},
            "changed": [],
            "written": {},
            "maximum_mib": 0.0,
        }

    def _earlier(self) -> dict[str, str]:
        """What ALTER SYSTEM has written. Raises: ApplicationError where the server cannot read its files to the end."""
        answer = self._psql.query(EARLIER)
        if answer["error"]:
            raise ApplicationError(f"PostgreSQL would take no reload: {answer['error']}")
        found: dict[str, str] = answer["values"]
        return found

    def _idle_mib(self, look: _Look) -> dict[int, float]:
        if self._terminate_idle_s is None:
            return {}
        pids = self._psql.query(IDLE.format(self._terminate_idle_s))
        parent = _resident_mib(look.postmaster)
        return {pid: _alone_mib(_resident_mib(pid), parent) for pid in pids}

    def _shrink(
        self,
        look: _Look,
        state: dict[str, Any],
        asked: set[str],
        changes: dict[str, int],
        ends: list[int],
        deadline: Deadline,
        notes: list[str],
    ) -> Release:
        before_shared_mib, before_mib = _parts_mib(look)
        if changes:
            # First: what is changed must have an owner whatever happens.
            obstacle = self._of_another(look)
            if obstacle:
                raise ApplicationError(obstacle)
            file = self._file(look.system)
            known = file.load()
            written_now = wrote(state["written"], changes, self._earlier())
            file.save({**state, "changed": sorted({*state["changed"], *changes}), "written": written_now})
            try:
                notes = [*notes, *self._change(changes, {}, deadline)]
            except NoAnswer:
                raise
            except ApplicationError:
                self._take_back(file, known, changes)
                raise
        if ends and deadline.passed:
            notes.append("idle sessions stay: it was called off, or is too late")
        elif ends and self._terminate_idle_s is not None:
            pids = ", ".join(str(pid) for pid in ends)
            ended = self._psql.query(END.format(pids, self._terminate_idle_s))
            while any(_lives(pid) for pid in ended) and not deadline.wait(0.05):
                pass
            notes.append(f"{len(ended)} idle sessions ended")
        after = self._last[1] if changes and self._last is not None else self._fresh()
        while WORKERS in changes and after.workers > after.settings[WORKERS] and not deadline.wait(0.2):
            after = self._fresh()  # a running query keeps its workers
        shared_mib, after_mib = _parts_mib(after)
        released = {
            "memory_mib": round(max(before_mib - after_mib, 0.0), 3),
            "cpu_cores": float(max(look.settings[WORKERS] - max(after.settings[WORKERS], after.workers), 0)),
        }
        resident = f"resident {before_shared_mib + before_mib:.0f} to {shared_mib + after_mib:.0f} MiB"
        sizes = f"{resident}, {after.settings[WORKERS]} parallel workers"
        measured_by = "RssAnon of all its processes, pg_settings and the running parallel workers"
        return Release({name: released[name] for name in asked}, measured_by, "; ".join([sizes, *notes]))

    def _take_back(self, file: StateFile, known: dict[str, Any] | None, changes: dict[str, int]) -> None:
        """The state of before a change that failed, if nothing was changed: nobody has to put that back."""
        with contextlib.suppress(ApplicationError):  # what cannot be seen keeps its owner
            now = self._earlier()
            if all(now.get(name) != written(name, value) for name, value in changes.items()):
                if known is None:
                    file.remove()
                else:
                    file.save(known)

    def _change(self, values: dict[str, int], earlier: dict[str, str | None], deadline: Deadline) -> list[str]:
        """Change settings and reload; returns what is to be said of those that did not take effect.

        Raises: ApplicationError where it is not known that those of `earlier` did: they still need an owner.
        """
        if not values and not earlier:
            return []
        before = self._fresh().loaded
        self._psql.run([*statements(values), *restoring(earlier), "SELECT pg_reload_conf()"])
        end = time.monotonic() + RELOAD_S
        while True:
            look = self._fresh()
            wrong = [name for name, value in values.items() if look.settings[name] != value]
            taken = look.loaded != before
            if (taken and not wrong) or time.monotonic() > end or deadline.wait(0.1):
                break
        if earlier and not taken:
            raise ApplicationError(f"PostgreSQL has not taken the reload, see its log; {', '.join(earlier)} may be low")
        return [f"{name} stays {look.settings[name]}, by {look.sources[name]}" for name in wrong]


def _nothing(target: dict[str, float]) -> Release:
    return Release(dict.fromkeys(target, 0.0), "nothing", "nothing was to be done")


def _shared_mib(look: _Look) -> float:
    return max(look.settings.get("shared_memory_size", 0), look.settings["shared_buffers"]) / 1024


def _minimum_mib(look: _Look, current_mib: float) -> float:
    return min(_shared_mib(look) + PER_SESSION_MIB * look.sessions, current_mib)


def _size_mib(look: _Look) -> float:
    return sum(_parts_mib(look))


def _parts_mib(look: _Look) -> tuple[float, float]:
    """Resident MiB of the server and all its processes: what they share, counted once, and what each has alone.

    Not the proportional size (Pss): for that the kernel walks all of shared_buffers for each session, at each look.
    """
    parent = _resident_mib(look.postmaster)
    sizes = [_resident_mib(pid) for pid in children(look.postmaster)]
    shared_mib = parent["RssAnon"] + sum(max(size[name] for size in (parent, *sizes)) for name in SHARED)
    return shared_mib, sum(_alone_mib(size, parent) for size in sizes)


def _alone_mib(size: dict[str, float], parent: dict[str, float]) -> float:
    """What comes free with a process: what it was forked with is the parent's as well."""
    return max(size["RssAnon"] - parent["RssAnon"], 0.0)


def _resident_mib(pid: int) -> dict[str, float]:
    """What it has resident by kind; all is 0 of one that is ending, before it is gone."""
    sizes = dict.fromkeys(("RssAnon", *SHARED), 0.0)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) / 1024
    return sizes


def _lives(pid: int) -> bool:
    return any(_resident_mib(pid).values())


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError as error:
        raise ApplicationError(f"process {pid} of PostgreSQL cannot be seen here: {error.strerror}") from None
    if fields.get("Name", "").strip() not in ("postgres", "postmaster"):
        raise ApplicationError(f"process {pid} is {fields.get('Name', '').strip()}, not PostgreSQL on this machine")
    return int(fields["PPid"])


def _available_mib() -> float:
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) / 1024


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="", metavar="HOST", help="host, or directory of its socket (default: psql's)")
    parser.add_argument("--port", type=int, default=5432, metavar="N", help="default: %(default)s")
    parser.add_argument("--user", default="postgres", metavar="ROLE", help="a superuser (default: %(default)s)")
    parser.add_argument("--database", default="postgres", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--password-file", default="", metavar="FILE", help="password file of libpq (.pgpass)")
    parser.add_argument(
        "--run-as", default="", metavar="USER", help="system user to run psql as, for peer authentication (needs root)"
    )
    parser.add_argument(
        "--maximum-mib",
        type=amount,
        default=0.0,
        metavar="N",
        help="resident MiB with all its settings used (default: what they allow, at most 0.8 of what is available)",
    )
    parser.add_argument(
        "--terminate-idle-s",
        type=amount,
        default=None,
        metavar="S",
        help="sessions that are idle for longer may be ended, the largest first (default: none is)",
    )
    parser.add_argument(
        "--state-file",
        default="",
        metavar="FILE",
        help=f"what is put back at full size; {{system}} in it is the cluster's system identifier "
        f"(default: {STATE_DIRECTORY}/postgresql-PORT-{{system}}.json)",
    )


def _build(options: argparse.Namespace) -> Adapter:
    if not 0 < options.port < 65536:
        raise AdapterError("--port: must be 1 to 65535")
    psql = Psql(options.host, options.port, options.user, options.database, options.password_file, options.run_as)
    path = options.state_file or f"{STATE_DIRECTORY}/postgresql-{options.port}-{{system}}.json"
    return PostgresqlAdapter(psql, path, options.maximum_mib, options.terminate_idle_s)


READY = Ready(
    "a PostgreSQL on this machine: work memory and parallel workers",
    """\
Lowers work_mem and its kin and max_parallel_workers by ALTER SYSTEM and a reload, and puts them back at full size.
shared_buffers stay, so that little memory comes free; what does is measured.

example:
  ebb-adapter postgresql --run-as postgres --terminate-idle-s 600
""",
    _options,
    _build,
)
