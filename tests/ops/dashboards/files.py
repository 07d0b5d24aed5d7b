"""The dashboards as Grafana loads them, by the names of their files."""

from __future__ import annotations

import json
from typing import Any

from tests.architecture.source import ROOT

DASHBOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted((ROOT / "ops" / "dashboards").glob("*.json"))
}


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
