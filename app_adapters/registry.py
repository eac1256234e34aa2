"""Registry of the ready adapters: what `ebb-adapter` and `python3 -m app_adapters` can run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Callable

from app_adapters.adapter import Adapter


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


def ready(name: str) -> Ready:
    """The adapter of this name."""
    found: Ready = import_module(MODULES[name]).READY
    return found


def address(text: str) -> tuple[str, int]:
    """HOST:PORT of an option. Raises: argparse.ArgumentTypeError."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def place(text: str) -> str | tuple[str, int]:
    """The path of a Unix socket, or HOST:PORT. Raises: argparse.ArgumentTypeError."""
    return text if text.startswith("/") else address(text)


def amount(text: str) -> float:
    """A finite number >= 0. Raises: argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number >= 0")
    return value
