"""The dashboards as Grafana loads them: one JSON file each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "ops/dashboards"
DASHBOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))
}


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Return the PromQL of every panel."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
