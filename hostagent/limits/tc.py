"""Our own limit on a tap: a token bucket (TBF) for each direction, by ``tc`` and ``ip``.

Traffic to the guest leaves the host through the tap, so its root qdisc holds it. Traffic from the guest arrives there,
where nothing can be queued: it is redirected to an IFB device of our own, whose root qdisc holds it. A change that
fails half way is undone. Sources: tc-tbf(8), tc-mirred(8), the kernel's Documentation/networking/ifb.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from hostagent.errors import TrafficControlError
from hostagent.threads import COMMANDS

#: Our root qdiscs carry it, so that we never remove one of another program. Qdiscs that the kernel put there have 0:.
HANDLE: Final = "ebb0:"
KERNELS_HANDLE: Final = "0:"
#: What libvirt puts on its taps when nothing limits them, and we when we lift a limit.
NO_QUEUE: Final = "noqueue"
#: libvirt's for traffic to the guest (virNetDevBandwidthSet).
LIBVIRTS_ROOT: Final = ("htb", "1:")
ALIAS: Final = "ebbtide "
#: What may pass at once: more than the largest packet of a guest's segmentation offload (64 KiB), and what is due when
#: the host's timer comes 20 ms late.
LEAST_BURST: Final = 128 << 10
LATE_S: Final = 0.02
LATENCY_MS: Final = 100
#: Packets that an IFB device takes before it waits for its softirq: on a busy host the kernel's 32 are a limit as well.
IFB_QUEUE: Final = "1000"
COMMAND_LIMIT_S: Final = 5.0
NAMESPACES: Final = Path("/run/netns")
DEVICES: Final = Path("/sys/class/net")

#: Runs argv with a standard input, and returns what it printed.
Run = Callable[[Sequence[str], str], Awaitable[str]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Tap:
    """A device on the host, and the network namespace that it is in (None: the host's own)."""

    name: str
    namespace: str | None = None

    @property
    def ifb(self) -> str:
        """The name of its IFB device: at most 15 letters, another one for every tap."""
        return f"ebbi-{hashlib.sha256(self.name.encode()).hexdigest()[:10]}"

    def tc(self, *words: str) -> tuple[str, ...]:
        return ("tc", *self._inside, *words)

    def ip(self, *words: str) -> tuple[str, ...]:
        return ("ip", *self._inside, *words)

    @property
    def _inside(self) -> tuple[str, ...]:
        return () if self.namespace is None else ("-n", self.namespace)


@dataclass(frozen=True, slots=True)
class Shape:
    """What stands on a tap. Rates in bytes/s; None where nothing limits that direction."""

    to_guest: int | None = None
    from_guest: int | None = None
    #: Kind and handle of the root qdisc, where one was put there that does something.
    root: tuple[str, str] | None = None
    ingress: bool = False
    #: Whether the ingress redirects to our IFB device.
    redirected: bool = False
    #: Whether the ingress does nothing.
    idle: bool = False
    #: Whether it looks like what libvirt leaves when it fails half way: its HTB without a qdisc in its class, and no
    #: filter on what comes in.
    half_made: bool = False

    @property
    def ours(self) -> bool:
        """Whether both directions are held by us."""
        return self.our_root and self.redirected and None not in (self.to_guest, self.from_guest)

    @property
    def our_root(self) -> bool:
        return self.root == ("tbf", HANDLE)

    @property
    def rate(self) -> int | None:
        """What both directions are held to, bytes/s; None if one of them is free."""
        if self.to_guest is None or self.from_guest is None:
            return None
        return max(self.to_guest, self.from_guest)


@dataclass(frozen=True, slots=True)
class Step:
    """One command, and the one that undoes it."""

    do: tuple[str, ...]
    undo: tuple[str, ...] | None = None


async def run(argv: Sequence[str], text: str = "") -> str:
    """Run a command to its end, in a thread: to start a process takes a loop's time, too.

    :raises TrafficControlError: it failed, is not there, or did not end in time.
    """
    try:
        ended = await COMMANDS.run(
            subprocess.run, argv, input=text.encode(), capture_output=True, timeout=COMMAND_LIMIT_S, check=False
        )
    except OSError as error:
        raise TrafficControlError(f"{argv[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise TrafficControlError(f"{' '.join(argv)} did not end within {COMMAND_LIMIT_S:g} s") from None
    if ended.returncode != 0:
        said = " / ".join(ended.stderr.decode(errors="replace").split("\n")[:2]).strip(" /")
        raise TrafficControlError(f"{' '.join(argv)} failed: {said}")
    return ended.stdout.decode(errors="replace")


class TrafficControl:
    """Limits taps. Calls for one tap must not overlap.

    :param execute: how commands are run.
    """

    def __init__(self, execute: Run = run, namespaces: Path = NAMESPACES, devices: Path = DEVICES) -> None:
        self._run = execute
        self._namespaces = namespaces
        self._devices = devices
        #: Namespaces of taps that were found outside the host's own.
        self._elsewhere: dict[str, str] = {}

    async def find(self, name: str) -> Tap:
        """The tap, in the host's network namespace or in the first named one that has it.

        :raises TrafficControlError: it is in none of them.
        """
        if (self._devices / name).exists():
            self._elsewhere.pop(name, None)
            return Tap(name)
        for namespace in self._named():
            tap = Tap(name, namespace)
            if name in await self._present(tap):
                self._elsewhere[name] = namespace
                return tap
        raise TrafficControlError(f"no network namespace that has a name holds a device {name}")

    async def look(self, tap: Tap) -> Shape:
        """Read what is set on a tap, by any program.

        :raises TrafficControlError: it cannot be read.
        """
        commands = f"qdisc show\nfilter show dev {tap.name} parent ffff:\n"
        answered = await self._run(tap.tc("-json", "-batch", "-"), commands)
        try:
            shape = parse(answered, tap)
        except TrafficControlError:
            # What tc says of u32 is no JSON before iproute2 5.18; the words of it are as later.
            filters = await self._run(tap.tc("filter", "show", "dev", tap.name, "parent", "ffff:"), "")
            shape = parse(answered, tap, filters)
        if shape.root != LIBVIRTS_ROOT:
            return shape
        # Neither classes of HTB nor a policer's rate are in the JSON of all versions of tc.
        classes = await self._run(tap.tc("class", "show", "dev", tap.name), "")
        filters = await self._run(tap.tc("filter", "show", "dev", tap.name, "parent", "ffff:"), "")
        return replace(
            shape,
            to_guest=_rate(r"^class htb 1:1 .*?\brate (\d+)([KMGT]?)bit", classes),
            from_guest=_rate(r"\bpolice\b.*?\brate (\d+)([KMGT]?)bit", filters),
        )

    async def limit(self, tap: Tap, bytes_s: int) -> None:
        """Hold each direction to a rate. On failure the tap is as it was before.

        :raises TrafficControlError: it could not be done, or another program limits this tap.
        """
        shape = await self.look(tap)
        if shape.root is not None and not shape.our_root:
            raise TrafficControlError(f"{tap.name} has a root qdisc of another program ({' '.join(shape.root)})")
        if shape.ours:
            await self._carry_out(change_steps(tap, shape, bytes_s))
            return
        await self.lift(tap)
        if (await self.look(tap)).ingress:
            raise TrafficControlError(f"{tap.name} has an ingress qdisc of another program")
        await self._carry_out(setup_steps(tap, bytes_s))

    async def lift(self, tap: Tap) -> None:
        """Remove all that is ours from a tap, and its IFB device; no error where nothing is.

        :raises TrafficControlError: something could not be removed.
        """
        present = await self._present(tap)
        if tap.name in present:
            shape = await self.look(tap)
            # A redirection to nowhere would lose what the guest sends: it goes before the device. One that does nothing
            # is what we were about to use when the agent was killed.
            if shape.redirected or (shape.idle and tap.ifb in present):
                await self._run(tap.tc("qdisc", "del", "dev", tap.name, "ingress"), "")
            if shape.our_root:
                await self._run(_no_queue(tap), "")
        if tap.ifb in present:
            await self._run(tap.ip("link", "del", tap.ifb), "")

    async def forget(self, name: str) -> None:
        """Remove what is ours of a tap that is gone, from the host's namespace and where it was found last.

        Failures are logged. The packaged unit lets the agent enter no other namespace: each would be a false warning.
        """
        for namespace in {None, self._elsewhere.pop(name, None)}:
            await self._forget(Tap(name, namespace))

    async def _forget(self, tap: Tap) -> None:
        try:
            await self.lift(tap)
        except TrafficControlError as error:
            why = str(error)
            log.warning("a limit on a tap could not be removed", tap=tap.name, namespace=tap.namespace, why=why)

    async def clear(self, tap: Tap) -> None:
        """Remove all qdiscs from a tap, of any program: what a failed call of libvirt has left."""
        for words in (_no_queue(tap), tap.tc("qdisc", "del", "dev", tap.name, "ingress")):
            with contextlib.suppress(TrafficControlError):
                await self._run(words, "")

    async def sweep(self) -> None:
        """Remove IFB devices of ours in the host's namespace whose tap is gone.

        :raises TrafficControlError: they cannot be listed.
        """
        text = await self._run(("ip", "-json", "-details", "link", "show", "type", "ifb"), "")
        for device in json.loads(text or "[]"):
            name = str(device.get("ifalias", "")).removeprefix(ALIAS)
            if device.get("ifname") == Tap(name).ifb and not (self._devices / name).exists():
                # In a namespace that it was moved to, it has a limit of its own.
                await self._forget(Tap(name))

    async def _present(self, tap: Tap) -> set[str]:
        text = await self._run(tap.ip("-json", "link", "show"), "")
        return {str(device.get("ifname")) for device in json.loads(text or "[]")}

    def _named(self) -> list[str]:
        return sorted(path.name for path in self._namespaces.glob("*"))

    async def _carry_out(self, steps: Sequence[Step]) -> None:
        undo: list[tuple[str, ...]] = []
        try:
            for step in steps:
                # Before it is run: given up half way, it may have been done.
                if step.undo is not None:
                    undo.append(step.undo)
                await self._run(step.do, "")
        except BaseException:
            # Also when the caller is cancelled: no half of a limit is left.
            await asyncio.shield(asyncio.ensure_future(self._undo(undo)))
            raise

    async def _undo(self, commands: Sequence[tuple[str, ...]]) -> None:
        for command in reversed(commands):
            # The last step has most often not been done.
            with contextlib.suppress(TrafficControlError):
                await self._run(command, "")


def setup_steps(tap: Tap, bytes_s: int) -> list[Step]:
    """How a free tap becomes a limited one."""
    mirror = ("action", "mirred", "egress", "redirect", "dev", tap.ifb)
    return [
        Step(tap.ip("link", "add", tap.ifb, "txqueuelen", IFB_QUEUE, "type", "ifb"), tap.ip("link", "del", tap.ifb)),
        Step(tap.ip("link", "set", tap.ifb, "alias", f"{ALIAS}{tap.name}")),
        Step(tap.ip("link", "set", tap.ifb, "addrgenmode", "none")),
        Step(tap.ip("link", "set", tap.ifb, "up")),
        Step(_bucket(tap, tap.ifb, bytes_s)),
        Step(
            tap.tc("qdisc", "add", "dev", tap.name, "handle", "ffff:", "ingress"),
            tap.tc("qdisc", "del", "dev", tap.name, "ingress"),
        ),
        # u32 is in every kernel, matchall is not.
        Step(
            tap.tc(
                *("filter", "add", "dev", tap.name, "parent", "ffff:", "protocol", "all", "prio", "1"),
                *("u32", "match", "u32", "0", "0", *mirror),
            )
        ),
        Step(_bucket(tap, tap.name, bytes_s), _no_queue(tap)),
    ]


def change_steps(tap: Tap, shape: Shape, bytes_s: int) -> list[Step]:
    """How a tap that we limit already gets another rate; no moment without a limit."""
    to_guest, from_guest = shape.to_guest or bytes_s, shape.from_guest or bytes_s
    return [
        Step(_bucket(tap, tap.name, bytes_s), _bucket(tap, tap.name, to_guest)),
        Step(_bucket(tap, tap.ifb, bytes_s), _bucket(tap, tap.ifb, from_guest)),
    ]


def _no_queue(tap: Tap) -> tuple[str, ...]:
    return tap.tc("qdisc", "replace", "dev", tap.name, "root", NO_QUEUE)


def _bucket(tap: Tap, device: str, bytes_s: int) -> tuple[str, ...]:
    burst = max(LEAST_BURST, int(bytes_s * LATE_S))
    return tap.tc(
        *("qdisc", "replace", "dev", device, "root", "handle", HANDLE),
        # tc calls bytes per second `bps`.
        *("tbf", "rate", f"{bytes_s}bps", "burst", str(burst), "latency", f"{LATENCY_MS}ms"),
    )


def parse(text: str, tap: Tap, words: str | None = None) -> Shape:
    """Read the answers to ``qdisc show`` and ``filter show`` of one tap, two JSON arrays one after the other.

    :param words: the second one as tc says it in words, instead of its array.
    :raises TrafficControlError: they are not what tc prints.
    """
    decoder = json.JSONDecoder()
    try:
        qdiscs, end = decoder.raw_decode(text.lstrip())
        filters = decoder.raw_decode(text.lstrip()[end:].lstrip())[0] if words is None else _filters(words)
        on = {(q["dev"], bool(q.get("root"))): q for q in qdiscs}
        root, ifb = on.get((tap.name, True)), on.get((tap.ifb, True))
        held = root is not None and root["handle"] != KERNELS_HANDLE and root["kind"] != NO_QUEUE
        ingress = any(q["dev"] == tap.name and q["kind"] in ("ingress", "clsact") for q in qdiscs)
        actions = [action for f in filters for action in f.get("options", {}).get("actions", ())]
        redirected = any(a.get("kind") == "mirred" and a.get("to_dev") == tap.ifb for a in actions)
        return Shape(
            to_guest=_tbf_rate(root),
            from_guest=_tbf_rate(ifb) if redirected else None,
            root=(root["kind"], root["handle"]) if root is not None and held else None,
            ingress=ingress,
            redirected=redirected,
            idle=ingress and not filters,
            half_made=held
            and not filters
            and _half_made(root, [q for q in qdiscs if q["dev"] == tap.name and not q.get("root")]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TrafficControlError(f"tc answered what cannot be read: {text[:200]!r}") from error


def _filters(words: str) -> list[dict[str, Any]]:
    """What of tc's words on filters `parse` reads, in the form of its JSON."""
    devices = re.findall(r"\bmirred \(Egress Redirect to device (\S+?)\)", words)
    actions = [{"kind": "mirred", "to_dev": device} for device in devices]
    return [{"options": {"actions": actions}}] if words.strip() else []


def _half_made(root: Any, others: list[Any]) -> bool:
    libvirts = (root["kind"], root["handle"]) == LIBVIRTS_ROOT and root["options"].get("default") == "0x1"
    return libvirts and all(other["kind"] == "ingress" for other in others)


def _tbf_rate(qdisc: Any) -> int | None:
    if qdisc is None or qdisc["kind"] != "tbf" or qdisc["handle"] != HANDLE:
        return None
    return int(qdisc["options"]["rate"])


def _rate(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    return int(found[1]) * int(1000 ** " KMGT".index(found[2] or " ")) // 8
