"""A real Prometheus scrapes the running system with our rules: every query of every dashboard is answered."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from ops.stack.ports import free_port
from tests.integration.system import System
from tests.ops.alerts.rules import RULES
from tests.ops.dashboards.files import DASHBOARDS, queries

PROMETHEUS = shutil.which("prometheus", path=sysconfig.get_path("scripts")) or shutil.which("prometheus")
SCRAPED_S = 12.0
# What a system without a GPU, drafts, refusals, a golden baseline or a day's history cannot show.
MAY_BE_EMPTY = re.compile(r"headrace_gpu_|spec_decode|promises|retry_after_error|golden_limit|:ratio_rate")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not on the PATH")]


@pytest.fixture(scope="module")
def prometheus(simulated: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped the system while it answered requests."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    info, port = simulated.info, free_port()
    target = info["metrics_url"].removeprefix("http://").removesuffix("/metrics")
    key = folder / "key"
    key.write_text(info["operator_key"])
    job = {
        "job_name": "headrace",
        "authorization": {"credentials_file": str(key)},
        "static_configs": [{"targets": [target]}],
    }
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": [job]}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [str(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    client, model, until = simulated.client(), simulated.model, time.monotonic() + SCRAPED_S
    # What tenants used is read from NATS now and then alone.
    usage = "increase(headrace_usage_prompt_tokens_total[10s])"
    while time.monotonic() < until or (time.monotonic() < until + 30 and not ask(url, usage)):
        client.completions.create(model=model, prompt="a b c", max_tokens=20, seed=1)
        time.sleep(0.3)
    yield url
    process.terminate()
    process.wait(20)


def ask(url: str, expression: str) -> list[dict[str, Any]]:
    answer = httpx2.get(f"{url}/api/v1/query", params={"query": expression}, timeout=20).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def test_target_is_up_and_all_rules_are_evaluated(prometheus: str) -> None:
    assert [result["value"][1] for result in ask(prometheus, "up")] == ["1"]
    groups = httpx2.get(f"{prometheus}/api/v1/rules", timeout=20).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_every_query_of_a_dashboard_is_answered_and_has_data(prometheus: str, dashboard: Any) -> None:
    for query in queries(dashboard):
        expression = re.sub(r"\$__\w+", "10s", query).replace("$model", ".*").replace("$worker", ".*")
        expression = expression.replace("$tenant", ".*")
        found = ask(prometheus, expression)
        assert found or MAY_BE_EMPTY.search(expression), (dashboard["title"], expression)
