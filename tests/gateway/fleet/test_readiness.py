"""Whether a request could be served, and why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.fleet.readiness import Readiness, readiness


@pytest.mark.parametrize(
    ("ready", "is_connected", "expected"),
    [
        (("a", "b"), True, Readiness("ready", ("a", "b"))),
        (("b",), True, Readiness("ready", ("b",))),
        ((), True, Readiness("no_worker", ())),
        (("a",), False, Readiness("no_queue", ("a",))),
        ((), False, Readiness("no_queue", ())),
    ],
)
def test_queue_is_looked_at_first_and_then_the_workers(
    ready: tuple[str, ...], is_connected: bool, expected: Readiness
) -> None:
    fleet = SimpleNamespace(models=lambda: ["a", "b"], is_ready=lambda model: model in ready)
    found = readiness(cast("Any", fleet), SimpleNamespace(is_connected=is_connected))
    assert found == expected
    assert found.is_ready is (expected.status == "ready")
