from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, groupby, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ops.bench import executed, simulate
from ops.bench.executed import ExecutedEngine, Execution, take_turns
from ops.load_generator.answer import Reading
from ops.load_generator.connection import Answer
from ops.simulation.profile import Profile, read_profile
from ops.simulation.step_time import HostTimes, LinearTimes, StepWork
from ops.simulation.workload import Arrival


def seen(sent_at: float, *times: float) -> Reading:
    return Reading(sent_at, times[-1], texts=[(at, "a") for at in times])


def test_broken_answer_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="503"):
        simulate.answered(Answer(1.0, [(1.5, b"HTTP/1.1 503 Busy\r\n\r\n")]))


def test_gaps_are_those_while_all_streams_decode() -> None:
    first = seen(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    late = seen(0.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0)
    found = simulate._gaps([first, late], 2, 40)
    # The third token of the first stream is the first one that comes behind the other stream's begin.
    assert [gap_s for _, gap_s in found] == [1.0] * 6
    assert found[0][0] == StepWork(2, 2 * 43)


def test_chunks_behind_the_first_of_a_prompt_find_cold_caches() -> None:
    system: Any = SimpleNamespace(serve=lambda arrivals: [seen(0.0, 2.0, 3.0) for _ in arrivals])
    profile = Profile("", LinearTimes(0.01), HostTimes(), 0.0, simulate.WORKER, 0.5)
    ways = dict(simulate.Calibration.measure(system, profile).ways)
    assert [ways[prompt] for prompt in (480, 900, 1500)] == pytest.approx([1.99, 1.48, 0.97])


def test_whole_system_adds_latency_time_of_prompts_and_of_the_host() -> None:
    device = LinearTimes(0.002, token_s=1e-4, free_tokens=2)
    profile = Profile("", device, HostTimes(1e-4, 1e-5, 3e-4), 0.0, simulate.WORKER, 0.0)
    gaps = [(StepWork(batch, 0), 0.0024 + 1.1e-4 * max(0, batch - 2)) for batch in (1, 2, 4, 8)]
    ways = [(prompt, 0.004 + 1e-5 * prompt) for prompt in simulate.PROMPTS]
    ways[2] = (ways[2][0], 0.5)
    found = simulate.calibrated(profile, [simulate.Calibration(gaps, ways)] * 2)
    assert (found.latency_s, found.device.token_s) == pytest.approx((0.004, 1.1e-4), rel=0.05)
    assert found.host.seconds(4) == pytest.approx(4e-4, rel=0.05)
    assert found.host.prompt_s == 3e-4


def test_what_clients_saw_is_summed_up() -> None:
    found = simulate.measured([(place, [place + 0.5, place + 0.6, place + 0.7]) for place in range(4)])
    assert found["tokens_per_s"] == pytest.approx(12 / 3.7)
    assert found["ttft_p50"] == pytest.approx(0.5)
    assert found["itl_p99"] == pytest.approx(0.1)
    # Two tokens that come together have no time between them.
    assert simulate.measured([(0.0, [1.0, 1.0])])["itl_p50"] == 0.0


def test_scored_loads_fit_the_models_context() -> None:
    loads = simulate.scored_loads(10.0, 60, 1)
    assert len(loads) == 5
    assert all(each.prompt + each.output < simulate.WORKER.max_model_len for load in loads.values() for each in load)


def test_engine_takes_its_own_processor_time_alone() -> None:
    engine, others = (ExecutedEngine(simulate.MODEL, simulate.WORKER) for _ in range(2))
    load = [Arrival(0.0, 40, 6), Arrival(0.0, 600, 3), Arrival(100.0, 40, 2)]
    found, busy = Execution(load), Execution([Arrival(0.0, 1500, 2)] * 5)
    take_turns(engine.serve(found), chain(others.serve(busy), repeat(None)))
    assert [len(times) for times in found.times] == [6, 3, 2]
    assert all(times == sorted(times) for times in found.times)
    # Idle time is skipped; what the other engine and this test computed is not counted.
    assert 100.0 < found.times[2][0] < 100.0 + 0.5 * sum(step.device_s for step in busy.steps)
    work = [step.work for step in found.steps]
    assert sum(length for each in work for _, length in each.chunks) == 40 + 600 + 40
    assert sum(each.num_decodes for each in work) == 5 + 2 + 1
    spent_s = sum(step.device_s + step.host_s for step in found.steps[:-2])
    assert max(found.times[1][-1], found.times[0][-1]) == pytest.approx(spent_s, rel=0.05)


def test_step_that_fails_ends_the_load_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ExecutedEngine(simulate.MODEL, simulate.WORKER)
    monkeypatch.setattr(engine._runner, "submit", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="the engine failed: no memory"):
        list(engine.serve(Execution([Arrival(0.0, 4, 2)])))


def test_engines_take_turns_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed, "TURN_S", 0.05)
    order = []

    def steps(name: str, count: int) -> Iterator[None]:
        for _ in range(count):
            order.append(name)
            end = time.thread_time() + 0.004
            while time.thread_time() < end:
                pass
            yield

    take_turns(steps("scored", 30), steps("endless", 1000))
    turns = [(name, len(list(each))) for name, each in groupby(order)]
    assert [name for name, _ in turns[:4]] == ["endless", "scored", "endless", "scored"]
    # A step that finds the caches full of the other engine's data is one of many.
    assert all(count >= 8 for _, count in turns[:-1])
    assert order.count("scored") == 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engine_and_whole_system_are_fitted_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, object]] = []
    monkeypatch.setattr("ops.bench.record.append_lines", lambda path, lines: rows.extend(lines))
    path = tmp_path / "profile.json"
    simulate.main(["--served", "--requests", "24", "--profile", str(path)])
    profile = read_profile(path)
    assert 0.0001 < profile.times.seconds(StepWork(1, 100))[1] < 0.1
    assert {"tokens_per_s", "ttft_p99", "itl_p99", "saturation"} <= profile.errors.keys()
    assert len(rows) == 2 * (4 * 5 + 1)
