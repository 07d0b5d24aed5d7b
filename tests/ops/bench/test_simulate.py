from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench import simulate
from ops.load_generator.answer import Reading
from ops.load_generator.connection import Answer
from ops.simulation.profile import read_profile


def seen(sent_at: float, *times: float) -> Reading:
    return Reading(sent_at, times[-1], texts=[(at, "a") for at in times])


def test_broken_answer_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="503"):
        simulate.answered(Answer(1.0, [(1.5, b"HTTP/1.1 503 Busy\r\n\r\n")]))


def test_gaps_are_those_while_all_streams_decode() -> None:
    first = seen(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    late = seen(0.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0)
    gaps = simulate._gaps([first, late], 2, 40)
    assert {gap.seconds for gap in gaps} == {1.0}
    assert all(gap.num_decodes == 2 for gap in gaps)
    # The third token of the first stream is the first one that comes behind the other stream's begin.
    assert min(gap.num_context for gap in gaps) == 2 * (40 + 2)


def test_what_clients_saw_is_summed_up() -> None:
    found = simulate.measured([seen(place, place + 0.5, place + 0.6, place + 0.6, place + 0.7) for place in range(4)])
    assert found["tokens_per_s"] == pytest.approx(16 / 3.7)
    assert found["ttft_p50"] == pytest.approx(0.5)
    # Two tokens that come together have no time between them.
    assert (found["itl_p50"], found["itl_p99"]) == pytest.approx((0.1, 0.1))
    assert simulate.measured([seen(0.0, 1.0, 1.0)])["itl_p50"] == 0.0


def test_scored_loads_fit_the_models_context() -> None:
    loads = dict(simulate.unseen_loads(10.0, 1))
    assert len(loads) == 5
    assert all(each.prompt + each.output < simulate.WORKER.max_model_len for load in loads.values() for each in load)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whole_system_is_measured_fitted_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, object]] = []
    monkeypatch.setattr("ops.bench.record.append_lines", lambda path, lines: rows.extend(lines))
    path = tmp_path / "profile.json"
    simulate.main(["--step-ms", "20", "--rounds", "1", "--profile", str(path)])
    profile = read_profile(path)
    assert 0.01 < profile.times.device.seconds(1, 100, ()) + profile.host.step_s < 0.1
    assert {"tokens_per_s", "ttft_p99", "itl_p99", "saturation"} <= profile.errors.keys()
    assert len(rows) == 4 * 5 + 1
    assert json.dumps(rows)
