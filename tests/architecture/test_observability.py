"""Dashboards and alerts ask for metrics that the services send, and each alert has an entry in the
runbook.

docs/metrics.md says what they send; tests/scenario/test_observability.py compares it with what a
mesh sends.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from support.prometheus import documented

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "observability"
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
[GROUP] = yaml.safe_load((FOLDER / "rules/treadle.yml").read_text())["groups"]
ALERTS = GROUP["rules"]
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
OF_EVERY_SERIES = {"job", "instance"}
GRAFANA = {"$__rate_interval": "5m", "$__range": "1h"}  # what it puts in place of its variables


def series() -> dict[str, set[str]]:
    """Labels of each series, by its name."""
    return {
        f"{name}{suffix}": labels | OF_EVERY_SERIES | ({"le"} if suffix == "_bucket" else set())
        for name, (kind, labels) in documented().items()
        for suffix in SUFFIXES[kind]
    }


def wrong(expression: str) -> Iterator[str]:
    """What an expression asks for that is not there. Raises ValueError where it is no PromQL."""
    known = series()
    for variable, value in GRAFANA.items():
        expression = expression.replace(variable, value)
    labels: set[str] = set()
    for node in nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.VectorSelector):
            if node.name not in known:
                yield f"no metric {node.name}"
                continue
            labels |= known[node.name]
            yield from (
                f"{node.name} has no label {each.name}"
                for each in node.matchers.matchers
                if each.name not in known[node.name]
            )
    for node in nodes(promql_parser.parse(expression)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            yield from (
                f"no label {name} to group by"
                for name in node.modifier.labels
                if name not in labels
            )


def nodes(expression: Any) -> list[Any]:
    """An expression with all its parts."""
    found: list[Any] = []
    promql_parser.walk(expression, found.append)
    return found


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and expression of each target of a dashboard."""
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_asks_for_metrics_and_labels_that_services_send(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    asked = queries(dashboard)
    assert len(asked) > len([panel for panel in dashboard["panels"] if panel["type"] == "row"])
    assert not {title: found for title, expression in asked if (found := list(wrong(expression)))}
    for variable in dashboard["templating"]["list"][1:]:
        metric, label = re.fullmatch(
            r"label_values\((\w+), (\w+)\)", variable["query"]["query"]
        ).groups()  # type: ignore[union-attr]
        assert label in series()[metric]
    legends = [
        target["legendFormat"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]
    known = {label for labels in series().values() for label in labels}
    assert {label for legend in legends for label in re.findall(r"\{\{(\w+)\}\}", legend)} <= known


def test_the_dashboards_show_every_metric() -> None:
    """One that nobody can see need not be sent."""
    shown = {
        node.name
        for path in DASHBOARDS
        for _, expression in queries(json.loads(path.read_text()))
        for node in nodes(promql_parser.parse(expression.replace("$__rate_interval", "5m")))
        if isinstance(node, promql_parser.VectorSelector) and node.name
    }
    bare = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert set(documented()) == bare


def test_panels_and_dashboards_have_places_and_names_of_their_own() -> None:
    """As Grafana needs them: an id for each panel of a dashboard, no two in one place, and a uid
    for each dashboard."""
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    for name in ("uid", "title"):
        assert len({each[name] for each in dashboards}) == len(dashboards)
    for dashboard in dashboards:
        panels = dashboard["panels"]
        assert (
            len({panel["id"] for panel in panels})
            == len({panel["title"] for panel in panels})
            == len(panels)
        )
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            assert 0 <= at["x"] < at["x"] + at["w"] <= 24
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert not cells & taken, f"{dashboard['title']}: {panel['title']}"
            taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_asks_for_metrics_that_services_send_and_has_an_entry_in_the_runbook(
    alert: dict[str, Any],
) -> None:
    assert not list(wrong(alert["expr"]))
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor == alert["alert"].lower()
    assert alert["alert"] in headings


def test_the_runbook_has_no_entry_without_an_alert_and_promtool_tests_every_alert() -> None:
    """`make manifests` runs promtool where it is installed."""
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert headings == names
    tests = yaml.safe_load((FOLDER / "rules/treadle.test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == set(names)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(treadle_scheduler_waitng)", "no metric treadle_scheduler_waitng"),
        ('treadle_scheduler_waiting{part="x"}', "treadle_scheduler_waiting has no label part"),
        ("sum by (tool) (treadle_scheduler_waiting)", "no label tool to group by"),
        (
            "rate(treadle_scheduler_tickets_total_bucket[5m])",
            "no metric treadle_scheduler_tickets_total_bucket",
        ),
    ],
)
def test_a_wrong_name_is_found(expression: str, problem: str) -> None:
    assert list(wrong(expression)) == [problem]
