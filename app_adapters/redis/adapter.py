"""Redis and Valkey: evict down to a lower `maxmemory` until the kernel has the memory back.

The limit is lowered in steps, the server evicts in its event loop, its allocator gives pages back by decay, and
`MEMORY PURGE` comes last because it stops the server for some 100 ms. Only CONFIG SET: a restart of the server brings
back what its file says. Where another's CONFIG REWRITE (Sentinel's, an operator's) has put a limit of ours into that
file, a CONFIG REWRITE at full size takes it out again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from functools import partial
from typing import Any

from app_adapters import __version__
from app_adapters.adapter import (
    FULL_SHARE,
    Adapter,
    Answer,
    Capabilities,
    Deadline,
    Promise,
    Refusal,
    Release,
    SizeRange,
)
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.processes.state_file import StateFile
from app_adapters.redis.client import RedisClient, ServerError
from app_adapters.redis.eviction import HELPFUL, rss_mib_of, shrink, tolerance_mib
from app_adapters.redis.plan import (
    EVICTING_POLICIES,
    MIB,
    NO_EVICTION,
    Figures,
    counts,
    figures,
    forks,
    limit_for,
    limit_in,
    maximum_for,
    number,
    obstacle,
    policy_to_use,
)
from app_adapters.registry import Ready, address, amount

MINIMUM_MIB = 64.0
FORK_SHARE = 0.1
DECAY_S = 5.0
# Not in /run: a limit that a CONFIG REWRITE has put into the server's file outlives a restart of the machine.
STATE_DIRECTORY = "/var/lib/ebbtide"
EARLIER_STATE_DIRECTORY = "/run/ebbtide"
FILE_BYTES = 1 << 20
# In place of a run id: the server has its own settings, but its file has not.
GIVEN_BACK = ""
LIMITS_KEPT = 2000  # those of a deflation by 32 GiB, which a state file has room for


class RedisAdapter(Adapter):
    """A Redis or Valkey on this machine; `address` is (host, port) or the path of its socket.

    `minimum_mib` is the resident size that it keeps. `maximum_mib` is its full size where it has no maxmemory (0: the
    largest that was seen). `policy` may stand in for noeviction while it is deflated. `fork_share` of its size is left
    free for the copies that a save makes. `decay_s` is how long the allocator may take by itself before the purge.
    """

    def __init__(
        self,
        address: tuple[str, int] | str = ("127.0.0.1", 6379),
        state_file: str = "",
        minimum_mib: float = MINIMUM_MIB,
        maximum_mib: float = 0.0,
        policy: str = "",
        fork_share: float = FORK_SHARE,
        decay_s: float = DECAY_S,
        user: str = "",
        password_file: str = "",
    ) -> None:
        self._address = address
        earlier = "" if state_file else _state_path(address, EARLIER_STATE_DIRECTORY)
        self._state = StateFile(state_file or _state_path(address, STATE_DIRECTORY), earlier)
        self._minimum_mib = minimum_mib
        self._maximum_mib = maximum_mib
        self._policy = policy
        self._fork_share = fork_share
        self._decay_s = decay_s
        self._user = user
        self._password_file = password_file
        self._seconds_per_mib = 0.005  # replaced by what the last deflation took
        self._largest_mib = 0.0

    def capabilities(self) -> Capabilities:
        """Resident sizes. What cannot be deflated now has its own size as the minimum."""
        with self._client() as client:
            info, found = self._look(client)
            reserve = self._reserve(client, info)
            state = self._known(info)
        blocked = obstacle(info, self._policy)
        minimum_mib = found.rss if blocked else min(self._floor_mib(found, reserve), found.rss)
        maximum_mib = self._full_mib(found, reserve, state)
        memory = SizeRange(round(found.rss, 3), round(minimum_mib, 3), round(maximum_mib, 3), 1.0)
        name = "valkey" if info.get("server_name") == "valkey" else "redis"
        expected_s = self._expected_s(found.rss - minimum_mib)
        return Capabilities(name, __version__, {"memory_mib": memory}, expected_s, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Promise what lies between the resident size and the target. Force waits for no decay and minds no waste."""
        with self._client() as client:
            info, found = self._look(client)
            blocked = obstacle(info, self._policy) or _config_obstacle(client, info)
            if blocked:
                floor = {"memory_mib": round(found.rss, 3)}
                return Refusal("the server gives nothing: " + blocked, None, floor)
            reserve = self._reserve(client, info)
            state = self._known(info)
            if state is None:
                state = _first_state(client, info, self._full_mib(found, reserve, None), self._limits_left())
        if target["memory_mib"] >= self._full_mib(found, reserve, state):
            return Promise({"memory_mib": 0.0}, 0.0, _nothing, "that is its full size")
        floor_mib = self._floor_mib(found, reserve)
        if found.rss <= floor_mib and target["memory_mib"] < found.rss:
            reason = f"the server holds {found.rss:.0f} MiB, its minimum is {floor_mib:.0f} MiB"
            return Refusal(reason, None, {"memory_mib": round(floor_mib, 3)})
        wanted_mib = max(target["memory_mib"], floor_mib) / (1 + reserve)
        amount_mib = max(found.rss - wanted_mib, 0.0)
        patience_s = 0.0 if mode == "force" else min(self._decay_s, deadline.remaining_s * 0.3)
        notes = self._notes(info, found, reserve, wanted_mib)
        saved = state
        return Promise(
            {"memory_mib": round(amount_mib, 3)},
            self._expected_s(amount_mib, patience_s),
            lambda: self._shrink(saved, wanted_mib, mode == "force", patience_s, deadline, notes),
            "; ".join([f"{found.rss:.0f} to {wanted_mib:.0f} MiB", *notes]),
        )

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Raise the limit, at full size to what it was before the first deflation. Memory comes on demand."""
        with self._client() as client:
            info, found = self._look(client)
            reserve = self._reserve(client, info)
            state = self._known(info)
        if state is None:
            return Promise({}, 0.0, _nothing, "nothing had been taken")
        original_mib = state["maxmemory"] / MIB
        limit_mib = limit_for(found, target["memory_mib"] / (1 + reserve))
        full = target["memory_mib"] >= FULL_SHARE * state["maximum_mib"] or 0 < original_mib <= limit_mib
        known = state

        def grow() -> Release:
            note = ""
            with self._client() as client:
                if full:
                    note = self._restore(client, known, info.get("config_file", ""))
                else:
                    with contextlib.suppress(ApplicationError):  # it has its memory all the same
                        self._note_limits(known, [int(limit_mib * MIB)])
                    _raise_limit(client, limit_mib)
                now = client.info()
            limit = f"{number(now, 'maxmemory') / MIB:.0f} MiB" if number(now, "maxmemory") else "unlimited"
            if full and number(now, "maxmemory") != known["maxmemory"]:
                raise ApplicationError(f"maxmemory is {limit} after it was set to {original_mib:.0f} MiB")
            reason = "; ".join(filter(None, [f"maxmemory {limit}, policy {now.get('maxmemory_policy')}", note]))
            return Release({"memory_mib": 0.0}, "maxmemory of INFO", reason)

        return Promise({}, 0.1, grow, "everything as before" if full else f"limit up to {limit_mib:.0f} MiB")

    def _client(self) -> RedisClient:
        password = ""
        if self._password_file:
            try:
                with open(self._password_file, encoding="utf-8") as file:
                    password = file.read(4096).strip()
            except (OSError, ValueError) as error:
                raise ApplicationError(f"the password file {self._password_file} cannot be read: {error}") from None
        return RedisClient(self._address, self._user, password)

    def _look(self, client: RedisClient) -> tuple[dict[str, str], Figures]:
        try:
            info = client.info()
        except ServerError as error:
            hint = " (see --password-file)" if error.code in ("NOAUTH", "WRONGPASS", "ERR") else ""
            raise ApplicationError(f"the server refused INFO: {error}{hint}") from None
        found = figures(info, rss_mib_of(info), policy_to_use(info, self._policy))
        self._largest_mib = max(self._largest_mib, found.rss)
        return info, found

    def _reserve(self, client: RedisClient, info: dict[str, str]) -> float:
        """Share of its size that stays free for forks; 0 where it never forks."""
        save_points = None
        with contextlib.suppress(ServerError):
            save_points = client.config_get("save")
        return self._fork_share if forks(info, save_points) else 0.0

    def _floor_mib(self, found: Figures, reserve: float) -> float:
        return max(self._minimum_mib, found.least) * (1 + reserve)

    def _full_mib(self, found: Figures, reserve: float, state: dict[str, Any] | None) -> float:
        """Resident size at full size, room for forks included. While deflated, that of the moment before."""
        if state is not None:
            return max(float(state["maximum_mib"]), found.rss)
        if found.limit > 0:
            return maximum_for(found, found.limit) * (1 + reserve)
        return max(self._maximum_mib or self._largest_mib, found.rss)

    def _expected_s(self, amount_mib: float, patience_s: float | None = None) -> float:
        wait_s = self._decay_s if patience_s is None else patience_s
        return round(0.5 + wait_s + max(amount_mib, 0.0) * self._seconds_per_mib, 1)

    def _known(self, info: dict[str, str]) -> dict[str, Any] | None:
        """What was noted before the first deflation; a server that was started again has its own settings back, but for
        a limit of ours that came into its file.
        """
        state = self._state.load()
        if state is None:
            return None
        limit, is_same_run = int(number(info, "maxmemory")), state.get("run_id") == info.get("run_id")
        if "limits" not in state:  # an earlier version has none: the one of now is ours
            state["limits"] = [limit] if is_same_run and limit != state.get("maxmemory") else []
        if not is_same_run:
            if not isinstance(state["limits"], list) or limit not in state["limits"]:
                return None
            state["run_id"] = info.get("run_id")
        kinds = {"maxmemory": int, "maximum_mib": float, "settings": dict, "limits": list}
        for name, kind in kinds.items():
            if not isinstance(state.get(name), kind):
                raise ApplicationError(f"the state file {self._state.path} is damaged: {name} is no {kind.__name__}")
        return state

    def _notes(self, info: dict[str, str], found: Figures, reserve: float, wanted_mib: float) -> list[str]:
        notes = []
        if reserve:
            notes.append(f"{wanted_mib * reserve:.0f} MiB are left for the copies of a save")
            copied_mib = max(number(info, "rdb_last_cow_size"), number(info, "aof_last_cow_size")) / MIB
            if copied_mib > wanted_mib * reserve:
                notes.append(f"the last save copied {copied_mib:.0f} MiB (see --fork-share)")
        own, used = info.get("maxmemory_policy", NO_EVICTION), policy_to_use(info, self._policy)
        if own != used:
            notes.append(f"{used} stands in for {own} until full size")
        if used.startswith("volatile-"):
            keys, expiring = counts(info)
            notes.append(f"only the {expiring} of {keys} keys that expire can go")
        return notes

    def _shrink(
        self,
        state: dict[str, Any],
        wanted_mib: float,
        force: bool,
        patience_s: float,
        deadline: Deadline,
        notes: list[str],
    ) -> Release:
        began = time.monotonic()
        with self._client() as client:
            info, before = self._look(client)
            evicted = number(info, "evicted_keys")
            self._state.save(state)  # first: what is changed must have an owner whatever happens
            problem = note = ""
            try:
                policy = policy_to_use(info, self._policy)
                if policy != info.get("maxmemory_policy"):
                    client.config_set("maxmemory-policy", policy)
                note_limits = partial(self._note_limits, state)
                note = shrink(client, before, wanted_mib, patience_s, force, deadline, note_limits)
            except ApplicationError as error:
                problem = str(error)
            info, after = self._look(client)
        with contextlib.suppress(ApplicationError):  # what was done is told all the same
            self._note_limits(state, [int(number(info, "maxmemory"))])
        released_mib = max(before.rss - after.rss, 0.0)
        if released_mib > 16 and not problem:
            self._seconds_per_mib = max(time.monotonic() - began - patience_s, 0.0) / released_mib
        parts = [
            f"resident {before.rss:.0f} to {after.rss:.0f} MiB, maxmemory {after.limit:.0f} MiB, "
            f"used {after.used:.0f} MiB, {number(info, 'evicted_keys') - evicted:.0f} keys evicted"
        ]
        if problem:
            parts.append(problem)
        elif after.rss > wanted_mib + tolerance_mib(wanted_mib):
            parts.append(note or f"{after.rss - wanted_mib:.0f} MiB over the target stay resident")
        measured_by = "VmRSS of the process, used_memory and maxmemory of INFO"
        complete = not problem or released_mib > 0
        return Release({"memory_mib": round(released_mib, 3)}, measured_by, "; ".join(parts + notes), complete)

    def _note_limits(self, state: dict[str, Any], limits: list[int]) -> None:
        """A limit of ours, in bytes, is known again where another has it written into the server's file."""
        new = [limit for limit in limits if limit != state["maxmemory"] and limit not in state["limits"]]
        if new:
            state["limits"] = [*state["limits"], *new][-LIMITS_KEPT:]
            self._state.save(state)

    def _limits_left(self) -> list[int]:
        """Those that the server's file may have still, though all has been given back."""
        state = self._state.load() or {}
        return state["limits"] if state.get("run_id") == GIVEN_BACK else []

    def _restore(self, client: RedisClient, state: dict[str, Any], config_file: str) -> str:
        """Everything as before the first deflation, also in the server's file; returns what is not so.

        The limit first: with it, nothing has to be evicted.
        """
        client.config_set("maxmemory", state["maxmemory"])
        for name, value in state["settings"].items():
            if client.config_get(name) != value:
                client.config_set(name, value)
        if _limit_in_file(config_file) in state["limits"]:
            try:
                client.call("CONFIG", "REWRITE")
            except ServerError as error:
                # The server is known again when it is started with that limit, and the next full size tries again.
                self._state.save({**state, "run_id": GIVEN_BACK})
                return f"{config_file} has the small limit, by another's CONFIG REWRITE, and cannot be written: {error}"
        self._state.remove()
        return ""


def _first_state(client: RedisClient, info: dict[str, str], maximum_mib: float, limits: list[int]) -> dict[str, Any]:
    """What is put back at full size, and the resident size at that."""
    earlier = {name: client.config_get(name) for name in HELPFUL}
    helpful = {name: value for name, value in earlier.items() if value is not None}
    return {
        "run_id": info.get("run_id"),
        "maxmemory": int(number(info, "maxmemory")),
        "settings": {**helpful, "maxmemory-policy": info.get("maxmemory_policy", NO_EVICTION)},
        "limits": limits,
        "maximum_mib": float(round(maximum_mib, 3)),
    }


def _limit_in_file(path: str) -> int | None:
    """None also where it cannot be read."""
    with contextlib.suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return limit_in(file.read(FILE_BYTES).decode("utf-8", "replace"))
    return None


def _nothing() -> Release:
    return Release({"memory_mib": 0.0}, "nothing", "nothing was to be done")


def _config_obstacle(client: RedisClient, info: dict[str, str]) -> str:
    """Whether CONFIG may be used, found out by a change that changes nothing."""
    try:
        limit = client.config_get("maxmemory")
        if limit is None:
            return "CONFIG GET knows no maxmemory"
        client.config_set("maxmemory", limit)
    except ServerError as error:
        return f"CONFIG is renamed, switched off or not allowed for this user: {error}"
    return ""


def _raise_limit(client: RedisClient, limit_mib: float) -> None:
    now_mib = number(client.info(), "maxmemory") / MIB
    if 0 < now_mib < limit_mib:  # 0 is no limit: an operator has lifted it
        client.config_set("maxmemory", int(limit_mib * MIB))


def _state_path(address: tuple[str, int] | str, directory: str) -> str:
    name = address if isinstance(address, str) else f"{address[0]}-{address[1]}"
    return os.path.join(directory, f"redis-{name.strip('/').replace('/', '-')}.json")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", type=address, default=("127.0.0.1", 6379), metavar="HOST:PORT", help="default: 127.0.0.1:6379"
    )
    parser.add_argument("--socket", default="", metavar="PATH", help="its Unix socket, instead of --server")
    parser.add_argument("--user", default="", metavar="NAME", help="ACL user (default: the server's default user)")
    parser.add_argument("--password-file", default="", metavar="FILE", help="file with the password")
    parser.add_argument(
        "--policy",
        choices=EVICTING_POLICIES,
        default="",
        help="eviction policy to set while it is deflated, where its own is noeviction; without this such a server is "
        "left alone",
    )
    parser.add_argument(
        "--minimum-mib",
        type=amount,
        default=MINIMUM_MIB,
        metavar="N",
        help="resident MiB that stay (default: %(default)g)",
    )
    parser.add_argument(
        "--maximum-mib",
        type=amount,
        default=0.0,
        metavar="N",
        help="resident MiB at full size where it has no maxmemory (default: the largest that was seen)",
    )
    parser.add_argument(
        "--fork-share",
        type=amount,
        default=FORK_SHARE,
        metavar="SHARE",
        help="of its size, left free for what a save copies, where it saves at all (default: %(default)g)",
    )
    parser.add_argument(
        "--decay-s",
        type=amount,
        default=DECAY_S,
        metavar="S",
        help="how long its allocator may give pages back by itself before MEMORY PURGE, which stops the server for "
        "some 100 ms; at most 0.3 of the deadline, not with mode force (default: %(default)g)",
    )
    parser.add_argument(
        "--state-file",
        default="",
        metavar="FILE",
        help=f"what is put back at full size (default: {STATE_DIRECTORY}/redis-HOST-PORT.json)",
    )


def _build(options: argparse.Namespace) -> Adapter:
    if options.fork_share > 1:
        raise AdapterError("--fork-share: a save copies at most everything: at most 1")
    return RedisAdapter(
        options.socket or options.server,
        options.state_file,
        options.minimum_mib,
        options.maximum_mib,
        options.policy,
        options.fork_share,
        options.decay_s,
        options.user,
        options.password_file,
    )


READY = Ready(
    "a Redis or Valkey on this machine",
    """\
Lowers maxmemory, so that the server evicts by its own policy, and lets its allocator give the pages back. A server with
noeviction is left alone unless --policy allows another one; a replica, or one without jemalloc, refuses.

example:
  ebb-adapter redis --server 127.0.0.1:6379 --policy allkeys-lru --minimum-mib 128
""",
    _options,
    _build,
)
