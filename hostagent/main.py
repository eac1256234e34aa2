"""The command ``ebb-hostagent``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from ebbtide.rest.errors import AccessError
from ebbtide.rest.options import Given, read_options
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


def main() -> None:
    """Run the agent until SIGTERM or SIGINT."""
    # Stores, journals and logs are for their owner.
    os.umask(0o077)
    words = sys.argv[1:]
    if words[:1] == ["join"]:
        _join(words[1:])
        return
    releases = words[:1] == ["release"]
    if not releases:
        # Until it can be reloaded, and after that: what asks for it then must not end it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
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
    from hostagent.running import run

    try:
        run(given, access, releases)
    except (HostAgentError, AccessError, OSError, ValueError) as error:
        _refuse(given.said(str(error)), 1)


def _join(words: Sequence[str]) -> None:
    from hostagent.joining import join

    try:
        join(words)
    except HostAgentError as error:
        _refuse(str(error), 1)
    except KeyboardInterrupt:
        _refuse("interrupted; the same line again does no harm", 130)


def _refuse(sentences: str, code: int) -> NoReturn:
    for sentence in sentences.splitlines():
        print(f"ebb-hostagent: {sentence}", file=sys.stderr)
    sys.exit(code)


def options_of(arguments: Sequence[str] | None) -> Given[HostAgentOptions]:
    """:raises OptionsError: see `read_options`."""
    return read_options(HostAgentOptions, arguments, ABOUT, EXAMPLE)


if __name__ == "__main__":
    main()
