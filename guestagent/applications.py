"""Relays what the host asks to the applications' hooks, and adds up what they answer and measure."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Callable, Collection

from guestagent.budgets import Share, application_budget_mib, believable, cores, guest_target_mib, split
from guestagent.errors import BadParams, HookError, HookTimeout
from guestagent.hooks import (
    AMOUNT_LIMIT,
    CALL_LIMIT_S,
    CORES_LIMIT,
    REASON_LENGTH,
    Hook,
    Told,
    amounts,
    in_parallel,
    read_drop_ins,
)
from guestagent.memory import Memory
from guestagent.messages import (
    AdapterCapabilities,
    ApplicationCapabilitiesResult,
    ApplicationSize,
    ApplicationStatusResult,
    DeflateParams,
    DeflateResult,
    ReinflateParams,
    ReinflateResult,
)

#: Seconds for what applications offer and for their answers: a tenth of the deadline, but at least and at most so much.
#: A guest that has lost its CPUs is slow; the host waits 15 s for both together.
CAPABILITIES_LIMITS_S = (1.5, 5.0)
TARGET_LIMITS_S = (2.5, 6.0)
#: By then, as parts of the deadline, each of them is over where the host waits: it waits for no longer than that, and
#: would hear nothing of those that did answer.
OVER_BY = (0.4, 0.9)
PROGRESS_LIMIT_S = 2.0
SIZE_LIMIT_S = 0.5
SIZE_AGE_S = 30.0
REQUESTS_KEPT = 256
#: Of all applications' words together, in characters: an answer must fit into a line.
WORDS_LENGTH = 4000
#: Applications that could not take a reinflation are told again after so long, twice as long each time, at most.
AGAIN_S = (1.0, 30.0)
#: The same of those that did not hear of a preemption.
NOTICE_AGAIN_S = (1.0, 5.0)
#: Without so much, MiB, a guest still has all of its memory.
FULL_BUT_MIB = 2.0
#: What applications give, and can be owed.
GIVEN = ("memory_mib", "cpu_cores")


@dataclass
class _Record:
    """A request of the host; `done` is set when `result` can be told."""

    params: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: DeflateResult | None = None
    #: What each of those that promised, or may yet, can have released at most: it may say anything.
    asked: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Owed:
    """Of a reinflation: who has not taken it on, and the components that no later request has named.

    `is_wanted` says whether it is to be told still, once it is known what they offer: a reinflation that comes late
    would call a newer deflation off.
    """

    names: Collection[str]
    components: Collection[str]
    is_wanted: Callable[[], bool]


class Applications:
    """The registered applications of this guest. Calls may come from several threads.

    `log` is given a sentence for every drop-in file that is left out, once. `copy_for` is given the users that hooks
    run as, by name with their ids, before they are asked anything: they are to have the token.
    """

    def __init__(
        self,
        directory: str,
        memory: Memory,
        cpus_possible: Callable[[], list[int]],
        token: Callable[[], str],
        log: Callable[[str], None],
        owner_uid: int = 0,
        copy_for: Callable[[dict[str, int]], None] = lambda users: None,
    ) -> None:
        self._directory = directory
        self._memory = memory
        self._cpus_possible = cpus_possible
        self._token = token
        self._log = log
        self._owner_uid = owner_uid
        self._copy_for = copy_for
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._hooks: dict[str, Hook] = {}
        #: Where each application's drop-in file was read last, also of those whose file is there and left out now:
        #: what is owed to them stays owed.
        self._files: dict[str, str] = {}
        self._problems: set[str] = set()
        self._sizes: dict[str, tuple[float, float]] = {}
        #: Counts what the host has asked for. By component: the number of the last request that named it, and its size.
        #: What an earlier reinflation owes of it is not told any more.
        self._count = 0
        self._newest: dict[str, tuple[int, float]] = {}
        #: The guest's target memory by the last request that named it, whether that is all of it, and the number and
        #: id of the last deflation.
        self._guest_mib, self._is_full = 0.0, False
        self._deflation = (0, "")

    def close(self) -> None:
        """Tell nobody again of what is owed."""
        self._closed.set()

    def sizes(self) -> list[ApplicationSize]:
        """Resident sizes, of hooks that are slow the last one known, if it is not old."""
        hooks, _ = self._load()
        total_mib = self._memory.status().total_mib
        answers = in_parallel({name: hook.capabilities for name, hook in hooks.items()}, SIZE_LIMIT_S)
        now = time.monotonic()
        with self._lock:
            for name, answer in answers.items():
                if not isinstance(answer, HookError) and "memory_mib" in answer.resources:
                    self._sizes[name] = (now, min(answer.resources["memory_mib"].current, total_mib))
            known = {name: self._sizes[name] for name in hooks if name in self._sizes}
        return [ApplicationSize(name, size) for name, (at, size) in known.items() if now - at <= SIZE_AGE_S]

    def capabilities(self) -> ApplicationCapabilitiesResult:
        """What the applications offer; those that do not answer are left out."""
        answers, _ = self._capabilities(self._load()[0], CAPABILITIES_LIMITS_S[0])
        return ApplicationCapabilitiesResult(list(answers.values()))

    def deflate(self, params: DeflateParams) -> DeflateResult:
        """Ask every application for its part; what comes too late counts as refused.

        Raises: BadParams where the request_id was used for something else.
        """
        return self._once("deflate", params.request_id, asdict(params), params.mode, params)

    def reinflate(self, params: ReinflateParams) -> ReinflateResult:
        """Tell every application the size that it can have again.

        Raises: BadParams where the request_id was used for something else.
        """
        result = self._once("reinflate", params.request_id, asdict(params), "ask", params)
        return ReinflateResult(result.request_id, result.state, result.reason)

    def preemption(self, body: dict[str, Any], for_s: float, holds: Callable[[], bool]) -> None:
        """Tell every application of a preemption, or of its end. One that does not hear it is logged, and told again
        until `for_s` seconds are over or that no longer holds."""
        until = time.monotonic() + for_s
        hooks, _ = self._load()
        in_parallel(
            {name: partial(self._tell, hook, body, until, holds) for name, hook in hooks.items()}, for_s + CALL_LIMIT_S
        )

    def _tell(self, hook: Hook, body: dict[str, Any], until: float, holds: Callable[[], bool]) -> None:
        pause_s, last = NOTICE_AGAIN_S[0], ""
        while holds():
            try:
                hook.preemption(body)
                return
            except Exception as error:  # whatever it is, it is told again
                if str(error) != last:
                    self._log(f"{hook.name} was not told of the preemption: {error}")
                last = str(error)
            left_s = until - time.monotonic() - pause_s
            if left_s <= 0 or self._closed.wait(pause_s):
                return
            pause_s = min(2 * pause_s, NOTICE_AGAIN_S[1])
            if body["seconds_left"] is not None:
                body = dict(body, seconds_left=round(left_s, 1))

    def status(self, request_id: str) -> ApplicationStatusResult:
        """What the applications have measured so far.

        Hooks are asked also where this agent was restarted and has forgotten the request.
        """
        with self._lock:
            record = self._records.get(request_id)
        if record is not None and not record.done.is_set():
            return ApplicationStatusResult(request_id, "running", {}, "", "the applications are being asked")
        if record is not None and record.result is not None and not record.asked:
            return ApplicationStatusResult(
                request_id, "failed", {}, "", f"{record.result.state}: {record.result.reason}"
            )
        hooks, _ = self._load()
        names = list(record.asked if record is not None else hooks)
        answers = in_parallel(
            {name: partial(hooks[name].progress, request_id) for name in names if name in hooks},
            PROGRESS_LIMIT_S,
        )
        states, reasons, measured_by = set(), [], []
        released: dict[str, float] = {}
        for name in names:
            answer = answers.get(name, HookError("its drop-in file is gone"))
            if isinstance(answer, HookTimeout):
                states.add("running")
                reasons.append(f"{name}: {answer}")
            elif isinstance(answer, HookError):
                states.add("failed")
                reasons.append(f"{name}: {answer}")
            elif answer[0] == 404:
                if record is not None:
                    states.add("failed")
                    reasons.append(f"{name}: does not know this request any more")
            else:
                body = answer[1]
                states.add(body["state"])
                told = amounts(body, "released")
                # Without a record nothing is known that could bound them; the host has bounds of its own.
                _add(released, told if record is None else _at_most(told, record.asked[name]))
                measured_by.append(str(body.get("measured_by", ""))[:REASON_LENGTH])
                reasons.append("{}: {}".format(name, str(body.get("reason", ""))[:REASON_LENGTH]))
        state = next((state for state in ("running", "failed", "released") if state in states), "unknown")
        return ApplicationStatusResult(request_id, state, released, _words(measured_by), _words(reasons))

    def _once(
        self, direction: str, request_id: str, body: dict[str, Any], mode: str, params: DeflateParams | ReinflateParams
    ) -> DeflateResult:
        body = dict(body, direction=direction)
        total_mib = self._memory.total_mib() if "memory_mib" in params.target else 0.0
        with self._lock:
            record = self._records.get(request_id)
            is_new = record is None
            if record is None:
                record = self._records[request_id] = _Record(body)
                self._count += 1
                number = self._count
                self._newest.update({name: (number, size) for name, size in params.target.items()})
                if "memory_mib" in params.target:
                    self._guest_mib = guest_target_mib(total_mib, params.bound_mib, params.target["memory_mib"])
                    self._is_full = isinstance(params, ReinflateParams) and params.full
                if direction == "deflate":
                    self._deflation = number, request_id
                guest_mib = self._guest_mib
                while len(self._records) > REQUESTS_KEPT:
                    self._records.popitem(last=False)
        if record.params != body:
            raise BadParams("request_id", "was used for another request")
        if not is_new:
            record.done.wait(CAPABILITIES_LIMITS_S[1] + TARGET_LIMITS_S[1] + 1.0)
            return record.result or _refused(request_id, "the applications are still being asked")
        try:
            record.result, record.asked, missed = self._ask(direction, request_id, mode, params, guest_mib)
        except BaseException:
            with self._lock:
                self._records.pop(request_id, None)
            raise
        finally:
            record.done.set()
        if isinstance(params, ReinflateParams) and (missed or record.asked):
            if missed:
                self._log(f"{', '.join(sorted(missed))}: told again of {request_id}, since {record.result.reason}")
            again = partial(self._tell_again, number, params, missed, dict.fromkeys(record.asked, request_id))
            try:
                threading.Thread(target=again, name="reinflation owed", daemon=True).start()
            except RuntimeError:
                self._log(f"{request_id} is not told again: no thread can be started")
        return record.result

    def _tell_again(self, number: int, params: ReinflateParams, missed: set[str], at_work: dict[str, str]) -> None:
        """Until each has taken the reinflation on and has done it, or the host asks for something else.

        :param at_work: those that promised, each with the request by which it did.
        """
        pause_s, request_id = AGAIN_S[0], ""
        attempts = count(2)
        named: set[str] = set()
        while missed or at_work:
            if self._closed.wait(pause_s):
                return
            pause_s = min(2 * pause_s, AGAIN_S[1])
            with self._lock:
                seen, guest_mib, is_full = self._count, self._guest_mib, self._is_full
                newest = {name: self._newest[name] for name in params.target if name in GIVEN}
            components = [name for name, (at, _) in newest.items() if at == number]
            if not components:
                return
            if "memory_mib" in newest:
                # Some may have been taken since, without a word to applications.
                now_mib = guest_target_mib(self._memory.total_mib(), params.bound_mib, newest["memory_mib"][1])
                is_full = is_full and now_mib > guest_mib - FULL_BUT_MIB
                guest_mib = min(guest_mib, now_mib)
            # With the sizes of later requests: what is told without a component may be taken to have all of it.
            now = replace(params, target={name: size for name, (_, size) in newest.items()}, full=is_full)
            try:
                states = self._progress(at_work)
                failed = {name for name, state in states.items() if state == "failed"}
                if failed - named:
                    self._log(f"{', '.join(sorted(failed))}: told again of {params.request_id}, which came to nothing")
                named |= failed
                missed |= failed
                at_work = {name: at_work[name] for name, state in states.items() if state == "running"}
                # A reinflation would call off what they are giving of another component.
                names = missed - self._giving(missed, number)
                owed = _Owed(names, components, partial(self._is_latest, seen))
                if names:
                    request_id = f"{params.request_id}+{next(attempts)}"
                    _, asked, still = self._ask("reinflate", request_id, "ask", now, guest_mib, owed)
                    missed = (missed - names) | still
                    at_work.update(dict.fromkeys(asked, request_id))
            except Exception as error:  # whatever it is, they are told again
                self._log(f"telling again of {params.request_id} failed: {type(error).__name__}: {error}")
        if request_id:
            self._log(f"all have done {params.request_id}")

    def _is_latest(self, number: int) -> bool:
        return number == self._count

    def _giving(self, names: set[str], number: int) -> set[str]:
        """Of some applications those that a later deflation has at work, or may have in a moment."""
        with self._lock:
            later, request_id = self._deflation
            record = self._records.get(request_id)
        if later < number:
            return set()
        if record is not None and not record.done.is_set():
            return names
        states = self._progress(dict.fromkeys(names, request_id))
        return {name for name, state in states.items() if state == "running"}

    def _progress(self, requests: dict[str, str]) -> dict[str, str]:
        """How far each of some applications is with a request: running, released or failed, as of what it forgot."""
        hooks, left_out = self._load()
        answers = in_parallel(
            {name: partial(hooks[name].progress, id_) for name, id_ in requests.items() if name in hooks},
            PROGRESS_LIMIT_S,
        )
        states = dict.fromkeys(left_out.intersection(requests), "failed")
        for name, answer in answers.items():
            if isinstance(answer, HookError):
                states[name] = "running" if isinstance(answer, HookTimeout) else "failed"
            else:
                states[name] = answer[1].get("state", "failed")
        return states

    def _ask(
        self,
        direction: str,
        request_id: str,
        mode: str,
        params: DeflateParams | ReinflateParams,
        guest_mib: float,
        owed: _Owed | None = None,
    ) -> tuple[DeflateResult, dict[str, dict[str, float]], set[str]]:
        """The answer, what each that promised, or may yet, was asked for, and those that may take it on when they are
        asked again.

        :param guest_mib: the guest's target memory.
        :param owed: who is asked; the others keep what they were told.
        """
        began = time.monotonic()
        hooks, missed = self._load()
        unread = [f"{name}: its drop-in file is left out" for name in sorted(missed)]
        if not hooks:
            reason = _words(unread) or "no adapter is registered"
            missed = missed if owed is None else missed.intersection(owed.names)
            return DeflateResult(request_id, "none", {}, 0.0, reason, None), {}, missed
        # Nobody waits for what is told again.
        waits_s = params.deadline_s if owed is None else math.inf
        limit_s = min(_limit_s(CAPABILITIES_LIMITS_S, params.deadline_s), OVER_BY[0] * waits_s)
        offers, reasons = self._capabilities(hooks, limit_s)
        targets = self._targets(offers, params, guest_mib)
        reasons += unread + [f"{name}: gives nothing of what is asked" for name in offers if name not in targets]
        missed |= set(hooks) - set(offers)
        calls: dict[str, Callable[[], Told]] = {}
        for name, target in targets.items():
            if owed is not None and (name not in owed.names or not set(target).intersection(owed.components)):
                continue
            body = {
                "request_id": request_id,
                "deadline_s": max(params.deadline_s - (time.monotonic() - began), 0.1),
                "mode": mode,
                "direction": direction,
                "target": target,
                "reason": "the VM is to have " + _amounts(params.target),
            }
            calls[name] = partial(hooks[name].target, body)
        if owed is not None and not owed.is_wanted():
            return _refused(request_id, "something else was asked since"), {}, set(owed.names)
        promised: dict[str, float] = {}
        asked: dict[str, dict[str, float]] = {}
        late: dict[str, dict[str, float]] = {}
        retries_s: list[float] = []
        expected_s = 0.0
        left_s = max(OVER_BY[1] * waits_s - (time.monotonic() - began), 0.0)
        for name, told in in_parallel(calls, min(_limit_s(TARGET_LIMITS_S, params.deadline_s), left_s)).items():
            limits = {component: offers[name].resources[component].current for component in targets[name]}
            if isinstance(told, HookError):
                reasons.append(f"{name}: {told}")
                missed.add(name)
                if isinstance(told, HookTimeout) and direction == "deflate":
                    late[name] = limits  # it may give all the same
                continue
            if told.promised:
                # Nothing comes free by growing.
                asked[name] = limits if direction == "deflate" else dict.fromkeys(limits, 0.0)
                _add(promised, _at_most(told.amounts, asked[name]))
                expected_s = max(expected_s, told.expected_s)
            elif told.retry_after_s is not None:
                retries_s.append(told.retry_after_s)
                missed.add(name)
            if told.reason:
                reasons.append(f"{name}: {told.reason}")
        missed = missed if owed is None else missed.intersection(owed.names)
        if not asked:
            return _refused(request_id, _words(reasons), max(retries_s) if retries_s else None), late, missed
        result = DeflateResult(request_id, "promised", promised, expected_s, _words(reasons), None)
        return result, {**asked, **late}, missed

    def _targets(
        self, offers: dict[str, AdapterCapabilities], params: DeflateParams | ReinflateParams, guest_mib: float
    ) -> dict[str, dict[str, float]]:
        """The size that each application is to have, of those components that it gives and that are asked for."""
        targets: dict[str, dict[str, float]] = {}
        ranges = {name: offer.resources["memory_mib"] for name, offer in offers.items() if _gives(offer, "memory_mib")}
        if ranges and "memory_mib" in params.target:
            resident_mib = sum(range_.current for range_ in ranges.values())
            budget_mib = application_budget_mib(self._memory.status(), resident_mib, guest_mib)
            sizes = split(budget_mib, [Share(r.current, r.minimum, max(r.minimum, r.maximum)) for r in ranges.values()])
            if isinstance(params, ReinflateParams) and params.full:
                # As each was set up; by what they hold now those that have shrunk most would stay so.
                sizes = [range_.maximum for range_ in ranges.values()]
            targets.update({name: {"memory_mib": round(size_mib, 3)} for name, size_mib in zip(ranges, sizes)})
        if "cpu_cores" in params.target:
            full_cores = params.full_cores or len(self._cpus_possible())
            for name, offer in offers.items():
                if _gives(offer, "cpu_cores"):
                    range_ = offer.resources["cpu_cores"]
                    size = cores(range_.maximum, params.target["cpu_cores"], full_cores)
                    targets.setdefault(name, {})["cpu_cores"] = round(max(size, range_.minimum), 3)
        return targets

    def _capabilities(self, hooks: dict[str, Hook], limit_s: float) -> tuple[dict[str, AdapterCapabilities], list[str]]:
        total_mib = self._memory.status().total_mib
        answers = in_parallel({name: hook.capabilities for name, hook in hooks.items()}, limit_s)
        offers: dict[str, AdapterCapabilities] = {}
        problems: list[str] = []
        for name, answer in answers.items():
            if isinstance(answer, HookError):
                problems.append(f"{name}: {answer}")
            else:
                if _gives(answer, "memory_mib"):
                    answer.resources["memory_mib"] = believable(answer.resources["memory_mib"], total_mib)
                offers[name] = answer
        return offers, problems

    def _load(self) -> tuple[dict[str, Hook], set[str]]:
        """The hooks, and the names of those whose drop-in file is left out now and could be read before."""
        found, problems = read_drop_ins(self._directory, self._owner_uid)
        drop_ins = found.values()
        self._copy_for({drop_in.user: drop_in.uid for drop_in in drop_ins if drop_in.user})
        with self._lock:
            for problem in set(problems.values()) - self._problems:
                self._log("adapter left out: " + problem)
            self._problems = set(problems.values())
            known = self._hooks
            self._hooks = {
                drop_in.name: known[drop_in.name]
                if drop_in.name in known and known[drop_in.name].drop_in == drop_in
                else Hook(drop_in, self._token)
                for drop_in in drop_ins
            }
            there = {name: path for name, path in self._files.items() if problems.keys() & {path, self._directory}}
            self._files = {**there, **{drop_in.name: path for path, drop_in in found.items()}}
            return dict(self._hooks), set(self._files).difference(self._hooks)


def _refused(request_id: str, reason: str, retry_after_s: float | None = None) -> DeflateResult:
    return DeflateResult(request_id, "refused", {}, 0.0, reason, retry_after_s)


def _limit_s(limits_s: tuple[float, float], deadline_s: float) -> float:
    return min(max(deadline_s / 10, limits_s[0]), limits_s[1])


def _gives(offer: AdapterCapabilities, component: str) -> bool:
    return component in offer.resources


def _at_most(amounts: dict[str, float], limits: dict[str, float]) -> dict[str, float]:
    """Of what an application says, what was asked for and can be."""
    return {name: min(amount, limits[name]) for name, amount in amounts.items() if name in limits}


def _words(parts: list[str]) -> str:
    return "; ".join(parts)[:WORDS_LENGTH]


def _amounts(target: dict[str, float]) -> str:
    units = {"memory_mib": "MiB", "cpu_cores": "cores"}
    return ", ".join(f"{target[name]:g} {unit}" for name, unit in units.items() if name in target)


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, amount in more.items():
        limit = CORES_LIMIT if name == "cpu_cores" else AMOUNT_LIMIT
        sums[name] = min(sums.get(name, 0.0) + amount, limit)
