"""`python -m ops.dashboards`: write the JSON of every dashboard beside this file."""

from __future__ import annotations

import json
from pathlib import Path

from ops.dashboards.overview import OVERVIEW
from ops.dashboards.panel import Dashboard, render
from ops.dashboards.slo import SLO
from ops.dashboards.tenant import TENANT
from ops.dashboards.worker import WORKER

DASHBOARDS = (OVERVIEW, WORKER, TENANT, SLO)
FOLDER = Path(__file__).parent


def path_of(dashboard: Dashboard) -> Path:
    """Return where a dashboard's JSON lies."""
    return FOLDER / f"{dashboard.name}.json"


def text_of(dashboard: Dashboard) -> str:
    """Return a dashboard's JSON."""
    return json.dumps(render(dashboard), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        path_of(each).write_text(text_of(each))
        print(path_of(each).name)
