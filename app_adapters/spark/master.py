"""`ebb-adapter spark`: the service of a cluster, and the hook of the master's own VM, which gives nothing."""

from __future__ import annotations

import argparse
import re
from typing import Callable

from app_adapters import __version__
from app_adapters.adapter import Adapter, Answer, Capabilities, Deadline, Promise, Refusal, Release
from app_adapters.errors import AdapterError
from app_adapters.registry import Ready, address, amount
from app_adapters.spark.curves import LINEAR, read_curves
from app_adapters.spark.rest import SparkRest
from app_adapters.spark.service import SparkService
from app_adapters.spark.window import WINDOW_S

LONGEST_WINDOW_S = 10.0
_URL = re.compile(r"http://[A-Za-z0-9._-]+(?::[0-9]{1,5})?|http://\[[0-9a-fA-F:]+\](?::[0-9]{1,5})?")


class SparkMasterAdapter(Adapter):
    """The master's VM gives nothing: without its master a cluster is worth nothing."""

    components = ("memory_mib", "cpu_cores")

    def __init__(self, start: Callable[[], SparkService]) -> None:
        self._start = start
        self.service: SparkService | None = None

    def begin(self) -> None:
        """Serve the cluster's relays from now on. Raises: AdapterError where that cannot be."""
        self.service = self._start()

    def capabilities(self) -> Capabilities:
        """It offers no resource."""
        return Capabilities("spark", __version__, {}, 0.0, True, ["ask", "force"])

    def deflate(self, target: dict[str, float], mode: str, deadline: Deadline) -> Answer:
        """Refuse."""
        return Refusal("the Spark master is not deflated: it is to run on a high-priority VM")

    def reinflate(self, target: dict[str, float], deadline: Deadline) -> Answer:
        """Nothing to do."""
        return Promise({}, 0.0, lambda: Release({}, "nothing", "nothing had been taken"))


def url(text: str) -> str:
    """http://HOST:PORT of an option, without a path. Raises: argparse.ArgumentTypeError."""
    if not _URL.fullmatch(text.rstrip("/")):
        raise argparse.ArgumentTypeError(f"{text} is not http://HOST:PORT")
    return text.rstrip("/")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master-ui", type=url, default="http://127.0.0.1:8080", metavar="URL", help="default: %(default)s"
    )
    parser.add_argument(
        "--driver",
        type=url,
        action="append",
        metavar="URL",
        help="web UI of a driver; may come several times (default: http://127.0.0.1:4040)",
    )
    parser.add_argument(
        "--serve", type=address, default=("127.0.0.1", 7079), metavar="HOST:PORT", help="default: 127.0.0.1:7079"
    )
    parser.add_argument(
        "--cluster-token-file",
        default="/etc/ebbtide/spark-token",
        metavar="FILE",
        help="token of this cluster's relays (default: %(default)s)",
    )
    parser.add_argument(
        "--window-s", type=amount, default=WINDOW_S, metavar="N", help="requests are collected (default: %(default)g)"
    )
    parser.add_argument("--curves", metavar="FILE", help="measured throughput at deflations, JSON (default: linear)")


def _build(options: argparse.Namespace) -> SparkMasterAdapter:
    if not 0 < options.window_s <= LONGEST_WINDOW_S:
        raise AdapterError(f"--window-s: must be more than 0 and at most {LONGEST_WINDOW_S:g}")
    curves = read_curves(options.curves) if options.curves else LINEAR
    rest = SparkRest(options.master_ui, tuple(options.driver or ["http://127.0.0.1:4040"]))
    host, port = options.serve

    def start() -> SparkService:
        try:
            return SparkService(rest, options.cluster_token_file, host, port, options.window_s, curves).start()
        except OSError as error:
            raise AdapterError(f"--serve: cannot listen on {host}:{port}: {error}") from None

    return SparkMasterAdapter(start)


READY = Ready(
    "the service beside a Spark master",
    """Collects what is asked of the VMs of a Spark cluster (standalone), and decides once for all of them whether
workers give cores up or the VMs are throttled. Each worker's VM runs `ebb-adapter spark-worker`. The master's own VM
gives nothing.

example:
  ebb-adapter spark --master-ui http://127.0.0.1:8080 --driver http://127.0.0.1:4040 --serve 10.0.0.5:7079

Relays' requests are not encrypted: listen on a network of the cluster alone. An application that sets
spark.ebbtide.stages is known better (docs/reference/adapters/spark.md).""",
    _options,
    _build,
)
