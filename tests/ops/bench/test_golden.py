"""What the bench of golden probes measures, by its options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ops.bench import golden


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        (["--probes", "0"], []),
        (["--probes", "7"], [("probes", 7)]),
        (["--probes", "0", "--rounds", "3"], [("rounds", 3)]),
        (["--probes", "7", "--rounds", "3"], [("probes", 7), ("rounds", 3)]),
    ],
)
def test_false_alarms_and_throughput_are_measured_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: list[str], measured: list[tuple[str, int]]
) -> None:
    seen: list[tuple[str, int]] = []

    def false_alarms(baseline: object, model: Path, num_probes: int, seed: int) -> Any:
        seen.append(("probes", num_probes))
        return SimpleNamespace(tell=lambda table, limit: None)

    def throughput(baseline: object, model: Path, rounds: int, table: object) -> None:
        seen.append(("rounds", rounds))

    monkeypatch.setattr(golden, "record", lambda model, max_tokens: SimpleNamespace(noise=0.1))
    monkeypatch.setattr(golden, "limit", lambda noise: noise)
    monkeypatch.setattr(golden, "false_alarms", false_alarms)
    monkeypatch.setattr(golden, "throughput", throughput)
    golden.main(options)
    assert seen == measured
