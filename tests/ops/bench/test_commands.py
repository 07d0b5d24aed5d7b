"""Every bench command runs, in its smallest form, and measures our own engine or gateway."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ops.bench import kv_tiers, record
from ops.bench.comparison import (
    OURS,
    add_load_options,
    add_rows,
    in_turns,
    loads_of,
    measure_in_turn,
    median_ratio,
)
from ops.bench.engine import EngineBench, Load, Measurement
from ops.bench.make_model import SHAPES, make_model
from ops.bench.peers.engines import PeerUnavailableError

SMALL = "--shapes 15m --batch 1 4 --prompt 512 --new 16 --rounds 1"
"""Prompts as long as a step's budget: those prefilled first decode for as many steps as there are others."""

COMMANDS = {
    "adapters": "--batch 2 --rounds 1",
    "engine_compare": f"{SMALL} --peers transformers",
    "gateway": "--isolated --concurrency 1 --tokens 8 --rounds 2",
    "kv_tiers": "--prompt 512 --rounds 1",
    "long_contexts": "--length 600 --texts 1 --recall-length 600 --passages 1 --tokens 700",
    "ranks": "--shapes 15m --batch 1 4 --prompt 32 --new 4 --rounds 1",
    # More tokens: streams over HTTP begin further apart, the more so on a busy machine.
    "served": f"{SMALL} --new 64 --servers none",
    "spec": "--proposer ngram --batch 1 --new 16 --rounds 1",
    "watermark": "--length 25 --texts 4 --pairs 10",
}
LEAST_ROWS = {"engine_compare": 4, "served": 2, "gateway": 2, "kv_tiers": 5, "ranks": 4}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "_RESULTS", tmp_path)
    return tmp_path


def run(name: str, options: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run a command and return what it recorded."""
    monkeypatch.setattr(sys, "argv", [f"python -m ops.bench.{name}", *options.split()])
    place = f"ops.bench.{name}"
    if hasattr(importlib.import_module(place), "__path__"):
        place += ".__main__"
    assert not importlib.import_module(place).main()
    rows = [line for path in results.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in rows]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_runs_in_its_smallest_form(name: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(name, COMMANDS[name], results, monkeypatch)
    assert len(rows) >= LEAST_ROWS.get(name, 1)
    if name in ("engine_compare", "served"):
        measured = Counter(row["engine"] for row in rows if row["decode_tokens_per_s"] > 0)
        assert measured[OURS] == 2
        assert not any(row["not_available"] for row in rows)


@pytest.mark.parametrize("option", ["--prompt", "--rounds", "--num-threads"])
def test_count_below_one_is_refused_before_a_model_is_made(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv_tiers.main([option, "0"])
    assert f"argument {option}: '0' is not a whole number of at least 1" in capsys.readouterr().err


def test_what_is_waited_for_is_looked_for_again_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    kv_tiers._wait_until(lambda: answers.pop(0))
    assert answers == []
    monkeypatch.setattr(kv_tiers, "_MAX_SETTLE_S", 0.01)
    kv_tiers._wait_until(lambda: False)


def test_sequences_outlast_the_measurement_of_a_full_batch(tmp_path: Path) -> None:
    """Each prompt takes a step's whole budget; the first sequence decodes while the others are prefilled."""
    make_model(SHAPES["15m"], tmp_path)
    load = Load(batch=6, prompt=32, new=2)
    bench = EngineBench(tmp_path, dtype="bfloat16", num_threads=1, max_load=load, token_budget=32, block_size=16)
    assert bench.measure(load).decode_rate > 0


@pytest.mark.parametrize(
    ("measured", "missing", "required", "status"),
    [
        (OURS, "peer", (OURS,), None),
        (OURS, "peer", (OURS, "peer"), "not measured: peer"),
        ("peer", OURS, (OURS,), f"not measured: {OURS}"),
    ],
)
def test_absent_engine_that_was_asked_for_fails_the_command(
    measured: str, missing: str, required: tuple[str, ...], status: str | None, results: Path
) -> None:
    table = record.ResultTable("engine", ("engine", "batch"))
    with nullcontext() if status is None else pytest.raises(SystemExit, match=status):
        add_rows(table, {(measured, 1): Measurement(1.0, 1.0)}, {}, {missing: "no cmake"}, required)


def test_engine_that_fails_in_any_round_is_not_compared() -> None:
    def measure(number: int) -> dict[int, Measurement]:
        return {1: Measurement(1.0, 1.0 + number)}

    failed: list[int] = []

    def fail_from(first: int, number: int) -> dict[int, Measurement]:
        if number >= first:
            failed.append(first)
            raise PeerUnavailableError("gone")
        return measure(number)

    engines = {OURS: measure, "absent": partial(fail_from, 0), "peer": partial(fail_from, 1)}
    expected = ({(OURS, 1): Measurement(1.0, 2.0)}, {"absent": "gone", "peer": "gone"})
    assert measure_in_turn(engines, 3) == expected
    assert failed == [0, 1], "what is missing is not asked again"


def test_figures_are_taken_in_turns_and_compared_pair_by_pair() -> None:
    calls: list[str] = []
    taken = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 3)
    assert calls == list("ababab")
    assert taken == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
    assert median_ratio([1.0], [3.0], 4) == 0.3333


def test_peers_are_kept_where_the_system_says_that_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def cache() -> Path:
        parser = argparse.ArgumentParser()
        add_load_options(parser)
        options = parser.parse_args(["--batch", "2,3", "--prompt", "7"])
        assert loads_of(options) == [Load(2, 7, 64), Load(3, 7, 64)]
        return Path(options.cache)

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache() == Path("/caches/headrace/bench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache() == Path("/home/somebody/.cache/headrace/bench")
