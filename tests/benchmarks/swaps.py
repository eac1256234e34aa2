"""What a test sees of /proc/swaps where other tests beside it have swap, too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SwapsIn:
    """/proc/swaps without what lies elsewhere."""

    place: Path

    def read_text(self) -> str:
        head, *lines = Path("/proc/swaps").read_text().splitlines(keepends=True)
        return head + "".join(line for line in lines if line.startswith(str(self.place)))
