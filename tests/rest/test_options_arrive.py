"""What each option of a daemon says arrives where it is used: one that is read and forgotten would be believed."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cluster_manager.main
import hostagent.main
from cluster_manager import configured
from cluster_manager.defaults import DAY_S
from cluster_manager.options import ManagerOptions
from ebbtide.lab.state import write_private
from ebbtide.rest import logs
from ebbtide.rest.logs import configure_logs
from ebbtide.rest.options import DaemonOptions, collect
from ebbtide.rest.rates import Rate
from ebbtide.rest.settings import AccessSettings, settings_of
from ebbtide.rest.tls import KeyPair
from hostagent import running, service
from hostagent.domain_xml.template_library import TemplateLibrary
from hostagent.domain_xml.templates import PACKAGED
from hostagent.options import HostAgentOptions, access_of

A, B, C = Path("/a"), Path("/b"), Path("/c")
#: Of both daemons: what is given, and what is to stand in which settings. The defaults are others.
ACCESS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens_file": (A, {"tokens_file": A}),
    "tls_certificate": (A, {"own": KeyPair(A, B)}),
    "tls_key": (B, {"own": KeyPair(A, B)}),
    "client_ca": (C, {"client_ca": C}),
    "requests_per_s": (2.0, {"rates.people.per_s": 2.0}),
    "burst": (3.0, {"rates.people.burst": 3.0}),
    "reports_per_s": (5.0, {"rates.agents": Rate(5.0, 50.0)}),
    "connections": (7, {"limits.in_all": 7}),
    "connections_per_address": (11, {"limits.per_address": 11}),
    "idle_timeout_s": (13.0, {"limits.idle_s": 13.0, "limits.handshake_s": 13.0}),
    "body_timeout_s": (17.0, {"body_timeout_s": 17.0}),
}
MANAGER: dict[str, tuple[Any, dict[str, Any]]] = {
    "listen": ("127.0.0.2:7999", {"host": "127.0.0.2", "port": 7999}),
    "url": ("http://127.0.0.3:1", {"url": "http://127.0.0.3:1"}),
    "certificate_days": (2.0, {"certificate_days": 2.0}),
    "keep_days": (3.0, {"retention.age_s": 3 * DAY_S}),
    "keep_events": (5, {"retention.most_events": 5}),
    "history": (False, {"history": False}),
    "policy": ("two-choices", {"policy.value": "two-choices"}),
    "seed": (7, {"seed": 7}),
    "gone_s": (11.0, {"gone_s": 11.0}),
    "most_hosts": (13, {"most_hosts": 13}),
    "move_first": ("never", {"move_first": "never"}),
    "move_mib_s": (14.0, {"move_mib_s": 14.0}),
    "token_file": ("other-token", {"token": "said-in-other-token"}),
    "hosts_key_file": ("other-key", {"hosts_key": "said-in-other-key"}),
    "database_password_file": ("password", {"database.password": "said-in-password"}),
    "engine_file": ("engine.toml", {"engine.engine": "slurm"}),
    "alerts_file": ("alerts.toml", {"webhooks[0].name": "oncall"}),
}
AGENT: dict[str, tuple[Any, dict[str, Any]]] = {
    "id": ("host-b", {"libvirt.host_id": "host-b", "part.host_id": "host-b"}),
    "capacity": ("cpu_cores=2,memory_mib=3", {"part.capacity.cpu_cores": 2.0, "part.capacity.memory_mib": 3.0}),
    "url": ("http://127.0.0.3:1", {"part.url": "http://127.0.0.3:1"}),
    "listen": ("127.0.0.2:7999", {"part.url": "http://127.0.0.2:7999"}),
    "state_dir": (A, {"directories.state": A, "libvirt.adopted": A / "adopted.json", "journal": (A, False)}),
    "manager": ("http://127.0.0.3:1", {"journal": (Path("state"), True)}),
    "image_dir": (A, {"libvirt.image_dir": A}),
    "disk_dir": (A, {"libvirt.disk_dir": A, "directories.disks": A}),
    "templates": ((A,), {"libvirt.template_dirs": (A, PACKAGED)}),
    "image_prefix": ((A,), {"libvirt.image_prefixes": (A,)}),
    "save_dir": (A, {"libvirt.save_dir": A, "directories.saved": A}),
    "uri": ("test:///default", {"libvirt.uri": "test:///default"}),
    "migration_uri": ("qemu+tls://h/system", {"libvirt.migration_uri": "qemu+tls://h/system"}),
    "migration_listen": ("127.0.0.4", {"libvirt.migration_listen": "127.0.0.4"}),
    "migration_emulated": (True, {"libvirt.migration_emulated": True}),
    "accelerator": ("kvm", {"libvirt.accelerator": "kvm", "part.accelerator": "kvm"}),
    "acpi_verdict": (A, {"libvirt.acpi_verdict": A}),
    "cold_first": (True, {"libvirt.cold_first": True}),
    "overhead_mib": (2.0, {"part.vm_overhead_mib": 2.0, "part.emulated_overhead_mib": 2.0}),
    "reserve_mib": (3.0, {"part.reserve_mib": 3.0}),
}
AGENTS_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "manager_ca": (C, {"server_ca": C}),
    "certificate": (A, {"caller": KeyPair(A, B)}),
    "key": (B, {"caller": KeyPair(A, B)}),
}
#: What the agent is served with, by the names of `hostagent.service.serve`.
SERVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "listen": ("[::1]:7999", {"address": "::1", "port": 7999}),
    "token_file": (A, {"token_file": A}),
    "manager": ("http://127.0.0.3:1", {"manager": ("http://127.0.0.3:1",)}),
    "manager_token_file": (A, {"manager_token_file": A}),
    "manager_name": ("ours", {"manager_name": "ours"}),
    "metrics_port": (7999, {"given.options.metrics_port": 7999}),
    "tracing": (True, {"tracing": True}),
}
LOGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "log_level": ("error", {"level": "error"}),
    "log_json": (True, {"as_json": True}),
}
#: What no table here has: of the manager its database, the port of its metrics and its spans, which tests of its
#: processes give, and the CA and the rebalancer (test_daemon_options.py).
ELSEWHERE = {
    *("database", "ca_key", "next_ca_key", "metrics_port", "tracing"),
    *(name for name in ManagerOptions.model_fields if name.startswith("rebalance")),
}


def find(settings: Any, where: str) -> Any:
    """What stands there; ``[0]`` for the first of several."""
    name, first, rest = where.partition("[0]")
    found = attrgetter(name)(settings)
    return attrgetter(rest.removeprefix("."))(found[0]) if first and found else found


def check(before: Any, after: Any, expected: dict[str, Any]) -> None:
    assert {where: find(after, where) for where in expected} == expected
    assert all(find(before, where) != value for where, value in expected.items()), "that is the default"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the files that options name."""
    monkeypatch.chdir(tmp_path)
    for name in ("hosts.key", "token", "other-token", "other-key", "password"):
        write_private(tmp_path / name, f"said-in-{name}")
    write_private(tmp_path / "secret", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    (tmp_path / "engine.toml").write_text('engine = "slurm"\ndirectory = "/a"\nuser = "nobody"\n')
    entry = 'name = "oncall"\nurl = "http://127.0.0.1:1"\nsecret_file = "secret"\nevents = ["*"]\n'
    write_private(tmp_path / "alerts.toml", f"[[webhook]]\n{entry}")
    return tmp_path


@pytest.mark.parametrize("model", [ManagerOptions, HostAgentOptions])
def test_each_option_is_in_one_of_these_tables(model: type[DaemonOptions]) -> None:
    own = {**MANAGER, **LOGS} if model is ManagerOptions else {**AGENT, **AGENTS_CALLS, **SERVED, **LOGS}
    elsewhere = ELSEWHERE if model is ManagerOptions else set()
    assert model.model_fields.keys() - own.keys() - ACCESS.keys() - elsewhere == set()
    assert own.keys() - model.model_fields.keys() == set()


@pytest.mark.parametrize("model", [ManagerOptions, HostAgentOptions])
@pytest.mark.parametrize("name", ACCESS)
def test_an_option_of_access_arrives(model: type[DaemonOptions], name: str) -> None:
    value, expected = ACCESS[name]
    needed = {"token_file": A, "hosts_key_file": A, "database": "db", "id": "host-a", "capacity": "auto"}
    tls = {"tls_certificate": A, "tls_key": B} if name in ("tls_certificate", "tls_key", "client_ca") else {}
    words = {key: word for key, word in needed.items() if key in model.model_fields}
    plain = settings_of(collect(model, None, words).options, "127.0.0.1")
    check(plain, settings_of(collect(model, None, {**words, **tls, name: value}).options, "127.0.0.1"), expected)


@pytest.mark.parametrize("name", MANAGER)
def test_an_option_of_the_manager_arrives(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, expected = MANAGER[name]
    monkeypatch.setattr(configured, "engine_of", lambda engine: None)  # whose programs need not be here
    words = {"token_file": "token", "hosts_key_file": "hosts.key", "database": "db"}
    if name == "database_password_file":
        words["database"] = "postgresql:///ebbtide"

    def settings_with(given: dict[str, Any]) -> Any:
        return configured.settings_of_all(collect(ManagerOptions, None, {**words, **given}).options)[0]

    check(settings_with({}), settings_with({name: value}), expected)


@pytest.mark.parametrize("name", AGENT)
async def test_an_option_of_the_host_agent_arrives(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In what the agent is put together from; what blocks or asks libvirt is left out."""
    value, expected = AGENT[name]
    made: dict[str, Any] = {}

    def note(what: str) -> Any:
        return lambda *given: made.update({what: given[0] if len(given) == 1 else given}) or given[0]

    def host(part: Any, _hypervisor: Any, _journal: Any, directories: Any, boot: Any) -> None:
        made.update(part=part, directories=SimpleNamespace(**directories))

    monkeypatch.setattr(running, "LibvirtHypervisor", note("libvirt"))
    monkeypatch.setattr(running, "Journal", note("journal"))
    monkeypatch.setattr(running, "Host", host)
    monkeypatch.setattr(running, "Agent", note("agent"))
    monkeypatch.setattr(TemplateLibrary, "load", lambda *given: None)
    monkeypatch.setattr(running, "probe_accelerator", lambda *given: SimpleNamespace(kind="qemu", reason=""))
    words = {"id": "host-a", "capacity": "cpu_cores=1,memory_mib=1", "token_file": "token", "state_dir": "state"}

    async def settings_with(given: dict[str, Any]) -> Any:
        await running._agent(collect(HostAgentOptions, None, {**words, **given}).options, AccessSettings())
        return SimpleNamespace(**made)

    check(await settings_with({}), await settings_with({name: value}), expected)


@pytest.mark.parametrize("name", AGENTS_CALLS)
def test_an_option_of_the_host_agents_calls_arrives(name: str) -> None:
    value, expected = AGENTS_CALLS[name]
    words = {"id": "host-a", "capacity": "auto", "token_file": A, "certificate": A, "key": B}
    plain = {key: word for key, word in words.items() if key not in ("certificate", "key")}
    before, after = (
        access_of(collect(HostAgentOptions, None, given).options) for given in (plain, {**words, name: value})
    )
    check(before, after, expected)


@pytest.mark.parametrize("name", SERVED)
async def test_an_option_that_the_host_agent_is_served_with_arrives(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value, expected = SERVED[name]
    made: dict[str, Any] = {}

    async def serve_as(*args: Any, **named: Any) -> None:
        bound = signature(service.serve).bind(*args, **named)
        bound.apply_defaults()
        made.update(bound.arguments)

    async def agent_of(*_: Any) -> None:
        return None

    def exporting_as(wanted: bool, *_: Any, **__: Any) -> Any:
        made.update(tracing=wanted)
        return nullcontext()

    monkeypatch.setattr(running, "serve", serve_as)
    monkeypatch.setattr(running, "exporting", exporting_as)
    monkeypatch.setattr(running, "_agent", agent_of)
    monkeypatch.setattr(running, "alone_to_the_end_in", lambda directory: None)
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", lambda *_: None)
    words = {"id": "host-a", "capacity": "cpu_cores=1,memory_mib=1", "token_file": "token"}

    async def served_with(given: dict[str, Any]) -> Any:
        await running._serve(collect(HostAgentOptions, None, {**words, **given}), AccessSettings())
        return SimpleNamespace(**made)

    check(await served_with({}), await served_with({name: value}), expected)


@pytest.mark.parametrize("daemon", [cluster_manager.main, hostagent.main])
@pytest.mark.parametrize("name", LOGS)
def test_an_option_of_the_log_arrives(daemon: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, expected = LOGS[name]

    class Configured(Exception):
        pass

    def configure(*args: Any) -> None:
        raise Configured(signature(configure_logs).bind(*args).arguments)

    monkeypatch.setattr(logs, "configure_logs", configure)
    monkeypatch.setattr(daemon.signal, "signal", lambda *_: None)
    monkeypatch.setattr(daemon.os, "umask", lambda mask: None)
    model = ManagerOptions if daemon is cluster_manager.main else HostAgentOptions
    words = {"token_file": A, "hosts_key_file": A, "database": "db", "id": "host-a", "capacity": "auto"}
    words = {key: word for key, word in words.items() if key in model.model_fields}

    def configured_with(given: dict[str, Any]) -> Any:
        monkeypatch.setattr(daemon, "options_of", lambda _: collect(model, None, {**words, **given}))
        with pytest.raises(Configured) as stopped:
            daemon.main()
        return SimpleNamespace(**stopped.value.args[0])

    check(configured_with({}), configured_with({name: value}), expected)
