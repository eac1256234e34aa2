"""The hook of a service that several processes serve, such as `gunicorn -w 2`: one of them leads and asks them all.

Each process has a hook of its own on `PATH.d/PID-RANDOM.sock`. The first to lock `PATH.lock` serves the service's hook
on PATH: what it offers is the sum of what they all offer, a target is split among them, and what came free in each is
added up. The kernel gives the lock to another process when the first ends, and those that come and go are found at
every question.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from typing import Any, Callable, Iterable
from urllib.parse import quote

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.client import HookClient, NoAnswer, NotListening, read_token
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.hook import CAPABILITIES, PREEMPTIONS, TARGETS, TOKEN_FILE, Reply
from app_adapters.logs import fault, say
from app_adapters.messages import MODES
from app_adapters.server import HookServer, private

#: The guest agent waits at least 1.5 s for what is offered.
OFFER_LIMIT_S = 1.2
#: For an answer it waits a tenth of the deadline, so much at least and at most; calling an older one off takes 1.5 s.
ANSWER_LIMITS_S = (2.3, 5.5)
#: Between two looks at what is at work: each asks all processes, so they become rarer.
LOOKS_S = (0.05, 0.5)
LOOK_GROWTH = 1.3
#: What a process offered counts for so long, where it does not answer when the target comes: the guest agent has
#: worked that out by it.
OFFER_AGE_S = 10.0
#: A socket on which nobody listens is that of a process which is about to for so long; then it is a dead one's.
LISTENS_AFTER_S = 5.0
#: Between two attempts of the process that leads to serve the service's hook.
AGAIN_S = 1.0


class SharedHookServer:
    """Serves one hook for all processes that start one with the same `path`, of one user; `adapter` is this process's
    own. It is started in each, after it was forked. Arguments as those of HookServer.

    Raises: OSError where it cannot listen, or the lock's file is another user's.
    """

    def __init__(
        self, adapter: Adapter, path: str, token_file: str = TOKEN_FILE, log: Callable[[str], None] = say
    ) -> None:
        self._path = path
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        self._lock = private(path + ".lock")
        self._whole = Group(adapter.components, path + ".d", token_file)
        self._token_file, self._log = token_file, log
        # A pid alone comes again, and is that of others where containers share the directory.
        name = f"{os.getpid()}-{os.urandom(2).hex()}"  # short: so must be the path
        self._own = HookServer(adapter, f"{path}.d/{name}.sock", token_file, log)
        self._ended = threading.Event()
        self._leading = threading.Event()
        self._leader = threading.Thread(target=self._lead, name="hook-leader", daemon=True)

    @property
    def url(self) -> str:
        """As a drop-in file names it."""
        return f"unix:{self._path}"

    def start(self) -> SharedHookServer:
        """Begin to serve; returns itself."""
        self._own.start()
        self._leader.start()
        return self

    def stop(self) -> None:
        """Stop serving and cancel what runs; another process takes over where this one led."""
        self._ended.set()
        if self._leading.is_set():
            self._leader.join()
        self._own.stop()

    def _lead(self) -> None:
        with self._lock as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # of the process: a child that it forks does not inherit it
            self._leading.set()
            failed = 0
            while not self._ended.is_set():
                try:
                    server = HookServer(self._whole, self._path, self._token_file, self._log).start()
                except OSError as error:
                    failed += 1
                    if failed == 2:  # at first it may be the one before, which has given the lock back and is ending
                        fault(f"the hook of all processes cannot be served: {error}", error)
                    self._ended.wait(AGAIN_S)
                    continue
                self._ended.wait()
                server.stop()


class Group(Adapter):
    """The processes whose hooks are in `directory`, as one application. Those that do not answer count as not there:
    the guest agent takes their memory for that of other processes then."""

    def __init__(self, components: tuple[str, ...], directory: str, token_file: str) -> None:
        self.components = components
        self._directory = directory
        self._token_file = token_file
        self._series = os.urandom(4).hex()  # of this leader: attempts of the one before it are older
        self._number = 0
        self._untold = ("", "", "")  # kind and reason of the notice that not all have heard, and its id
        self._offered: tuple[float, dict[str, dict[str, Any]]] = (0.0, {})  # what was offered last, and when

    def capabilities(self) -> Capabilities:
        """Sums over the processes. Raises: ApplicationError where none answers."""
        offers = self._offers()
        self._offered = time.monotonic(), offers
        first = next(iter(offers.values()))
        ranges = {name: _sum(_ranges(offers, name).values()) for name in first["resources"]}
        return Capabilities(
            first["name"],
            first["version"],
            ranges,
            max(offer["expected_s"] for offer in offers.values()),
            all(offer["reversible"] for offer in offers.values()),
            [mode for mode in MODES if all(mode in offer["modes"] for offer in offers.values())],
        )

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Each gives its part. Raises: ApplicationError where none answers."""
        return self._decide("deflate", target, mode, deadline)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Each gets its part. Raises: ApplicationError where none answers."""
        return self._decide("reinflate", target, "ask", deadline)

    def preemption(self, seconds_left: float | None, kind: str, reason: str) -> None:
        """All are told. Raises: ApplicationError with the words of those that cannot be."""
        # The same again has the same id, so that those who have heard it do not hear it twice.
        if self._untold[:2] != (kind, reason):
            self._untold = kind, reason, self._next_id()
        body = {"request_id": self._untold[2], "seconds_left": seconds_left, "kind": kind, "reason": reason}
        told = self._everywhere(dict.fromkeys(self._clients(), body), PREEMPTIONS, ANSWER_LIMITS_S[0])
        problems = [f"{_pid(name)}: {_words(answer)}" for name, (status, answer) in told.items() if status != 200]
        if problems:
            raise ApplicationError("; ".join(problems))
        self._untold = ("", "", "")

    def _decide(self, direction: str, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        limit_s = min(max(deadline.remaining_s / 10, ANSWER_LIMITS_S[0]), ANSWER_LIMITS_S[1])
        began = time.monotonic()
        offers = self._offers(limit_s * 0.3)
        silent = [name for name in self._clients() if name not in offers]
        known = self._known(silent)
        split = {
            name: parts_of_those_heard(size, _ranges(offers, name), _ranges(known, name), direction)
            for name, size in target.items()
        }
        request_id = self._next_id()
        bodies: dict[str, dict[str, Any] | None] = {
            pid: {
                "request_id": request_id,
                "deadline_s": max(deadline.remaining_s, 0.1),
                "mode": mode,
                "direction": direction,
                "target": {name: sizes[pid] for name, sizes in split.items() if pid in sizes},
                "reason": "the part of this process",
            }
            for pid in offers
        }
        told = self._everywhere(bodies, TARGETS, limit_s - (time.monotonic() - began))
        willing = [pid for pid, (status, _) in told.items() if status == 202]
        words = [f"{_pid(name)}: {_words(answer)}" for name, (_, answer) in told.items() if _words(answer)]
        reasons = "; ".join(words + [f"{_pid(name)}: does not answer" for name in silent])
        if not willing:
            floors = [answer.get("floor") or {} for _, answer in told.values()]
            floor = {name: sum(f[name] for f in floors) for name in target if all(name in f for f in floors)}
            retries_s = [answer.get("retry_after_s") or 0.0 for _, answer in told.values()]
            # Of a reinflation a process refuses without a time what it refuses for good; others may answer later.
            refused = [status == 409 and answer.get("retry_after_s") is None for status, answer in told.values()]
            for_good = direction == "reinflate" and len(refused) == len(offers) and all(refused) and not silent
            return Refusal(reasons, max(retries_s) or None, floor, for_good)
        promised = _added(told[pid][1]["promised"] for pid in willing)
        expected_s = max(told[pid][1]["expected_s"] for pid in willing)
        # One that hangs may be small: a reinflation has not reached it, and is to come again.
        complete = len(willing) == len(offers) and not (silent and direction == "reinflate")
        return Promise(promised, expected_s, lambda: self._gather(request_id, willing, complete, deadline), reasons)

    def _gather(self, request_id: str, pids: list[str], complete: bool, deadline: Deadline) -> Release:
        """What came free in all, when all have ended or the deadline has. A newer attempt calls off what still runs."""
        path = f"{TARGETS}/{quote(request_id, safe='')}"
        told: dict[str, Reply] = {}
        running, pause_s = pids, LOOKS_S[0]
        while running and not deadline.wait(pause_s):
            pause_s = min(pause_s * LOOK_GROWTH, LOOKS_S[1])
            told.update(dict.fromkeys(running, (404, {"error": "has gone"})))
            told.update(self._everywhere(dict.fromkeys(running), path, 2.0))
            running = [pid for pid in running if _runs(told[pid])]
        ended = {pid: answer for pid, (status, answer) in told.items() if status == 200 and pid not in running}
        reasons = [f"{_pid(pid)}: {'has not ended' if pid in running else _words(told[pid][1])}" for pid in pids]
        measured_by = " and ".join(dict.fromkeys(answer["measured_by"] for answer in ended.values()))
        complete = complete and all(pid in ended and ended[pid]["state"] == "released" for pid in pids)
        released = _added(answer["released"] for answer in ended.values())
        return Release(
            released, f"{measured_by}, in {len(ended)} of {len(pids)} processes", "; ".join(reasons), complete
        )

    def _offers(self, limit_s: float = OFFER_LIMIT_S) -> dict[str, dict[str, Any]]:
        told = self._everywhere(dict.fromkeys(self._clients()), CAPABILITIES, limit_s)
        offers = {pid: answer for pid, (status, answer) in told.items() if status == 200}
        if not offers:
            problems = "; ".join(f"{_pid(name)}: {_words(answer)}" for name, (_, answer) in told.items())
            raise ApplicationError(f"no process of the service answers: {problems or 'there is none'}")
        return offers

    def _known(self, silent: list[str]) -> dict[str, dict[str, Any]]:
        """What those that do not answer now have offered, where the guest agent counts on it still."""
        at, offers = self._offered
        is_fresh = time.monotonic() - at <= OFFER_AGE_S
        return {name: offers[name] for name in silent if is_fresh and name in offers}

    def _next_id(self) -> str:
        self._number += 1
        return f"group#{self._series}.{self._number}"

    def _clients(self) -> dict[str, HookClient]:
        """By the names of their sockets. Raises: ApplicationError where the token cannot be read."""
        try:
            token = read_token(self._token_file)
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".sock"))
        except (AdapterError, OSError) as error:
            raise ApplicationError(str(error)) from None
        return {name[:-5]: HookClient(f"unix:{self._directory}/{name}", token) for name in names}

    def _everywhere(self, bodies: dict[str, dict[str, Any] | None], path: str, limit_s: float) -> dict[str, Reply]:
        """The answers by name, asked at once: GET without a body. What failed is status 0; who has gone is left out."""
        replies: dict[str, Reply] = {pid: (0, {"error": f"no answer within {limit_s:g} s"}) for pid in bodies}
        clients = self._clients()

        def ask(pid: str, body: dict[str, Any] | None) -> None:
            try:
                replies[pid] = clients[pid].ask("GET" if body is None else "POST", path, body, limit_s)
            except (KeyError, NotListening):
                _clear(f"{self._directory}/{pid}.sock")
                gone.add(pid)
            except NoAnswer as error:
                replies[pid] = 0, {"error": str(error)}

        gone: set[str] = set()
        threads = [threading.Thread(target=ask, args=one, name="hook-process", daemon=True) for one in bodies.items()]
        for thread in threads:
            thread.start()
        end = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        return {pid: reply for pid, reply in list(replies.items()) if pid not in gone}


def parts(target: float, ranges: dict[str, SizeRange]) -> dict[str, float]:
    """The size that each is to have so that all have `target` together: each gives in proportion to what it has above
    its minimum, or grows in proportion to what it lacks. What is less than all minimums, or more than all maximums, is
    split in their proportion: it is for the application to refuse."""
    change = target - sum(one.current for one in ranges.values())
    ends = {pid: one.maximum if change > 0 else one.minimum for pid, one in ranges.items()}
    room = {
        pid: max(end - ranges[pid].current if change > 0 else ranges[pid].current - end, 0.0)
        for pid, end in ends.items()
    }
    if abs(change) > sum(room.values()):
        total = sum(ends.values())
        return {pid: round(target * (end / total if total else 1 / len(ends)), 3) for pid, end in ends.items()}
    share = change / sum(room.values()) if change else 0.0
    return {pid: round(one.current + share * room[pid], 3) for pid, one in ranges.items()}


def parts_of_those_heard(
    target: float, heard: dict[str, SizeRange], unheard: dict[str, SizeRange], direction: str
) -> dict[str, float]:
    """`parts` where some do not answer: a deflation leaves them what they have, and nobody goes below its minimum for
    them; in a reinflation their part is kept for them."""
    if direction == "reinflate":
        return parts(target, {**unheard, **heard})
    left = target - sum(one.current for one in unheard.values())
    return parts(max(left, min(target, sum(one.minimum for one in heard.values()))), heard)


def _ranges(offers: dict[str, dict[str, Any]], component: str) -> dict[str, SizeRange]:
    found = {pid: offer["resources"].get(component) for pid, offer in offers.items()}
    return {pid: SizeRange(**sizes) for pid, sizes in found.items() if sizes}


def _sum(ranges: Iterable[SizeRange]) -> SizeRange:
    sizes = [(one.current, one.minimum, one.maximum, one.step) for one in ranges]
    current, minimum, maximum, step = zip(*sizes)
    return SizeRange(sum(current), sum(minimum), sum(maximum), max(step))


def _added(vectors: Iterable[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in vectors:
        for name, amount in one.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def _runs(reply: Reply) -> bool:
    """Also for one that did not answer: its work may go on."""
    return reply[0] == 0 or (reply[0] == 200 and reply[1].get("state") == "running")


def _clear(path: str) -> None:
    """Remove the socket of a process that has ended. No pid tells that: another process, of another container even, may
    have the same."""
    with contextlib.suppress(OSError):
        if not 0 <= time.time() - os.lstat(path).st_mtime < LISTENS_AFTER_S:
            os.unlink(path)


def _pid(name: str) -> str:
    """Of the process whose socket has this name."""
    return name.partition("-")[0]


def _words(answer: dict[str, Any]) -> str:
    return str(answer.get("error") or answer.get("reason") or "")
