"""What the manager's options say, with the files that they name: read, and held to each other."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from cluster_manager.alerts.webhooks import read_webhooks
from cluster_manager.authority import CertificateAuthority
from cluster_manager.defaults import DAY_S, RebalancingRules, Retention
from cluster_manager.errors import SettingsError
from cluster_manager.options import ManagerOptions
from cluster_manager.settings import Settings
from cluster_manager.store.database import database_of
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.matcher.engines.interface import engine_of
from ebbtide.matcher.engines.settings import EngineSettings, read_settings
from ebbtide.rest.access import Certificates
from ebbtide.rest.errors import AccessError
from ebbtide.rest.gate import Gate
from ebbtide.rest.roles import Role
from ebbtide.rest.settings import settings_of
from ebbtide.rest.tls import is_base, is_everywhere
from ebbtide.rest.tokens import Principal, principal, read_token
from ebbtide.tracing.exporting import check_tracing


def settings_of_all(options: ManagerOptions) -> tuple[Settings, Gate]:
    """What the options say, with the files that they name.

    :raises SettingsError, AccessError, EngineSettingsError: they cannot be used.
    """
    host, colon, port = options.listen.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise SettingsError(f"--listen must be HOST:PORT, but is {options.listen!r}")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise SettingsError(f"--url {options.url} must begin with http:// or https://")
    if options.token_file is None and options.tokens_file is None:
        raise SettingsError("--token-file or --tokens-file must be given")
    check_tracing(options.tracing)
    engine = read_settings(options.engine_file) if options.engine_file is not None else EngineSettings()
    # What it needs is missed now, not when the manager leads.
    engine_of(engine)
    notes = [
        f"there is no user {user} on this machine: tasks that are to run as {user} wait until there is"
        for user in engine.unknown_users
    ]
    host = host.strip("[]")
    token = _token("--token-file", options.token_file) if options.token_file is not None else ""
    key = _token("--hosts-key-file", options.hosts_key_file)
    if key == token:
        raise SettingsError("--token-file and --hosts-key-file hold the same word: who has the one would have all")

    def own() -> list[Principal]:
        path = options.token_file
        return [principal("token-file", Role.ADMIN, read_token(path))] if path is not None else []

    access, signs = settings_of(options, host), options.ca_key is not None
    gate = Gate(access, own, Certificates(of_host=True), required=False, hosts_key=key, signs=signs)
    authority = None
    if options.next_ca_key is not None and options.ca_key is None:
        raise SettingsError("--next-ca-key needs --ca-key: the present CA vouches for the one that is to follow")
    if options.ca_key is not None:
        if options.client_ca is None:
            raise SettingsError("--ca-key needs --client-ca, whose key it is")
        authority = CertificateAuthority.load(
            options.client_ca, options.ca_key, options.tls_certificate, options.next_ca_key
        )
        if options.next_ca_key is not None and authority.following is None:
            why, ended = f"is gone and {options.client_ca} has one CA", "`ebb ca finish`"
            if options.next_ca_key.exists():
                why, ended = "is the key of the present CA", f"{ended}; if that was broken off, call it again"
            notes.append(
                f"--next-ca-key {options.next_ca_key} {why}: the other one was followed ({ended}); remove next_ca_key "
                "from the options"
            )
    url = _url_of(options, host, int(port), gate.scheme, notes)
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
        url=url,
        retention=Retention(age_s=options.keep_days * DAY_S, most_events=options.keep_events),
        history=options.history,
        engine=engine,
        webhooks=read_webhooks(options.alerts_file) if options.alerts_file is not None else (),
        move_first=options.move_first,
        move_mib_s=options.move_mib_s,
        authority=authority,
        certificates=gate.certificates,
        certificate_days=options.certificate_days,
        rebalancing=_rebalancing(options) if options.rebalance else None,
        notes=tuple(notes),
    )
    return settings, gate


def _url_of(options: ManagerOptions, host: str, port: int, scheme: str, notes: list[str]) -> str | None:
    """Where hosts and clients reach the manager; None: it is not known.

    :param host: where it listens.
    :param notes: what is to be said of it is added.
    """
    at = f"[{host}]:{port}" if ":" in host else options.listen
    url, called, given, usable = f"{scheme}://{at}" if port else None, host, "--listen", True
    if options.url:
        url, given = options.url.rstrip("/"), "--url"
        usable = is_base(url)
        called = (urlsplit(url).hostname or "") if usable else options.url
    if url is None or (usable and not is_everywhere(called)):
        return url
    # No reason to stay down: the hosts of a cluster may all have joined otherwise.
    notes.append(f"{given} {called} is no address that others could call: no host can be invited until --url says one")
    return None


def _rebalancing(options: ManagerOptions) -> RebalancingRules:
    return RebalancingRules(
        RebalancePace(
            hold_s=options.rebalance_hold_s,
            rest_s=options.rebalance_rest_s,
            longest_s=options.rebalance_longest_s,
            least_worth=options.rebalance_least_worth,
        ),
        every_s=options.rebalance_every_s,
        most_moves=options.rebalance_most_moves,
        copy_disks=options.rebalance_copy_disks,
        bandwidth_mib_s=options.rebalance_bandwidth_mib_s,
    )


def _token(option: str, path: Path) -> str:
    try:
        return read_token(path)
    except AccessError as error:
        raise SettingsError(f"{option}: {error}") from None
