"""What `ebb doctor` finds of the certificates of this machine's daemons: when they end, and what renews them.

The files are those that the daemons' own files of options name.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cluster_manager.options import ManagerOptions
from ebbtide.cli.certificates import DAYS
from ebbtide.cli.findings import Finding
from ebbtide.extras import installing
from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import read_file
from ebbtide.rest.tls import issued_by
from hostagent.options import HostAgentOptions

if TYPE_CHECKING:
    from cryptography import x509

#: Before a certificate ends; the alert EbbtideCertificateEnds has the same.
WARNED_BEFORE: Final = datetime.timedelta(days=30)
#: One of a host renews itself when a third of its life is left; the alert EbbtideHostCertificateEnds has the same.
HOST_WARNED_BEFORE: Final = datetime.timedelta(days=20)
HOST_LEAST_LEFT: Final = 2 / 9
#: Where it is not known where the CA's key is.
_SOMEWHERE: Final = "DIRECTORY"


def certificates(
    now: datetime.datetime,
    facts: dict[str, Any],
    manager: Path = ManagerOptions.file,
    agent: Path = HostAgentOptions.file,
) -> Iterator[Finding]:
    """Of the CA, the manager and the host agent, as far as they run here with TLS.

    :param facts: gets when each ends.
    :param manager: the manager's file of options, where there is one; ``agent``: that of the host agent.
    """
    ends = facts.setdefault("certificates", [])
    seen: set[Path] = set()
    for file, names in ((manager, ("tls_certificate",)), (agent, ("tls_certificate", "certificate"))):
        try:
            options = read_file(file)[0] if file.exists() else {}
        except (AccessError, OSError) as error:
            yield Finding(name="certificates", ok=False, needed=False, detail=f"not looked at: {error}")
            continue
        for name in (*names, "client_ca", "manager_ca"):
            path = Path(str(options.get(name, "")))
            if name not in options or path in seen:
                continue
            seen.add(path)
            whose = "CA" if name.endswith("ca") else "manager" if file == manager else "host"
            try:
                found = _read(path)
            except (ImportError, OSError, ValueError) as error:
                yield _unread(f"{whose} certificate", path, error)
                continue
            # Behind one of its own is its chain.
            for one in found if whose == "CA" else found[:1]:
                ends.append({"file": str(path), "ends": one.not_valid_after_utc.isoformat()})
                fix = _fix(whose, one, options, found if whose == "CA" else _cas(options), now)
                yield _judged(whose, path, one, fix, now)


def _read(path: Path) -> list[x509.Certificate]:
    from cryptography import x509

    return x509.load_pem_x509_certificates(path.read_bytes())


def _cas(options: Mapping[str, Any]) -> list[x509.Certificate]:
    """Those of a manager, as far as they can be read."""
    try:
        return _read(Path(str(options.get("client_ca", ""))))
    except (OSError, ValueError):
        return []


def _unread(name: str, path: Path, error: Exception) -> Finding:
    if isinstance(error, ImportError):
        fix = installing("certificates")
        return Finding(name=name, ok=False, needed=False, detail=f"{path} needs the package cryptography", fix=fix)
    why = getattr(error, "strerror", None) or str(error)
    return Finding(name=name, ok=False, needed=False, detail=f"{path} cannot be read: {why}")


def warned_before(whose: str, life: datetime.timedelta) -> datetime.timedelta:
    """How long before its end somebody has to look at a certificate that is valid for so long in all."""
    return min(HOST_WARNED_BEFORE, life * HOST_LEAST_LEFT) if whose == "host" else WARNED_BEFORE


def _judged(whose: str, path: Path, one: x509.Certificate, fix: str, now: datetime.datetime) -> Finding:
    name, begin, end = f"{whose} certificate", one.not_valid_before_utc, one.not_valid_after_utc
    left = end - now
    if left <= datetime.timedelta():
        detail = f"{path} has ended on {end:%Y-%m-%d}: nobody believes it any more"
        return Finding(name=name, ok=False, needed=True, ended=True, detail=detail, fix=fix)
    if begin > now:
        detail = f"{path} counts from {begin:%Y-%m-%d %H:%M} UTC only (is this machine's clock right?), and not yet"
        return Finding(name=name, ok=False, needed=False, detail=detail, fix=fix)
    detail = f"{path} ends on {end:%Y-%m-%d}, in {left.days} days"
    if left < warned_before(whose, end - begin):
        return Finding(name=name, ok=False, needed=False, detail=detail, fix=fix)
    return Finding(name=name, ok=True, needed=False, detail=detail)


def _fix(
    whose: str, one: x509.Certificate, options: Mapping[str, Any], cas: list[x509.Certificate], now: datetime.datetime
) -> str:
    """The command that renews a certificate."""
    key = options.get("ca_key")
    directory = str(Path(str(key)).parent) if key is not None else _SOMEWHERE
    ended = one.not_valid_after_utc <= now
    again = f"at the manager: ebb host invite {options.get('id', 'HOST')}; then the line that it prints, with --force"
    if one.not_valid_before_utc > now:
        # For a wrong clock nothing is made anew.
        return "timedatectl: set the clock" + (f"; if it is right, {again}" if whose == "host" else "")
    if whose == "manager":
        # What signs it is to last as long: `ebb certificates` refuses more.
        left = min([(ca.not_valid_after_utc - now).days for ca in cas if issued_by(one, ca)], default=DAYS)
        addresses = " ".join(f"--manager {address}" for address in _addresses(one))
        days = f" --days {left}" if left < DAYS else ""
        if left > 0:
            return f"ebb certificates {directory} {addresses}{days} && systemctl reload ebb-manager"
        ended = True
    if whose == "host":
        # It renews itself; the log says why it has not.
        return again if ended else "systemctl restart ebb-hostagent; journalctl -u ebb-hostagent"
    where = "" if key is not None else "at the manager: "
    if len(cas) > 1:
        return f"{where}ebb ca finish {directory}"
    if ended:
        return f"{where}ebb certificates NEW-DIRECTORY --manager ADDRESS; then, for each host, ebb host invite HOST"
    return f"{where}ebb ca next {directory}"


def _addresses(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ["ADDRESS"]
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]
