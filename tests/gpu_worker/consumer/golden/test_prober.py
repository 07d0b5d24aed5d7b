"""Golden probes on a real model: what is wrong is found within two probes, and what is right is never blamed.

A worker that fails golden probes: it withdraws where another one can take over, and says why.

The simulated engine says the same of every token, so a baseline of other numbers is one of another model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from gpu_worker.consumer.golden.watch import GoldenSettings, WithdrawRule
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.simulated_runner import SimulatedRunner
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.worker import golden_settings
from ops.bench.golden import Form, ProbedLab, false_alarms, record
from ops.bench.stepping import BLOCK_SIZE
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob
from ops.stack.config import DEMO_MODEL
from shared.errors import ConfigError
from shared.golden import Baseline, GoldenPrompt, GoldenReading, make_key, sign
from shared.messages import Heartbeat
from shared.sampling import Sampling
from tests.gpu_worker.consumer.harness import TOKENIZER, MakeWorker, TestGateway

Weights = dict[str, torch.Tensor]


# Of the default prompts: the anchor, one more long one, and two short ones.
CHOSEN = (0, 3, 4, 7)


def changed_copy(
    target: Path, weights: Callable[[dict[str, torch.Tensor]], None] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """Copy the demo model, and change its weights or its configuration."""
    shutil.copytree(DEMO_MODEL, target)
    if config:
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights is not None:
        tensors = load_file(target / "model.safetensors")
        weights(tensors)
        save_file(tensors, target / "model.safetensors")
    return target


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return record(DEMO_MODEL, CHOSEN)


def _block_of_noise(tensors: Weights) -> None:
    matrix = tensors["model.layers.0.mlp.down_proj.weight"]
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * matrix.float().std()
    matrix[:64, :64] = noise.to(matrix.dtype)


def _flipped_bit(tensors: Weights) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int16)[5, 7] ^= 0x4000


def _int4(target: Path) -> Path:
    list(quantize(QuantizeJob(DEMO_MODEL, target, "rtn-int4", 64, None, 4, 64, "cpu")))
    return target


WRONG: dict[str, Callable[[Path], Path]] = {
    "int4": _int4,
    "rotation base": lambda target: changed_copy(target, config={"rope_theta": 20_000.0}),
    "block of weights": lambda target: changed_copy(target, _block_of_noise),
    "one bit": lambda target: changed_copy(target, _flipped_bit),
}


@pytest.mark.parametrize("name", WRONG)
def test_model_that_is_not_the_recorded_one_fails_both_of_two_probes(
    name: str, baseline: Baseline, tmp_path: Path
) -> None:
    lab = ProbedLab(WRONG[name](tmp_path / "model"), baseline)
    lab.probe()
    lab.probe()
    assert lab.prober.in_a_row == 2
    assert lab.prober.deviation > lab.prober.limit


@pytest.mark.parametrize("place", range(1, len(CHOSEN)))
def test_one_prompt_with_other_answers_fails_one_of_two_probes(place: int, baseline: Baseline) -> None:
    prompts = list(baseline.prompts)
    prompts[place] = replace(prompts[place], logprobs=tuple(each - 1.0 for each in prompts[place].logprobs))
    lab = ProbedLab(DEMO_MODEL, replace(baseline, prompts=tuple(prompts)))
    lab.probe()
    lab.probe()
    assert lab.prober.num_failed == 1, lab.prober.deviation


@pytest.mark.parametrize("place", [0, 14, 30])
def test_stale_block_of_the_prefix_cache_fails_the_next_probe(place: int, baseline: Baseline) -> None:
    lab = ProbedLab(DEMO_MODEL, baseline)
    lab.probe()
    anchor = lab.prober._sequence(baseline.prompts[0].token_ids, Sampling(), 1)
    blocks = lab.engine.scheduler._blocks._cache.match(anchor)  # type: ignore[union-attr]
    other = blocks[(place + 9) % len(blocks)]
    for stack in lab.runner.cache.groups[0].stacks:
        for tensor in (stack.keys, stack.values):
            tensor[:, blocks[place]] = tensor[:, other]
    lab.probe()
    lab.probe()
    assert lab.prober.in_a_row == 2, lab.prober.deviation


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float16"))]
)
def test_right_model_passes_though_its_probe_is_preempted(dtype: str, baseline: Baseline) -> None:
    lab = ProbedLab(DEMO_MODEL, baseline, Form(dtype, num_blocks=64, token_budget=256))
    # While the anchor runs, a job of 40 blocks, a person comes who needs as many.
    prompt = [1 + number % 4000 for number in range(39 * BLOCK_SIZE)]
    waiting = [Sequence("person", prompt, len(prompt), Sampling(temperature=0.0, ignore_eos=True), 2, arrival=0.0)]

    def come() -> None:
        if waiting and lab.stats.free_blocks < 39:
            lab.engine.add(waiting.pop())

    lab.probe(come)
    assert lab.stats.num_preemptions > 0
    lab.probe()
    assert (lab.prober.num_probes, lab.prober.num_failed) == (2, 0), lab.prober.deviation
    assert lab.stats.num_prefix_hits > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_probes_in_many_forms_raise_no_alarm(baseline: Baseline) -> None:
    """`python -m ops.bench.golden --probes 10000` is the same, for longer."""
    found = false_alarms(baseline, DEMO_MODEL, 200, 5)
    assert (found.num_probes, found.failed) == (200, [])


@pytest.mark.parametrize(("num_people", "num_prompt_tokens"), [(16, 16), (1, 900)], ids=["slots", "blocks"])
def test_worker_that_is_always_busy_is_probed_too(num_people: int, num_prompt_tokens: int, baseline: Baseline) -> None:
    lab = ProbedLab(DEMO_MODEL, baseline, Form(num_blocks=110))
    for number in range(num_people):
        prompt = [1 + number % 4000 for number in range(num_prompt_tokens)]
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        # One of them leaves early.
        lab.engine.add(Sequence(f"p{number}", prompt, len(prompt), sampling, 20 if number else 100, arrival=0.0))
    lab.step()
    lab.step()
    for _ in range(10):
        lab.prober.tick(may_begin=True)
        assert lab.stats.waiting + lab.stats.running == num_people, "people have the device"
        lab.now += 60.0
        lab.step()
    assert lab.prober.age_s == 600.0
    lab.prober.tick(may_begin=True)
    while lab.engine.has_work():
        lab.step()
    assert (lab.prober.num_probes, lab.prober.num_failed, lab.prober.age_s) == (1, 0, 0.0)


def test_probes_take_their_share_of_the_time_at_most(baseline: Baseline) -> None:
    lab = ProbedLab(DEMO_MODEL, baseline, share=0.001)
    spent_s, largest_s = 0.0, 0.0
    while lab.prober.num_probes < 3:
        lab.prober.tick(may_begin=True)
        while lab.engine.has_work():
            lab.step()
        largest_s = max(largest_s, lab.prober.device_s - spent_s)
        spent_s = lab.prober.device_s
        assert spent_s <= 0.001 * lab.now + largest_s
        lab.now += 10.0
    assert lab.now > 1000 * (spent_s - largest_s)


def test_failure_is_confirmed_at_once_though_the_share_is_used_up(baseline: Baseline, tmp_path: Path) -> None:
    lab = ProbedLab(WRONG["rotation base"](tmp_path / "model"), baseline, share=0.001)
    for _ in range(4):
        lab.prober.tick(may_begin=True)
        while lab.engine.has_work():
            lab.step()
        lab.now += 1.0
    assert lab.prober.num_probes == 2


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
