"""The prefix cache benchmark: what it compares, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_worker.execution.simulated_runner import SimulatedRunner
from ops.bench import prefix_cache
from ops.bench.make_model import Shape, make_model
from ops.bench.prefix_cache import MissCost, MissLoad, load_runner, measure_first_tokens, measure_misses
from shared.errors import ConfigError

SHAPE = Shape(96, 32, 48, 1, 4, 2, is_tied=True, max_len=2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shape")
    make_model(SHAPE, directory)
    return directory


def test_same_loads_are_served_with_and_without_the_cache() -> None:
    cost = measure_misses(SimulatedRunner(0, range(3, 9)), 1000, MissLoad(batch=2, prompt=70, new=3), rounds=3)
    assert len(cost.with_cache_s) == len(cost.without_s) == 3


def test_prompt_that_is_known_but_for_a_hundredth_is_timed_beside_a_new_one(model: Path) -> None:
    runner = load_runner(model, 1600, MissLoad(), num_threads=1)
    first = measure_first_tokens(runner, SHAPE.vocab_size, 1600, rounds=2)
    assert first.hit_share == 0.99
    assert first.speedup > 1


def test_cost_is_the_median_of_pairs_and_its_interval_holds_it() -> None:
    cost = MissCost([1.02, 2.2, 0.5], [1.0, 2.0, 0.5])
    assert cost.percent == pytest.approx(2.0)
    assert cost.percent_interval == pytest.approx((0.0, 10.0))


def test_interval_narrows_with_the_number_of_pairs() -> None:
    def width(count: int) -> float:
        low, high = MissCost([1 + index % 10 / 100 for index in range(count)], [1.0] * count).percent_interval
        return high - low

    assert width(1000) < width(20)


def test_model_with_short_sequences_is_refused_with_a_remedy(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequences of 2001 tokens.*make_model --max-len 2001"):
        load_runner(model, 2000, MissLoad(), num_threads=1)


def test_run_appends_what_it_measured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.bench.record._RESULTS", tmp_path)
    arguments = ["--model", str(model), "--prompt", "800", "--rounds", "2", "--hit-rounds", "1", "--num-threads", "1"]
    prefix_cache.main(arguments)
    misses, hits = (json.loads(line) for line in (tmp_path / "prefix_cache.jsonl").read_text().splitlines())
    low, high = misses["cost_percent_interval"]
    assert low <= misses["cost_percent"] <= high
    assert misses["cache_us_per_prompt_token"] < 100
    # Rounded to one decimal: a ratio below one, on a busy machine, is rounded by more than its twentieth.
    assert hits["ttft_speedup"] == pytest.approx(hits["cold_ttft_ms"] / hits["hit_ttft_ms"], rel=0.05, abs=0.06)
    assert (hits["prompt"], hits["hit_share"]) == (800, 0.98)
