"""Bodies of deliveries in the forms that receivers read, and their signature by Standard Webhooks."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from cluster_manager.alerts.endings import is_end
from cluster_manager.alerts.webhooks import Form, Webhook
from ebbtide.messages.explanations import Event


def body_of(event: Event, form: Form) -> bytes:
    """The JSON of a delivery."""
    made: Any
    if form == "chat":
        made = {"text": _plain(f"{event.kind}: {event.sentence}")}
    elif form == "alertmanager":
        labels = {"alertname": "EbbtideEvent", "kind": event.kind, "vm": event.vm, "host": event.host}
        over = {"endsAt": _iso(event.at)} if is_end(event.host, event.sentence) else {}
        made = [
            {
                "labels": {name: value for name, value in labels.items() if value},
                "annotations": {"summary": event.sentence},
                "startsAt": _iso(event.at),
                **over,
            }
        ]
    else:
        made = {"type": event.kind, "timestamp": _iso(event.at), "data": event.model_dump(mode="json")}
    return json.dumps(made).encode("ascii")


def headers_of(event: Event, webhook: Webhook, body: bytes, now: float) -> Mapping[str, str]:
    """The same id for each try of an event, the moment of this try, and the signature over both and the body."""
    id_, at = f"ebbtide-{event.id}-{int(event.at * 1000)}", str(int(now))
    return {
        "Content-Type": "application/json",
        "User-Agent": "ebb-manager",
        "webhook-id": id_,
        "webhook-timestamp": at,
        "webhook-signature": signature(webhook.key, id_, at, body),
    }


def signature(key: bytes, id_: str, at: str, body: bytes) -> str:
    """HMAC-SHA256 over the id, the moment in Unix seconds and the body, joined by points."""
    digest = hmac.new(key, f"{id_}.{at}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode('ascii')}"


def _plain(text: str) -> str:
    """Words of hosts and guests must call nobody and link nowhere: no markup of Slack's, no mention."""
    for special, plain in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\N{ZERO WIDTH SPACE}")):
        text = text.replace(special, plain)
    return text


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
