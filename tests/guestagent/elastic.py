"""An application that gives all it is asked for, when it is let."""

from __future__ import annotations

import threading
from collections.abc import Callable

from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Release, SizeRange

#: Serve an adapter's hook under a name, and register it in the guest.
Serve = Callable[[str, Adapter], None]


class Elastic(Adapter):
    """Gives all it is asked for, when `go` is set. `hang` holds up the next decision."""

    def __init__(self, size_mib: float, minimum_mib: float = 10.0, maximum_mib: float = 1000.0) -> None:
        self.size_mib, self.minimum_mib, self.maximum_mib = size_mib, minimum_mib, maximum_mib
        self.targets: list[tuple[str, float, str]] = []
        self.go = threading.Event()
        self.go.set()
        self.hang: threading.Event | None = None

    def capabilities(self) -> Capabilities:
        memory = SizeRange(self.size_mib, self.minimum_mib, self.maximum_mib, 1.0)
        return Capabilities("elastic", "1", {"memory_mib": memory}, 0.5, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        if self.hang is not None:
            self.hang.wait(20)
        return self._take("deflate", target["memory_mib"], mode, deadline)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return self._take("reinflate", target["memory_mib"], "", deadline)

    def _take(self, direction: str, size_mib: float, mode: str, deadline: Deadline) -> Answer:
        self.targets.append((direction, size_mib, mode))
        amount_mib = max(self.size_mib - size_mib, 0.0)

        def work() -> Release:
            while not self.go.wait(0.01):
                if deadline.passed:
                    return Release({"memory_mib": 0.0}, "itself", "not in time", complete=False)
            self.size_mib = size_mib
            return Release({"memory_mib": amount_mib}, "itself", "done")

        return Promise({"memory_mib": amount_mib}, 0.5, work, "gladly")


class Workers(Adapter):
    """Has so many cores and gives them all, at once."""

    components = ("cpu_cores",)

    def __init__(self, cores: float) -> None:
        self.cores = self.maximum = cores
        self.targets: list[dict[str, float]] = []

    def capabilities(self) -> Capabilities:
        return Capabilities(
            "workers", "1", {"cpu_cores": SizeRange(self.cores, 0.1, self.maximum, 0.1)}, 0.1, True, ["ask"]
        )

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        return self._take(target)

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        return self._take(target)

    def _take(self, target: dict[str, float]) -> Answer:
        self.targets.append(target)
        amount = max(self.cores - target["cpu_cores"], 0.0)
        self.cores = target["cpu_cores"]
        return Promise({"cpu_cores": amount}, 0.1, lambda: Release({"cpu_cores": amount}, "itself", "done"))
