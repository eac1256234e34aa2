"""The options of `ebb-manager`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cluster_manager.defaults import CERTIFICATE_DAYS, DAY_S, GONE_S, MOST_HOSTS, MoveFirst, RebalancingRules, Retention
from ebbtide.deflation.placement.waiting import MOVE_MIB_S
from ebbtide.rest.options import DaemonOptions, settings_config

_RULES = RebalancingRules()
#: A hundred years.
MOST_DAYS = 36_500


class ManagerOptions(DaemonOptions):
    """See `ebb-manager --help`."""

    program: ClassVar[str] = "ebb-manager"
    file: ClassVar[Path] = Path("/etc/ebbtide/manager.toml")
    model_config = settings_config("ebb-manager")

    listen: str = Field("127.0.0.1:7100", description="where to serve", json_schema_extra={"metavar": "HOST:PORT"})
    token_file: Path | None = Field(
        None,
        description="token of an admin; needed where there is no --tokens-file",
        json_schema_extra={"example": "/etc/ebbtide/token"},
    )
    hosts_key_file: Path = Field(
        description="key of which the tokens of all hosts are made, each its own: see `ebb host tokens --help`",
        json_schema_extra={"example": "/etc/ebbtide/hosts.key"},
    )
    database: str = Field(
        description="SQLite file, made if missing, or postgresql://USER@HOST/NAME "
        "(docs/reference/high-availability.md)",
        json_schema_extra={"metavar": "FILE|URL", "example": "/var/lib/ebbtide/manager/manager.sqlite"},
    )
    database_password_file: Path | None = Field(
        None, description="password of the PostgreSQL user; without it as libpq finds one"
    )
    ca_key: Path | None = Field(
        None,
        description="PEM, the key of --client-ca: this manager signs the certificates of hosts that join "
        "(docs/how-to/add-a-host.md)",
    )
    next_ca_key: Path | None = Field(
        None,
        description="PEM, the key of a CA that is to follow, whose certificate stands in --client-ca, too "
        "(docs/reference/security.md)",
    )
    certificate_days: Annotated[float, Field(gt=0, le=3650)] = Field(
        CERTIFICATE_DAYS, description="how long they are valid; hosts renew them when a third of that is left"
    )
    url: str | None = Field(
        None,
        description="where hosts and clients reach this manager; default: what it listens on, if that is one address",
    )
    keep_days: Annotated[float, Field(ge=1, le=MOST_DAYS)] = Field(
        Retention().age_s / DAY_S,
        description="how long events, ended operations, ended VMs, ended tasks and core changes are kept",
    )
    keep_events: Annotated[int, Field(ge=1)] = Field(
        Retention().most_events, description="and of events not more than these"
    )
    history: bool = Field(
        True, description="keep how hosts and VMs were, for 30 days (docs/reference/history.md); --no-history: do not"
    )
    policy: Literal["best-fit", "first-fit", "two-choices"] = Field("best-fit", description="how hosts are chosen")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of the chance in two-choices")
    gone_s: Annotated[float, Field(ge=1, le=MOST_DAYS * DAY_S)] = Field(
        GONE_S,
        description="seconds that a VM which is being moved waits for a host that does not answer any more, beyond its "
        "request's deadline",
    )
    engine_file: Path | None = Field(
        None, description="TOML: the Slurm or Dask that runs tasks (docs/reference/tasks.md)"
    )
    alerts_file: Path | None = Field(
        None, description="TOML: webhooks that are told of chosen events (docs/how-to/alerts.md)"
    )
    most_hosts: Annotated[int, Field(ge=1)] = Field(MOST_HOSTS, description="hosts that are registered at a time")
    move_first: MoveFirst = Field(
        "shared",
        description="before a VM is preempted, have one move while it runs to a host with room, where that is enough: "
        "one whose disk is shared, any (its disk is copied), or never",
    )
    move_mib_s: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = Field(
        MOVE_MIB_S,
        description="what such a move copies in a second at the least, MiB (100: a link of 1 Gbit/s); a VM with more "
        "memory than it copies in half of the time does not move",
    )
    rebalance: bool = Field(
        False,
        description="move VMs by itself, while they run, to hosts with room (docs/reference/lifecycle.md); the options "
        "below are for that",
    )
    rebalance_every_s: Annotated[float, Field(ge=10, le=DAY_S)] = Field(
        _RULES.every_s, description="seconds between two looks"
    )
    rebalance_hold_s: Annotated[float, Field(ge=0, le=DAY_S)] = Field(
        _RULES.pace.hold_s, description="a host counts whose VMs have been deflated for so long"
    )
    rebalance_rest_s: Annotated[float, Field(ge=0, le=MOST_DAYS * DAY_S)] = Field(
        _RULES.pace.rest_s, description="a VM that was moved stays for so long"
    )
    rebalance_longest_s: Annotated[float, Field(ge=0, le=MOST_DAYS * DAY_S)] = Field(
        _RULES.pace.longest_s, description="a deflation is expected to last as long again as it has, this at the most"
    )
    rebalance_least_worth: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = Field(
        _RULES.pace.least_worth, description="core-hours that a move must give back for each GiB that it copies"
    )
    rebalance_most_moves: Annotated[int, Field(ge=1, le=100)] = Field(
        _RULES.most_moves, description="moves under way at a time; of one host one"
    )
    rebalance_bandwidth_mib_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = Field(
        _RULES.bandwidth_mib_s, description="of one move, in MiB/s; 0: no limit"
    )
    rebalance_copy_disks: bool = Field(False, description="move also VMs whose disk is not shared, by copying it")
