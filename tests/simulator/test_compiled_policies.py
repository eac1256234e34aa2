"""The policies' own functions, compiled: the same numbers to the last bit as interpreted."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from ebbtide.deflation import kernels
from ebbtide.deflation.placement import kernels as placement_kernels
from ebbtide.deflation.placement import placement_step
from ebbtide.simulator import compiling
from ebbtide.simulator.coaster import loop as coaster_loop
from ebbtide.simulator.compiling import announced, compiled, plain, shared
from ebbtide.simulator.jobs import loop as job_loop
from ebbtide.simulator.modules import closure

#: Arrays where it is compiled, lists where it is interpreted.
Numbers: TypeAlias = Any

for _kernel in (*kernels.KERNELS, *placement_step.KERNELS, *placement_kernels.KERNELS):
    shared(_kernel)


@compiled
def at_a_host(
    priority: Numbers,
    upper: Numbers,
    minimum: Numbers,
    current: Numbers,
    charge: Numbers,
    amount: Numbers,
    pressed: Numbers,
    order: Numbers,
    targets: Numbers,
    shortfall: Numbers,
    chosen: Numbers,
) -> tuple[int, bool]:
    """Everything that is decided at one host; the last axis of the targets' first is by policy."""
    kernels.split(priority, upper, minimum, current, amount, order, targets[0], shortfall)
    kernels.share(priority, upper, minimum, current, amount, pressed, order, targets[1])
    in_the_way = placement_step.sizes_to_reach(priority, upper, minimum, current, amount, order, targets[2])
    return kernels.victims(priority, upper, current, charge, amount, targets[2], pressed, order, chosen), in_the_way


@compiled
def at_a_start(
    priority: Numbers,
    upper: Numbers,
    minimum: Numbers,
    current: Numbers,
    order: Numbers,
    amount: Numbers,
    targets: Numbers,
    figures: Numbers,
) -> bool:
    """The last VM starts deflated; ``figures`` is filled: the shortfall, the need, what is free of its size."""
    least = minimum[len(priority) - 1]
    can = placement_step.join(
        priority, upper, minimum, current, order, amount, least, 320.0, targets, figures[0], figures[1]
    )
    placement_step.room_to_start(amount, upper[0], upper[len(priority) - 1], 320.0, figures[2])
    return can


@compiled
def among_hosts(demand: Numbers, availability: Numbers, capacity: Numbers, figures: Numbers) -> tuple[int, int, int]:
    """Everything that is decided among hosts; ``figures`` is filled: factors, what is missing, the need."""
    placement_kernels.scale_of(capacity, figures[0])
    best = placement_kernels.best_host(demand, availability, capacity, figures[0])
    first = placement_kernels.first_host(demand, availability, capacity)
    fitter = placement_kernels.fitter_host(demand, availability, capacity, figures[0], 0, len(capacity) - 1)
    placement_step.missing_of(demand, availability[0], capacity[0], figures[1])
    placement_step.need_of(figures[1], availability[fitter], figures[2])
    return best, first, fitter


def sizes(generator: np.random.Generator, count: int) -> Numbers:
    """Sizes of VMs: few values, so that ties are common, or any."""
    if generator.random() < 0.5:
        return generator.integers(1, 5, (count, 4)) * np.array([1.0, 1024.0, 100.0, 0.0])
    return np.round(generator.random((count, 4)) * np.array([16.0, 32768.0, 500.0, 1000.0]), 2)


def host(generator: np.random.Generator) -> tuple[Numbers, ...]:
    """The tables of a host with VMs of all kinds, some below their minimums, and an amount to free or to share."""
    count = int(generator.integers(0, 25))
    priority = generator.choice([kernels.FIXED, kernels.DEFLATABLE, kernels.DEFLATABLE, kernels.HARVEST], count)
    upper = sizes(generator, count)
    minimum = upper * generator.choice([0.0, 0.1, 0.3, 1.0], (count, 1))
    given = (
        generator.choice([0.0, 0.0, 0.25, 0.5, 1.0], (count, 4))
        if generator.random() < 0.7
        else generator.random((count, 4))
    )
    current = np.where(priority[:, None] == kernels.FIXED, upper, upper - (upper - minimum * 0.9) * given)
    charge = current + np.array([0.0, 320.0, 0.0, 0.0])
    amount = current.sum(axis=0) * generator.choice([0.0, 0.01, 0.3, 0.8, 2.0], 4) + generator.choice([0.0, 0.01])
    pressed = generator.random(count) < 0.2
    return priority, upper, minimum, current, charge, amount, pressed, generator.permutation(count)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_decided_at_a_host_is_the_same_compiled_and_interpreted(seed: int) -> None:
    loop: Any = at_a_host
    generator, preempted, short = np.random.default_rng(seed), 0, 0
    for _ in range(150):
        tables = host(generator)
        count = len(tables[0])
        fast = np.zeros((3, count, 4)), np.zeros(4), np.zeros(count, np.int64)
        slow: Any = [[[0.0] * 4 for _ in range(count)] for _ in range(3)], [0.0] * 4, [0] * count
        answer = loop(*tables, *fast)
        # Interpreted over lists, as the live system calls them.
        assert plain(loop)(*(table.tolist() for table in tables), *slow) == answer
        assert fast[0].tolist() == slow[0]
        assert fast[1].tolist() == slow[1]
        victims, _ = answer
        assert fast[2].tolist()[: max(victims, 0)] == slow[2][: max(victims, 0)]
        preempted, short = preempted + (victims > 0), short + bool(fast[1].any())
    assert preempted > 10
    assert short > 10


def test_how_a_vm_starts_deflated_is_the_same_compiled_and_interpreted() -> None:
    loop: Any = at_a_start
    generator, started, refused = np.random.default_rng(9), 0, 0
    for _ in range(200):
        priority, upper, minimum, current, _, amount, _, order = host(generator)
        count = len(priority)
        if count == 0:
            continue
        priority[-1], current[-1] = kernels.DEFLATABLE, upper[-1]
        tables = (priority, upper, minimum, current, order, amount * generator.choice([0.01, 0.1, 1.0]))
        fast, slow = (np.zeros((count, 4)), np.zeros((3, 4))), ([[0.0] * 4] * 0, [[0.0] * 4 for _ in range(3)])
        slow[0].extend([0.0] * 4 for _ in range(count))
        can = loop(*tables, *fast)
        assert plain(loop)(*(table.tolist() for table in tables), *slow) == can
        assert [part.tolist() for part in fast] == list(slow)
        started, refused = started + can, refused + (not can)
    assert started > 20
    assert refused > 20


@pytest.mark.parametrize("seed", range(4))
def test_what_is_decided_among_hosts_is_the_same_compiled_and_interpreted(seed: int) -> None:
    generator, found = np.random.default_rng(seed), 0
    for _ in range(100):
        count = int(generator.integers(1, 60))
        capacity = np.array([(48.0, 131072.0, 2000.0, 0.0), (64.0, 262144.0, 0.0, 3000.0)])[
            generator.integers(0, 2, count)
        ]
        share = generator.random((count, 4)) if generator.random() < 0.5 else generator.integers(0, 3, (count, 4)) / 2
        availability, demand = capacity * share, sizes(generator, 1)[0]
        fast, slow = np.zeros((3, 4)), [[0.0] * 4 for _ in range(3)]
        answer = among_hosts(demand, availability, capacity, fast)
        assert plain(among_hosts)(demand.tolist(), availability.tolist(), capacity.tolist(), slow) == answer
        assert fast.tolist() == slow
        found += answer[0] >= 0
    assert found > 30


def test_what_is_to_be_done_is_the_same_compiled_and_interpreted() -> None:
    loop: Any = compiled(_every_decision)
    assert loop(np.eye(4)) == _every_decision(np.eye(4).tolist())


def _every_decision(rows: Any) -> list[int]:
    """Over what is missing and deflatable in each component alone, and every answer of the plan."""
    said = [0]
    for missing in rows:
        for deflatable in rows:
            for bits in range(8):
                verdict = placement_step.decide(
                    missing, deflatable, deflatable, bits & 1 > 0, bits & 2 > 0, bits & 4 > 0
                )
                said.append(verdict)
    for purpose in range(3):
        for priority in range(3):
            said.append(placement_step.next_purpose(purpose, priority, True))
            said.append(placement_step.next_purpose(purpose, priority, False))
    return said


def test_machine_code_belongs_to_the_sources_that_it_is_made_from() -> None:
    """A change elsewhere lets it be."""
    sources = set(closure([coaster_loop.__name__], ours=True))
    assert {
        coaster_loop.__name__,
        "ebbtide.matcher.policies.cloudcoaster",
        "ebbtide.simulator.coaster.checking",
    } <= sources
    assert job_loop.__name__ not in sources
    assert compiling._directory(frozenset([coaster_loop.__name__])) != compiling._directory(
        frozenset([job_loop.__name__])
    )


def twice(value: float) -> float:
    return 2.0 * value


def first(values: Numbers) -> Any:
    return values[0]


def test_one_process_compiles_and_says_so_while_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling, "_SILENT_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    told = threading.Event()

    def listener(what: str) -> None:
        said.append(what)
        told.set()

    monkeypatch.setattr(compiling, "LISTENERS", [listener])
    loop: Any = compiled(twice)
    call = announced(loop, "twice")
    directory = Path(loop.stats.cache_path)
    assert directory.is_relative_to(tmp_path)
    directory.mkdir(parents=True, exist_ok=True)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(call(4.0)))
    other = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        thread.start()
        assert told.wait(60)
        # Somebody else compiles it: here nothing is compiled meanwhile.
        assert (said, loop.signatures, found) == (["twice"], [], [])
    finally:
        os.close(other)
    thread.join(60)
    assert found == [8.0]
    assert said == ["twice", ""]
    assert call(5.0) == 10.0
    assert said == ["twice", ""]
    # Who comes later loads it.
    again: Any = compiled(twice)
    assert announced(again, "twice")(4.0) == 8.0
    assert sum(again.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_machine_code_that_was_cut_short_is_compiled_again_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, left: int
) -> None:
    """As by a loss of power: else every simulation with that loop would fail until someone removes the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loop: Any = compiled(twice)
    assert loop(4.0) == 8.0
    (kept,) = Path(loop.stats.cache_path).glob(kind)
    os.truncate(kept, left)
    for hits in (0, 1):
        again: Any = compiled(twice)
        assert announced(again, "twice")(4.0) == 8.0
        assert sum(again.stats.cache_hits.values()) == hits


def test_machine_code_of_another_signature_is_not_taken_for_what_could_not_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba numbers files anew behind a damaged index, and writes the index first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    numbers, whole = np.array([1.5, 2.5]), np.array([1, 2])
    loop: Any = compiled(first)
    assert (loop(numbers), loop(whole)) == (1.5, 1)
    (index,) = Path(loop.stats.cache_path).glob("*.nbi")
    os.truncate(index, 20)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
        assert compiled(first)(whole) == 1
    for hits in (0, 1):
        again: Any = compiled(first)
        assert again(whole) == 1
        assert sum(again.stats.cache_hits.values()) == hits


def test_a_loop_whose_machine_code_cannot_be_kept_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loop: Any = compiled(twice)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files can be made, and nothing be written into them.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, room[1]))
    try:
        assert announced(loop, "twice")(4.0) == 8.0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert not list(Path(loop.stats.cache_path).glob("*.nb*"))


def test_a_loop_is_compiled_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # By it numba tries places.
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    loop: Any = compiled(twice)
    assert announced(loop, "twice")(4.0) == 8.0
    assert loop.stats.cache_path is None


def test_scipy_is_loaded_for_loops_that_need_it_only() -> None:
    code = """if True:
        import sys
        import numpy as np
        from ebbtide.simulator import compiling
        compiling.prepare()
        import numba
        assert numba.njit(lambda x: x + 1)(1) == 2
        print("scipy" in sys.modules)
        print(numba.njit(lambda a: np.dot(a, a))(np.eye(2)).tolist(), "scipy" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "[[1.0, 0.0], [0.0, 1.0]] True"]


def test_scipy_that_is_there_already_brings_no_linear_algebra() -> None:
    code = """if True:
        import sys
        import numpy as np
        import scipy.special
        from ebbtide.simulator import compiling
        compiling.prepare()
        import numba
        assert sys.modules["scipy"] is scipy
        print("scipy.linalg" in sys.modules)
        print(numba.njit(lambda a: np.dot(a, a))(np.eye(2)).tolist(), scipy.special.ndtr(0.0))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "[[1.0, 0.0], [0.0, 1.0]] 0.5"]


def test_numbas_runtime_is_compiled_with_the_first_loop_and_not_before() -> None:
    code = """if True:
        import numpy as np
        from ebbtide.simulator import compiling
        compiling.prepare()
        import numba
        from numba.core.runtime import rtsys
        numba.core.registry.cpu_target.target_context.refresh()
        print("_made" in vars(rtsys._library))
        print(numba.njit(lambda n: np.ones(n).sum())(3), "_made" in vars(rtsys._library))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "3.0 True"]


def test_a_policys_loop_is_made_without_scipy() -> None:
    code = """if True:
        import sys
        from ebbtide.simulator.jobs.engine import Engine, Machines
        Engine([], Machines(1, 1))
        print("numba" in sys.modules, "scipy" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
