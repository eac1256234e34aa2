"""The command ``ebb-manager``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from cluster_manager.api.app import make_app
from cluster_manager.errors import ManagerError, SettingsError
from cluster_manager.manager import Manager
from cluster_manager.plans.plans import GONE_S
from cluster_manager.settings import MOST_HOSTS, Settings
from cluster_manager.store.database import database_of
from cluster_manager.store.pruning import DAY_S, Retention
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.engines.settings import EngineSettings, read_settings
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.rest.access import Certificates, Rates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate, reloading
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import add_options, settings_of
from ebbtide.rest.tokens import principal, read_token

log = structlog.get_logger()

#: A hundred years.
MOST_DAYS = 36_500

EXAMPLES = """\
examples:
  ebb-manager --token-file /etc/ebbtide/token --hosts-key-file /etc/ebbtide/hosts.key --database manager.sqlite
  ebb-manager --listen 127.0.0.1:7200 --token-file t --hosts-key-file k --database m.sqlite --policy first-fit
  ebb-manager --listen 192.0.2.1:7100 --tokens-file tokens.toml --hosts-key-file k --database m.sqlite \\
      --tls-certificate manager.pem --tls-key manager.key --client-ca ca.pem
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager until SIGTERM or SIGINT.

    :returns: 0 after a clean shutdown, 1 if it cannot start.
    """
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
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
        settings, gate = _settings(options)
        asyncio.run(serve(settings, gate))
    except (ManagerError, AccessError, EngineSettingsError, OSError) as error:
        print(f"ebb-manager: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(settings: Settings, gate: Gate) -> None:
    """Serve until a signal asks to stop; then close the server, then the plans, then the store.

    :raises ManagerError: the store cannot be used.
    :raises OSError: the address is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = make_app(Manager(settings, freezes_memory=True), gate.access)
    async with gate.serve(app, settings.host, settings.port, shutdown_timeout_s=2.0) as listener, reloading(gate):
        log.info("listening", url=f"{gate.scheme}://{settings.host}:{listener.port}")
        await stop.wait()
        log.info("stopping", why="a signal asked for it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebb-manager",
        description="Places VMs on hosts, deflating low-priority VMs where that is needed. See also: ebb --help.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--listen", default="127.0.0.1:7100", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("--token-file", type=Path, help="token of an admin; needed where there is no --tokens-file")
    parser.add_argument(
        "--hosts-key-file", type=Path, required=True, metavar="FILE",
        help="key of which the tokens of all hosts are made, each its own: see `ebb invite --help`",
    )  # fmt: skip
    parser.add_argument(
        "--database", required=True, metavar="FILE|URL",
        help="SQLite file, made if missing, or postgresql://USER@HOST/NAME (docs/reference/high-availability.md)",
    )  # fmt: skip
    parser.add_argument(
        "--database-password-file", type=Path, help="password of the PostgreSQL user; without it as libpq finds one"
    )
    parser.add_argument("--url", help="where clients reach this manager; default: what it listens on")
    parser.add_argument(
        "--keep-days", type=float, default=Retention().age_s / DAY_S, metavar="DAYS",
        help="how long events, ended operations, ended VMs and core changes are kept; default: %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--keep-events", type=int, default=Retention().most_events, metavar="N",
        help="and of events not more than these; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--policy", type=PlacementPolicy, choices=list(PlacementPolicy), default=PlacementPolicy.BEST_FIT,
        help="how hosts are chosen: best-fit, first-fit or two-choices; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the chance in two-choices; default: %(default)s")
    parser.add_argument(
        "--gone-s", type=float, default=GONE_S, metavar="SECONDS",
        help="how long a VM that is being moved waits for a host that does not answer any more, beyond its request's "
        "deadline; default: %(default)g",
    )  # fmt: skip
    parser.add_argument(
        "--engine-file",
        type=Path,
        metavar="FILE",
        help="TOML: the Slurm or Dask that runs tasks (docs/reference/tasks.md)",
    )
    parser.add_argument(
        "--most-hosts", type=int, default=MOST_HOSTS, metavar="N",
        help="hosts that are registered at a time; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    add_options(parser, Rates())
    return parser


def _settings(options: argparse.Namespace) -> tuple[Settings, Gate]:
    host, colon, port = options.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SettingsError(f"--listen must be HOST:PORT, but is {options.listen!r}")
    if options.seed < 0:
        raise SettingsError("--seed must not be negative")
    if not 1 <= options.keep_days <= MOST_DAYS:
        raise SettingsError(f"--keep-days must be within [1, {MOST_DAYS}]")
    if not 1 <= options.gone_s <= MOST_DAYS * DAY_S:
        raise SettingsError(f"--gone-s must be within [1, {MOST_DAYS * DAY_S:g}]")
    for name in ("keep_events", "most_hosts"):
        if getattr(options, name) < 1:
            raise SettingsError(f"--{name.replace('_', '-')} must be at least 1")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise SettingsError("--url must begin with http:// or https://")
    if options.token_file is None and options.tokens_file is None:
        raise SettingsError("--token-file or --tokens-file must be given")
    engine = read_settings(options.engine_file) if options.engine_file is not None else EngineSettings()
    # What it needs is missed now, not when the manager leads.
    engine_of(engine)
    host = host.strip("[]")
    token = read_token(options.token_file) if options.token_file is not None else ""
    key = read_token(options.hosts_key_file)
    if key == token:
        raise SettingsError("--token-file and --hosts-key-file hold the same word: who has the one would have all")
    own = [principal("token-file", Role.ADMIN, token)] if token else []
    gate = Gate(settings_of(options, host), own, Certificates(of_host=True), required=False, hosts_key=key)
    listens_at = f"{gate.scheme}://{options.listen}" if int(port) else None
    settings = Settings(
        database=database_of(options.database, options.database_password_file),
        token=token,
        hosts_key=key,
        host=host,
        port=int(port),
        policy=options.policy,
        seed=options.seed,
        gone_s=options.gone_s,
        agent_tls=gate.calls,
        revoked=gate.revoked,
        most_hosts=options.most_hosts,
        url=options.url.rstrip("/") if options.url else listens_at,
        retention=Retention(age_s=options.keep_days * DAY_S, most_events=options.keep_events),
        engine=engine,
    )
    return settings, gate


if __name__ == "__main__":
    sys.exit(main())
