"""The command ``ebb-hostagent``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, cast

from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import Given, read_options
from ebbtide.rest.settings import AccessSettings
from hostagent.errors import HostAgentError
from hostagent.options import HostAgentOptions, access_of

ABOUT = "Deflates and reinflates the VMs of one KVM host."
EXAMPLE = """\
example:
  ebb-hostagent --id host-a --capacity cpu_cores=6,memory_mib=4096 \\
      --token-file /etc/ebbtide/host-a.command-token \\
      --manager http://127.0.0.1:7100 --manager-token-file /etc/ebbtide/host-a.report-token
  both tokens: `ebb host tokens host-a`, at the manager
  ebb-hostagent join https://10.0.0.1:7100 - <<<TOKEN
      as `ebb host invite` prints it at the manager: makes key and certificate, writes /etc/ebbtide/hostagent.toml and
      starts the service; see `ebb-hostagent join --help`
  ebb-hostagent release
      with the options of /etc/ebbtide/hostagent.toml, where no agent runs: undo what was taken from every VM, as
      `ebb host undeflate` does, and end; 1 where something is left. Done before the Debian package is removed.
  beyond loopback, with TLS: docs/reference/security.md

The agent manages only domains that it made itself or was told to adopt; it knows them by the intent in their libvirt
metadata. Ended or killed, it leaves them as they are, and resumes what was unfinished when it is started again.
"""
#: Where OpenSSL looks for the CAs that a machine trusts (SSL_CTX_load_verify_locations(3)).
_CA_VARIABLES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def main() -> None:
    """Run the agent until SIGTERM or SIGINT."""
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
    words = sys.argv[1:]
    if words[:1] == ["join"]:
        _join(words[1:])
        return
    releases = words[:1] == ["release"]
    try:
        given = options_of(words[1:] if releases else words)
    except AccessError as error:
        _refuse(str(error), 2)
    if "structlog" not in sys.modules:
        # It would import it for coloured tracebacks, which are not wanted here: 4 MiB.
        cast(dict[str, Any], sys.modules).setdefault("rich", None)
    # Imported here, so that --help and a wrong option are answered at once.
    from ebbtide.rest.logs import configure_logs

    configure_logs(given.options.log_level, given.options.log_json)
    try:
        access = access_of(given.options)
    except AccessError as error:
        _refuse(given.said(str(error)), 2)
    with _without_system_cas(given.options, access):
        from hostagent.running import run

    try:
        run(given, access, releases)
    except (HostAgentError, AccessError, OSError, ValueError) as error:
        _refuse(given.said(str(error)), 1)


@contextlib.contextmanager
def _without_system_cas(options: HostAgentOptions, access: AccessSettings) -> Iterator[None]:
    """While it is imported aiohttp reads all CAs that this machine trusts, 2 MiB; they are for a manager beyond
    https:// without a CA of its own."""
    own = access.server_ca or access.client_ca or access.caller
    names = () if own is None and any(url.startswith("https:") for url in options.manager) else _CA_VARIABLES
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, os.devnull))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


def _join(words: Sequence[str]) -> None:
    from hostagent.joining import join

    try:
        join(words)
    except HostAgentError as error:
        _refuse(str(error), 1)


def _refuse(sentences: str, code: int) -> NoReturn:
    for sentence in sentences.splitlines():
        print(f"ebb-hostagent: {sentence}", file=sys.stderr)
    sys.exit(code)


def options_of(arguments: Sequence[str] | None) -> Given[HostAgentOptions]:
    """:raises OptionsError: see `read_options`."""
    return read_options(HostAgentOptions, arguments, ABOUT, EXAMPLE)


if __name__ == "__main__":
    main()
