"""Dashboards: the files are well formed, ask only for metrics that exist, and have the panels that pages name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.ops.alerts.rules import RULES, promtool, recorded_labels
from tests.ops.dashboards.files import DASHBOARDS, queries
from tests.ops.dashboards.known_metrics import LABELS_OF, problems

# What Grafana's loader and its Prometheus data source need of a panel and of a dashboard, by its documented JSON model.
SOURCE = {"type": "object", "required": ["type", "uid"], "properties": {"uid": {"const": "${datasource}"}}}
NUMBER = {"type": "integer", "minimum": 0}
TARGET = {
    "type": "object",
    "required": ["refId", "datasource", "expr", "range", "instant"],
    "properties": {"refId": {"pattern": "^[A-Z]$"}, "datasource": SOURCE, "expr": {"type": "string", "minLength": 1}},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "description", "gridPos", "targets", "fieldConfig", "options", "datasource"],
    "properties": {
        "type": {"enum": ["timeseries", "stat", "table"]},
        "datasource": SOURCE,
        "gridPos": {"type": "object", "required": ["x", "y", "w", "h"], "additionalProperties": NUMBER},
        "targets": {"type": "array", "minItems": 1, "items": TARGET},
        "fieldConfig": {"type": "object", "required": ["defaults", "overrides"]},
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["uid", "title", "schemaVersion", "panels", "templating", "time", "annotations"],
    "properties": {
        "uid": {"pattern": "^[a-z-]{1,40}$"},
        "schemaVersion": {"const": 39},
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
        "templating": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"required": ["name", "type", "query"]}}},
        },
    },
}
BY_NAME = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
RUNBOOKS = Path(__file__).parents[3] / "ops/docs/runbooks"


@BY_NAME
def test_file_has_the_form_that_grafana_loads(dashboard: dict[str, Any]) -> None:
    jsonschema.validate(dashboard, DASHBOARD)


def test_files_are_the_four_that_the_docs_name() -> None:
    assert [each["uid"] for each in DASHBOARDS.values()] == [f"headrace-{name}" for name in DASHBOARDS]
    assert set(DASHBOARDS) == {"overview", "slo", "tenant", "worker"}


def test_panels_that_runbooks_name_exist() -> None:
    named = [
        (panel, dashboard)
        for page in sorted(RUNBOOKS.glob("*.md"))
        for panel, dashboard in re.findall(r"panel \*([^*]+)\* on the dashboard \*([^*]+)\*", page.read_text())
    ]
    assert named
    shown = {(panel["title"], each["title"]) for each in DASHBOARDS.values() for panel in each["panels"]}
    assert set(named) <= shown


@BY_NAME
def test_tables_show_every_query_in_a_column_of_its_own(dashboard: dict[str, Any]) -> None:
    # Grafana shows the first frame of a table and hides the others behind a list, unless they are merged.
    for panel in dashboard["panels"]:
        if panel["type"] == "table":
            merge, organize = panel["transformations"]
            assert merge["id"] == "merge"
            columns = {f"Value #{target['refId']}": target["legendFormat"] for target in panel["targets"]}
            assert organize["options"]["renameByName"] == columns
            assert "__auto" not in columns.values()
            assert len(set(columns.values())) == len(columns)


@BY_NAME
def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


@BY_NAME
def test_every_query_names_metrics_and_labels_that_exist(dashboard: dict[str, Any]) -> None:
    for expression in queries(dashboard):
        assert problems(expression, recorded_labels()) == [], expression


@BY_NAME
def test_variables_are_used_and_made_of_labels_that_exist(dashboard: dict[str, Any]) -> None:
    used = {name for expression in queries(dashboard) for name in re.findall(r"\$(?!__)(\w+)", expression)} - {"1"}
    variables = [each for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert used == {variable["name"] for variable in variables}
    for variable in variables:
        match = re.fullmatch(r"label_values\(([\w:]+)(\{.*\})?, (\w+)\)", variable["query"]["query"])
        assert match is not None
        assert match.group(3) in LABELS_OF[match.group(1)]


@BY_NAME
def test_legends_name_labels_that_the_query_keeps(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                groups = re.findall(r"by \(([^)]*)\)", target["expr"])
                kept = {name.strip() for group in groups for name in group.split(",")}
                assert label in kept or not groups, (panel["title"], label)


@pytest.mark.skipif(promtool() is None, reason="promtool is not on the PATH")
def test_promtool_can_read_every_query(tmp_path: Path) -> None:
    every = [
        re.sub(r"\$__\w+", "5m", expression).replace("$model", ".*")
        for dashboard in DASHBOARDS.values()
        for expression in queries(dashboard)
    ]
    rules = [{"record": f"query{number}", "expr": expression} for number, expression in enumerate(every)]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    ran = subprocess.run([str(promtool()), "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def panel_of(dashboard: str, title: str) -> dict[str, Any]:
    return next(panel for panel in DASHBOARDS[dashboard]["panels"] if panel["title"] == title)


@pytest.mark.parametrize("title", ["First token within 2.5 s", "Next token within 0.1 s", "Promises kept"])
def test_share_below_the_objective_is_red(title: str) -> None:
    thresholds = panel_of("slo", title)["fieldConfig"]["defaults"]["thresholds"]["steps"]
    # Grafana takes the last step that a value has reached.
    reached = [[step["color"] for step in thresholds if (step["value"] or 0) <= share][-1] for share in (0.899, 0.99)]
    assert reached == ["red", "green"]


@pytest.mark.parametrize("title", ["Promises kept", "Error of Retry-After"])
def test_panel_that_has_nothing_to_show_on_a_good_day_says_so(title: str) -> None:
    panel = panel_of("slo", title)
    assert panel["fieldConfig"]["defaults"]["noValue"] == "no refused client has come back"
    assert re.search(r"> 0\)$|>= 0$", panel["targets"][0]["expr"]), "nothing would be drawn as not a number"


def test_statuses_have_colours_of_their_own() -> None:
    overrides = panel_of("overview", "Answers by status")["fieldConfig"]["overrides"]

    def color(status: str) -> str:
        # Of several overrides that match, Grafana applies the last.
        found = [each for each in overrides if re.fullmatch(each["matcher"]["options"].strip("/"), status)]
        return str(found[-1]["properties"][0]["value"]["fixedColor"])

    assert len({color(status) for status in ("200", "400", "429", "499", "500", "503")}) == 6
    assert color("401") == color("400")


def test_objective_of_the_dashboard_is_that_of_the_rules() -> None:
    text = RULES.read_text()
    assert '_bucket{le="2.5"}' in text
    assert '_bucket{le="0.1"}' in text
    assert "14.4 * 0.01" in text
