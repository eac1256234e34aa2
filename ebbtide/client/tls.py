"""TLS with a manager: its files, and what went wrong in one sentence."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from ebbtide.client.errors import ClientError

#: OpenSSL's verify codes: no issuer is found, or one that signed itself and is not trusted.
_ISSUER_UNKNOWN: Final = frozenset({2, 18, 19, 20, 21})


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """PEM files; without any of them, the manager's certificate must be signed by a CA that this machine trusts."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext | None:
        """For the client. Raises ClientError for files that cannot be used."""
        if self == TLSFiles():
            return None
        # Here, since it brings the servers' side with it, which a client without TLS does not need.
        from ebbtide.rest.errors import AccessError
        from ebbtide.rest.settings import key_pair
        from ebbtide.rest.tls import client_context

        try:
            return client_context(self.ca, key_pair(self.certificate, self.key, "--certificate and --key"))
        except AccessError as error:
            raise ClientError(str(error)) from error


def tls_problem(url: str, error: Exception) -> str | None:
    """What is wrong with the connection's TLS, as the end of a sentence; None if it is something else."""
    if url.startswith("https:") and isinstance(error, aiohttp.ServerDisconnectedError):
        # With TLS 1.3 the refusal of a certificate comes after the handshake, and asyncio keeps it to itself.
        return "it was closed at once; does it want a client's certificate (--certificate and --key)?"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = getattr(cause, "verify_message", None) or str(cause)
        advice = "; name its CA by --ca or EBB_CA" if getattr(cause, "verify_code", None) in _ISSUER_UNKNOWN else ""
        return f"its certificate is not accepted ({reason}){advice}"
    text = str(error)
    if "SSL" not in text:
        return None
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return "it does not speak TLS; is its address one of http://?"
    if "ALERT" in text:
        return "it wants a client's certificate, or does not accept this one (--certificate and --key)"
    return f"TLS failed: {text}"
