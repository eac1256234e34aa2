"""Generator of the dashboards: `python -m deploy.grafana.dashboards` writes cluster.json and host.json beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

DIRECTORY: Final = Path(__file__).parent
WIDE: Final = 24
HIGH: Final = 8
_DATA: Final = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "bargauge"]


@dataclass(frozen=True)
class Panel:
    """One panel.

    :param asks: expressions, each with its legend.
    :param unit: as Grafana calls it.
    :param text: of a stat: the value, or the legend, where the value is always 1.
    """

    title: str
    asks: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 12
    stacked: bool = False
    about: str = ""
    text: Literal["auto", "name"] = "auto"


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: rows of panels under headings."""

    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[tuple[str, str]] = ()


def _sizes(title: str, asks: Sequence[tuple[str, str]], stacked: bool = False, unit: str = "") -> tuple[Panel, Panel]:
    """A panel for CPU and one for memory, of expressions with AMOUNT in place of the unit.

    :param unit: of both; empty: cores, and bytes.
    """
    return (
        Panel(
            f"{title}: CPU",
            [(ask.replace("AMOUNT", "cpu_cores"), said) for ask, said in asks],
            unit or "cores",
            stacked=stacked,
        ),
        Panel(
            f"{title}: memory",
            [(ask.replace("AMOUNT", "memory_bytes"), said) for ask, said in asks],
            unit or "bytes",
            stacked=stacked,
        ),
    )


def _quantile(share: float, metric: str, match: str = "") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{match}[$__rate_interval])))"


def _taken(metric: str) -> str:
    """What a counter of deflations of one host rose by in an hour, by layer."""
    return f'sum by (layer) (increase({metric}{{host="$host",direction="deflate"}}[1h]))'


_CREATE: Final = 'ebbtide_manager_operation_duration_seconds_count{kind="create"}'
CLUSTER: Final = Dashboard(
    "ebbtide-cluster",
    "Ebbtide: cluster",
    (
        (
            "At a glance",
            (
                Panel("Leader", [("max(ebbtide_manager_leader)", "")], kind="stat", width=4),
                Panel("Epoch", [("max(ebbtide_manager_epoch)", "")], kind="stat", width=4),
                Panel("Hosts", [("ebbtide_cluster_hosts", "{{state}}")], kind="stat", width=8),
                Panel(
                    "Waiting for room", [("sum(ebbtide_cluster_preempted_vms) or vector(0)", "")], kind="stat", width=4
                ),
                Panel("Under pressure", [("ebbtide_cluster_vms_under_pressure", "")], kind="stat", width=4),
            ),
        ),
        (
            "Capacity",
            (
                *_sizes(
                    "What hosts let VMs hold",
                    [
                        ("sum by (priority) (ebbtide_cluster_bound_AMOUNT)", "{{priority}}"),
                        ("sum(ebbtide_cluster_free_AMOUNT)", "free"),
                    ],
                    stacked=True,
                ),
                *_sizes(
                    "Sold, bound and capacity",
                    [
                        ("sum(ebbtide_cluster_nominal_AMOUNT)", "nominal"),
                        ("sum(ebbtide_cluster_bound_AMOUNT)", "bound"),
                        ("sum(ebbtide_cluster_minimum_AMOUNT)", "minimum"),
                        ("sum(ebbtide_cluster_capacity_AMOUNT)", "capacity"),
                        ("sum(ebbtide_cluster_deflatable_AMOUNT)", "deflatable"),
                    ],
                ),
                Panel("VMs", [("sum by (state) (ebbtide_cluster_vms)", "{{state}}")], stacked=True),
                Panel("Age of reports", [("ebbtide_cluster_host_report_age_seconds", "{{host}}")], "s"),
            ),
        ),
        (
            "What the manager does",
            (
                Panel("Operations under way", [("ebbtide_manager_operations", "{{kind}}")], stacked=True),
                Panel(
                    "Placements by outcome",
                    [(f"sum by (state) (increase({_CREATE}[$__rate_interval]))", "{{state}}")],
                ),
                Panel(
                    "How long placements take",
                    [
                        (
                            _quantile(share, "ebbtide_manager_operation_duration_seconds", '{kind="create"}'),
                            f"{share:.0%}",
                        )
                        for share in (0.5, 0.95)
                    ],
                    "s",
                ),
                Panel(
                    "Preemptions",
                    [("increase(ebbtide_manager_preemptions_total[$__rate_interval])", "{{reason}}")],
                ),
                Panel("Moves of the manager's own", [("ebbtide_manager_moves", "moves")]),
                Panel("Reports", [("rate(ebbtide_manager_reports_total[$__rate_interval])", "{{kind}}")], "reqps"),
            ),
        ),
        (
            "Deflation",
            (
                Panel(
                    "Memory taken, by layer",
                    [("layer:ebbtide_vm_verified_memory_bytes:rate1h", "{{layer}}")],
                    "Bps",
                    about="The application's part is in the guest's: they are not added.",
                ),
                Panel(
                    "Deflations that fall short", [("host:ebbtide_vm_short:ratio_rate1h", "{{host}}")], "percentunit"
                ),
            ),
        ),
        (
            "Tasks and predictions",
            (
                Panel("Tasks", [("ebbtide_matcher_tasks", "{{state}}")], stacked=True),
                Panel(
                    "Tasks that ended, and attempts that were broken off",
                    [
                        ("increase(ebbtide_matcher_tasks_ended_total[$__rate_interval])", "{{outcome}}"),
                        ("increase(ebbtide_matcher_kills_total[$__rate_interval])", "broken off"),
                    ],
                ),
                Panel("Brier score", [("ebbtide_matcher_brier_score", "{{of}}")]),
                Panel(
                    "Observed less predicted, by decile",
                    [("ebbtide_matcher_observed_ratio - ebbtide_matcher_predicted_ratio", "{{of}} {{decile}}")],
                    "percentunit",
                    kind="bargauge",
                ),
            ),
        ),
        (
            "The manager itself",
            (
                Panel(
                    "Stalls of event loops", [("increase(ebbtide_loop_stalls_total[$__rate_interval])", "{{instance}}")]
                ),
                Panel(
                    "CPU of the daemons",
                    [('rate(process_cpu_seconds_total{job=~"ebbtide.*"}[$__rate_interval])', "{{instance}}")],
                ),
                Panel(
                    "Memory of the daemons",
                    [('process_resident_memory_bytes{job=~"ebbtide.*"}', "{{instance}}")],
                    "bytes",
                ),
                Panel("Free room for the store", [("ebbtide_manager_store_free_bytes", "{{instance}}")], "bytes"),
            ),
        ),
    ),
)

_OF: Final = '{host="$host"}'
HOST: Final = Dashboard(
    "ebbtide-host",
    "Ebbtide: host",
    (
        (
            "At a glance",
            (
                Panel(
                    "State",
                    [('ebbtide_cluster_host_state{host="$host"} == 1', "{{state}}")],
                    kind="stat",
                    width=6,
                    text="name",
                ),
                Panel(
                    "Mode", [('ebbtide_host_mode{host="$host"} == 1', "{{mode}}")], kind="stat", width=6, text="name"
                ),
                Panel("Hypervisor answers", [(f"ebbtide_host_hypervisor_up{_OF}", "")], kind="stat", width=6),
                Panel("VMs", [(f"sum(ebbtide_host_vms{_OF})", "")], kind="stat", width=6),
            ),
        ),
        (
            "Room",
            (
                *_sizes(
                    "The host",
                    [
                        (f"ebbtide_host_capacity_AMOUNT{_OF}", "capacity"),
                        (f"ebbtide_host_free_AMOUNT{_OF}", "free"),
                        (f"ebbtide_host_deflatable_AMOUNT{_OF}", "deflatable"),
                        (f"ebbtide_host_overcommitted_AMOUNT{_OF}", "overcommitted"),
                    ],
                ),
                Panel(
                    "Memory and swap",
                    [
                        (f"ebbtide_host_memory_available_bytes{_OF}", "available"),
                        (f"ebbtide_host_swap_free_bytes{_OF}", "swap free"),
                    ],
                    "bytes",
                ),
                Panel("Free room of directories", [(f"ebbtide_host_disk_free_bytes{_OF}", "{{directory}}")], "bytes"),
            ),
        ),
        (
            "VMs",
            (
                *_sizes("Bound", [(f"ebbtide_vm_bound_AMOUNT{_OF}", "{{vm}}")], stacked=True),
                *_sizes(
                    "Bound as a share of nominal",
                    [(f"ebbtide_vm_bound_AMOUNT{_OF} / ebbtide_vm_nominal_AMOUNT{_OF}", "{{vm}}")],
                    unit="percentunit",
                ),
                Panel("Resident memory", [(f"ebbtide_vm_resident_memory_bytes{_OF}", "{{vm}}")], "bytes"),
                Panel("Under pressure", [(f"ebbtide_vm_under_pressure{_OF}", "{{vm}}")]),
                Panel("Throttled by quota", [(f"ebbtide_vm_throttled_ratio{_OF}", "{{vm}}")], "percentunit"),
                Panel(
                    "Memory that guests have available",
                    [(f"ebbtide_guest_memory_available_bytes{_OF}", "{{vm}}")],
                    "bytes",
                ),
                Panel(
                    "Guests stalled for memory",
                    [
                        (
                            'rate(ebbtide_guest_memory_stalled_seconds_total{host="$host",stall="some"}[$__rate_interval])',
                            "{{vm}}",
                        )
                    ],
                    "percentunit",
                ),
                Panel("CPUs on line in guests", [(f"ebbtide_guest_cpus_online{_OF}", "{{vm}}")]),
            ),
        ),
        (
            "Layers",
            (
                Panel("Memory asked", [(_taken("ebbtide_host_layer_asked_memory_bytes_total"), "{{layer}}")], "bytes"),
                Panel(
                    "Memory verified",
                    [(_taken("ebbtide_host_layer_verified_memory_bytes_total"), "{{layer}}")],
                    "bytes",
                    about="The application's part is in the guest's: they are not added.",
                ),
                Panel(
                    "Seconds of layers",
                    [(f"sum by (layer) (increase(ebbtide_host_layer_seconds_total{_OF}[1h]))", "{{layer}}")],
                    "s",
                ),
                Panel(
                    "Shortfalls by reason",
                    [
                        (
                            f"sum by (reason, resource) (increase(ebbtide_host_shortfalls_total{_OF}[1h]))",
                            "{{reason}} {{resource}}",
                        )
                    ],
                ),
                Panel("Drift put right", [(f"increase(ebbtide_vm_drift_repairs_total{_OF}[1h])", "{{vm}}")]),
                Panel("Decisions", [(f"rate(ebbtide_host_decisions_total{_OF}[$__rate_interval])", "{{kind}}")]),
            ),
        ),
        (
            "The agent itself",
            (
                Panel("Operations under way", [(f"ebbtide_host_operations{_OF}", "{{kind}}")], stacked=True),
                Panel(
                    "Calls to libvirt",
                    [(f"rate(ebbtide_libvirt_calls_total{_OF}[$__rate_interval])", "{{outcome}}")],
                    "cps",
                ),
                Panel(
                    "How long calls take, 95 of 100",
                    [(_quantile(0.95, "ebbtide_libvirt_call_duration_seconds", _OF), "calls")],
                    "s",
                ),
                Panel(
                    "Lag of the event loop, 99 of 100",
                    [(_quantile(0.99, "ebbtide_loop_lag_seconds", _OF), "lag")],
                    "s",
                ),
            ),
        ),
    ),
    variables=(("host", "label_values(ebbtide_host_info, host)"),),
)
ALL: Final = {"cluster.json": CLUSTER, "host.json": HOST}


def document_of(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": WIDE, "h": 1},
                "panels": [],
            }
        )
        top, left = top + 1, 0
        for panel in row:
            if left + panel.width > WIDE:
                top, left = top + HIGH, 0
            place = {"x": left, "y": top, "w": panel.width, "h": HIGH}
            panels.append(_panel(len(panels) + 1, panel, place))
            left += panel.width
        top += HIGH
    variables = [_variable(name, query) for name, query in dashboard.variables]
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus", "current": {}}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["ebbtide"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "links": [{"type": "dashboards", "tags": ["ebbtide"], "title": "Ebbtide", "asDropdown": False}],
        "panels": panels,
    }


def text_of(dashboard: Dashboard) -> str:
    """The document as it is checked in."""
    return json.dumps(document_of(dashboard), indent=1) + "\n"


def expressions(document: dict[str, Any]) -> list[str]:
    """What a dashboard asks Prometheus."""
    asked = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    return asked + [one["query"]["query"] for one in document["templating"]["list"] if one["type"] == "query"]


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never"}
    custom["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    unit = "short" if panel.unit == "cores" else panel.unit
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATA,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0 if panel.kind == "timeseries" else None, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": panel.text, "orientation": "auto"},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": expression,
                "legendFormat": legend or "__auto",
                "datasource": _DATA,
                "instant": panel.kind != "timeseries",
                "range": panel.kind == "timeseries",
            }
            for index, (expression, legend) in enumerate(panel.asks)
        ],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _DATA,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def main() -> None:
    """Write the dashboards."""
    for name, dashboard in ALL.items():
        (DIRECTORY / name).write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
