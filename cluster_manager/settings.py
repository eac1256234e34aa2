"""Settings of the manager; times in seconds."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster_manager.alerts.webhooks import Webhook
from cluster_manager.authority import CertificateAuthority
from cluster_manager.defaults import (
    CERTIFICATE_DAYS,
    GONE_S,
    MOST_HOSTS,
    LeadershipTimes,
    MoveFirst,
    RebalancingRules,
    Retention,
)
from cluster_manager.store.database import Database
from ebbtide.deflation.placement.policy_names import PlacementPolicy
from ebbtide.deflation.placement.waiting import MOVE_MIB_S
from ebbtide.matcher.engines.interface import Engine, engine_of
from ebbtide.matcher.engines.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """How long the manager waits for host agents."""

    #: For one answer, beyond what a long poll asks the agent to hold back.
    answer_s: float = 5.0
    #: How long an agent may stay away (restart, lost packets) before the plan gives the host up.
    absence_s: float = 20.0
    #: How long one long poll is held by the agent.
    poll_s: float = 20.0
    #: First pause before a repeated call; doubles up to two seconds.
    pause_s: float = 0.1
    #: How much longer than its deadline a reclaim or target may take until its operation is given up.
    grace_s: float = 30.0
    #: Between two tries of what a plan cannot do without, on a host that did not do it.
    retry_s: float = 5.0
    #: A start or a stop of a VM: an emulated guest boots in some ten seconds on an idle machine.
    start_stop_s: float = 180.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one manager. Tokens are secrets: never logged, never in a message."""

    #: The file of a SQLite database, or a PostgreSQL database.
    database: Database
    #: What an admin carries; empty where all tokens stand in the tokens file.
    token: str
    #: Of it the tokens of host agents are made (`rest.credentials`).
    hosts_key: str
    host: str = "127.0.0.1"
    #: 0 takes a free one.
    port: int = 7100
    policy: PlacementPolicy = PlacementPolicy.BEST_FIT
    #: Of the generator of two-choices.
    seed: int = 0
    #: A host that has not reported for so long gets no new VM. Agents report every two seconds.
    silent_after_s: float = 10.0
    #: A VM that is being moved is its owner's again when a host that it may be on has not answered for so long.
    gone_s: float = GONE_S
    #: Largest request body, bytes.
    body_limit: int = 256 * 1024
    agents: AgentLimits = AgentLimits()
    #: For calls of host agents, which then are reached by HTTPS only. None: also HTTP, or by whom this machine trusts.
    agent_tls: ssl.SSLContext | None = None
    #: The hosts that are lost: they are called no more, and count as silent; asked before each call.
    revoked: Callable[[], frozenset[str]] = frozenset
    #: What signs the certificates of hosts that join, and for how many days; None: nothing does.
    authority: CertificateAuthority | None = None
    certificate_days: float = CERTIFICATE_DAYS
    #: The certificates in force, PEM: its own and the CAs; asked for at each look at when the first of them ends.
    certificates: Callable[[], tuple[bytes, ...]] = tuple
    #: Host agents beyond this machine may be called by plain HTTP: in tests, no option says so.
    insecure: bool = False
    #: Hosts that are known at a time; another one is not registered.
    most_hosts: int = MOST_HOSTS
    #: Which VMs a placement has move to a host with room before it preempts one: those whose disk is shared, or all.
    move_first: MoveFirst = "shared"
    #: What such a move copies in a second at the least, MiB.
    move_mib_s: float = MOVE_MIB_S
    #: How VMs are moved to hosts with room; None: nobody is, but by requests.
    rebalancing: RebalancingRules | None = None
    leadership: LeadershipTimes = field(default_factory=LeadershipTimes)
    retention: Retention = field(default_factory=Retention)
    #: Whether the history of hosts and VMs is kept.
    history: bool = True
    #: Where clients and agents reach this manager, for those that ask a standby; None: it is not known.
    url: str | None = None
    #: Who is told of chosen events, while this manager leads.
    webhooks: tuple[Webhook, ...] = ()
    #: What runs tasks, and what makes it.
    engine: EngineSettings = field(default_factory=EngineSettings)
    #: What in the options is wrong and keeps nothing from its start, a sentence each.
    notes: tuple[str, ...] = ()
    make_engine: Callable[[EngineSettings], Engine | None] = engine_of
