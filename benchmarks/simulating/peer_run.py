"""AccaSim (https://pypi.org/project/accasim, MIT) over an SWF log, in its own process.

`python -m benchmarks.simulating.peer_run LOG CORES DIRECTORY`: one machine of so many cores, first come, first served.
What it writes goes into the directory; printed is its mean wait in s, and what its run took by its own clock.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import json
import re
from pathlib import Path
from typing import Any, Final

#: A log's sizes do not matter here, and it wants to know of memory.
MEMORY_KIB: Final = 10**12


def run(log: Path, cores: int, directory: Path) -> dict[str, Any]:
    """Mean wait and time of the run, in s. Raises ValueError where AccaSim tells neither."""
    # It was written for Python before 3.10, which had them here, too.
    collections.Mapping = collections.abc.Mapping  # type: ignore[attr-defined]
    from accasim.base.allocator_class import FirstFit
    from accasim.base.scheduler_class import FirstInFirstOut
    from accasim.base.simulator_class import Simulator

    system = directory / "system.json"
    node = {"core": cores, "mem": MEMORY_KIB}
    equivalence = {"processor": {"core": 1}}
    system.write_text(
        json.dumps(
            {
                "system_name": "one",
                "start_time": 0,
                "equivalence": equivalence,
                "groups": {"all": node},
                "resources": {"all": 1},
            }
        )
    )
    simulator = Simulator(
        str(log),
        str(system),
        FirstInFirstOut(FirstFit()),
        scheduling_output=False,
        show_statistics=False,
        RESULTS_FOLDER_NAME=str(directory),
    )
    simulator.start_simulation()
    told = next(directory.rglob("stats-*")).read_text()
    return {"wait_s": _told(told, "Avg. waiting times"), "seconds": _told(told, "Simulation time")}


def _told(text: str, name: str) -> float:
    found = re.search(rf"{re.escape(name)}: ([\d.]+)", text)
    if found is None:
        raise ValueError(f"AccaSim did not tell its {name}")
    return float(found[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("cores", type=int)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    print(json.dumps(run(options.log, options.cores, options.directory)))
