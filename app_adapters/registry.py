"""Registry of the ready adapters: what `ebb-adapter` and `python3 -m app_adapters` can run."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Callable

from app_adapters.adapter import Adapter
from app_adapters.errors import AdapterError
from app_adapters.hook import require_loopback


@dataclass(frozen=True)
class Ready:
    """A ready adapter: its options, and how they make one. `build` raises AdapterError for options that cannot be."""

    summary: str
    description: str
    options: Callable[[argparse.ArgumentParser], None]
    build: Callable[[argparse.Namespace], Adapter]


#: By name, the module that has it as READY. Loaded only when used: a guest's adapter is to start quickly.
MODULES = {
    "memcached": "app_adapters.memcached.adapter",
    "redis": "app_adapters.redis.adapter",
    "valkey": "app_adapters.redis.adapter",
    "jvm": "app_adapters.jvm.command",
    "spark": "app_adapters.spark.master",
    "spark-worker": "app_adapters.spark.worker",
    "gunicorn": "app_adapters.web.gunicorn",
    "nginx": "app_adapters.web.nginx",
    "command": "app_adapters.processes.command",
    "postgresql": "app_adapters.postgresql.adapter",
    "inelastic": "app_adapters.processes.inelastic",
}


#: The group of entry points by which other packages add theirs: `NAME = "module:READY"`.
GROUP = "ebbtide.adapters"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def others() -> dict[str, Any]:
    """The entry points of adapters that other packages bring, by name. Those of this package cannot be replaced."""
    from importlib.metadata import entry_points

    found: Any = entry_points()
    chosen = found.select(group=GROUP) if hasattr(found, "select") else found.get(GROUP, ())  # before Python 3.10
    return {point.name: point for point in chosen if point.name not in MODULES and _NAME.fullmatch(point.name)}


def ready(name: str) -> Ready:
    """The adapter of this name. Raises: AdapterError for one of another package that cannot be loaded."""
    if name in MODULES:
        found: Ready = import_module(MODULES[name]).READY
        return found
    point = others().get(name)
    if point is None:
        raise AdapterError(f"there is no adapter {name}")
    try:
        other = point.load()
    except Exception as error:  # another package's module may raise anything
        raise AdapterError(f"{name} ({point.value}) cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(other, Ready):
        raise AdapterError(f"{name} ({point.value}) is no app_adapters.registry.Ready")
    return other


def application_name(text: str) -> str:
    """A name as drop-in files have it. Raises: argparse.ArgumentTypeError."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is not lower-case letters, digits and -, at most 63")
    return text


def address(text: str) -> tuple[str, int]:
    """HOST:PORT of an option. Raises: argparse.ArgumentTypeError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def place(text: str) -> str | tuple[str, int]:
    """The path of a Unix socket, or HOST:PORT on loopback; port 0 where there is the host only, for the port that goes
    with the application's name. Raises: argparse.ArgumentTypeError."""
    if text.startswith("/"):
        return text
    try:
        require_loopback(text.strip("[]"))
    except ValueError:
        host, port = address(text)
        if not port:
            raise argparse.ArgumentTypeError(f"{text}: a port must be one that a drop-in file can name") from None
        return host, port
    return text.strip("[]"), 0


def amount(text: str) -> float:
    """A finite number >= 0. Raises: argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value
