"""Report of `memcached` beside its figures: every measurement as a line of a table, and a picture of the medians."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ebbtide.extras import installing

TABLE = "memcached.csv"
PICTURE = "memcached.png"
#: The workload that is drawn.
DRAWN = "zipf_4k"
COLOURS = {"application": "tab:blue", "hypervisor": "tab:red"}


@dataclass
class Row:
    """One measurement. Rates are a second; `cap` None: reads as the disk is; `stores`: misses were stored."""

    case: str
    arm: str
    share: float
    run: int
    full_hits_s: float
    footprint_mib: float
    took_s: float
    ideal: float = 0.0
    best: float = 0.0
    cap: int | None = None
    stores: bool = False
    hits_s: float = 0.0
    served_s: float = 0.0
    hit_ratio: float = 0.0
    faults_per_get: float = 0.0
    reads_s: float = 0.0
    swapped_mib: float = 0.0
    load_average: float = 0.0

    @property
    def key(self) -> tuple[str, float, int | None, bool]:
        return self.case, self.share, self.cap, self.stores

    @property
    def sentence(self) -> str:
        cap = "native reads" if self.cap is None else f"{self.cap} reads/s"
        return (
            f"{self.case} {self.share:.0%} {self.arm} ({self.took_s:.1f} s), {cap}: {self.hits_s:.0f} hits/s of "
            f"{self.full_hits_s:.0f}, hit ratio {self.hit_ratio:.3f} (ideal LRU {self.ideal:.3f}), "
            f"{self.faults_per_get:.3f} faults per get"
        )


def write_table(rows: Sequence[Row], directory: Path) -> Path:
    """Write the table of what was measured so far, so that a stopped benchmark leaves it; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / TABLE
    names = [field.name for field in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            values = (getattr(row, name) for name in names)
            writer.writerow([round(value, 6) if isinstance(value, float) else value for value in values])
    return path


def write(rows: Sequence[Row], directory: Path, report: Callable[[str], None]) -> list[Path]:
    """Write the table and, where matplotlib is installed, the picture; returns the paths."""
    table = write_table(rows, directory)
    try:
        return [table, draw(rows, directory / PICTURE)]
    except ImportError:
        report(f"no picture: matplotlib is missing ({installing('bench')})")
        return [table]


def curve(rows: Sequence[Row], arm: str, cap: int | None, stores: bool) -> list[tuple[float, float, float, float]]:
    """Share, median, least and most of the rate relative to full size, by falling share, from full size on."""
    points = [(1.0, 1.0, 1.0, 1.0)]
    mine = [row for row in rows if (row.case, row.arm, row.cap, row.stores) == (DRAWN, arm, cap, stores)]
    for share in sorted({row.share for row in mine}, reverse=True):
        rates = [(row.served_s if stores else row.hits_s) / row.full_hits_s for row in mine if row.share == share]
        points.append((share, statistics.median(rates), min(rates), max(rates)))
    return points


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Rates over memory, one panel for each cap, both arms in each. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    caps = list(dict.fromkeys(row.cap for row in rows if row.case == DRAWN and not row.stores))
    figure, panels = pyplot.subplots(1, len(caps), figsize=(4.2 * len(caps), 4.2), sharey=True, squeeze=False)
    for cap, panel in zip(caps, panels[0], strict=True):
        stored = any(row.stores and row.cap == cap and row.case == DRAWN for row in rows)
        for arm, colour in COLOURS.items():
            for stores in (False, True) if stored else (False,):
                _line(panel, curve(rows, arm, cap, stores), arm, colour, stores)
        panel.set_title("reads as the disk is" if cap is None else f"at most {cap:,} reads/s")
        panel.set_xlabel("memory, % of the footprint")
        panel.set_xlim(102, 20)
        panel.set_ylim(0, 1.25)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("hits a second, relative to full size")
    figure.suptitle("memcached deflated: 4 kB values, Zipf 0.99 (median, least and most of the runs)")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    for panel in panels[0]:
        more = panel.get_legend_handles_labels()
        for handle, label in zip(*more, strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _line(panel: Any, points: list[tuple[float, float, float, float]], arm: str, colour: str, stores: bool) -> None:
    shares = [100 * share for share, *_ in points]
    middle = [median for _, median, _, _ in points]
    spread = [[median - least for _, median, least, _ in points], [most - median for _, median, _, most in points]]
    label = f"{'with the ' if arm == 'application' else ''}{arm}{' only' if arm == 'hypervisor' else ''}"
    label += ", misses stored" if stores else ""
    style = "--" if stores else "-"
    panel.errorbar(shares, middle, yerr=spread, label=label, color=colour, linestyle=style, marker="o", capsize=3)
