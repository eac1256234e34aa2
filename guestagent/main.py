"""Command line of the guest agent."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Sequence

from guestagent import __version__
from guestagent.agent import Agent, log
from guestagent.channel import PORT_NAME, find_port
from guestagent.cpus import Cpus
from guestagent.memory import Memory

EXAMPLES = """\
examples:
  python3 -m guestagent
      serve the host on the virtio-serial port io.ebbtide.guest.0
  python3 -m guestagent --port /dev/vport1p2 --reserve-mib 96
      a port by path, and 96 MiB that are never offered to the host
"""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="ebb-guestagent",
        description="Ebbtide's agent inside a guest: tells the host which CPUs and how much memory the guest "
        "can spare, takes CPUs off and on line, and relays deflation requests to the applications.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--port", default=PORT_NAME, metavar="PATH|NAME", help="port to the host (default: %(default)s)"
    )
    parser.add_argument(
        "--adapters-dir", default="/etc/ebbtide/adapters.d", metavar="DIR", help="drop-in files (default: %(default)s)"
    )
    parser.add_argument(
        "--run-dir", default="/run/ebbtide", metavar="DIR", help="where the adapters' token goes (default: %(default)s)"
    )
    parser.add_argument(
        "--reserve-mib",
        type=_amount,
        metavar="N",
        help="MiB kept for the guest (default: 5 %% of its memory, at least 48)",
    )
    parser.add_argument("--sysfs", default="/sys", metavar="DIR", help="root of sysfs (default: %(default)s)")
    parser.add_argument("--procfs", default="/proc", metavar="DIR", help="root of procfs (default: %(default)s)")
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    options = build_parser().parse_args(argv)
    agent = Agent(
        find=lambda: find_port(options.port, options.sysfs),
        cpus=Cpus(options.sysfs, options.procfs),
        memory=Memory(options.procfs, options.reserve_mib),
        adapters_dir=options.adapters_dir,
        run_dir=options.run_dir,
        procfs=options.procfs,
        owner_uid=os.getuid(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()
    agent.close()
    log("stopped")
    return 0
