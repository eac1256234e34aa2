"""Command line of the ready adapters."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import Sequence

from app_adapters import __version__
from app_adapters.errors import AdapterError
from app_adapters.ready import MODULES, address, ready
from app_adapters.server import HookServer

EXAMPLES = """\
examples:
  ebb-adapter memcached --memcached 127.0.0.1:11211 --listen 127.0.0.1:7070
  ebb-adapter inelastic --reason 'the database keeps its buffers' --listen 127.0.0.1:7071
  ebb-adapter memcached --help

Without an installation: python3 -m app_adapters memcached ...
The guest agent finds an adapter by a drop-in file such as /etc/ebbtide/adapters.d/memcached.json:
  {"name": "memcached", "url": "http://127.0.0.1:7070"}
"""


def build_parser(chosen: Sequence[str] = tuple(MODULES)) -> argparse.ArgumentParser:
    """The options, those of the chosen adapters in full."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--listen", type=address, default=("127.0.0.1", 7070), metavar="HOST:PORT", help="default: 127.0.0.1:7070"
    )
    common.add_argument(
        "--token-file", default="/run/ebbtide/token", metavar="FILE", help="token of this VM (default: %(default)s)"
    )
    parser = argparse.ArgumentParser(
        prog="ebb-adapter",
        description="Serve Ebbtide's application hook for an application on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    adapters = parser.add_subparsers(dest="adapter", required=True, metavar="ADAPTER")
    for name in MODULES:
        if name in chosen:
            one = ready(name)
            options = adapters.add_parser(
                name,
                parents=[common],
                help=one.summary,
                description=one.description,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            one.options(options)
        else:
            adapters.add_parser(name, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    # Only what runs is loaded.
    named = [word for word in argv[:1] if word in MODULES]
    options = build_parser(named or tuple(MODULES)).parse_args(argv)
    try:
        adapter = ready(options.adapter).build(options)
        server = HookServer(adapter, options.listen[0], options.listen[1], options.token_file)
    except AdapterError as error:
        print(f"ebb-adapter: {options.adapter}: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"ebb-adapter: cannot listen on {options.listen[0]}:{options.listen[1]}: {error}", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    print(f"ebb-adapter: {options.adapter} on {server.address[0]}:{server.address[1]}", file=sys.stderr, flush=True)
    ended.wait()
    server.stop()
    return 0
