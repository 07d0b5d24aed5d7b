"""The reader of queries and the check against the metrics that exist: both find mistakes."""

from __future__ import annotations

import pytest

from tests.ops.dashboards.known_metrics import problems
from tests.ops.dashboards.promql import Selector, named


def test_metrics_labels_and_groups_are_found_among_functions_and_operators() -> None:
    found = named(
        'histogram_quantile(0.99, sum by (le, m) (rate(a_bucket{x=~"$v", y!="by (z)"}[5m]))) / on (w) b or vector(0)'
    )
    assert found.selectors == [Selector("a_bucket", {"x", "y"}), Selector("b")]
    assert found.groups == {"le", "m", "w"}


def test_what_the_reader_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown at '@ 5'"):
        named("a @ 5")


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(vllm:no_such_total[5m])", "no metric vllm:no_such_total"),
        ('sum(headrace_shed_total{route="x"})', "headrace_shed_total has no label route"),
        ("sum by (worker) (headrace_shed_total)", "no metric here has a label worker"),
        ("rate(vllm:e2e_request_latency_seconds[5m])", "no metric vllm:e2e_request_latency_seconds"),
        ('headrace_fleet_workers{le="1"}', "headrace_fleet_workers has no label le"),
    ],
)
def test_query_that_would_show_nothing_is_found(expression: str, problem: str) -> None:
    assert problems(expression, {}) == [problem]


def test_good_query_has_no_problem() -> None:
    query = 'sum by (model_name, instance) (rate(vllm:request_success_total{finished_reason="stop"}[5m]))'
    assert problems(query, {}) == []
