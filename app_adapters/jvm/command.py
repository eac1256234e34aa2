"""`ebb-adapter jvm`."""

from __future__ import annotations

import argparse
import re

from app_adapters.jvm.adapter import JVMAdapter
from app_adapters.jvm.processes import Choice, Finder
from app_adapters.jvm.transports import JMX, Attach, Jattach, Transport
from app_adapters.processes.originals import Originals
from app_adapters.registry import Ready, address, amount

STATE_DIR = "/run/ebbtide/jvm"

DESCRIPTION = """\
Brings a JVM's heap down by SoftMaxHeapSize (Shenandoah, ZGC) or by the free ratios (G1, Serial), and up again.
Needs no JDK. Parallel, a frozen heap (-Xms as large as -Xmx) and OpenJ9 are refused with the reason.

example:
  ebb-adapter jvm --main-class org.example.Server

Good to start the JVM with: -XX:+UnlockExperimentalVMOptions -XX:+UseShenandoahGC, or -XX:+UseZGC -XX:ZUncommitDelay=5
(300 s otherwise), or -XX:+UseSerialGC -XX:-ShrinkHeapInSteps; without -Xms.
"""


def _options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--pid", type=_pid, metavar="N", help="the JVM's pid")
    which.add_argument("--pid-file", default="", metavar="FILE", help="a file with it, read again at every look")
    which.add_argument(
        "--main-class", default="", metavar="NAME", help="its main class, in full or the last name; or jar"
    )
    which.add_argument("--match", type=_expression, default="", metavar="REGEX", help="found in its command line")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--jattach", nargs="?", const="jattach", metavar="PROGRAM", help="talk to it by jattach")
    how.add_argument(
        "--jmx", type=address, metavar="HOST:PORT", help="talk to it by its JMX port; needs a JRE and the extra jmx"
    )
    parser.add_argument(
        "--minimum-mib", type=amount, default=0.0, metavar="N", help="resident MiB it keeps (default: its live set)"
    )
    parser.add_argument(
        "--state-dir", default=STATE_DIR, metavar="DIR", help="keeps the flags' original values (default: %(default)s)"
    )


def _build(options: argparse.Namespace) -> JVMAdapter:
    choice = Choice(options.pid, options.pid_file, options.main_class, options.match)
    transport: Transport = Attach()
    if options.jattach:
        transport = Jattach(options.jattach)
    elif options.jmx:
        transport = JMX(*options.jmx)
    return JVMAdapter(Finder(choice), transport, Originals(options.state_dir), options.minimum_mib)


def _pid(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not a pid")
    return int(text)


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is not a regular expression: {error}") from None
    return text


READY = Ready("a JVM on this machine", DESCRIPTION, _options, _build)
