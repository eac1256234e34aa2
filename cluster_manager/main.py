"""The command ``ebb-manager``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from cluster_manager.api.app import make_app
from cluster_manager.errors import ManagerError, SettingsError
from cluster_manager.manager import Manager
from cluster_manager.options import ManagerOptions
from cluster_manager.settings import Settings
from cluster_manager.store.database import database_of
from cluster_manager.store.pruning import DAY_S, Retention
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.engines.settings import EngineSettings, read_settings
from ebbtide.matcher.errors import EngineSettingsError
from ebbtide.rest.access import Certificates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.logs import configure_logs
from ebbtide.rest.options import Given, read_options
from ebbtide.rest.reload import reloading
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import settings_of
from ebbtide.rest.supervision import supervised
from ebbtide.rest.tokens import Principal, principal, read_token

log = structlog.get_logger()

ABOUT = "Places VMs on hosts, deflating low-priority VMs where that is needed. See also: ebb --help."
EXAMPLES = """\
examples:
  ebb-manager --token-file /etc/ebbtide/token --hosts-key-file /etc/ebbtide/hosts.key --database manager.sqlite
  ebb-manager --listen 127.0.0.1:7200 --token-file t --hosts-key-file k --database m.sqlite --policy first-fit
  ebb-manager --config manager.toml
  ebb-manager --listen 192.0.2.1:7100 --tokens-file tokens.toml --hosts-key-file k --database m.sqlite \\
      --tls-certificate manager.pem --tls-key manager.key --client-ca ca.pem
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager until SIGTERM or SIGINT.

    :returns: 0 after a clean shutdown, 1 if it cannot start, 2 if its options cannot be.
    """
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
    try:
        given = options_of(arguments)
    except AccessError as error:
        return _refuse(str(error), 2)
    configure_logs(given.options.log_level, given.options.log_json)
    try:
        settings, gate = settings_of_all(given.options)
    except (SettingsError, AccessError, EngineSettingsError) as error:
        return _refuse(given.said(str(error)), 2)
    try:
        asyncio.run(serve(settings, gate, given))
    except (ManagerError, AccessError, OSError) as error:
        return _refuse(str(error), 1)
    return 0


def _refuse(sentences: str, code: int) -> int:
    for sentence in sentences.splitlines():
        print(f"ebb-manager: {sentence}", file=sys.stderr)
    return code


def options_of(arguments: Sequence[str] | None) -> Given[ManagerOptions]:
    """:raises OptionsError: see `read_options`."""
    return read_options(ManagerOptions, arguments, ABOUT, EXAMPLES)


async def serve(settings: Settings, gate: Gate, given: Given[ManagerOptions] | None = None) -> None:
    """Serve until a signal asks to stop; then close the server, then the plans, then the store.

    :raises ManagerError: the store cannot be used.
    :raises OSError: the address is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    manager = Manager(settings, freezes_memory=True)
    app = make_app(manager, gate.access)
    serving = gate.serve(app, settings.host, settings.port, shutdown_timeout_s=2.0)
    async with serving as listener, reloading(gate, given):
        log.info("listening", url=f"{gate.scheme}://{settings.host}:{listener.port}")
        async with supervised(manager.sentence):
            await stop.wait()
            log.info("stopping", why="a signal asked for it")


def settings_of_all(options: ManagerOptions) -> tuple[Settings, Gate]:
    """What the options say, with the files that they name.

    :raises SettingsError, AccessError, EngineSettingsError: they cannot be used.
    """
    host, colon, port = options.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SettingsError(f"--listen must be HOST:PORT, but is {options.listen!r}")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise SettingsError("--url must begin with http:// or https://")
    if options.token_file is None and options.tokens_file is None:
        raise SettingsError("--token-file or --tokens-file must be given")
    engine = read_settings(options.engine_file) if options.engine_file is not None else EngineSettings()
    # What it needs is missed now, not when the manager leads.
    engine_of(engine)
    host = host.strip("[]")
    token = _token("--token-file", options.token_file) if options.token_file is not None else ""
    key = _token("--hosts-key-file", options.hosts_key_file)
    if key == token:
        raise SettingsError("--token-file and --hosts-key-file hold the same word: who has the one would have all")

    def own() -> list[Principal]:
        path = options.token_file
        return [principal("token-file", Role.ADMIN, _token("--token-file", path))] if path is not None else []

    gate = Gate(settings_of(options, host), own, Certificates(of_host=True), required=False, hosts_key=key)
    listens_at = f"{gate.scheme}://{options.listen}" if int(port) else None
    settings = Settings(
        database=database_of(options.database, options.database_password_file),
        token=token,
        hosts_key=key,
        host=host,
        port=int(port),
        policy=PlacementPolicy(options.policy),
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


def _token(option: str, path: Path) -> str:
    try:
        return read_token(path)
    except AccessError as error:
        raise SettingsError(f"{option}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
