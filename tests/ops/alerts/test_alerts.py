"""Rules: they query existing metrics, each has a runbook, and promtool accepts them and their unit tests."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from gateway.telemetry.row import GAP_BOUNDS_S, LATENCY_BOUNDS_S
from tests.ops.alerts.rules import ROOT, RULES, UNIT_TESTS, promtool, recorded_labels, rules
from tests.ops.dashboards.known_metrics import problems

RUNBOOKS = ROOT / "ops" / "docs" / "runbooks"
ALERTS = [rule for rule in rules() if "alert" in rule]
NEEDS_PROMTOOL = pytest.mark.skipif(promtool() is None, reason="there is no promtool: .ci/promtool fetches it")


def test_every_rule_names_metrics_and_labels_that_exist() -> None:
    for rule in rules():
        assert problems(rule["expr"], recorded_labels()) == [], rule


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alert_says_what_is_wrong_and_which_page_says_what_to_do(alert: dict[str, dict[str, str]]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    page = ROOT / alert["annotations"]["runbook"]
    assert page.parent == RUNBOOKS
    text = page.read_text()
    assert f"`{alert['alert']}`" in text
    assert text.startswith("# ")
    # A label that the expression drops would leave a hole in the sentence.
    labels = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    groups = re.findall(r"by \(([^)]*)\)", str(alert["expr"]))
    kept = {name.strip() for group in groups for name in group.split(",")}
    assert labels <= kept or not groups or ":ratio_rate" in str(alert["expr"])


def test_index_of_runbooks_has_every_alert_and_every_page() -> None:
    index = (RUNBOOKS / "README.md").read_text()
    assert set(re.findall(r"`(Headrace\w+)`", index)) == {alert["alert"] for alert in ALERTS}
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


def test_runbooks_link_to_pages_that_exist() -> None:
    for page in RUNBOOKS.glob("*.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_objectives_are_bounds_of_the_histograms() -> None:
    text = RULES.read_text()
    assert {float(le) for le in re.findall(r'first_token_seconds_bucket\{le="([^"]+)"', text)} <= set(LATENCY_BOUNDS_S)
    assert {float(le) for le in re.findall(r'token_latency_seconds_bucket\{le="([^"]+)"', text)} <= set(GAP_BOUNDS_S)


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]}
    assert fired == {alert["alert"] for alert in ALERTS}


@NEEDS_PROMTOOL
@pytest.mark.parametrize(("command", "file"), [("check", RULES), ("test", UNIT_TESTS)], ids=["check", "test"])
def test_promtool_accepts(command: str, file: object) -> None:
    ran = subprocess.run(
        [str(promtool()), command, "rules", str(file)], capture_output=True, text=True, check=False, cwd=RULES.parent
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
