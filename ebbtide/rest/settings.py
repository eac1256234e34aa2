"""Security settings of a REST server: the same options for both daemons, checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ebbtide.deflation.errors import InvalidField
from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import DaemonOptions
from ebbtide.rest.rates import ConnectionLimits, Rate, Rates
from ebbtide.rest.tls import KeyPair, is_loopback


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Of one server; as it stands: plain HTTP for loopback, and no tokens but the daemon's own.

    :param tokens_file: more tokens, with roles.
    :param own: certificate and key: HTTPS.
    :param client_ca: who signs the certificates of the other daemon: mutual TLS.
    :param server_ca: who signs the other daemon's certificate where we call it; default: ``client_ca``.
    :param caller: what we call the other daemon with; default: ``own``.
    """

    tokens_file: Path | None = None
    own: KeyPair | None = None
    client_ca: Path | None = None
    server_ca: Path | None = None
    caller: KeyPair | None = None
    rates: Rates | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    body_timeout_s: float = 10.0

    @property
    def scheme(self) -> str:
        return "http" if self.own is None else "https"


def settings_of(options: DaemonOptions, host: str) -> AccessSettings:
    """What the options say.

    :param host: where the server is going to listen.
    :raises AccessError: options that contradict each other, or an address beyond loopback without protection.
    """
    own = key_pair(options.tls_certificate, options.tls_key, "--tls-certificate and --tls-key")
    if options.client_ca is not None and own is None:
        raise AccessError("--client-ca needs --tls-certificate and --tls-key")
    if options.client_ca is None and not is_loopback(host):
        raise AccessError(
            f"--listen {host} can be reached from other machines: give --tls-certificate, --tls-key and --client-ca"
        )
    return AccessSettings(
        tokens_file=options.tokens_file,
        own=own,
        client_ca=options.client_ca,
        rates=Rates(
            people=_rate(options.requests_per_s, options.burst, "--requests-per-s"),
            agents=_rate(options.reports_per_s, max(10 * options.reports_per_s, 1.0), "--reports-per-s"),
        ),
        limits=replace(
            ConnectionLimits(),
            in_all=int(_positive(options.connections, "--connections")),
            per_address=int(_positive(options.connections_per_address, "--connections-per-address")),
            idle_s=_positive(options.idle_timeout_s, "--idle-timeout-s"),
            handshake_s=_positive(options.idle_timeout_s, "--idle-timeout-s"),
        ),
        body_timeout_s=_positive(options.body_timeout_s, "--body-timeout-s"),
    )


def key_pair(certificate: Path | None, key: Path | None, options: str) -> KeyPair | None:
    """Two options that need each other.

    :raises AccessError: one of them is missing.
    """
    if (certificate is None) != (key is None):
        raise AccessError(f"{options} need each other")
    return KeyPair(certificate, key) if certificate is not None and key is not None else None


def _rate(per_s: float, burst: float, option: str) -> Rate:
    try:
        return Rate(per_s, burst)
    except InvalidField as error:
        raise AccessError(f"{option if error.field == 'per_s' else '--burst'} {error.problem}") from None


def _positive(value: float, option: str) -> float:
    if not 0 < value < 1e9:
        raise AccessError(f"{option} must be above 0")
    return value
