"""A cluster that is saved and loaded goes on bit for bit; how arrivals are handed over changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.simulator.cluster.cluster import Cluster
from ebbtide.simulator.cluster.settings import ClusterPolicy, under
from ebbtide.simulator.cluster.state import NODE, TALLY, Arrivals
from ebbtide.simulator.errors import SimulatorError
from ebbtide.simulator.inputs.batches import Indices
from tests.simulator.cluster.vms import arrivals, cluster, crowd

NODES = [(8.0, 16384.0), (16.0, 24576.0), (4.0, 65536.0)]


def rows(whole: Arrivals, begin: int, end: int) -> Arrivals:
    return whole.part(slice(begin, end))


def course(host: Cluster) -> list[bytes]:
    """All that a run comes to, and where it stands, but for where in memory."""
    tally = [host.tally[name].tobytes() for name in TALLY.names or () if name not in ("state", "fault")]
    nodes = [host.nodes[name].tobytes() for name in NODE.names or () if name not in ("first", "last")]
    members = [repr(list(host.on(node))).encode() for node in range(len(host.nodes))]
    return [*tally, *nodes, *members]


@pytest.mark.parametrize("policy", list(ClusterPolicy))
def test_a_run_that_is_stopped_in_the_middle_and_loaded_ends_in_the_same_bits(
    policy: ClusterPolicy, tmp_path: Path
) -> None:
    whole = under(policy, arrivals(crowd(np.random.default_rng(3), 500)))
    through = cluster(NODES, policy)
    decided = through.take(whole)
    through.finish(through.now_s + 50)

    first = cluster(NODES, policy)
    begun = first.take(rows(whole, 0, 217))
    first.save(tmp_path / "state.npz")
    second = Cluster.load(tmp_path / "state.npz")
    assert second.taken == 217
    ended = second.take(rows(whole, second.taken, 500))
    second.finish(second.now_s + 50)

    assert np.array_equal(np.concatenate([begun.node, ended.node]), decided.node)
    assert np.array_equal(np.concatenate([begun.victims, ended.victims]), decided.victims)
    assert course(second) == course(through)
    assert second.rules == through.rules


def test_arrivals_one_by_one_are_as_good_as_all_at_once() -> None:
    whole = arrivals(crowd(np.random.default_rng(4), 300))
    at_once, one_by_one = cluster(NODES), cluster(NODES)
    at_once.take(whole)
    found: list[Indices] = [one_by_one.take(rows(whole, row, row + 1)).node for row in range(300)]
    assert len(found) == 300
    assert course(one_by_one) == course(at_once)


def test_memory_is_bounded_by_what_is_alive() -> None:
    host = cluster(NODES, validate=False)
    for seed in range(20):
        part = arrivals(crowd(np.random.default_rng(seed), 500))
        later = part._replace(at_s=part.at_s + host.now_s, departs_s=part.at_s + host.now_s + 20)
        host.take(later)
    assert host.taken == 10_000
    # Alive and one chunk of arrivals, not all that ever arrived.
    assert len(host.vms) < 2500


def test_what_is_no_checkpoint_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for name, content in (("text", b"state"), ("empty", b""), ("zip", b"PK\x03\x04broken")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(SimulatorError, match=name):
            Cluster.load(path)
    with pytest.raises(SimulatorError, match="nowhere"):
        Cluster.load(tmp_path / "nowhere")
    np.savez(tmp_path / "other.npz", form=np.array(3))
    with pytest.raises(SimulatorError, match=r"other\.npz is no checkpoint"):
        Cluster.load(tmp_path / "other.npz")


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path: Path) -> None:
    host = cluster(NODES)
    with pytest.raises(SimulatorError, match="cannot be written"):
        host.save(tmp_path / "missing" / "state.npz")
    host.save(tmp_path / "state.npz")
    host.save(tmp_path / "state.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]
