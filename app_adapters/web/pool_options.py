"""Command line options that all pools of workers have."""

from __future__ import annotations

import argparse

from app_adapters.errors import ApplicationError
from app_adapters.processes.process_memory import cpus_possible
from app_adapters.registry import amount


def whole(text: str) -> int:
    """A whole number >= 1. Raises: argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 10000:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 10000")
    return int(text)


def pool_options(parser: argparse.ArgumentParser) -> None:
    """Options of all pools of workers."""
    parser.add_argument(
        "--minimum-workers", type=whole, default=1, metavar="N", help="kept in any case (default: %(default)s)"
    )
    parser.add_argument(
        "--cores", type=amount, metavar="N", help="cores that all workers stand for (default: the CPUs of this machine)"
    )


def full_cores(options: argparse.Namespace) -> float:
    """Raises: ApplicationError which names the option."""
    if options.cores == 0:
        raise ApplicationError("--cores: must be more than 0")
    return float(options.cores or cpus_possible())
