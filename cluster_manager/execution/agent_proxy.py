"""Proxy for what clients ask of one host through the manager, without a plan: explanations, dry runs, modes.

A mode belongs to its host, which keeps it; the manager hears of it by the host's reports. A change of mode must not
wait behind a plan that holds the host, so it is passed on directly, under this manager's epoch.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from cluster_manager.errors import AgentError, AgentRefused, RequestError, wrong_state
from cluster_manager.inventory.agents import Agents
from cluster_manager.inventory.hosts import Hosts
from cluster_manager.store.store import Store
from ebbtide.messages.adoptions import Adoptable
from ebbtide.messages.commands import ModeCommand, SteadyCommand, SteadySettings, SteadyStatus, TargetCommand
from ebbtide.messages.common import PartialVector
from ebbtide.messages.dry_runs import Forecast
from ebbtide.messages.explanations import EventRow, VMExplanation
from ebbtide.messages.hosts import TemplateList
from ebbtide.messages.operations import Operation
from ebbtide.messages.problem_codes import ProblemCode
from ebbtide.messages.requests import ModeRequest
from ebbtide.messages.vms import ClusterVM

T = TypeVar("T")
#: Events of a VM in one explanation.
EVENTS: Final = 20


class AgentProxy:
    """Passes questions on to hosts.

    :param epoch: of this manager.
    """

    def __init__(self, agents: Agents, hosts: Hosts, store: Store, epoch: int) -> None:
        self._agents = agents
        self._hosts = hosts
        self._store = store
        self._epoch = epoch

    async def explain(self, vm: ClusterVM, plans: tuple[str, ...]) -> VMExplanation:
        """Why a VM has its size: the host's word, and what the manager did with it. A silent host is no error.

        :param plans: what is at work on it now.
        """
        explanation, unreachable = None, None
        if vm.host is None:
            unreachable = f"{vm.name} is on no host"
        else:
            try:
                explanation = await self._agents.explain(vm.host, vm.name)
            except AgentError as error:
                unreachable = str(error)
        rows = await self._store.events(EVENTS, vm.name)
        events = (EventRow(at=r.at, vm=r.vm, host=r.host, kind=r.kind, sentence=r.sentence) for r in reversed(rows))
        return VMExplanation(
            host=vm.host,
            state=vm.state,
            sentence=vm.sentence,
            on_preemption=vm.on_preemption,
            preemption_notice_s=vm.preemption_notice_s,
            preempted=vm.preempted,
            explanation=explanation,
            unreachable=unreachable,
            events=tuple(events),
            plans=plans,
        )

    async def forecast(self, vm: ClusterVM, command: TargetCommand) -> Forecast:
        """What a target would come to.

        :raises RequestError: 409 where it is on no host, the host's refusal, 503 where it does not answer.
        """
        if vm.host is None:
            raise wrong_state(f"{vm.name} is {vm.state}, not running", "name")
        # A question fences no command, and is no client's command.
        ours = command.model_copy(update={"epoch": self._epoch, "order": 0})
        return await _passed_on(self._agents.forecast(vm.host, vm.name, ours))

    async def set_mode(self, host: str, wanted: ModeRequest) -> Operation:
        """Change a host's mode.

        :raises RequestError: 404 unknown host, the host's refusal, 503 where it does not answer.
        """
        self._known(host)
        ours = ModeCommand(epoch=self._epoch, **wanted.model_dump())
        return await _passed_on(self._agents.set_mode(host, ours))

    async def steady(self, host: str, wanted: SteadySettings | None = None) -> SteadyStatus:
        """Steady mode of a host, changed first where that is wanted: the host keeps it, as its mode.

        :raises RequestError: 404 unknown host, the host's refusal, 503 where it does not answer.
        """
        self._known(host)
        ours = None if wanted is None else SteadyCommand(epoch=self._epoch, **wanted.model_dump())
        return await _passed_on(self._agents.steady(host, ours))

    async def host_operation(self, host: str, request_id: str, wait_s: float) -> Operation:
        """An operation of a host, for what was passed on to it.

        :raises RequestError: 404 unknown host or operation, 503 where the host does not answer.
        """
        self._known(host)
        # Once, since a client waits, who would take a long silence for the manager's.
        found = await _passed_on(self._agents.operation(host, request_id, wait_s, retry=False))
        if found is None:
            raise RequestError(404, f"{host} knows of no operation {request_id}", "request_id")
        return found

    async def templates(self, host: str) -> TemplateList:
        """The templates of a host.

        :raises RequestError: 404 unknown host, 503 where the host does not answer.
        """
        self._known(host)
        return await _passed_on(self._agents.templates(host))

    async def adoptable(self, host: str, domain: str) -> Adoptable:
        """What a domain of a host could be adopted as, by what it uses; or that its host looks after it already.

        :raises RequestError: 404 unknown host or domain, 503 where the host does not answer.
        """
        if (known := self._hosts.get(host)) is None:
            raise RequestError(404, f"there is no host {host}", "host")
        recorded = await self._store.recorded(host)
        for vm in known.report.vms:
            if domain in (vm.name, vm.domain) and vm.name not in recorded:
                kept = PartialVector.model_validate(vm.minimum.model_dump())
                why = f"{host} looks after {vm.name} already, and it is not on the record"
                return Adoptable(domain=domain, known_as=vm.name, size=vm.nominal, minimum=kept, sentence=why)
        return await _passed_on(self._agents.adoptable(host, domain))

    async def metrics(self, host: str) -> bytes:
        """The metrics of a host's agent, as they come.

        :raises RequestError: 404 unknown host, 503 where it does not answer.
        """
        self._known(host)
        return await _passed_on(self._agents.metrics(host))

    def _known(self, host: str) -> None:
        if self._hosts.get(host) is None:
            raise RequestError(404, f"there is no host {host}", "id")


async def _passed_on(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except AgentRefused as error:
        problem = error.problem
        # That the host does not let this manager in is not about the client's token.
        if problem is None or error.status in (401, 403):
            raise RequestError(503, str(error), None, ProblemCode.HOST_UNAVAILABLE) from error
        raise RequestError(error.status, problem.detail, problem.field, problem.code) from error
    except AgentError as error:
        raise RequestError(503, str(error), None, ProblemCode.HOST_UNAVAILABLE) from error
