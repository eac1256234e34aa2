"""Any program as an adapter: it is asked by JSON on its standard input and answers by JSON on its standard output.

The exact JSON stands in docs/reference/adapters.md. Promising is quick; the work is a second call, `release`.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from typing import Any, Sequence

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.messages import COMPONENTS, MODES
from app_adapters.processes.process import children, proportional_mib
from app_adapters.processes.programs import ask_program
from app_adapters.registry import Ready, amount

#: The guest agent waits 1.5 s for capabilities.
ANSWER_LIMIT_S = 1.4
SETTLE_S = 2.0
LOOK_S = 0.1

_SIZES = ("current", "minimum", "maximum", "step")


class CommandAdapter(Adapter):
    """Asks the program `argv`. Where `pid_file` names one, the memory of that process tree is measured here.

    `answer_limit_s` is the time that the program has for everything but `release`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        name: str = "command",
        components: Sequence[str] = ("memory_mib",),
        pid_file: str = "",
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        if not argv:
            raise AdapterError("--run: names no program")
        self.components = tuple(components)
        self._argv = tuple(argv)
        self._name = name
        self._pid_file = pid_file
        self._answer_limit_s = answer_limit_s

    def capabilities(self) -> Capabilities:
        """As the program says; what is measured here takes the place of `current`. Raises: ApplicationError."""
        answer = self._ask({"method": "capabilities"})
        resources = answer.get("resources")
        if not isinstance(resources, dict) or not resources:
            raise self._odd("resources", "must be an object with the sizes of each component")
        ranges = {}
        for component, sizes in resources.items():
            if component not in self.components:
                raise self._odd(
                    f"resources.{component}", f"was not named by --component ({', '.join(self.components)})"
                )
            found = self._amounts(sizes, f"resources.{component}", _SIZES)
            missing = [name for name in _SIZES if name not in found]
            if missing:
                raise self._odd(f"resources.{component}.{missing[0]}", "is missing")
            ranges[component] = SizeRange(*(found[name] for name in _SIZES))
        if self._pid_file and "memory_mib" in ranges:
            ranges["memory_mib"].current = self._measured_mib()
        modes = answer.get("modes", list(MODES))
        if not isinstance(modes, list) or not set(map(str, modes)) <= set(MODES):
            raise self._odd("modes", f"must be a list of {' and '.join(MODES)}")
        version = str(answer.get("version", __version__))[:100]
        expected_s = self._amount(answer, "expected_s", 1.0)
        return Capabilities(self._name, version, ranges, expected_s, bool(answer.get("reversible", True)), modes)

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """As the program says. Raises: ApplicationError."""
        return self._decide("deflate", target, mode, deadline)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """As the program says. Raises: ApplicationError."""
        return self._decide("reinflate", target, "ask", deadline)

    def status(self) -> dict[str, float]:
        """As the program says, memory as it is measured here. Raises: ApplicationError."""
        answer = self._ask({"method": "status"})
        sizes = self._amounts(answer.get("sizes"), "sizes", self.components)
        if self._pid_file and "memory_mib" in self.components:
            sizes["memory_mib"] = self._measured_mib()
        return sizes

    def _decide(self, method: str, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        question = {"method": method, "target": target, "mode": mode, "deadline_s": round(deadline.remaining_s, 3)}
        answer = self._ask(question)
        reason = str(answer.get("reason", ""))
        refused = answer.get("refused")
        if refused is not None and refused is not False:
            if not isinstance(refused, str):
                raise self._odd("refused", "must be the reason, a text")
            retry_s = self._amount(answer, "retry_after_s", 0.0) or None
            floor = self._amounts(answer.get("floor", {}), "floor", self.components)
            return Refusal(refused or "the program refused", retry_s, floor, answer.get("for_good") is True)
        if "promised" not in answer:
            raise self._odd("promised", "is missing, and so is refused")
        promised = self._amounts(answer["promised"], "promised", self.components)
        expected_s = self._amount(answer, "expected_s", 1.0)
        return Promise(promised, expected_s, lambda: self._release(question, deadline), reason)

    def _release(self, decided: dict[str, Any], deadline: Deadline) -> Release:
        direction = decided["method"]
        before_mib = self._measured_mib() if self._pid_file else 0.0
        remaining_s = deadline.remaining_s
        question = {**decided, "method": "release", "direction": direction, "deadline_s": round(remaining_s, 3)}
        answer = ask_program(self._argv, question, remaining_s, lambda: deadline.passed)
        released = self._amounts(answer.get("released"), "released", self.components)
        measured_by = "the program: " + str(answer.get("measured_by", "it does not say how"))
        if self._pid_file and "memory_mib" in decided["target"]:
            released["memory_mib"] = 0.0
            if direction == "deflate":
                released["memory_mib"] = self._fall_mib(before_mib, decided["target"]["memory_mib"], deadline)
            measured_by = "PSS of the processes of " + self._pid_file
        complete = answer.get("complete", True)
        if not isinstance(complete, bool):
            raise self._odd("complete", "must be true or false")
        return Release(released, measured_by, str(answer.get("reason", "released")), complete)

    def _fall_mib(self, before_mib: float, target_mib: float, deadline: Deadline) -> float:
        """What came free, by the kernel's figures. Pages may go back a moment after the program says so."""
        end = time.monotonic() + SETTLE_S
        after_mib = self._measured_mib()
        while after_mib > target_mib and time.monotonic() < end and not deadline.wait(LOOK_S):
            after_mib = self._measured_mib()
        return round(max(before_mib - after_mib, 0.0), 3)

    def _measured_mib(self) -> float:
        try:
            with open(self._pid_file) as file:
                pid = int(file.read(32))
        except (OSError, ValueError) as error:
            raise ApplicationError(f"--pid-file: {self._pid_file} holds no pid: {error}") from None
        return round(_tree_mib(pid), 3)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = ask_program(self._argv, question, self._answer_limit_s, lambda: False)
        return answer

    def _amounts(self, value: Any, field: str, names: Sequence[str]) -> dict[str, float]:
        if not isinstance(value, dict):
            raise self._odd(field, "must be an object")
        foreign = sorted(set(map(str, value)) - set(names))
        if foreign:
            raise self._odd(f"{field}.{foreign[0]}", f"there is {', '.join(names)} only")
        return {name: self._number(value[name], f"{field}.{name}") for name in value}

    def _amount(self, answer: dict[str, Any], field: str, default: float) -> float:
        value = answer.get(field)
        return default if value is None else self._number(value, field)

    def _number(self, value: Any, field: str) -> float:
        try:
            if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
                return float(value)
        except OverflowError:  # an integer beyond every float
            pass
        raise self._odd(field, "must be a finite number >= 0")

    def _odd(self, field: str, problem: str) -> ApplicationError:
        return ApplicationError(f"{self._argv[0]}: answer: {field}: {problem}")


def _tree_mib(pid: int) -> float:
    """Memory of a process and all that descend from it. A child may end in between. Raises: ApplicationError."""
    total_mib = proportional_mib(pid)
    for child in children(pid):
        try:
            total_mib += _tree_mib(child)
        except ApplicationError:
            continue
    return total_mib


def component(text: str) -> str:
    """A component's name. Raises: argparse.ArgumentTypeError."""
    if text not in COMPONENTS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(COMPONENTS)}")
    return text


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, metavar="'PROG ARGS'", help="the program; no shell sees this")
    parser.add_argument(
        "--component",
        type=component,
        action="append",
        metavar="NAME",
        help=f"what it gives: {' or '.join(COMPONENTS)}; may be repeated (default: memory_mib)",
    )
    parser.add_argument(
        "--pid-file", default="", metavar="FILE", help="measure the memory of this process and its children"
    )
    parser.add_argument(
        "--answer-limit-s",
        type=amount,
        default=ANSWER_LIMIT_S,
        metavar="S",
        help="seconds that the program has for an answer, its work apart (default: %(default)s)",
    )


def _build(options: argparse.Namespace) -> Adapter:
    try:
        argv = shlex.split(options.run)
    except ValueError as error:
        raise AdapterError(f"--run: {error}") from None
    components = tuple(dict.fromkeys(options.component or ["memory_mib"]))
    return CommandAdapter(argv, options.name, components, options.pid_file, options.answer_limit_s)


READY = Ready(
    "any program that answers JSON with JSON",
    """\
The program is run for every question, which it finds as JSON on its standard input: {"method": "capabilities"},
"status", "deflate", "reinflate", and "release" for the work that it promised. docs/reference/adapters.md has the exact
JSON.

example:
  ebb-adapter command --run '/usr/local/sbin/shrink-cache --fast' --pid-file /run/cache.pid""",
    _options,
    _build,
)
