"""Random sequences of arrivals, departures and kills of managers and agents: nothing is lost, doubled, or preempted for
nothing, and whoever was preempted comes back when there is room.

Each sequence follows from its number alone; EBB_SEQUENCE=17 plays one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence as Numbers
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.sequence import HERDS, Sequence
from tests.hostagent.random_parts import ERRORS, errors_noted

pytestmark = [
    pytest.mark.timeout(600),
    # Of a transaction that its manager was killed in the middle of.
    pytest.mark.filterwarnings("ignore:The garbage collector is trying to clean up"),
]
DEEP = [pytest.mark.deep, pytest.mark.timeout(7200)]
STEPS = 12
QUICK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


#: Found by the long form: one was preempted while a guest elsewhere booted (272), while others could give (884), for 1
#: MiB (961).
FOUND = [272, 884, 961]
RUN = [*range(30), *FOUND, *range(HERDS, HERDS + 8)]
#: By the hundred, so that a failure leaves the others to be played, and more than one process can take part.
DEEP_RUNS = [range(first, first + 100) for first in (*range(0, 1000, 100), *range(HERDS, HERDS + 300, 100))]


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(RUN, id="run"),
        *(pytest.param(numbers, id=f"deep-{numbers[0]}", marks=DEEP) for numbers in DEEP_RUNS),
    ],
)
def test_no_vm_is_lost_or_in_two_places_or_preempted_for_nothing_and_all_come_back(
    numbers: Numbers[int],
) -> None:
    happened: Counter[str] = Counter()
    if "EBB_SEQUENCE" in os.environ:
        numbers = [int(os.environ["EBB_SEQUENCE"])]
    with errors_noted():
        for number in numbers:
            # A store is written to the disk at every record: in memory where the machine has a file system for that.
            with TemporaryDirectory(prefix="ebb-sequence-", dir=QUICK) as directory:
                sequence = Sequence(Path(directory), number)
                try:
                    sequence.play(STEPS)
                except Exception as error:
                    raise AssertionError(f"sequence {number}") from error
            assert not ERRORS, f"sequence {number}: {ERRORS}"
            happened += sequence.happened
    print(dict(happened))
    assert len(numbers) == 1 or (happened["preempted"] and happened["returned"])
