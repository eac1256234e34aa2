"""Runs inside a guest in the guest agent's place: writes what no guest agent would. Usage: flood.py many|long"""

from __future__ import annotations

import os
import sys
import time

from guestagent.channel import PORT_NAME, find_port

line = b'{"jsonrpc": "2.0", "method": "more"}\n' * 64 if sys.argv[1] == "many" else b"x" * 100_000 + b"\n"
port = os.open(find_port(PORT_NAME, "/sys"), os.O_RDWR)
print("ready", flush=True)
while True:
    try:
        os.write(port, line)
    except OSError:  # the host's end is closed
        time.sleep(0.1)
