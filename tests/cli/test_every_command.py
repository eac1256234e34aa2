"""Each command: its help, what it prints for people and for programs, and what it says of a thing that is missing.

Those that need real guests are held to the same in tests/guests/test_lab_commands.py.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import pytest_asyncio
import typer
import yaml
from typer.testing import CliRunner

from cluster_manager.authority import CertificateAuthority
from ebbtide.cli import main
from ebbtide.cli.main import COMMANDS, app
from ebbtide.cli.schemas import DOCUMENTS, schema_of
from ebbtide.errors import EbbError
from hostagent.state.journal import Journal
from tests.cli.running import Running
from tests.cli.test_conformance_command import EXAMPLE, TOKEN, agent_of
from tests.cli.test_doctor_vm import DISK, DOMAIN
from tests.simulator.experiments.places import put
from tests.waiting import until

ROOT: Final = Path(__file__).resolve().parents[2]
MADE: Final = "vm create NEW --cpu-cores 0.5 --memory-mib 300 --minimum-cpu-cores 0.2"
SWEPT: Final = "sim run DIR/lines.toml --results DIR/out-NEW --workers 1 --set seeds=1 --set x=[1]"
#: A manager that does not answer is what is missing to those that ask it and name nothing.
NO_MANAGER: Final = "--manager http://127.0.0.1:9 --token-file DIR/token"
#: They name nothing that could be missing, or make it.
NAMELESS: Final = {"doctor", "lab down", "token new", "context list", "context add"}
#: They need real guests.
GUESTS: Final = {"lab up", "lab status", "lab image build", "demo", "guest enable"}


@dataclass(frozen=True)
class Call:
    """How a command is called; NEW is a name that no earlier call used, DIR a directory.

    :param before: what has to be done before it.
    :param missing: its words where something is missing; default: the words with ``not-there`` for its name.
    :param code: with what it ends then.
    :param exit_code: with what it ends otherwise.
    """

    words: str = ""
    before: tuple[str, ...] = ()
    missing: str | None = None
    code: int = 3
    exit_code: int | None = 0


def local(words: str, missing: str, code: int = 1, *before: str) -> Call:
    return Call(words, before, missing, code)


LISTED: Final = Call(missing=NO_MANAGER, code=1)
CALLS: Final[dict[str, Call]] = {
    "vm list": LISTED,
    "vm show": Call("base"),
    "vm create": Call("NEW --cpu-cores 0.5 --memory-mib 300", (), "-f DIR/none.yaml", 1),
    "vm label": Call("base a=b"),
    "vm delete": Call("NEW --yes", (MADE,)),
    "vm start": Call("NEW", (MADE, "vm stop NEW")),
    "vm stop": Call("NEW", (MADE,)),
    "vm shrink": Call("NEW --cpu-cores 0.3", (MADE,)),
    "vm grow": Call("NEW", (MADE, "vm shrink NEW --cpu-cores 0.3")),
    "vm target": Call("NEW --cpu-cores 0.3", (MADE,)),
    "vm resize": Call("NEW --minimum-cpu-cores 0.3", (MADE,)),
    # There is one host only.
    "vm migrate": Call("NEW --lose-disk", (MADE,), exit_code=1),
    "vm explain": Call("base"),
    "vm history": Call("base"),
    "vm doctor": local("web --uri test://DIR/node.xml", "not-there --uri test://DIR/node.xml"),
    "vm adopt": Call("NEW --host host-a --minimum-cpu-cores 0.1 --minimum-memory-mib 200", code=1),
    "vm release": Call("NEW --yes", ("vm adopt NEW --host host-a --minimum-cpu-cores 0.1 --minimum-memory-mib 200",)),
    "host list": LISTED,
    "host show": Call("host-a"),
    "host history": Call("host-a"),
    "host label": Call("host-a rack=r7"),
    "host invite": Call("NEW", (), NO_MANAGER, 1),
    "host uninvite": LISTED,
    "host pause": Call("host-a", ("host resume host-a",)),
    "host resume": Call("host-a"),
    "host drain": Call("host-a", ("host resume host-a",)),
    "host config": Call("host-a"),
    "host undeflate": Call("host-a", ("host resume host-a",)),
    "host forget": Call("host-NEW --yes"),
    # Any id can be revoked, known or not.
    "host revoke": Call("host-NEW --yes", (), f"not-there {NO_MANAGER} --yes", 1),
    "host templates": Call("host-a"),
    "host epoch": local("--state-dir DIR", "--state-dir DIR/none"),
    "host tokens": local("host-b --key-file DIR/key-NEW --directory DIR", "host-b --key-file DIR/none/key"),
    "task submit": Call("NEW true", (), f"NEW {NO_MANAGER} true", 1),
    "task list": LISTED,
    "task show": Call("work"),
    "task output": Call("work", ("wait task work --for running",)),
    "task explain": Call("work"),
    "task cancel": Call("NEW", ("task submit NEW sleep 60",)),
    "task engine": LISTED,
    "task acquirer": LISTED,
    "machine list": LISTED,
    "machine show": Call("base"),
    "machine changes": LISTED,
    "machine calibration": LISTED,
    "plan list": LISTED,
    "plan show": Call("FIRST"),
    "plan cancel": Call("NEW"),
    "plan rebalance": Call("--dry-run", (), f"--dry-run {NO_MANAGER}", 1),
    "event list": LISTED,
    "top": Call("--once", (), f"--once {NO_MANAGER}", 1),
    "apply": Call("-f DIR/vms.yaml", (), "-f DIR/none.yaml", 1),
    "wait vm": Call("base --for running"),
    "wait host": Call("host-a --for ready"),
    "wait task": Call("NEW --for over", ("task submit NEW sleep 60", "task cancel NEW")),
    "context add": Call("NEW --manager https://x --token-file DIR/token"),
    "context list": Call(),
    "context show": Call("lab", (), "not-there"),
    "context use": Call("lab", (), "not-there"),
    "context remove": Call("NEW", ("context add NEW --manager https://x --token-file DIR/token",), "not-there"),
    "health": LISTED,
    "whoami": LISTED,
    # What is missing on a machine makes it end with 1; it is printed all the same.
    "doctor": Call(exit_code=None),
    "conformance": local("AGENT --token-file DIR/agent-token", "AGENT --token-file DIR/none"),
    "backup": Call("DIR/NEW.backup", (), "DIR/none/backup", 1),
    "openapi": LISTED,
    "certificates": local("DIR/tls-NEW", "/proc/none/tls"),
    "ca next": local("DIR/tls-NEW", "DIR/none", 1, "certificates DIR/tls-NEW"),
    "ca show": LISTED,
    "ca finish": Call("DIR/tls-NEW", ("certificates DIR/tls-NEW", "ca next DIR/tls-NEW"), "DIR/none", 1),
    "token new": Call("--role operator --name ci"),
    "config check": local("DIR/hostagent.toml", "DIR/none.toml"),
    "config example": local("manager", "not-there", 2),
    "lab down": Call(),
    "sim inputs": local(f"{ROOT}/tests/simulator/data/azure_derived.csv.gz", "DIR/none.csv"),
    "sim run": local(SWEPT.removeprefix("sim run "), "DIR/none.toml"),
    "sim show": local("DIR/out-NEW", "DIR/none", 1, SWEPT),
    "sim compare": local("DIR/out-NEW DIR/out-NEW", "DIR/out-NEW DIR/none", 1, SWEPT),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files that the calls name."""
    made = tmp_path_factory.mktemp("commands")
    put(made)
    for name, text in (("token", "secret"), ("agent-token", TOKEN)):
        (made / name).write_text(text)
        (made / name).chmod(0o600)
    (made / "hostagent.toml").write_text(
        f'id = "host-a"\ncapacity = "cpu_cores=1,memory_mib=512"\ntoken_file = "{made}/token"\n'
    )
    (made / "node.xml").write_text(f"<node>{DOMAIN.format(name='ebb-host-a.web', vcpus=4, devices=DISK)}</node>")
    (made / "vms.yaml").write_text("name: base\nnominal: {cpu_cores: 0.5, memory_mib: 300}\n")
    Journal(made).raise_epoch(3)
    return made


@dataclass
class Caller:
    """Calls commands of one manager, each in its own words."""

    running: Running
    directory: Path
    names: dict[str, str]
    numbers: int = 0

    def filled(self, words: str, new: str) -> list[str]:
        names = {"DIR": str(self.directory), "NEW": new, **self.names}
        for word, value in names.items():
            words = words.replace(word, value)
        return shlex.split(words)

    async def run(self, words: str, new: str, *more: str) -> Any:
        argv = self.filled(words, new)
        if asks_a_manager(argv) and "--manager" not in argv:
            at = next((at for at, word in enumerate(argv) if word in ("true", "sleep")), len(argv))
            argv[at:at] = self.running.options()
        at = next((at for at, word in enumerate(argv) if word in ("true", "sleep")), len(argv))
        argv[at:at] = more
        return await asyncio.to_thread(CliRunner().invoke, app, argv)

    async def prepared(self, words: str) -> str:
        """What a command cannot do itself is there for it; a name of its own."""
        self.numbers += 1
        new, lab = f"x{self.numbers}", self.running.lab
        manager = lab.cluster.manager
        assert manager is not None
        if words in ("vm adopt", "vm release"):
            await self.running.add_domain(new)
        if words in ("host forget", "host revoke"):
            await lab.add_old_host(f"host-{new}")
        if words == "plan cancel":
            assert await manager.hosts.locks.hold("another plan", "host-a")
            body = {"name": new, "nominal": {"cpu_cores": 0.5, "memory_mib": 300.0}}
            assert (await lab.cluster.call("POST", "/v1/vms", json={"request_id": new, "vm": body}))[0] == 202
        for line in CALLS[words].before:
            done = await self.run(line, new)
            assert done.exit_code == 0, (line, done.output, done.exception)
        if words == "ca finish":
            tls = self.directory / f"tls-{new}"
            authority = CertificateAuthority.load(tls / "ca.pem", tls / "ca.key", None, tls / "next-ca.key")
            manager.enrolments._authority = authority
            manager.enrolments._shown = dict.fromkeys(manager.hosts.ids(), (b"", True))
        return new

    async def cleared(self, words: str, new: str) -> None:
        """Room for the next one."""
        manager = self.running.lab.cluster.manager
        assert manager is not None
        if words == "plan cancel":
            manager.hosts.locks.release("another plan")
        if words.startswith("host "):
            await self.running.ebb("host", "resume", "host-a")
        if any(vm["name"] == new for vm in (await self.running.lab.cluster.get("/v1/vms"))["vms"]):
            await self.running.ebb("vm", "delete", new, "--yes")


def command_of(words: list[str]) -> Any:
    """The command that these words begin with."""
    found: Any = typer.main.get_command(app)
    for word in words:
        if not hasattr(found, "commands"):
            break
        found = found.get_command(None, word)
    return found


def asks_a_manager(words: list[str]) -> bool:
    return any("--manager" in parameter.opts and "--token-file" in {
        option for other in command_of(words).params for option in other.opts
    } and words[0] != "context" for parameter in command_of(words).params)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(running: Running, directory: Path) -> AsyncIterator[Caller]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(directory))
        patch.setenv("EBB_STATE_DIR", str(directory / "no-lab"))
        patch.setenv("EBB_CACHE_DIR", str(directory / "cache"))
        for variable in ("EBB_MANAGER", "EBB_TOKEN_FILE", "EBB_CONTEXT"):
            patch.delenv(variable, raising=False)
        base = MADE.replace("NEW", "base").split()
        first = json.loads(await running.ebb(*base, "-o", "json"))["request_id"]
        task = ["task", "submit", *running.options(), "work", "sleep", "600"]
        assert (await asyncio.to_thread(CliRunner().invoke, app, task)).exit_code == 0
        # Its host has told of it.
        await until(lambda: told(running))
        async with agent_of(EXAMPLE) as url:
            yield Caller(running, directory, {"FIRST": first, "AGENT": url})


async def told(running: Running) -> bool:
    return "base" in await running.ebb("machine", "list")


def one_document(words: str, text: str) -> Any:
    document = json.loads(text)
    jsonschema.validate(document, schema_of(words))
    return document


def test_every_command_is_called_or_needs_guests() -> None:
    assert [words for words, _, _ in COMMANDS if words not in GUESTS] == list(CALLS)
    assert {words for words, _, _ in COMMANDS} == set(DOCUMENTS) == set(CALLS) | GUESTS


@pytest.mark.parametrize("words", [words for words, _, _ in COMMANDS])
def test_a_command_has_a_help_page_with_an_example_and_output(words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "-o, --output" in result.output
    assert f"Example: ebb {words}" in " ".join(result.output.split())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("words", CALLS)
async def test_a_command_prints_a_table_and_a_document_of_its_schema(caller: Caller, words: str) -> None:
    call, printed = CALLS[words], {}
    for form in ("table", "json", "yaml"):
        new = await caller.prepared(words)
        result = await caller.run(f"{words} {call.words}", new, "-o", form)
        if call.exit_code is not None:
            assert result.exit_code == call.exit_code, (result.output, result.exception)
        printed[form] = result.stdout
        await caller.cleared(words, new)
    document = one_document(words, printed["json"])
    assert alike(yaml.safe_load(printed["yaml"]), document)
    # What failed is said on standard error; and the document of an API is one, however it is printed.
    assert printed["table"].strip() or call.exit_code == 1
    assert printed["table"] != printed["json"] or words == "openapi"


def alike(one: Any, other: Any) -> bool:
    """The same fields, whatever stands in them."""
    return type(one) is type(other) and (not isinstance(one, dict) or one.keys() == other.keys())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("words", [words for words in CALLS if words not in NAMELESS])
async def test_what_is_missing_is_one_sentence_and_an_exit_code(caller: Caller, words: str) -> None:
    call = CALLS[words]
    rest = call.missing
    if rest is None:
        first, *others = call.words.split(" ")
        rest = " ".join(["not-there", *others]) if first else ""
    earlier = +caller.running.seen
    result = await caller.run(f"{words} {rest}", "not-there")
    assert result.stdout == ""
    code = result.exit_code
    if isinstance(result.exception, EbbError):
        code = main.exit_code_of(result.exception)
        assert "\n" not in str(result.exception)
        assert any(name in str(result.exception) for name in ("not-there", "none", "127.0.0.1:9"))
    else:
        assert "not-there" in result.stderr or "none" in result.stderr, (result.stderr, result.exception)
    assert code == call.code, (result.output, result.exception)
    agents = ("/v1/hosts/{id}/report", "/v1/hosts/{id}/usage", "/v1/adoptions")
    changed = [
        (verb, path, status)
        for verb, path, status in caller.running.seen - earlier
        if verb != "GET" and status < 300 and path not in agents
    ]
    assert changed == []
