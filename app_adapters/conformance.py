"""`ebb-adapter check URL`: asks a hook of any make whether it keeps to the protocol (docs/reference/adapters.md)."""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from typing import Any, Callable, Sequence

from app_adapters import checks
from app_adapters.client import HookClient, NoAnswer, NotListening, read_token
from app_adapters.errors import AdapterError, BadAnswer
from app_adapters.hook import CAPABILITIES, HEALTH, STATUS, TARGETS, TOKEN_FILE, Reply
from app_adapters.messages import COMPONENTS, MODES
from app_adapters.registry import amount

DESCRIPTION = """\
Ask a hook whether it keeps to the protocol, and print a line for each check. Nothing is taken from the application: it
is told to grow to its maximum, so do not ask it in a VM that is deflated now. With --memory-mib or --cpu-cores it is
shrunk to that size, called off, and grown to its maximum again, also where a check fails or is stopped (Ctrl-C).

Exit status: 0 all is well, 1 a check failed, 2 it cannot be asked at all, 130 stopped.

examples:
  ebb-adapter check unix:/run/ebbtide/hooks/cache.sock
  ebb-adapter check http://127.0.0.1:7070 --token-file ./token --memory-mib 128"""
#: Within which the guest agent wants what is offered, and an answer to a target, at least.
OFFER_LIMIT_S, ANSWER_LIMIT_S = 1.5, 2.5
#: Between two tellings of one that cannot grow now.
AGAIN_S = 1.0


class Wrong(AdapterError):
    """What a hook does otherwise than the protocol says."""


class Conformance:
    """The checks of one hook, in their order; `size` is what to shrink it to, empty for nothing."""

    def __init__(self, url: str, token: str, size: dict[str, float], limit_s: float) -> None:
        self._hook, self._size, self._limit_s = HookClient(url, token), size, limit_s
        self._strangers = {"without a token": HookClient(url), "with a wrong one": HookClient(url, token + "x")}
        self._current: dict[str, float] = {}
        self._maximum: dict[str, float] = {}
        self._shrunk = False  # or may be: it was asked to, and has not grown since
        self._growths = itertools.count(1)
        self._id = "check " + os.urandom(4).hex()

    def checks(self) -> list[tuple[str, Callable[[], str]]]:
        """Names and checks; each returns what it saw. They raise Wrong, BadAnswer or NoAnswer."""
        shrinking = [("shrinks and grows", self.shrinks), ("a newer attempt calls off", self.calls_off)]
        return [
            ("healthz", self.health),
            ("the token", self.token),
            ("capabilities", self.capabilities),
            ("status", self.status),
            ("paths and methods", self.paths),
            ("bad bodies", self.bad_bodies),
            ("a target", self.target),
            *(shrinking if self._size else []),
        ]

    def health(self) -> str:
        """It needs no token; a hook that is mounted in a service may not have it."""
        try:
            status, body = self._strangers["without a token"].ask("GET", HEALTH)
        except NotListening:
            raise
        except NoAnswer:  # the service's own page for what it does not know
            status, body = 404, {}
        if status == 404:
            return "not served: the hook is part of a service with paths of its own"
        _require(status == 200 and body.get("status") == "ok", f"GET {HEALTH}: {status} {body}")
        return f"version {body.get('version')}"

    def token(self) -> str:
        """Nobody without it is told anything, or changes anything."""
        for who, stranger in self._strangers.items():
            for method, path in (("GET", CAPABILITIES), ("GET", STATUS), ("POST", TARGETS), ("GET", TARGETS + "/x")):
                status, _ = stranger.ask(method, path, {} if method == "POST" else None)
                _require(status == 401, f"{method} {path} {who}: {status}, not 401")
        status, body = self._hook.ask("GET", CAPABILITIES)
        _require(status != 401, f"GET {CAPABILITIES} with the token: 401 {body.get('error')}")
        return "401 without it and with another"

    def capabilities(self) -> str:
        """What it offers, in time."""
        began = time.monotonic()
        status, body = self._hook.ask("GET", CAPABILITIES)
        took_s = time.monotonic() - began
        _require(status == 200, f"{status} {body.get('error')}")
        resources = body.get("resources")
        if not isinstance(resources, dict) or not resources:
            raise Wrong("resources: no object with a component")
        for name in resources:
            _require(name in COMPONENTS, f"resources.{name}: there is {' and '.join(COMPONENTS)} only")
            sizes = resources[name] if isinstance(resources[name], dict) else {}
            now, least, most, _ = (
                checks.number(sizes.get(figure), f"resources.{name}.{figure}")
                for figure in ("current", "minimum", "maximum", "step")
            )
            _require(least <= most, f"resources.{name}: minimum {least:g} is above maximum {most:g}")
            self._current[name], self._maximum[name] = now, max(now, most)
        checks.number(body.get("expected_s"), "expected_s")
        _require(isinstance(body.get("reversible"), bool), "reversible: neither true nor false")
        modes = body.get("modes")
        _require(isinstance(modes, list) and set(modes) <= set(MODES), f"modes: no list of {' and '.join(MODES)}")
        _require(took_s < OFFER_LIMIT_S, f"took {took_s:.1f} s; the guest agent waits for {OFFER_LIMIT_S:g} s")
        return ", ".join(f"{name} {size:g}" for name, size in self._current.items())

    def status(self) -> str:
        """What it has, of what it offers."""
        status, body = self._hook.ask("GET", STATUS)
        _require(status == 200, f"{status} {body.get('error')}")
        sizes = checks.vector(body.get("sizes"), "sizes")
        return ", ".join(f"{name} {size:g}" for name, size in sizes.items())

    def paths(self) -> str:
        """What there is not."""
        wanted = (
            (404, "GET", "/deflation/v2/capabilities"),
            (404, "GET", f"{TARGETS}/never-asked"),
            (405, "POST", CAPABILITIES),
            (405, "GET", TARGETS),
        )
        for expected, method, path in wanted:
            status, _ = self._hook.ask(method, path, {} if method == "POST" else None)
            _require(status == expected, f"{method} {path}: {status}, not {expected}")
        return "404 and 405"

    def bad_bodies(self) -> str:
        """400, with a sentence that names the field."""
        good = self._body("reinflate", self._maximum)  # harmless where one of these is taken for good
        for field, body in (
            ("body", b"{"),
            ("request_id", {**good, "request_id": ""}),
            ("deadline_s", {**good, "deadline_s": 0}),
            ("mode", {**good, "mode": "beg"}),
            ("direction", {**good, "direction": "sideways"}),
            ("target", {**good, "target": {}}),
            ("target", {**good, "target": dict.fromkeys(self._maximum or COMPONENTS, -1)}),
        ):
            assert isinstance(body, (bytes, dict))
            status, answer = self._hook.ask("POST", TARGETS, body)
            _require(status == 400, f"{field} is wrong: {status}, not 400")
            _require(field == "body" or field in str(answer.get("error")), f"{field} is not named: {answer}")
        return "400, with the field's name"

    def target(self) -> str:
        """A target that takes nothing, not even a limit's room: an answer in time, kept, and followed to its end."""
        body = self._body("reinflate", self._maximum, "/é%")
        first = self._ask(body)
        again = self._hook.target(body)
        _require(again == first, f"the same request again: {again}, at first {first}")
        status, answer = self._hook.target({**body, "deadline_s": self._limit_s + 1})
        _require((status, answer.get("state")) == (409, "conflict"), f"another body under its id: {status} {answer}")
        ended = self._ended(body)
        return f"{first[1]['state']}, {ended['state']}: {ended['reason']}"

    def shrinks(self) -> str:
        """To the wanted size, and to its maximum."""
        self._can_grow_again()
        body = self._body("deflate", self._size, "-down")
        state = self._ask(body)[1]["state"]
        ended = self._ended(body)
        for name, freed in checks.vector(ended["released"], "released").items():
            _require(freed <= self._current[name], f"released.{name}: {freed:g}, and it had {self._current[name]:g}")
        grown = self._grow()
        _require(not any(grown["released"].values()), f"a reinflation released {grown['released']}")
        return f"{state}, {ended['state']} {ended['released']}: {ended['reason']}"

    def calls_off(self) -> str:
        """The older attempt ends, and the newer is answered in time."""
        self._can_grow_again()
        older, newer = (self._body("deflate", self._size, mark) for mark in ("-off#1", "-off#2"))
        asked = [(body, *self._ask(body)) for body in (older, newer)]
        for body, status, _ in asked:
            if status == 202:
                self._ended(body)
        late = self._hook.target(self._body("deflate", self._current, "-off#0"))
        _require(late[0] == 409, f"an older attempt that comes late: {late[0]}, not 409")
        self._grow()
        return f"the newer is {asked[-1][2]['state']}"

    def give_back(self) -> None:
        """What was taken and not given back yet, whatever a check said: asked until the limit. Raises: as a check."""
        end = time.monotonic() + self._limit_s
        while self._shrunk:
            try:
                self._grow()
            except NotListening:
                raise
            except (BadAnswer, NoAnswer, Wrong):
                if time.monotonic() > end:
                    raise
                time.sleep(AGAIN_S)

    def _can_grow_again(self) -> None:
        for name in self._size:
            _require(name in self._maximum, f"resources.{name}: not known, so nothing is taken")

    def _grow(self) -> dict[str, Any]:
        """Its end, once it has grown to its maximum: told again where it cannot now, as the guest agent does."""
        end = time.monotonic() + self._limit_s
        while True:
            body = self._body("reinflate", self._maximum, f"-up{next(self._growths)}")
            status, answer = self._ask(body)
            if status == 202:
                answer = self._ended(body)
                if answer["state"] == "released":
                    self._shrunk = False
                    return answer
            for_good = status == 409 and answer.get("retry_after_s") is None
            _require(not for_good and time.monotonic() < end, f"it does not grow again: {answer.get('reason')}")
            time.sleep(AGAIN_S)

    def _body(self, direction: str, target: dict[str, float], mark: str = "") -> dict[str, Any]:
        body = {"request_id": self._id + mark, "deadline_s": self._limit_s, "mode": "ask", "direction": direction}
        return {**body, "target": target, "reason": "a check of the hook"}

    def _ask(self, body: dict[str, Any]) -> Reply:
        """A checked answer to a target."""
        # It may have grown since it was asked last: what it promises is of what it has now.
        self.capabilities()
        self._shrunk |= body["direction"] == "deflate"
        began = time.monotonic()
        status, answer = self._hook.target(body)
        took_s = time.monotonic() - began
        states = {202: "promised", 409: "refused"}
        _require(status in states, f"a target: {status} {answer.get('error')}")
        _require(answer.get("state") == states[status], f"state: {answer.get('state')}, and the status {status}")
        _require(answer.get("request_id") == body["request_id"], f"request_id: {answer.get('request_id')}")
        _require(isinstance(answer.get("reason"), str), "reason: no text")
        _require(took_s < ANSWER_LIMIT_S, f"took {took_s:.1f} s; the guest agent waits for {ANSWER_LIMIT_S:g} s")
        if status == 202:
            checks.number(answer.get("expected_s"), "expected_s")
            for name, promised in checks.vector(answer.get("promised"), "promised").items():
                most = self._current.get(name, 0.0)
                _require(promised <= most, f"promised.{name}: {promised:g}, and it has {most:g}")
        else:
            checks.vector(answer.get("floor"), "floor")
            if answer.get("retry_after_s") is not None:
                checks.number(answer["retry_after_s"], "retry_after_s")
        return status, answer

    def _ended(self, body: dict[str, Any]) -> dict[str, Any]:
        """A target's checked end."""
        end = time.monotonic() + self._limit_s + 5.0
        while True:
            status, answer = self._hook.progress(body["request_id"])
            _require(status == 200, f"a target's progress: {status} {answer.get('error')}")
            _require(answer.get("request_id") == body["request_id"], f"request_id: {answer.get('request_id')}")
            if answer.get("state") in ("released", "failed"):
                checks.vector(answer.get("released"), "released")
                _require(isinstance(answer.get("measured_by"), str), "measured_by: no text")
                return answer
            _require(answer.get("state") == "running", f"state: {answer.get('state')}")
            _require(
                time.monotonic() < end, f"runs still, {self._limit_s:g} s of its deadline and 5 s more have passed"
            )
            time.sleep(0.05)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `ebb-adapter check` can be told."""
    parser.add_argument("url", metavar="URL", help="unix:/PATH, or http://HOST:PORT on loopback")
    parser.add_argument(
        "--token-file", default=TOKEN_FILE, metavar="FILE", help="token of this VM (default: %(default)s)"
    )
    parser.add_argument(
        "--memory-mib", type=amount, metavar="MIB", help="shrink it to so much memory, and grow it fully"
    )
    parser.add_argument("--cpu-cores", type=amount, metavar="N", help="shrink it to so many cores, and grow it fully")
    parser.add_argument(
        "--limit-s", type=amount, default=30.0, metavar="S", help="deadline of a target (default: %(default)g)"
    )


def main(argv: Sequence[str]) -> int:
    """Check one hook; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="ebb-adapter check", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    options = parser.parse_args(argv)
    named = {name: getattr(options, name) for name in COMPONENTS}
    size = {name: value for name, value in named.items() if value is not None}
    try:
        conformance = Conformance(options.url, read_token(options.token_file), size, options.limit_s)
    except (AdapterError, ValueError) as error:
        print(f"cannot be asked: {error}")
        return 2
    # As Ctrl-C: of timeout(1), and of a shell that is gone.
    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in ends:
        signal.signal(one, signal.default_int_handler)
    try:
        return _run(conformance)
    finally:
        for one in ends:
            signal.signal(one, signal.SIG_DFL)


def _run(conformance: Conformance) -> int:
    failed, status = 0, 0
    try:
        for name, check in conformance.checks():
            try:
                print(f"ok    {name}: {check()}", flush=True)
            except NotListening as error:
                print(f"cannot be asked: {error}")
                status = 2
                break
            except (BadAnswer, NoAnswer, Wrong) as error:
                failed += 1
                print(f"FAIL  {name}: {error}", flush=True)
    except KeyboardInterrupt:
        status = 130
        print("stopped", flush=True)
    finally:
        try:
            conformance.give_back()
        except (BadAnswer, NoAnswer, Wrong, KeyboardInterrupt) as error:
            failed += 1
            print(f"FAIL  what was taken is not given back: {str(error) or 'stopped'}", flush=True)
    if status == 0:
        print(f"{failed} failed" if failed else "all is well")
    return status or min(failed, 1)
