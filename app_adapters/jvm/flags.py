"""Flags of a HotSpot JVM as `VM.flags -all` lists them, and the collector that they name. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict

from app_adapters.errors import ApplicationError

MIB = 1024 * 1024
#: The flag that chooses each collector.
COLLECTORS = {
    "UseShenandoahGC": "Shenandoah",
    "UseZGC": "ZGC",
    "UseG1GC": "G1",
    "UseSerialGC": "Serial",
    "UseParallelGC": "Parallel",
    "UseEpsilonGC": "Epsilon",
}
_LINE = re.compile(r"\s*\S+\s+(\w+)\s+:?=\s*(.*?)\s*\{([^}]*)\}(?:\s+\{[^}]*\})?\s*")


@dataclass(frozen=True)
class Flag:
    """One flag. `manageable`: it can be set while the JVM runs."""

    name: str
    value: str
    manageable: bool


Flags = Dict[str, Flag]


def parse_flags(text: str) -> Flags:
    """What `VM.flags -all` printed, by name. Raises: ApplicationError where it lists none."""
    found = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            name, value, kind = match.groups()
            found[name] = Flag(name, value, "manageable" in kind)
    if not found:
        raise ApplicationError(f"the JVM lists no flags: {text.strip()[:120]}")
    return found


def collector(flags: Flags) -> str:
    """The collector's name, empty where it is none that is known here."""
    return next((name for flag, name in COLLECTORS.items() if is_on(flags, flag)), "")


def is_on(flags: Flags, name: str) -> bool:
    """Whether a flag is there and true."""
    return name in flags and flags[name].value == "true"


def number(flags: Flags, name: str, default: float = 0.0) -> float:
    """A flag's value as a number; `default` where it is missing or none."""
    try:
        return float(flags[name].value)
    except (KeyError, ValueError):
        return default


def size_mib(flags: Flags, name: str) -> float:
    """A flag in bytes, in MiB; 0 where it is missing."""
    return number(flags, name) / MIB


def with_value(flags: Flags, name: str, value: str) -> Flags:
    """The same flags after one has been set."""
    return {**flags, name: Flag(name, value, flags[name].manageable)}
