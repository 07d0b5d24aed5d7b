"""The rules as the tests read them."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from tests.ops.dashboards.promql import named

ROOT = Path(__file__).parents[3]
RULES = ROOT / "ops" / "alerts" / "headrace.rules.yml"
UNIT_TESTS = RULES.with_name("headrace.tests.yml")


def promtool() -> str | None:
    """Return Prometheus's own tool, where it is installed (`.ci/promtool` takes it from Debian's package)."""
    return shutil.which("promtool", path=sysconfig.get_path("scripts")) or shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def recorded_labels() -> dict[str, frozenset[str]]:
    return {rule["record"]: frozenset(named(rule["expr"]).groups) for rule in rules() if "record" in rule}
