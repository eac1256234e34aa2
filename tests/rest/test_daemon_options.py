"""Options of the daemons from file, environment and command line: who wins, and what is said of what cannot be."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tomllib
from pathlib import Path

import pytest
import structlog

import cluster_manager.main as manager
import hostagent.main as host_agent
from cluster_manager import configured, privileges
from cluster_manager.defaults import RebalancingRules
from cluster_manager.options import ManagerOptions
from ebbtide.cli.certificates import Authority, begin_rollover, finish_rollover
from ebbtide.cli.commands import config
from ebbtide.cli.commands.options import Printing
from ebbtide.deflation.placement.rebalance_pace import RebalancePace
from ebbtide.deflation.resources import ResourceVector
from ebbtide.lab.state import write_private
from ebbtide.messages.hosts import capacity_of
from ebbtide.rest.errors import AccessError, OptionsError
from ebbtide.rest.options import DaemonOptions, collect, example_of, read_options
from hostagent.options import HostAgentOptions, access_of
from tests.rest.pki import Pki

MODELS: list[type[DaemonOptions]] = [ManagerOptions, HostAgentOptions]
NEEDED = 'hosts_key_file = "hosts.key"\ndatabase = "m.sqlite"\ntoken_file = "token"\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("hosts.key", "token"):
        write_private(tmp_path / name, f"secret-of-{name}")
    return tmp_path / "manager.toml"


def said_of(path: Path) -> str:
    with pytest.raises(OptionsError) as refused:
        collect(ManagerOptions, path, {})
    return str(refused.value)


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(NEEDED + "seed = 1\nkeep_days = 1\nmost_hosts = 1\n")
    monkeypatch.setenv("EBB_MANAGER_SEED", "2")
    monkeypatch.setenv("EBB_MANAGER_KEEP_DAYS", "2")
    given = read_options(ManagerOptions, ["--config", str(file), "--seed", "3"], "", "")
    assert (given.options.seed, given.options.keep_days, given.options.most_hosts) == (3, 2, 1)
    assert given.origins["seed"] == "--seed"
    assert given.origins["keep_days"] == "EBB_MANAGER_KEEP_DAYS"
    assert given.origins["most_hosts"] == f"{file}:6: most_hosts"


def test_the_environment_may_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(NEEDED + "seed = 7\n")
    monkeypatch.setenv("EBB_MANAGER_CONFIG", str(file))
    assert read_options(ManagerOptions, [], "", "").options.seed == 7


def test_what_may_be_given_again_is_an_array_in_the_file_and_has_commas_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, urls = tmp_path / "hostagent.toml", ("https://a:1", "https://b:2")
    words = {"id": "host-a", "capacity": "auto", "token_file": "t"}
    path.write_text('manager = ["https://a:1", "https://b:2"]\n')
    assert collect(HostAgentOptions, path, words).options.manager == urls
    path.write_text("")
    monkeypatch.setenv("EBB_HOSTAGENT_MANAGER", "https://a:1, https://b:2")
    assert collect(HostAgentOptions, path, words).options.manager == urls
    again = ["--manager", "https://a:1", "--manager", "https://b:2"]
    needed = ["--id", "host-a", "--capacity", "auto", "--token-file", "t"]
    assert read_options(HostAgentOptions, [*needed, *again], "", "").options.manager == urls


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seed = -3", "4: seed: input should be greater than or equal to 0, but is -3"),
        ('keep_days = "long"', "4: keep_days: input should be a valid number"),
        ("metrics_port = false", "4: metrics_port: must not be true or false, but is False"),
        ("keep_events = true", "4: keep_events: must not be true or false, but is True"),
        ("keep_days = true", "4: keep_days: must not be true or false, but is True"),
        ("url = false", "4: url: must not be true or false, but is False"),
        ("sede = 3", "4: sede: there is no such option"),
        ("[store]\nurl = 3", "4: store: there is no such option"),
        ("seed = ", "4: Invalid value"),
        ("seed = 1\nseed = 2", "5: Cannot overwrite a value"),
        ('policy = "worst"', "4: policy: input should be 'best-fit', 'first-fit' or 'two-choices', but is 'worst'"),
    ],
)
def test_a_wrong_line_is_named_by_file_line_and_key(file: Path, line: str, said: str) -> None:
    file.write_text(NEEDED + line + "\n")
    assert said_of(file).startswith(f"{file}:{said}")


def test_all_that_is_wrong_is_said_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("seed = -3\n")
    monkeypatch.setenv("EBB_MANAGER_GONE_S", "x")
    assert [sentence.split(": ")[0] for sentence in said_of(file).splitlines()] == [
        "--hosts-key-file is missing",
        "--database is missing",
        f"{file}:1",
        "EBB_MANAGER_GONE_S",
    ]


def test_options_that_contradict_each_other_are_named_where_they_stand(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(NEEDED + 'listen = "192.0.2.1:7100"\n')
    assert manager.main(["--config", str(file)]) == 2
    structlog.reset_defaults()
    assert capsys.readouterr().err.startswith(f"ebb-manager: {file}:4: listen: --listen 192.0.2.1 can be reached from")
    assert not (file.parent / "m.sqlite").exists()


@pytest.mark.parametrize(
    ("url", "uri", "listen", "fits"),
    [
        ("https://10.0.0.2:7101", "qemu+tls://10.0.0.2/system", "10.0.0.2", True),
        ("https://10.0.0.2:7101", "qemu+tls://host-b.example/system", "10.0.0.2", False),
        ("https://10.0.0.2:7101", "qemu+tls://10.0.0.2/system", "127.0.0.1", False),
        ("https://10.0.0.2:7101", "qemu+unix:///system?socket=/run/b.sock", "127.0.0.1", False),
        ("http://127.0.0.1:7101", "qemu+unix:///system?socket=/run/b.sock", "127.0.0.1", True),
    ],
)
def test_addresses_of_migrations_that_no_manager_sends_to_are_an_error(
    url: str, uri: str, listen: str, fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "hostagent.toml"
    path.write_text(f'migration_uri = "{uri}"\nmigration_listen = "{listen}"\nurl = "{url}"\n')
    words = {"id": "host-a", "capacity": "auto", "token_file": "t"}
    options = collect(HostAgentOptions, path, words).options
    with contextlib.nullcontext() if fits else pytest.raises(AccessError, match=r"^--migration-uri \S+ and"):
        access_of(options)


@pytest.mark.parametrize("name", ["disk_dir", "image_dir"])
@pytest.mark.parametrize(("directory", "fits"), [("/srv/vms", True), ("vms", False), ("/srv/my disks", False)])
def test_directories_that_no_other_host_could_be_told_of_are_an_error_where_vms_move_here(
    name: str, directory: str, fits: bool, tmp_path: Path
) -> None:
    words = {"id": "host-a", "capacity": "auto", "token_file": "t", name: directory}
    path = tmp_path / "hostagent.toml"
    path.write_text("")
    access_of(collect(HostAgentOptions, path, words).options)
    words["migration_uri"] = "qemu+unix:///system?socket=/run/b.sock"
    says = rf"^--{name.replace('_', '-')} {directory} must be an absolute path"
    with contextlib.nullcontext() if fits else pytest.raises(AccessError, match=says):
        access_of(collect(HostAgentOptions, path, words).options)


@pytest.mark.parametrize(
    ("capacity", "said"),
    [
        ("cpu_cores=14", "memory_mib must be given, and above 0"),
        ("cpu_cores=0,memory_mib=0", "cpu_cores must be given, and above 0"),
        ("cpu_cores=6,cpu_cores=2,memory_mib=4", "cpu_cores is given twice"),
        ("cpu_cores=6,memory_mib=17179869184", "memory_mib must be at most 1e+09"),
        ("cpu_cores=6,memory_mib=4096,disk=1", "disk is no component"),
    ],
)
def test_a_capacity_that_no_host_can_have_is_refused_with_its_component(
    tmp_path: Path, capacity: str, said: str
) -> None:
    path = tmp_path / "hostagent.toml"
    path.write_text(f'id = "host-a"\ntoken_file = "t"\ncapacity = "{capacity}"\n')
    with pytest.raises(OptionsError, match=rf":3: capacity: {re.escape(said)}"):
        collect(HostAgentOptions, path, {})


def test_a_capacity_may_have_spaces() -> None:
    assert capacity_of("cpu_cores = 6, memory_mib = 4096") == ResourceVector(cpu_cores=6, memory_mib=4096)


TAKEN = "[Errno 98] Address already in use (while attempting to bind on address {!r})"


@pytest.mark.parametrize(
    ("sentence", "line"),
    [
        (TAKEN.format(("127.0.0.1", 7101)), 3),
        (TAKEN.format(("127.0.0.1", 9101)), 5),
        (TAKEN.format(("127.0.0.1", 91013)), None),
        ("[Errno 13] Permission denied: '/srv/agent/state.json'", 4),
        ("[Errno 13] Permission denied: '/srv/agents'", None),
        ("nothing has gone 13 times, 0 or 9101", None),
        ("cannot read the token file t: No such file or directory", 9),
        ("what is t is not said", None),
    ],
)
def test_a_sentence_is_about_the_option_whose_value_it_has_and_not_by_chance(
    tmp_path: Path, sentence: str, line: int | None
) -> None:
    file = tmp_path / "hostagent.toml"
    file.write_text(
        'id = "a"\nurl = ""\nlisten = "127.0.0.1:7101"\nstate_dir = "/srv/agent"\nmetrics_port = 9101\n'
        'connections = 13\noverhead_mib = 0\ncapacity = "auto"\ntoken_file = "t"\n'
    )
    said = collect(HostAgentOptions, file, {}).said(sentence)
    assert said == sentence if line is None else re.match(rf"{re.escape(str(file))}:{line}: \w+: ", said)


@pytest.mark.parametrize(
    ("line", "words", "sentence", "named"),
    [
        ('listen = "10.0.0.12:7101"', {}, TAKEN.format(("10.0.0.12", 7101)), True),
        ('migration_listen = "10.0.0.12"', {"listen": "10.0.0.12:7101"}, TAKEN.format(("10.0.0.12", 7101)), False),
        ('migration_listen = "127.0.0.1"', {}, TAKEN.format(("127.0.0.1", 7101)), False),
        ('metrics_port = 9101\nmigration_listen = "127.0.0.1"', {}, TAKEN.format(("127.0.0.1", 9101)), True),
        ('disk_dir = "/srv"', {"state_dir": "/srv/agent"}, "[Errno 13] Permission denied: '/srv/agent'", False),
        ('disk_dir = "/srv"', {"uri": "qemu:///system"}, "--uri qemu:///system of /srv does not answer", False),
        ('id = "host-a"', {}, "[Errno 13] Permission denied: '/srv/host-a/state.json'", False),
        ('log_level = "error"', {}, "an error", False),
        ('accelerator = "qemu"', {}, "qemu:///system does not answer", False),
    ],
)
def test_an_address_that_is_taken_is_that_of_the_option_that_has_all_of_it_also_where_that_stands_in_no_file(
    tmp_path: Path, line: str, words: dict[str, str], sentence: str, named: bool
) -> None:
    file = tmp_path / "hostagent.toml"
    file.write_text(line + "\n")
    needed = {"capacity": "auto", "token_file": "t"} | ({} if line.startswith("id") else {"id": "a"})
    said = collect(HostAgentOptions, file, needed | words).said(sentence)
    assert said == (f"{file}:1: {line.split()[0]}: {sentence}" if named else sentence)


def test_the_manager_names_the_option_of_an_address_that_is_taken(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(NEEDED + f'listen = "127.0.0.1:{port}"\n')
        assert manager.main(["--config", str(file)]) == 1
    structlog.reset_defaults()
    assert f"ebb-manager: {file}:4: listen: [Errno 98] Address already in use" in capsys.readouterr().err


def test_an_address_of_version_6_is_found_in_a_sentence_too(tmp_path: Path) -> None:
    file = tmp_path / "hostagent.toml"
    file.write_text('listen = "[::1]:7101"\nid = "a"\ncapacity = "auto"\ntoken_file = "t"\n')
    said = collect(HostAgentOptions, file, {}).said(TAKEN.format(("::1", 7101, 0, 0)))
    assert said.startswith(f"{file}:1: listen: ")


def test_a_host_agent_with_a_wrong_file_ends_before_it_begins(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text('id = "host-a"\ncapacity = "much"\ntoken_file = "token"\nstate_dir = "state"\n')
    monkeypatch.setattr("sys.argv", ["ebb-hostagent", "--config", str(file)])
    with pytest.raises(SystemExit) as ended:
        host_agent.main()
    assert ended.value.code == 2
    said = f"ebb-hostagent: {file}:2: capacity: 'much' is not COMPONENT=NUMBER, as in cpu_cores=6,memory_mib=4096, but"
    assert capsys.readouterr().err == f"{said} is 'much'\n"
    assert not (file.parent / "state").exists()


@pytest.mark.parametrize("model", MODELS)
def test_the_example_names_every_option_at_its_default(model: type[DaemonOptions], tmp_path: Path) -> None:
    text = example_of(model)
    values = tomllib.loads(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert list(values) == list(model.model_fields)
    for name, described in model.model_fields.items():
        if not described.is_required() and described.default is not None:
            default = described.default
            said = tuple(values[name]) if isinstance(default, tuple) else type(default)(values[name])
            assert said == default


def test_the_check_says_what_the_daemon_would(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(privileges, "SERVICE_USER", "nobody-of-this-name")
    monkeypatch.setattr(privileges, "SYSTEMD", Path("/nowhere"))
    file.write_text(NEEDED)
    config.check(file, to=Printing())
    assert capsys.readouterr().out == f"{file}: the manager can start with it as user {file.owner()}\n"
    file.write_text(NEEDED.replace('"token"', '"nothing"'))
    with pytest.raises(AccessError, match=rf"{re.escape(str(file))}:3: token_file: --token-file: cannot read"):
        config.checked(config.Daemon.MANAGER, file)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("token_file", r":3: token_file: cannot read"),
        ("manager_token_file", r":5: manager_token_file: cannot read"),
        ("templates", r"the template directory .*nothing is not there"),
    ],
)
def test_the_check_reads_what_the_host_agent_reads(tmp_path: Path, named: str, said: str) -> None:
    file = tmp_path / "hostagent.toml"
    for name in ("token", "reports"):
        (tmp_path / name).write_text(f"{name}-of-this-host\n")
        (tmp_path / name).chmod(0o600)
    options = {"token_file": "token", "manager_token_file": "reports"}

    def write() -> None:
        file.write_text(
            f"""id = "host-a"
capacity = "cpu_cores=2,memory_mib=2048"
token_file = "{tmp_path / options["token_file"]}"
manager = ["http://127.0.0.1:7100"]
manager_token_file = "{tmp_path / options["manager_token_file"]}"
templates = {[str(tmp_path / options["templates"])] if "templates" in options else []}
"""
        )

    write()
    config.checked(config.Daemon.HOSTAGENT, file)
    options[named] = "nothing"
    write()
    with pytest.raises(AccessError, match=said):
        config.checked(config.Daemon.HOSTAGENT, file)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('url = "127.0.0.1:17201"', r":4: url: --url 127\.0\.0\.1:17201 must be a scheme, a host and a port"),
        ('listen = "::1:7101"', r":4: listen: .*--url http://::1:7101 must be a scheme, a host and a port"),
        ('manager = ["https://"]', r":4: manager: --manager https:// must be like https://"),
        ('manager = ["https:/h:7100"]', r":4: manager: --manager https:/h:7100 must be like https://"),
        ('manager = ["127.0.0.1:7100"]', r":4: manager: --manager 127\.0\.0\.1:7100 must be like https://"),
        ("overhead_mib = 2e6", r":4: overhead_mib: input should be less than or equal to 1000000"),
        ("reserve_mib = 99999999", r":4: reserve_mib: --reserve-mib 1e\+08 leaves nothing of this machine's memory"),
    ],
)
def test_the_check_refuses_what_the_host_agent_would_end_with(tmp_path: Path, line: str, said: str) -> None:
    write_private(tmp_path / "token", "token-of-this-host")
    file = tmp_path / "hostagent.toml"
    file.write_text(f'id = "host-a"\ncapacity = "auto"\ntoken_file = "{tmp_path / "token"}"\n{line}\n')
    with pytest.raises(AccessError, match=said):
        config.checked(config.Daemon.HOSTAGENT, file)


@pytest.mark.parametrize(("line", "noted"), [('disk_dir = "/home/vms"', "disk_dir /home/vms"), ("", None)])
def test_the_check_names_a_directory_in_which_the_packaged_service_may_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, noted: str | None
) -> None:
    write_private(tmp_path / "token", "token-of-this-host")
    file = tmp_path / "hostagent.toml"
    file.write_text(f'id = "host-a"\ncapacity = "auto"\ntoken_file = "{tmp_path / "token"}"\n{line}\n')
    config.check(file, to=Printing())
    printed = capsys.readouterr()
    assert "the hostagent can start with it" in printed.out
    assert printed.err.startswith(f"note: {file}: {noted}: the packaged service") if noted else not printed.err


def test_the_check_looks_for_the_directory_of_the_store(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "SERVICE_USER", "nobody-of-this-name")
    monkeypatch.setattr(privileges, "SYSTEMD", Path("/nowhere"))
    file.write_text(NEEDED.replace("m.sqlite", "not/there/m.sqlite"))
    with pytest.raises(AccessError, match=r":2: database: --database: the directory not/there is not there"):
        config.checked(config.Daemon.MANAGER, file)
    monkeypatch.setattr(config, "SERVICE_DIRECTORY", Path("not/there"))
    config.checked(config.Daemon.MANAGER, file)


def test_a_task_user_whom_nobody_knows_is_warned_of_and_keeps_nothing_down(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(privileges, "SERVICE_USER", "nobody-of-this-name")
    monkeypatch.setattr(privileges, "SYSTEMD", Path("/nowhere"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    engine = file.parent / "engine.toml"
    engine.write_text('engine = "slurm"\ndirectory = "/srv"\nuser = "nobody"\n[users]\nci = "nobody-knows"\n')
    file.write_text(NEEDED + 'engine_file = "engine.toml"\n')
    said = "there is no user nobody-knows on this machine: tasks that are to run as nobody-knows wait until there is"
    settings, _ = configured.settings_of_all(collect(ManagerOptions, file, {}).options)
    assert (settings.engine.users, settings.notes) == ({"ci": "nobody-knows"}, (said,))
    config.check(file, to=Printing())
    printed = capsys.readouterr()
    assert "the manager can start with it" in printed.out
    assert printed.err == f"note: {file}: {said}\n"


@pytest.mark.parametrize(
    ("lines", "url", "noted"),
    [
        ('listen = "0.0.0.0:7100"', None, ["--listen 0.0.0.0"]),
        ('listen = "[::]:7100"', None, ["--listen ::"]),
        ('listen = "[::ffff:0.0.0.0]:7100"', None, ["--listen ::ffff:0.0.0.0"]),
        ('listen = "0.0.0.0:7100"\nurl = "https://0.0.0.0:7100"', None, ["--url 0.0.0.0"]),
        ('url = "https://10.0.0.1:71000"', None, ["--url https://10.0.0.1:71000"]),
        ('url = "https://"', None, ["--url https://"]),
        ('url = "https://h/x"', None, ["--url https://h/x"]),
        ('url = "https://h?y"', None, ["--url https://h?y"]),
        ('url = "http://[::1"', None, ["--url http://[::1"]),
        ('url = "https://fd00::5:7100"', None, ["--url https://fd00::5:7100"]),
        ('listen = "0.0.0.0:7100"\nurl = "https://manager:7100/"', "https://manager:7100", []),
        ('listen = "0.0.0.0:7100"\nurl = "https://ebb_manager"', "https://ebb_manager", []),
        ('listen = "[fd00::5]:7100"', "https://[fd00::5]:7100", []),
        ('listen = "fd00::5:7100"', "https://[fd00::5]:7100", []),
        ('listen = "192.0.2.1:7100"', "https://192.0.2.1:7100", []),
        ('listen = "192.0.2.1:0"', None, []),
    ],
)
def test_a_manager_at_no_address_that_others_could_call_starts_and_says_so(
    file: Path, lines: str, url: str | None, noted: list[str]
) -> None:
    pki = Pki(file.parent / "tls")
    pair = pki.pair("ebb-manager")
    tls = {"tls_certificate": pair.certificate, "tls_key": pair.key, "client_ca": pki.ca}
    file.write_text(NEEDED + "".join(f'{name} = "{path}"\n' for name, path in tls.items()) + lines + "\n")
    settings, _ = configured.settings_of_all(collect(ManagerOptions, file, {}).options)
    assert settings.url == url
    assert [note.partition(" is no address")[0] for note in settings.notes] == noted


def test_a_url_of_another_kind_is_refused_where_it_stands(file: Path) -> None:
    file.write_text(NEEDED + 'url = "h:1"\n')
    with pytest.raises(AccessError, match=r":4: url: --url h:1 must begin with http:// or https://"):
        config.checked(config.Daemon.MANAGER, file)


def test_a_ca_that_was_followed_leaves_a_manager_that_starts_with_the_options_of_before_and_says_so(
    file: Path,
) -> None:
    tls = file.parent / "tls"
    pair = Pki(tls).pair("ebb-manager")
    begin_rollover(tls)
    paths = {"tls_certificate": pair.certificate, "tls_key": pair.key, "client_ca": tls / "ca.pem"}
    paths |= {"ca_key": tls / "ca.key", "next_ca_key": tls / "next-ca.key"}
    file.write_text(NEEDED + "".join(f'{name} = "{path}"\n' for name, path in paths.items()))

    def noted() -> tuple[str, ...]:
        return configured.settings_of_all(collect(ManagerOptions, file, {}).options)[0].notes

    assert noted() == ()
    (tls / "next-ca.key").rename(tls / "kept")
    with pytest.raises(AccessError, match=r"cannot read .*next-ca\.key: No such file"):
        noted()
    (tls / "kept").rename(tls / "next-ca.key")
    following = Authority.following(tls, 1)
    assert following is not None
    kept = (tls / "next-ca.key").read_text()
    finish_rollover(tls, following, 1)
    (note,) = noted()
    assert note.startswith(f"--next-ca-key {tls}/next-ca.key is gone")
    assert note.endswith("remove next_ca_key from the options")
    # As at another manager, which is given the files of the one where it was done.
    write_private(tls / "next-ca.key", kept)
    (note,) = noted()
    assert note.startswith(f"--next-ca-key {tls}/next-ca.key is the key of the present CA")
    assert note.endswith("remove next_ca_key from the options")


def test_the_rebalancer_is_off_and_has_the_pace_that_the_file_says(file: Path) -> None:
    file.write_text(NEEDED + "rebalance_most_moves = 5\n")
    settings, _ = configured.settings_of_all(collect(ManagerOptions, file, {}).options)
    assert settings.rebalancing is None
    file.write_text(NEEDED + "rebalance = true\n")
    settings, _ = configured.settings_of_all(collect(ManagerOptions, file, {}).options)
    assert settings.rebalancing == RebalancingRules()
    pace = {"hold_s": 1.5, "rest_s": 2, "longest_s": 3, "least_worth": 4}
    others = {"every_s": "60", "most_moves": "5", "bandwidth_mib_s": "6", "copy_disks": "true"}
    rows = [f"rebalance_{name} = {value}" for name, value in (*pace.items(), *others.items())]
    file.write_text(NEEDED + "\n".join(["rebalance = true", *rows]))
    settings, _ = configured.settings_of_all(collect(ManagerOptions, file, {}).options)
    assert settings.rebalancing == RebalancingRules(RebalancePace(**pace), 60, 5, True, 6)
    file.write_text(NEEDED + "rebalance_most_moves = 0\n")
    assert said_of(file) == f"{file}:4: rebalance_most_moves: input should be greater than or equal to 1, but is 0"
