"""Dask as an engine: a worker's resource ``core``, one worker named with each task. Needs no root anywhere.

Dask knows no held tasks: what is held is a file beside the records, and is submitted when it is released. The scheduler
keeps a task for as long as it is published under its attempt's name, also while no manager is connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from signal import Signals
from typing import Any, Final

import cloudpickle
import distributed

from ebbtide.files import replacing
from ebbtide.matcher.engines import dask_inside
from ebbtide.matcher.engines.records import UNRECORDED, Record, Records, exit_code_of, merged, shell_of
from ebbtide.matcher.engines.settings import EngineSettings
from ebbtide.matcher.errors import EngineRefused, EngineSettingsError, EngineUnreachable
from ebbtide.matcher.match.attempts import AttemptState, Claim, EngineMachine, Look, Seen, task_of
from ebbtide.matcher.match.tasks import TaskOrder

# Workers and scheduler need not have this package installed.
cloudpickle.register_pickle_by_value(dask_inside)

#: Half of it has no types.
_dask: Final[Any] = distributed
#: What the keys of all attempts begin with: the scheduler keeps something for ever of each key that begins otherwise
#: up to its first "-". No label has a "_".
KEY_PREFIX: Final = "ebbtide_attempt-"
#: How long an attempt that was asked to end has before it is killed, seconds.
KILL_AFTER_S: Final = 5.0
#: How `dask_inside.run` says what its command ended with.
_EXIT_CODE: Final = re.compile(r"^RuntimeError\('exit code ([0-9]{1,3})'\)$")


class Dask:
    """One scheduler and its workers, which carry the names of machines."""

    kind = "dask"

    def __init__(self, settings: EngineSettings) -> None:
        if settings.directory is None or settings.dask_scheduler is None:
            raise EngineSettingsError("directory and dask_scheduler must be given")
        self._settings = settings
        self._directory: Path = settings.directory
        self._records = Records(settings.directory, settings.answer_s)
        self._client: Any = None
        self._addresses: dict[str, str] = {}
        self._drained: dict[str, str] = {}
        #: Workers that attempts are on, by address.
        self._places: dict[str, str] = {}
        #: Those that have not answered since the latest look.
        self._silent: set[str] = set()
        #: When each attempt was first to end, by the loop's time, and which of those have got their signal.
        self._ends_since: dict[str, float] = {}
        self._asked: set[str] = set()
        #: Attempts that have begun, whatever has become of their records.
        self._begun: set[str] = set()

    async def start(self) -> None:
        await self._records.check()

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(OSError, TimeoutError):
                await client.close(timeout=2)

    async def look(self, wanted: Collection[str], begun: Collection[str] = ()) -> Look:
        self._begun = {*begun, *self._begun.intersection(wanted)}
        self._silent = set()
        before = await self._records.read(wanted, begun)
        held = await self._records.in_thread(self._held)
        async with self._connected() as client:
            found = await client.run_on_scheduler(dask_inside.survey, f"{self._settings.label}.", KEY_PREFIX)
        # A key is anybody's to choose; a name of ours is that of a directory.
        tasks = {
            attempt: task
            for attempt, task in found["tasks"].items()
            if task_of(attempt, self._settings.label) is not None
        }
        after = await self._records.read({*wanted, *tasks, *held}, begun)
        self._addresses = {worker["name"]: worker["address"] for worker in found["workers"]}
        self._drained = {worker["name"]: worker["drained"] for worker in found["workers"]}
        places = {attempt: self._addresses.get(task["worker"] or "") for attempt, task in tasks.items()}
        self._places = {attempt: address for attempt, address in places.items() if address is not None}
        seen = {attempt: Seen(AttemptState.HELD) for attempt in held}
        for attempt, task in tasks.items():
            seen[attempt] = _seen(task, before.get(attempt, Record()))
        for attempt in held:
            if after[attempt].claim is not Claim.NONE and attempt not in tasks:
                # Sealed before it was released; or its scheduler has lost it, with all that it had.
                seen[attempt] = Seen(AttemptState.GONE)
        return Look({worker["name"]: _machine(worker) for worker in found["workers"]}, merged(seen, before, after))

    async def submit(self, attempt: str, order: TaskOrder) -> None:
        body = json.dumps({"command": list(order.command), "cores": order.cores})
        await self._records.prepare(attempt, self._settings.user)
        await self._records.in_thread(lambda: self._hold(attempt, body))

    async def release(self, attempt: str, machine: str) -> None:
        held = await self._records.in_thread(lambda: self._body(attempt))
        if held is None:
            return
        body = json.loads(held)
        argv = [*shell_of(self._directory, attempt), machine, *body["command"]]
        async with self._connected() as client:
            address = self._address(machine)
            if self._drained.get(machine):
                raise EngineRefused(f"dask: {machine} takes no new task: {self._drained[machine]}")
            future = client.submit(
                dask_inside.run,
                argv,
                key=KEY_PREFIX + attempt,
                workers=[address],
                allow_other_workers=False,
                resources={"core": body["cores"]},
                retries=0,
                pure=False,
            )
            # Keeps it at the scheduler when this client is gone.
            await client.publish_dataset(future, name=attempt, override=True)

    async def cancel(self, attempt: str, begun_too: bool = True) -> None:
        record = await self._records.seal(attempt)
        if record.claim is Claim.SEALED:
            if attempt in self._begun or attempt in self._places:
                # Its record may have been lost; the next look takes it to be over, so it gets no time to end.
                try:
                    await self._signal(attempt, Signals.SIGKILL, all_of_it=True)
                except EngineRefused:
                    # What has surely not begun waits for no worker that is silent.
                    if begun_too and (attempt in self._begun or record.anew):
                        raise
            await self._drop(attempt)
            return
        if not begun_too:
            return
        # By time: looks follow one another at once where much happens. And one: another would disturb who saves.
        now = asyncio.get_running_loop().time()
        if now - self._ends_since.setdefault(attempt, now) >= KILL_AFTER_S:
            await self._signal(attempt, Signals.SIGKILL, all_of_it=True)
        elif attempt not in self._asked and await self._signal(attempt, Signals.SIGTERM, all_of_it=True):
            self._asked.add(attempt)

    async def signal(self, attempt: str, signal: str, notice: str) -> None:
        if await self._records.told(attempt, notice):
            return
        # Else it is asked for again: it may be with a worker that is not known yet.
        if await self._signal(attempt, Signals[f"SIG{signal}"], all_of_it=False):
            await self._records.tell(attempt, notice)

    async def _signal(self, attempt: str, number: Signals, all_of_it: bool) -> bool:
        """Whether a worker has the attempt, which has got it then.

        :raises EngineRefused: none that has answered, and not all have.
        """
        shell = shell_of(self._directory, attempt)
        async with self._connected() as client:
            # Where the scheduler has it; one that it has lost may be anywhere. Its record says what its command wants.
            workers = [self._places[attempt]] if attempt in self._places else list(self._addresses.values())
            there, why = await self._run(client, dask_inside.signal, shell, int(number), all_of_it, workers=workers)
        if why and not any(there):
            raise EngineRefused(f"dask: {why}")
        return any(there)

    async def forget(self, attempt: str) -> None:
        await self._drop(attempt)

    async def set_usable_cores(self, machine: str, cores: int) -> None:
        async with self._connected() as client:
            _, why = await self._run(client, dask_inside.set_cores, cores, workers=[self._address(machine)])
        if why:
            raise EngineRefused(f"dask: {why}")

    async def _run(
        self, client: Any, function: Callable[..., Any], *arguments: Any, workers: list[str]
    ) -> tuple[list[Any], str]:
        """Call something in workers. One that does not answer is no reason to leave the others alone, and is waited for
        once between two looks.

        :returns: what was answered, and why not all have answered; empty: they have.
        """
        said = await asyncio.gather(*(self._run_in(worker, client, function, *arguments) for worker in workers))
        return [one for answers, _ in said for one in answers], "; ".join(why for _, why in said if why)

    async def _run_in(
        self, worker: str, client: Any, function: Callable[..., Any], *arguments: Any
    ) -> tuple[list[Any], str]:
        """As `_run`, of one."""
        if worker in self._silent:
            return [], f"{worker}: it does not answer"
        limit_s = self._settings.answer_s / 2
        try:
            async with asyncio.timeout(limit_s):
                answered = await client.run(function, *arguments, workers=[worker])
        except (OSError, TimeoutError) as error:
            self._silent.add(worker)
            return [], f"{worker}: {str(error) or f'no answer within {limit_s:g} s'}"
        return list(answered.values()), ""

    async def drain(self, machine: str, reason: str) -> None:
        async with self._connected() as client:
            await client.run_on_scheduler(dask_inside.mark_drained, self._address(machine), reason)
        self._drained[machine] = reason

    async def undrain(self, machine: str) -> None:
        await self.drain(machine, "")

    def _address(self, machine: str) -> str:
        try:
            return self._addresses[machine]
        except KeyError:
            raise EngineRefused(f"dask: there is no worker {machine}") from None

    async def _drop(self, attempt: str) -> None:
        """Have neither the scheduler nor the directory hold it any more."""
        self._ends_since.pop(attempt, None)
        self._asked.discard(attempt)
        async with self._connected() as client:
            with contextlib.suppress(KeyError):
                await client.unpublish_dataset(attempt)
            # Earlier versions gave it the attempt's name for a key.
            keys = KEY_PREFIX + attempt, attempt
            await client.cancel([_dask.Future(key, client) for key in keys], force=True)
        await self._records.in_thread(lambda: self._records.held_path(attempt).unlink(missing_ok=True))

    def _body(self, attempt: str) -> str | None:
        """What `_hold` wrote."""
        try:
            return self._records.held_path(attempt).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def _hold(self, attempt: str, body: str) -> None:
        path = self._records.held_path(attempt)
        if path.exists():
            return
        with replacing(path) as file:
            file.write(body.encode())

    def _held(self) -> set[str]:
        """Attempts that were taken on and not dropped: held ones, unless the scheduler has them."""
        return {path.stem for path in self._directory.glob(f"{self._settings.label}.*.held")}

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        """A connection, made where there is none; one that breaks is dropped."""
        limit_s = self._settings.answer_s
        try:
            async with asyncio.timeout(limit_s):
                if self._client is None or self._client.status != "running":
                    await self._connect()
                assert self._client is not None
                yield self._client
        except (OSError, TimeoutError) as error:
            await self.stop()
            why = str(error) or f"no answer within {limit_s:g} s"
            raise EngineUnreachable(f"dask: {self._settings.dask_scheduler}: {why}") from error

    async def _connect(self) -> None:
        await self.stop()
        settings, security = self._settings, None
        if settings.dask_ca_file is not None:
            security = _dask.Security(
                require_encryption=True,
                tls_ca_file=str(settings.dask_ca_file),
                tls_client_cert=str(settings.dask_certificate_file),
                tls_client_key=str(settings.dask_key_file),
            )
        # Known before it is connected: one that is not closed would complain when it is collected.
        self._client = _dask.Client(
            settings.dask_scheduler,
            asynchronous=True,
            set_as_default=False,
            name="ebb-manager",
            security=security,
            timeout=settings.answer_s,
        )
        await self._client


def _seen(task: Mapping[str, Any], record: Record) -> Seen:
    """A key of the scheduler, with what its record said before."""
    state, worker = task["state"], task["worker"]
    if state == "processing":
        begun, asked = record.claim is Claim.BEGUN, task["cores"]
        cores = max(math.ceil(asked), 1) if asked is not None else None
        return Seen(AttemptState.RUNNING if begun else AttemptState.RELEASED, worker, cores=cores)
    if state in ("memory", "erred", "released", "forgotten"):
        # Kept as a result: the attempt returned, and so its command ended with 0.
        found = _EXIT_CODE.search(task["reason"])
        ended = 0 if state == "memory" else int(found[1]) if found else None
        code = exit_code_of(ended) if ended is not None else None
        reason = "" if code is not None else " ".join(task["reason"].split())[:300]
        return Seen(AttemptState.ENDED, worker, exit_code=code, reason=reason, unrecorded=ended == UNRECORDED)
    if record.claim is Claim.BEGUN:
        # It was on a worker that is gone, and would begin again, which its record forbids.
        return Seen(AttemptState.ENDED, worker, reason="its worker is gone")
    return Seen(AttemptState.RELEASED, worker)


def _machine(worker: Mapping[str, Any]) -> EngineMachine:
    cores = worker["cores"]
    return EngineMachine(
        name=worker["name"],
        most_cores=int(worker["threads"]),
        usable_cores=int(cores) if cores is not None else 0,
        up=bool(worker["running"]),
        drained=worker["drained"],
        # Less than a core is work all the same.
        foreign_cores=math.ceil(worker["others"]),
    )
