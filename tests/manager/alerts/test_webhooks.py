"""The alerts file, and what a delivery says and is signed with."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from cluster_manager.alerts.bodies import body_of, headers_of, signature
from cluster_manager.alerts.webhooks import Webhook, read_webhooks
from cluster_manager.errors import SettingsError
from cluster_manager.inventory.report_news import news_in
from ebbtide.lab.state import write_private
from ebbtide.messages.common import Vector
from ebbtide.messages.explanations import Event
from tests.manager.plan_events import report_of

ROOT = Path(__file__).resolve().parents[3]
KEY = bytes(range(32))
WORD = "whsec_" + base64.b64encode(KEY).decode()
GOOD = """\
[[webhook]]
name = "oncall"
url = "https://chat.example.org/hooks/a-secret-path"
secret_file = "secret"
events = ["preempted", "lost"]
"""
EVENT = Event(id=7, at=1_700_000_000.25, vm="web", host="host-a", kind="preempted", sentence="web <!channel> @all & co")


def written(directory: Path, text: str, secret: str = WORD, mode: int = 0o600) -> Path:
    write_private(directory / "secret", secret + "\n")
    path = directory / "alerts.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_webhook_is_read_and_its_secrets_are_not_shown(tmp_path: Path) -> None:
    (webhook,) = read_webhooks(written(tmp_path, GOOD))
    assert webhook == Webhook(
        "oncall", "https://chat.example.org/hooks/a-secret-path", KEY, frozenset({"preempted", "lost"}), "event"
    )
    assert "a-secret-path" not in repr(webhook)
    assert repr(KEY) not in repr(webhook)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("https://chat", "ftp://chat", "webhook.0 (oncall): url: must be http"),
        ("https://chat.example.org", "file://", "webhook.0 (oncall): url: must be http"),
        ("https://chat.example.org/", "https:///", "webhook.0 (oncall): url: must be http"),
        ("https://chat.example.org", "https://chat:99999", "webhook.0 (oncall): url: must be http"),
        ("a-secret-path", "a path", "webhook.0 (oncall): url: must be http"),
        ('"oncall"', '"On call"', "webhook.0.name: "),
        ('["preempted", "lost"]', "[]", "webhook.0.events: "),
        ('["preempted", "lost"]', '["Pre"]', "webhook.0.events.0: "),
        ('["preempted", "lost"]', '["lost", "preemted"]', "events.1: Value error, preemted is no kind of event"),
        ('"secret"', '"none"', "webhook.0 (oncall): secret_file: cannot read"),
        ("events", 'form = "fax"\nevents', "webhook.0.form: "),
        ("events", "colour = 1\nevents", "webhook.0.colour: "),
        ("[[webhook]]", "webhook = [\n", "is no TOML"),
        (GOOD, GOOD + GOOD, "two webhooks named oncall"),
        (GOOD, GOOD * 17, "webhook: "),
        (GOOD, "", "webhook: "),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(SettingsError) as raised:
        read_webhooks(written(tmp_path, GOOD.replace(old, new)))
    assert said in str(raised.value)
    assert "a-secret-path" not in str(raised.value)


@pytest.mark.parametrize("secret", ["word", "whsec_", "whsec_####", "whsec_" + base64.b64encode(b"short").decode()])
def test_a_secret_must_be_one_of_standard_webhooks(tmp_path: Path, secret: str) -> None:
    with pytest.raises(SettingsError, match="secret_file: must hold whsec_") as raised:
        read_webhooks(written(tmp_path, GOOD, secret))
    assert "short" not in str(raised.value)


def test_a_file_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="can be read by every user"):
        read_webhooks(written(tmp_path, GOOD, mode=0o644))
    path = written(tmp_path, GOOD)
    (tmp_path / "secret").chmod(0o604)
    with pytest.raises(SettingsError, match=r"secret_file: .* can be read by every user"):
        read_webhooks(path)
    with pytest.raises(SettingsError, match="cannot read the alerts file"):
        read_webhooks(tmp_path / "none")


@pytest.mark.parametrize("name", ["chat", "alertmanager"])
def test_the_examples_can_be_used_as_they_are(tmp_path: Path, name: str) -> None:
    write_private(tmp_path / "alerts.secret", WORD)
    text = (ROOT / "deploy/alerts" / f"{name}.toml").read_text().replace("/etc/ebbtide/", f"{tmp_path}/")
    write_private(tmp_path / "alerts.toml", text)
    (webhook,) = read_webhooks(tmp_path / "alerts.toml")
    assert webhook.form == name
    assert {"preempted", "lost", "failed", "certificate-ends"} <= webhook.kinds


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example of its specification, which its libraries test with."""
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_second_try_has_the_same_id_and_another_moment() -> None:
    webhook = Webhook("oncall", "http://127.0.0.1:1", KEY, frozenset())
    first, second = (headers_of(EVENT, webhook, b"{}", now) for now in (1_700_000_001.9, 1_700_000_005.0))
    assert first["webhook-id"] == second["webhook-id"] == "ebbtide-7-1700000000250"
    assert (first["webhook-timestamp"], second["webhook-timestamp"]) == ("1700000001", "1700000005")
    assert first["webhook-signature"] != second["webhook-signature"]


def test_the_forms_of_bodies() -> None:
    assert json.loads(body_of(EVENT, "event")) == {
        "type": "preempted",
        "timestamp": "2023-11-14T22:13:20.250+00:00",
        "data": EVENT.model_dump(),
    }
    said = "preempted: web &lt;!channel&gt; @\N{ZERO WIDTH SPACE}all &amp; co"
    assert json.loads(body_of(EVENT, "chat")) == {"text": said}
    (alert,) = json.loads(body_of(EVENT, "alertmanager"))
    assert alert == {
        "labels": {"alertname": "EbbtideEvent", "kind": "preempted", "vm": "web", "host": "host-a"},
        "annotations": {"summary": EVENT.sentence},
        "startsAt": "2023-11-14T22:13:20.250+00:00",
    }
    (alert,) = json.loads(body_of(EVENT.model_copy(update={"vm": None}), "alertmanager"))
    assert "vm" not in alert["labels"]


def test_what_is_over_resolves_the_alert_that_was_about_it_and_no_words_of_a_host_do() -> None:
    trouble = report_of("host-a").model_copy(update={"unavailable": "the hypervisor of host-a answers again"})
    full = report_of("host-a").model_copy(update={"overcommitted": Vector(cpu_cores=1.0)})
    for before, fine in ((trouble, report_of("host-a")), (full, report_of("host-a"))):
        alerts = []
        for news in (*news_in(before, fine), *news_in(fine, before)):
            told = EVENT.model_copy(update={"kind": news.kind, "vm": None, "sentence": news.sentence})
            alerts += json.loads(body_of(told, "alertmanager"))
        begun, over = alerts
        assert begun["labels"] == over["labels"]
        assert "endsAt" not in begun
        assert over["endsAt"] == over["startsAt"]
