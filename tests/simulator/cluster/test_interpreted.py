"""The compiled loop decides as the same code interpreted: nothing overflows, wraps or is rounded otherwise."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np

from ebbtide.simulator.cluster.settings import ClusterPolicy, under
from tests.simulator.cluster.vms import arrivals, cluster, crowd

NODES = [(8.0, 16384.0), (16.0, 24576.0), (4.0, 65536.0)]


def digests() -> list[str]:
    """Of what each policy does with a crowd: every decision, every size, every figure."""
    found = []
    for number, policy in enumerate(ClusterPolicy):
        host = cluster(NODES, policy, start_deflated=True)
        decided = host.take(under(policy, arrivals(crowd(np.random.default_rng(number), 250))))
        host.finish(host.now_s + 20)
        digest = hashlib.sha256(decided.node.tobytes() + decided.victims.tobytes())
        digest.update(host.tally.tobytes() + host.nodes.tobytes())
        digest.update(repr([list(host.on(node)) for node in range(len(NODES))]).encode())
        found.append(f"{policy} {digest.hexdigest()} {len(decided.victims)}")
    return found


def test_compiled_and_interpreted_runs_are_the_same_bit_for_bit() -> None:
    interpreted = subprocess.run(
        [sys.executable, "-m", "tests.simulator.cluster.test_interpreted"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert interpreted.returncode == 0, interpreted.stderr
    assert interpreted.stdout.splitlines() == digests()


if __name__ == "__main__":
    print("\n".join(digests()))
