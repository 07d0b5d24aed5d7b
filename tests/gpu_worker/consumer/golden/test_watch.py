"""A worker that fails golden probes: it withdraws where another one can take over, and says why.

The simulated engine says the same of every token, so a baseline of other numbers is one of another model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.consumer.golden.watch import GoldenSettings, WithdrawRule
from gpu_worker.execution.simulated_runner import SimulatedRunner
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.worker import golden_settings
from shared.errors import ConfigError
from shared.golden import Baseline, GoldenPrompt, GoldenReading, make_key, sign
from shared.messages import Heartbeat
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, TestGateway

Make = MakeWorker
IDS = tuple(range(1, 41))


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.start.assembly.TICK_S", 0.02)


def settings(model: str, *, is_right: bool, withdraw: WithdrawRule = "unless-last") -> GoldenSettings:
    said = SimulatedRunner(0, TOKENIZER.plain_token_ids)._logprob
    recorded = [said - (0.0 if is_right else 0.1 * (place % 3)) for place in range(len(IDS) - 1)]
    answer = (((7, said), (8, said)),)
    prompt = GoldenPrompt(IDS, tuple(recorded))
    return GoldenSettings(
        Baseline(model=model, label="v1", recorded=0.0, noise=0.0, prompts=(prompt,), answer=answer), 1.0, withdraw
    )


def reading(beat: Heartbeat) -> GoldenReading:
    assert beat.metrics is not None
    return beat.metrics.golden or GoldenReading()


async def test_right_worker_is_probed_and_serves_on(make_worker: Make, gateway: TestGateway, model: str) -> None:
    worker = await make_worker(golden=settings(model, is_right=True))
    beat = await worker.wait_for_heartbeat(lambda beat: reading(beat).probes >= 3)
    found = reading(beat)
    assert (found.failed, found.deviation, found.problem, beat.draining) == (0, 0.0, "", False)
    assert found.device_s > 0.0
    assert (await gateway.ask()).finish.reason == "length"


async def test_wrong_worker_withdraws_where_another_takes_over(
    make_worker: Make, gateway: TestGateway, model: str
) -> None:
    wrong = await make_worker(golden=settings(model, is_right=False, withdraw="always"))
    beat = await wrong.wait_for_heartbeat(lambda beat: reading(beat).has_withdrawn)
    assert reading(beat).failed >= 2
    assert "2 golden probes in a row differ" in reading(beat).problem
    assert "v1" in reading(beat).problem
    assert wrong.worker.withdrawn == reading(beat).problem
    await wrong.wait_for_heartbeat(lambda beat: beat.draining)
    right = await make_worker(golden=settings(model, is_right=True))
    answer = await gateway.ask()
    assert set(answer.workers) == {right.name}


async def test_last_worker_goes_on_and_withdraws_when_another_is_there(
    make_worker: Make, gateway: TestGateway, model: str
) -> None:
    last = await make_worker(golden=settings(model, is_right=False))
    beat = await last.wait_for_heartbeat(lambda beat: reading(beat).in_a_row >= 4)
    assert not beat.draining
    assert reading(beat).problem
    assert last.worker.withdrawn is None
    assert set((await gateway.ask()).workers) == {last.name}
    # One that is wrong too, or not known yet, is not a reason to withdraw; one that says nothing of itself is.
    failing = await make_worker(golden=settings(model, is_right=False, withdraw="never"))
    await failing.wait_for_heartbeat(lambda beat: reading(beat).in_a_row >= 2)
    beat = await last.wait_for_heartbeat(lambda beat: reading(beat).in_a_row >= 6)
    assert not beat.draining
    await make_worker()
    await last.wait_for_heartbeat(lambda beat: beat.draining and reading(beat).has_withdrawn)


async def test_worker_that_may_never_withdraw_says_what_it_found(make_worker: Make, model: str) -> None:
    await make_worker()
    worker = await make_worker(golden=settings(model, is_right=False, withdraw="never"))
    beat = await worker.wait_for_heartbeat(lambda beat: reading(beat).in_a_row >= 3)
    assert not beat.draining
    assert reading(beat).problem


async def test_operator_has_the_last_word(make_worker: Make, gateway: TestGateway, model: str) -> None:
    worker = await make_worker(golden=settings(model, is_right=False, withdraw="always"))
    await worker.wait_for_heartbeat(lambda beat: beat.draining)
    worker.worker.consumer.uncordon()
    assert (await gateway.ask()).finish.reason == "length"
    # It serves on, and says that it is still wrong.
    beat = await worker.wait_for_heartbeat(lambda beat: not beat.draining and not reading(beat).has_withdrawn)
    more = reading(beat).failed + 3
    beat = await worker.wait_for_heartbeat(lambda beat: reading(beat).failed >= more)
    assert (beat.draining, reading(beat).has_withdrawn) == (False, False)
    assert "golden probes in a row differ" in reading(beat).problem


def _config(tmp_path: Path, baseline: Baseline, **changes: Any) -> WorkerConfig:
    key = make_key(tmp_path / "key")
    (tmp_path / "baseline").write_bytes(sign(baseline, key))
    named = {"golden": tmp_path / "baseline", "golden_key_file": tmp_path / "key", **changes}
    return WorkerConfig(model=tmp_path, **named)


def test_baseline_of_this_model_is_taken(tmp_path: Path) -> None:
    baseline = settings("m", is_right=True).baseline
    found = golden_settings(_config(tmp_path, baseline, golden_withdraw="never"), "m", 4096)
    assert found == GoldenSettings(baseline, 0.001, "never")
    assert golden_settings(WorkerConfig(model=tmp_path), "m", 4096) is None


@pytest.mark.parametrize(
    ("model", "vocab_size", "changes", "told"),
    [
        ("other", 4096, {}, "is of 'm', and this worker serves 'other'"),
        ("m", 30, {}, "has token 40, and this model has 30"),
        ("m", 4096, {"golden_key_file": None}, "HEADRACE_GOLDEN_KEY_FILE: is required"),
        ("m", 4096, {"golden": None}, "HEADRACE_GOLDEN is not"),
    ],
)
def test_baseline_that_is_not_this_models_is_refused(
    model: str, vocab_size: int, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = _config(tmp_path, settings("m", is_right=True).baseline, **changes)
    with pytest.raises(ConfigError, match=told):
        golden_settings(config, model, vocab_size)
