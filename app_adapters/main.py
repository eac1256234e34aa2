"""Command line of the ready adapters."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import Sequence

from app_adapters import __version__
from app_adapters.adapter import Adapter
from app_adapters.inelastic import InelasticAdapter
from app_adapters.memcached import MINIMUM_MIB, MemcachedAdapter
from app_adapters.server import HookServer

EXAMPLES = """\
examples:
  python3 -m app_adapters memcached --memcached 127.0.0.1:11211 \\
      --listen 127.0.0.1:7070 --token-file /run/ebbtide/token
  python3 -m app_adapters inelastic --reason 'the database keeps its buffers' --listen 127.0.0.1:7071

The guest agent finds an adapter by a drop-in file such as /etc/ebbtide/adapters.d/memcached.json:
  {"name": "memcached", "url": "http://127.0.0.1:7070"}
"""


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be a finite number >= 0")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--listen", type=_address, default=("127.0.0.1", 7070), metavar="HOST:PORT", help="default: 127.0.0.1:7070"
    )
    common.add_argument(
        "--token-file", default="/run/ebbtide/token", metavar="FILE", help="token of this VM (default: %(default)s)"
    )
    parser = argparse.ArgumentParser(
        prog="python3 -m app_adapters",
        description="Serve Ebbtide's application hook for an application on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    adapters = parser.add_subparsers(dest="adapter", required=True, metavar="ADAPTER")
    memcached = adapters.add_parser(
        "memcached",
        parents=[common],
        help="a memcached on this machine",
        description="Start memcached with MALLOC_MMAP_THRESHOLD_=131072 in its environment, or pages stay resident.",
    )
    memcached.add_argument(
        "--memcached", type=_address, default=("127.0.0.1", 11211), metavar="HOST:PORT", help="default: 127.0.0.1:11211"
    )
    memcached.add_argument(
        "--minimum-mib",
        type=_amount,
        default=MINIMUM_MIB,
        metavar="N",
        help="resident MiB it keeps (default: %(default)g)",
    )
    inelastic = adapters.add_parser("inelastic", parents=[common], help="an application that always refuses")
    inelastic.add_argument("--name", default="inelastic", help="default: %(default)s")
    inelastic.add_argument("--reason", default="this application gives no memory", help="default: %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    options = build_parser().parse_args(argv)
    adapter: Adapter
    if options.adapter == "memcached":
        adapter = MemcachedAdapter(options.memcached[0], options.memcached[1], options.minimum_mib)
    else:
        adapter = InelasticAdapter(options.name, options.reason)
    try:
        server = HookServer(adapter, options.listen[0], options.listen[1], options.token_file)
    except (ValueError, OSError) as error:
        print(f"app_adapters: cannot listen on {options.listen[0]}:{options.listen[1]}: {error}", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    print(f"app_adapters: {options.adapter} on {server.address[0]}:{server.address[1]}", file=sys.stderr, flush=True)
    ended.wait()
    server.stop()
    return 0
