"""Command line of the guest agent: the daemon, and `request` and `status` for services and people."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from typing import Sequence

from guestagent import __version__
from guestagent.agent import Agent
from guestagent.channel import PORT_NAME, find_port
from guestagent.cold.pages import ColdPages
from guestagent.cpus import Cpus
from guestagent.errors import GuestFailure
from guestagent.memory import Memory, spare_this_process
from guestagent.notices import PressureTrigger
from guestagent.options import FILE, OptionsError, example, named, read_options
from guestagent.telling import Supervision, configure, log

#: Exit status of `status` while a notice of preemption runs.
PREEMPTED = 3
#: Options that SIGHUP takes over.
AT_ONCE = ("log_level", "log_json", "reserve_mib")
EXAMPLES = """\
examples:
  python3 -m guestagent
      serve the host on the virtio-serial port io.ebbtide.guest.0
  python3 -m guestagent --port /dev/vport1p2 --reserve-mib 96
      a port by path, and 96 MiB that are never offered to the host
  python3 -m guestagent --check-config --config guestagent.toml
      say what is wrong in a file of options, by line and key; exit status 2 if anything is
  python3 -m guestagent request --memory-mib 512 --reason "a batch job starts"
      ask the host, through the agent that runs, for 512 MiB more than the VM has now
  python3 -m guestagent status --json
      how the VM is, and whether it is preempted; exit status 3 if it is
"""


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="ebb-guestagent",
        description="Ebbtide's agent inside a guest: tells the host which CPUs and how much memory the guest "
        "can spare, takes CPUs off and on line, and relays deflation requests to the applications.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"the same options by name, a TOML file (default: {FILE}, if it is there)"
    )
    parser.add_argument("--check-config", action="store_true", help="say what is wrong with the options, and end")
    parser.add_argument("--example-config", action="store_true", help="print a file of options, and end")
    parser.add_argument(
        "--port", default=PORT_NAME, metavar="PATH|NAME", help="port to the host (default: %(default)s)"
    )
    parser.add_argument(
        "--adapters-dir", default="/etc/ebbtide/adapters.d", metavar="DIR", help="drop-in files (default: %(default)s)"
    )
    parser.add_argument(
        "--preempt-dir",
        default="/etc/ebbtide/preempt.d",
        metavar="DIR",
        help="programs that are run when the VM is preempted (default: %(default)s)",
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
    parser.add_argument(
        "--request-group", metavar="GROUP", help="group whose members may ask the host for more, besides root"
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["error", "warning", "info"],
        help="the least that is logged (default: %(default)s)",
    )
    parser.add_argument("--log-json", action="store_true", help="log lines as JSON, not as key=value")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    request = commands.add_parser(
        "request",
        help="ask the host for more memory or CPU than the VM has now",
        description="Ask the host, through the agent that runs, for more than the VM has now. The host decides; it "
        "gives at most what the VM was sold, and hears repeated requests less and less often.",
    )
    request.add_argument("--memory-mib", type=_amount, default=0.0, metavar="N", help="MiB beyond what it has")
    request.add_argument("--cpu-cores", type=_amount, default=0.0, metavar="N", help="cores beyond what it has")
    request.add_argument("--reason", default="", metavar="TEXT", help="what for, in a few words")
    status = commands.add_parser(
        "status",
        help="how the VM is, and whether it is preempted",
        description="Tell how the VM is, as the agent that runs knows it. Exit status: 0, it goes on; 3, it is "
        "preempted, and its notice runs; 1, the agent cannot be asked.",
    )
    status.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def _amount(text: str) -> float:
    """Raises: argparse.ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"this must be a number from 0 on, but is {text[:40]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    parser = build_parser()
    try:
        options = read_options(parser, argv)
    except OptionsError as error:
        for sentence in str(error).splitlines():
            print(f"ebb-guestagent: {sentence}", file=sys.stderr)
        return 2
    if options.example_config:
        print(example(build_parser()), end="")
        return 0
    group_id, no_group = -1, ""
    try:
        group_id = _group_id(options.request_group)
    except KeyError:
        where = options.origins.get("request_group", "--request-group")
        no_group = f"{where}: there is no group {options.request_group!r}"
    if options.check_config:
        if no_group:
            print(f"ebb-guestagent: {no_group}", file=sys.stderr)
            return 2
        print("the guest agent can start with these options")
        return 0
    if options.command == "request":
        return _request(options)
    if options.command == "status":
        return _status(options)
    configure(options.log_level, options.log_json)
    if no_group:  # the host needs this agent more than that group does
        log(f"only root may ask the host for more: {no_group}", "warning")
    for problem in spare_this_process(options.procfs):
        log(f"under memory pressure this agent may be killed or slow: {problem}", "warning")
    memory = Memory(options.procfs, options.reserve_mib)
    agent = Agent(
        find=lambda: find_port(options.port, options.sysfs),
        cpus=Cpus(options.sysfs, options.procfs),
        memory=memory,
        cold=ColdPages(memory, options.sysfs),
        adapters_dir=options.adapters_dir,
        run_dir=options.run_dir,
        procfs=options.procfs,
        owner_uid=os.getuid(),
        trigger=_trigger(options.procfs),
        request_group_id=group_id,
        preempt_dir=options.preempt_dir,
        supervision=Supervision(),
        reload=lambda: _reload(argv, options, memory),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    signal.signal(signal.SIGHUP, lambda *_: agent.ask_to_reload())
    agent.run()
    agent.close()
    log("stopped")
    return 0


def _reload(argv: Sequence[str] | None, started: argparse.Namespace, memory: Memory) -> None:
    """Take over what can be taken over while it runs; say so, and what needs a start."""
    parser = build_parser()
    try:
        options = read_options(parser, argv)
    except OptionsError as error:
        log("nothing was reloaded, all stays as it is: " + str(error).replace("\n", "; "), "error")
        return
    configure(options.log_level, options.log_json)
    memory.reserve_mib = options.reserve_mib
    log("reloaded: log_level, log_json, reserve_mib")
    differ = [name for name in named(parser) if getattr(options, name) != getattr(started, name)]
    later = [name for name in differ if name not in AT_ONCE]
    if later:
        log("some options count only after a start: " + ", ".join(later), "warning")


def _trigger(procfs: str) -> PressureTrigger | None:
    if not os.path.ismount(procfs):  # a copy of some files takes no orders
        return None
    try:
        return PressureTrigger(procfs)
    except OSError as error:
        log(f"pressure is told only when asked for: {error.strerror}")
        return None


def _group_id(name: str | None) -> int:
    """Raises: KeyError."""
    if name is None:
        return -1
    import grp

    return grp.getgrnam(name).gr_gid


def _request(options: argparse.Namespace) -> int:
    from guestagent.requests import ask_for_more

    try:
        ask_for_more(options.run_dir, options.memory_mib, options.cpu_cores, options.reason)
    except GuestFailure as error:
        print(f"ebb-guestagent: {error}", file=sys.stderr)
        return 1
    print("the host was asked; it decides")
    return 0


def _status(options: argparse.Namespace) -> int:
    from guestagent.requests import ask_status

    try:
        found = ask_status(options.run_dir)
    except GuestFailure as error:
        print(f"ebb-guestagent: {error}", file=sys.stderr)
        return 1
    notice = found.get("preemption")
    if options.json:
        import json

        print(json.dumps(found))
    else:
        host = "connected" if found.get("host_connected") else "not connected"
        print(
            f"VM {found.get('vm') or '?'}, its host {host}; CPUs on line: {found.get('cpus_online')}; "
            f"memory: {found.get('memory_mib')} MiB, {found.get('available_mib')} available"
        )
        if notice:
            left = f"{notice.get('kind')} in {notice.get('seconds_left')} s"
            print(f"preempted: {left} (reason {notice.get('reason')})")
        else:
            print("not preempted")
    return PREEMPTED if notice else 0
