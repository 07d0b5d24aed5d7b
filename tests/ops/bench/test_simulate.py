from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench import simulate
from ops.bench.load.open_load import Seen, _seen
from ops.load_generator.connection import Answer
from ops.simulation.profile import read_profile
from ops.simulation.workload import Arrival

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%b"}]}\n\n' % text.encode()


def test_tokens_that_come_together_have_the_same_time() -> None:
    end = event("") + b"data: [DONE]\n\n"
    answer = Answer(1.0, [(1.5, HEAD + event("a")), (1.6, event("b") + event("c")), (1.7, end)], True)
    seen = _seen(Arrival(0.0, 5, 3), answer)
    assert seen.times == [1.5, 1.6, 1.6]
    assert seen.ttft_s == 0.5
    assert seen.gaps_s == pytest.approx([0.1, 0.0])


def test_broken_answer_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="503"):
        _seen(Arrival(0.0, 5, 3), Answer(1.0, [(1.5, b"HTTP/1.1 503 Busy\r\n\r\n")]))


def test_gaps_are_those_while_all_streams_decode() -> None:
    first = Seen(Arrival(0.0, 40, 6), 0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    late = Seen(Arrival(0.0, 40, 6), 0.0, [2.5, 3.0, 4.0, 5.0, 6.0, 7.0])
    gaps = simulate._gaps([first, late], 2, 40)
    assert {gap.seconds for gap in gaps} == {1.0}
    assert all(gap.num_decodes == 2 for gap in gaps)
    # The third token of the first stream is the first one that comes behind the other stream's begin.
    assert min(gap.num_context for gap in gaps) == 2 * (40 + 2)


def test_what_clients_saw_is_summed_up() -> None:
    seen = [Seen(Arrival(0.0, 5, 3), float(place), [place + 0.5, place + 0.6, place + 0.7]) for place in range(4)]
    found = simulate.measured(seen)
    assert found["tokens_per_s"] == pytest.approx(12 / 3.7)
    assert found["ttft_p50"] == pytest.approx(0.5)
    assert found["itl_p99"] == pytest.approx(0.1)


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
