"""Configuration, rules and alerts for Prometheus: promtool has nothing against them, and they ask for what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cluster_manager.api import metric_families as of_manager
from ebbtide.rest.metrics.sheet import COMMON
from ebbtide.rest.roles import Role, needed
from hostagent.api import metric_families as of_agent
from tests.deploy.names import unknown_names
from tests.promtool import promtool

DIRECTORY = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"
RULES = (DIRECTORY / "ebbtide.rules.yml").read_text()
TESTS = sorted(DIRECTORY.glob("ebbtide.rules*.test.yml"))


def test_the_scrape_configuration_is_one() -> None:
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "prometheus.yml", directory=DIRECTORY)
    for path in re.findall(r"http://127\.0\.0\.1:7100(/\S+)", (DIRECTORY / "prometheus.yml").read_text()):
        assert needed("GET", path) is Role.METRICS


def test_the_lines_for_tls_are_taken_in_both_jobs_and_for_the_list_of_targets(tmp_path: Path) -> None:
    text = (DIRECTORY / "prometheus.yml").read_text()
    text = re.sub(r"# (scheme: https|tls_config: \{.*\})$", r"\1", text, flags=re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(text.replace("url: http:", "url: https:"))
    (tmp_path / "ebbtide.rules.yml").write_text(RULES)
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "prometheus.yml", directory=tmp_path)
    manager, hosts = yaml.safe_load(text)["scrape_configs"]
    assert (manager["scheme"], hosts["scheme"]) == ("https", "https")
    assert manager["tls_config"] == hosts["tls_config"] == hosts["http_sd_configs"][0]["tls_config"]


def test_of_a_host_all_that_is_its_own_is_taken_and_nothing_that_managers_or_rules_say() -> None:
    _, hosts = yaml.safe_load((DIRECTORY / "prometheus.yml").read_text())["scrape_configs"]
    (relabel,) = hosts["metric_relabel_configs"]
    assert (relabel["source_labels"], relabel["action"]) == (["__name__"], "drop")
    dropped = re.compile(relabel["regex"]).fullmatch
    own = [metric.name for metric in (*COMMON, *of_agent.declared())]
    managers = [metric.name for metric in of_manager.declared()]
    recorded = re.findall(r"record: (\S+)", RULES)
    assert [name for name in own if dropped(name)] == []
    assert [name for name in (*managers, *recorded) if not dropped(name)] == []


def test_the_job_of_this_machine_names_an_agents_host_and_takes_of_it_what_the_job_of_hosts_takes(
    tmp_path: Path,
) -> None:
    head, local = (DIRECTORY / "prometheus.yml").read_text().split("  # - job_name: ebbtide-local", 1)
    local = re.sub(r"^  # ", "  ", "  # - job_name: ebbtide-local" + local, flags=re.MULTILINE)
    local = re.sub(r"^    (    )?# (metric|  -|labels)", r"    \1\2", local, flags=re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(head + local)
    (tmp_path / "ebbtide.rules.yml").write_text(RULES)
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "prometheus.yml", directory=tmp_path)
    _, hosts, own = yaml.safe_load(head + local)["scrape_configs"]
    assert own["metric_relabel_configs"] == hosts["metric_relabel_configs"]
    # As the list of targets says it: without it `sum by (host)` merges hosts.
    assert own["static_configs"][0]["labels"] == {"host": "NAME"}


def test_the_rules_pass_promtool_and_their_own_tests() -> None:
    assert "FAILED" not in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", "ebbtide.rules.yml", directory=DIRECTORY
    )
    assert "SUCCESS" in promtool("test", "rules", *(path.name for path in TESTS), directory=DIRECTORY)


def test_a_test_of_rules_can_fail(tmp_path: Path) -> None:
    (tmp_path / "ebbtide.rules.yml").write_text(RULES.replace('state="silent"} == 1', 'state="silent"} == 2'))
    (tmp_path / "ebbtide.rules.test.yml").write_text((DIRECTORY / "ebbtide.rules.test.yml").read_text())
    with pytest.raises(AssertionError, match="EbbtideHostSilent"):
        promtool("test", "rules", "ebbtide.rules.test.yml", directory=tmp_path)


def test_every_alert_fires_in_a_test_and_every_recorded_series_is_asked_for() -> None:
    tests = "".join(path.read_text() for path in TESTS)
    for alert in re.findall(r"alert: (\w+)", RULES):
        assert re.search(rf"alertname: {alert}\n\s+exp_alerts:(?! \[\])", tests), alert
    for series in re.findall(r"record: (\S+)", RULES):
        assert f"{series}" in tests, series


def test_the_rules_ask_for_metrics_that_exist() -> None:
    assert not unknown_names(re.sub(r"#.*|summary:.*|description:.*", "", RULES))


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert unknown_names("sum(ebbtide_vm_bound_memory_mib) / ebbtide_vm_nominal_memory_bytes") == {
        "ebbtide_vm_bound_memory_mib"
    }
