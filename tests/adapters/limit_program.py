"""A program for the command adapter: it brings the cache of limited_service.py to a size.

Usage: limit_program.py PORT PID_FILE
"""

from __future__ import annotations

import json
import socket
import sys

BASELINE_MIB = 20.0
port, pid_file = int(sys.argv[1]), sys.argv[2]
question = json.load(sys.stdin)


def resident_mib() -> float:
    with open(pid_file) as file:
        pid = int(file.read())
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("Pss:"))


def limit(mib: float) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(f"LIMIT {mib}\n".encode())
        connection.makefile("rb").readline()


method = question["method"]
now_mib = resident_mib()
answer: dict[str, object]
if method == "capabilities":
    sizes = {"current": now_mib, "minimum": 40, "maximum": 220, "step": 1}
    answer = {"version": "7", "resources": {"memory_mib": sizes}, "expected_s": 0.5}
elif method == "status":
    answer = {"sizes": {"memory_mib": now_mib}}
elif method == "release":
    limit(max(question["target"]["memory_mib"] - BASELINE_MIB, 1))
    # What it says is ten times what it does: what counts is measured.
    answer = {"released": {"memory_mib": 10 * max(now_mib - resident_mib(), 0)}, "measured_by": "PSS"}
else:
    amount = max(now_mib - question["target"]["memory_mib"], 0) if method == "deflate" else 0
    answer = {"promised": {"memory_mib": amount}, "expected_s": 0.5}
json.dump(answer, sys.stdout)
