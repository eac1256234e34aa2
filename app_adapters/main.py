"""Command line of the ready adapters."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from dataclasses import asdict
from typing import Sequence

from app_adapters import __version__, checks, conformance
from app_adapters.adapter import Adapter, Deadline, Refusal
from app_adapters.errors import AdapterError, ApplicationError
from app_adapters.hook import TOKEN_FILE, default_port
from app_adapters.registry import MODULES, application_name, others, place, ready
from app_adapters.server import HookServer, url_of

#: Where root's adapters listen.
SOCKETS = "/run/ebbtide/hooks"
#: For what --give-back does, seconds.
GIVE_BACK_S = 120.0
EXAMPLES = """\
examples:
  ebb-adapter memcached --memcached 127.0.0.1:11211
  ebb-adapter memcached --check           # can it be asked? what could it give?
  ebb-adapter memcached --give-back       # when its drop-in and service are gone: its full size
  ebb-adapter memcached --print-drop-in > /etc/ebbtide/adapters.d/memcached.json
  ebb-adapter command --run '/usr/local/sbin/shrink-cache' --listen /run/ebbtide/hooks/cache.sock
  ebb-adapter memcached --name sessions --memcached 127.0.0.1:11212   # a second one: its own socket and drop-in
  ebb-adapter memcached --help            # options of one adapter, with an example
  ebb-adapter check unix:/run/ebbtide/hooks/memcached.sock            # does a hook keep to the protocol?

Without an installation: python3 -m app_adapters memcached ...
The guest agent finds an adapter by a drop-in file such as /etc/ebbtide/adapters.d/memcached.json:
  {"name": "memcached", "url": "unix:/run/ebbtide/hooks/memcached.sock"}
"""


def build_parser(chosen: str = "") -> argparse.ArgumentParser:
    """The options: of the chosen adapter, or of all. Raises: AdapterError where the chosen one cannot be loaded."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--listen",
        type=place,
        metavar="PATH|HOST[:PORT]",
        help=f"a Unix socket, or a port on loopback, which any process of the guest can hold when this one has ended; "
        f"without a port, one that goes with the name (default: {SOCKETS}/NAME.sock)",
    )
    common.add_argument(
        "--name", type=application_name, help="the application's, also in the drop-in file (default: the adapter's)"
    )
    common.add_argument(
        "--token-file", default=TOKEN_FILE, metavar="FILE", help="token of this VM (default: %(default)s)"
    )
    common.add_argument(
        "--check",
        action="store_true",
        help="print as JSON what it could give, and end: 0, or 1 where it cannot be asked",
    )
    common.add_argument(
        "--give-back",
        action="store_true",
        help="have the application grow to its maximum, without a host or a token, and end: 0, or 1 and why not",
    )
    common.add_argument("--print-drop-in", action="store_true", help="print the drop-in file for it, and end")
    parser = argparse.ArgumentParser(
        prog="ebb-adapter",
        description="Serve Ebbtide's application hook for an application on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    adapters = parser.add_subparsers(dest="adapter", required=True, metavar="ADAPTER")
    for name in [chosen] if chosen else [*MODULES, *sorted(others())]:
        try:
            one = ready(name)
        except AdapterError as error:
            if chosen:
                raise
            adapters.add_parser(name, add_help=False, help=str(error).replace("%", "%%"))
            continue
        options = adapters.add_parser(
            name,
            parents=[common],
            help=one.summary,
            description=one.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.options(options)
    if not chosen:
        checking = adapters.add_parser(
            "check",
            help="ask any hook whether it keeps to the protocol",
            description=conformance.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        conformance.add_options(checking)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    first = argv[0] if argv else ""
    if first == "check":
        return conformance.main(argv[1:])
    try:  # only what runs is loaded
        options = build_parser(first if first in MODULES or first in others() else "").parse_args(argv)
    except AdapterError as error:
        say(str(error))
        return 2
    options.name = options.name or options.adapter
    listen = options.listen or f"{SOCKETS}/{options.name}.sock"
    path, (host, port) = (listen, ("127.0.0.1", None)) if isinstance(listen, str) else ("", listen)
    if port == 0:
        port = default_port(options.name)
    where = path or url_of(host, port).replace("http://", "")
    if options.print_drop_in:
        print(json.dumps({"name": options.name, "url": f"unix:{path}" if path else f"http://{where}"}))
        return 0
    try:
        adapter = ready(options.adapter).build(options)
        if options.check:
            return check(options.name, adapter)
        if options.give_back:
            return give_back(options.name, adapter)
        server = HookServer(adapter, path, options.token_file, say, host=host, port=port)
        adapter.begin()
    except AdapterError as error:
        say(f"{options.name}: {error}")
        return 2
    except (ValueError, OSError) as error:
        say(f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}")
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    say("{} on {}".format(options.name, server.url.replace("http://", "")))
    ended.wait()
    server.stop()
    return 0


def check(name: str, adapter: Adapter) -> int:
    """Ask once, as the guest agent would: prints JSON and returns 0, or says why not and returns 1."""
    try:
        offer = checks.capabilities(adapter.capabilities())
    except AdapterError as error:
        say(f"{name}: cannot be asked: {error}")
        return 1
    print(json.dumps(asdict(offer), indent=2))
    if not any(range_.current > range_.minimum for range_ in offer.resources.values()):
        say(f"{name}: can be asked, but has nothing above its minimum now")
    return 0


def give_back(name: str, adapter: Adapter) -> int:
    """What a reinflation to its maximum does: returns 0, or says why not and returns 1."""
    try:
        offer = checks.capabilities(adapter.capabilities())
        target = {component: range_.maximum for component, range_ in offer.resources.items()}
        answer = checks.answer(adapter.reinflate(target, Deadline(GIVE_BACK_S)), "reinflate")
        if isinstance(answer, Refusal):
            raise ApplicationError(answer.reason)
        done = checks.release(answer.work())
    except AdapterError as error:
        say(f"{name}: has not its full size: {error}")
        return 1
    reason = "; ".join(filter(None, [answer.reason, done.reason]))
    say(f"{name}: {'has its full size' if done.complete else 'has not its full size'}: {reason}")
    return 0 if done.complete else 1


def say(sentence: str) -> None:
    """A sentence on standard error, where systemd's journal takes it from. One that cannot be written stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        print(f"ebb-adapter: {sentence}", file=sys.stderr, flush=True)
