"""The command ``ebb-manager``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from aiohttp import web

from cluster_manager.api import make_app
from cluster_manager.errors import ManagerError, SettingsError
from cluster_manager.manager import Manager
from cluster_manager.settings import Settings, read_token
from deflation.placement_policies import PlacementPolicy

log = structlog.get_logger()

EXAMPLES = """\
examples:
  ebb-manager --token-file /etc/ebbtide/token --agent-token-file /etc/ebbtide/agent-token --database manager.sqlite
  ebb-manager --listen 127.0.0.1:7200 --token-file t --agent-token-file a --database m.sqlite --policy first-fit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager until SIGTERM or SIGINT.

    :returns: 0 after a clean shutdown, 1 if it cannot start.
    """
    options = _parser().parse_args(arguments)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(options.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        asyncio.run(serve(_settings(options)))
    except (ManagerError, OSError) as error:
        print(f"ebb-manager: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(settings: Settings) -> None:
    """Serve until a signal asks to stop; then close the server, then the plans, then the store.

    :raises ManagerError: the store cannot be used.
    :raises OSError: the address is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(make_app(Manager(settings)), access_log=None, shutdown_timeout=2.0)
    try:
        await runner.setup()
        site = web.TCPSite(runner, settings.host, settings.port)
        await site.start()
        log.info("listening", url=f"http://{settings.host}:{runner.addresses[0][1]}")
        await stop.wait()
        log.info("stopping", why="a signal asked for it")
    finally:
        await runner.cleanup()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebb-manager",
        description="Places VMs on hosts, deflating low-priority VMs where that is needed. See also: ebb --help.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", default="127.0.0.1:7100", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--token-file", type=Path, required=True, help="token of the clients of the REST interface")
    parser.add_argument("--agent-token-file", type=Path, required=True, help="token between manager and host agents")
    parser.add_argument("--database", type=Path, required=True, help="SQLite file, made if it does not exist")
    parser.add_argument(
        "--policy", type=PlacementPolicy, choices=list(PlacementPolicy), default=PlacementPolicy.BEST_FIT,
        help="how hosts are chosen: best-fit, first-fit or two-choices; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the chance in two-choices; default: %(default)s")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    host, colon, port = options.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SettingsError(f"--listen must be HOST:PORT, but is {options.listen!r}")
    if options.seed < 0:
        raise SettingsError("--seed must not be negative")
    return Settings(
        database=options.database,
        token=read_token(options.token_file),
        agent_token=read_token(options.agent_token_file),
        host=host.strip("[]"),
        port=int(port),
        policy=options.policy,
        seed=options.seed,
    )


if __name__ == "__main__":
    sys.exit(main())
