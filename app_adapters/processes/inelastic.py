"""An application that always refuses: its memory is its own."""

from __future__ import annotations

import argparse
from typing import Callable

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release, SizeRange
from app_adapters.registry import Ready


class InelasticAdapter(Adapter):
    """Refuses every deflation with the given reason; a reinflation costs nothing and is always fine."""

    def __init__(
        self,
        name: str = "inelastic",
        reason: str = "this application gives no memory",
        resident_mib: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._name = name
        self._reason = reason
        self._resident_mib = resident_mib

    def capabilities(self) -> Capabilities:
        """The resident size is all it can have."""
        size_mib = self._resident_mib()
        memory = SizeRange(current=size_mib, minimum=size_mib, maximum=size_mib, step=1.0)
        return Capabilities(self._name, __version__, {"memory_mib": memory}, 0.0, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Refuse."""
        return Refusal(self._reason, floor={"memory_mib": self._resident_mib()})

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Nothing to do."""
        return Promise({}, 0.0, lambda: Release({"memory_mib": 0.0}, "nothing", "nothing had been taken"))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", default="this application gives no memory", help="default: %(default)s")


READY = Ready(
    "an application that always refuses",
    """\
Refuses every deflation with its reason, so that the next layers take over.

example:
  ebb-adapter inelastic --name database --reason 'the buffers are pinned'""",
    _options,
    lambda options: InelasticAdapter(options.name, options.reason),
)
