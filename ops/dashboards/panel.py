"""Panels, and the JSON that Grafana (schema 39, Grafana 10.4 and later) wants of a dashboard of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39
WIDTH = 24
ROW_HEIGHT = 8
STAT_HEIGHT = 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A query and what its lines are called."""

    expression: str
    legend: str = "__auto"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        text: What it shows, and what to think of it.
        unit: Grafana's name of it: `s`, `percentunit`, `reqps`, `bytes`, `short`, ...
        limit: Where it turns red; None for nowhere.
        objective: Below this it is red; None where less is not worse.
        empty: What it says where the query finds nothing.
        colors: Colours of lines, by regular expressions of their names; a line that none names has Grafana's choice.
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 12
    limit: float | None = None
    objective: float | None = None
    empty: str = ""
    colors: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of a dashboard: the values of a label, of which some or all are chosen."""

    name: str
    query: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; its identifier in Grafana is `headrace-<name>`."""

    name: str
    title: str
    text: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]


def quantiles(metric: str, by: str, match: str, quantiles: Sequence[float] = (0.5, 0.95, 0.99)) -> tuple[Query, ...]:
    """Return queries for quantiles of a histogram, named without `_bucket`; a label `by` makes lines of its own."""
    selector = f"{metric}_bucket{{{match}}}" if match else f"{metric}_bucket"
    rate = f"sum by (le{', ' if by else ''}{by}) (rate({selector}[$__rate_interval]))"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(Query(f"histogram_quantile({q}, {rate})", f"p{q * 100:g}{legend}") for q in quantiles)


def graph(title: str, text: str, *queries: Query, **attributes: Any) -> Panel:
    """Return a panel of these queries; `attributes` are the others of `Panel`."""
    return Panel(title, text, queries, **attributes)


def stat(title: str, text: str, expression: str, limit: float | None = None) -> Panel:
    """Return a narrow panel of one number."""
    return Panel(title, text, (Query(expression),), kind="stat", width=4, limit=limit)


def latencies(match: str, ttft_limit: float | None = None, itl_limit: float | None = None) -> tuple[Panel, Panel]:
    """Return the panels of times to first token and between tokens, by model; `match` are label matchers."""
    ttft = quantiles("vllm:time_to_first_token_seconds", "model_name", match)
    itl = quantiles("vllm:inter_token_latency_seconds", "model_name", match)
    return (
        Panel("Time to first token", "As clients see it.", ttft, unit="s", limit=ttft_limit),
        Panel("Time between tokens", "As the gateways receive them.", itl, unit="s", limit=itl_limit),
    )


def ratio(title: str, text: str, part: str, whole: str, legend: str, unit: str = "percentunit") -> Panel:
    """Return a panel of one expression over another."""
    return Panel(title, text, (Query(f"{part} / {whole}", legend),), unit=unit)


def render(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard's JSON."""
    return {
        "uid": f"headrace-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["headrace"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "tags": ["headrace"], "title": "Headrace", "asDropdown": True, "keepTime": True}
        ],
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": _placed(dashboard.panels),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
        "hide": 0,
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Fill rows from the left."""
    placed: list[dict[str, Any]] = []
    x = y = row_height = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y, row_height = 0, y + row_height, 0
        height = STAT_HEIGHT if panel.kind == "stat" else ROW_HEIGHT
        placed.append(_panel(panel, number) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": height}})
        x, row_height = x + panel.width, max(row_height, height)
    return placed


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    thresholds = {"mode": "absolute", "steps": _steps(panel)}
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": thresholds}
    if panel.empty:
        defaults["noValue"] = panel.empty
    if panel.kind == "timeseries":
        style = "off" if panel.limit is None else "line"
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 8, "thresholdsStyle": {"mode": style}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": list(map(_colored, panel.colors))},
        "options": _OPTIONS[panel.kind],
        "transformations": _merged(panel) if panel.kind == "table" else [],
        "targets": [_target(query, panel, place) for place, query in enumerate(panel.queries)],
    }


def _steps(panel: Panel) -> list[dict[str, Any]]:
    """Colours from the least value upwards."""
    if panel.objective is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.objective}]
    above = [] if panel.limit is None else [{"color": "red", "value": panel.limit}]
    return [{"color": "green", "value": None}, *above]


def _colored(color: tuple[str, str]) -> dict[str, Any]:
    names, fixed = color
    properties = [{"id": "color", "value": {"mode": "fixed", "fixedColor": fixed}}]
    return {"matcher": {"id": "byRegexp", "options": f"/{names}/"}, "properties": properties}


def _merged(panel: Panel) -> list[dict[str, Any]]:
    """One table of all queries, a column each under its legend; without it, Grafana shows the first query's alone."""
    names = {f"Value #{_letter(place)}": query.legend for place, query in enumerate(panel.queries)}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
    ]


def _letter(place: int) -> str:
    return chr(ord("A") + place)


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"},
    "table": {"showHeader": True},
}


def _target(query: Query, panel: Panel, place: int) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "refId": _letter(place),
        "datasource": _SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "editorMode": "code",
        "range": not is_table,
        "instant": is_table,
        "format": "table" if is_table else "time_series",
    }
