"""The task that carries deliveries out while this manager leads: it reads the event log, and asks each webhook's outbox
what is due."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
import structlog

from cluster_manager.alerts.bodies import body_of, headers_of
from cluster_manager.alerts.outbox import Outbox, Outcome
from cluster_manager.alerts.webhooks import Webhook
from cluster_manager.errors import LostLeadership, StoreError
from cluster_manager.store import queries
from cluster_manager.store.store import Store
from ebbtide.messages.explanations import Event

log = structlog.get_logger()

#: Between two looks at the event log, and at what is due.
LOOK_S: Final = 0.5
#: Rows of one look.
BATCH: Final = 500
#: Of one try as a whole, and for its connection.
TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0, connect=5.0)
#: The document with the position of each webhook.
NAME: Final = "alerts"


class Alerts:
    """Sends from `start` to `stop`; nothing where there are no webhooks.

    :param check: raises `LostLeadership` where this manager leads no more.
    :param clock: seconds since the epoch.
    :param monotonic: seconds of a clock that nobody sets.
    """

    def __init__(
        self,
        webhooks: Sequence[Webhook],
        store: Store,
        check: Callable[[], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._webhooks = webhooks
        self._store = store
        self._check = check
        self._clock = clock
        self._monotonic = monotonic
        #: By name; empty until the log was first looked at.
        self.outboxes: dict[str, Outbox] = {}
        self._saved: dict[str, int] = {}
        self._read_to = 0
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._webhooks:
            self._task = asyncio.create_task(self._run(), name="alerts")

    async def stop(self) -> None:
        """What is being sent is broken off, and sent again by whoever leads next."""
        tasks = [task for task in (self._task, *self._sending.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    async def _run(self) -> None:
        # No cookies, no proxy of the environment: only the addresses of the operator's file are called.
        async with aiohttp.ClientSession(timeout=TIMEOUT, cookie_jar=aiohttp.DummyCookieJar()) as session:
            while True:
                try:
                    await self._look()
                    for name, outbox in self.outboxes.items():
                        if name not in self._sending and (event := outbox.due(self._monotonic())) is not None:
                            self._sending[name] = asyncio.create_task(
                                self._send(session, outbox.webhook, event), name=f"alert to {name}"
                            )
                except StoreError as error:
                    log.warning("alerts wait for the store", why=str(error))
                except Exception:
                    log.exception("alerts were not looked at, by a defect of the manager")
                await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Take what is new in the log, and keep how far each webhook is."""
        if not self.outboxes:
            await self._recall()
        while rows := await self._store.rows(queries.events_after(self._read_to, BATCH)):
            events = [_event(row) for row in rows]
            now = self._monotonic()
            beyond_s = self._clock() - now
            self.outboxes = {name: outbox.offered(events, now, beyond_s) for name, outbox in self.outboxes.items()}
            self._read_to = events[-1].id
            if len(rows) < BATCH:
                break
        positions = {name: outbox.position for name, outbox in self.outboxes.items()}
        if positions != self._saved:
            await self._store.save_knowledge(NAME, json.dumps(positions))
            self._saved = positions

    async def _recall(self) -> None:
        """Go on where the last leader was; a webhook that is new begins with what comes from now on."""
        newest = next((row.id for row in await self._store.rows(queries.newest_event())), 0)
        kept = _positions(await self._store.knowledge(NAME))
        made = {hook.name: Outbox(hook, min(kept.get(hook.name, newest), newest)) for hook in self._webhooks}
        self._read_to = min(outbox.seen for outbox in made.values())
        self.outboxes = made

    async def _send(self, session: aiohttp.ClientSession, webhook: Webhook, event: Event) -> None:
        """One try, and what came of it."""
        try:
            outcome, why, retry_after_s = await self._try(session, webhook, event)
        except LostLeadership:
            return
        except Exception:
            log.exception("an alert was not sent, by a defect of the manager", webhook=webhook.name, id=event.id)
            outcome, why, retry_after_s = Outcome.REFUSED, "a defect of the manager", 0.0
        finally:
            del self._sending[webhook.name]
        outbox = self.outboxes[webhook.name]
        if outcome is not Outcome.DELIVERED and not outbox.failures:
            log.warning("an alert was not delivered", webhook=webhook.name, id=event.id, outcome=outcome.value, why=why)
        self.outboxes[webhook.name] = outbox.answered(event, outcome, self._monotonic(), retry_after_s)

    async def _try(self, session: aiohttp.ClientSession, webhook: Webhook, event: Event) -> tuple[Outcome, str, float]:
        """The outcome, why it is no better, and the pause that the receiver asks for. Raises `LostLeadership`."""
        body = body_of(event, webhook.form)
        headers = headers_of(event, webhook, body, self._clock())
        self._check()
        try:
            async with session.post(webhook.url, data=body, headers=headers, allow_redirects=False) as response:
                pause_s = _seconds(response.headers.get("Retry-After", ""))
                return outcome_of(response.status), f"it answers {response.status}", pause_s
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome.FAILED, type(error).__name__, 0.0  # not its text, which may hold the address


def _event(row: Any) -> Event:
    return Event(id=row.id, at=row.at, vm=row.vm, host=row.host, kind=row.kind, sentence=row.sentence)


def outcome_of(status: int) -> Outcome:
    """What an answer means; a redirection is not followed."""
    if 200 <= status < 300:
        return Outcome.DELIVERED
    return Outcome.FAILED if status in (408, 425, 429) or status >= 500 else Outcome.REFUSED


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0.0


def _positions(body: str | None) -> dict[str, int]:
    try:
        found = json.loads(body or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        log.warning("how far alerts were is damaged: they begin with what comes from now on")
        return {}
    return {str(name): at for name, at in found.items() if isinstance(at, int) and at >= 0}
