"""Golden probes on a real model: what is wrong is found within two probes, and what is right is never blamed."""

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

from gpu_worker.core.sequence import Sequence
from ops.bench.golden import Form, ProbedLab, false_alarms, record
from ops.bench.stepping import BLOCK_SIZE
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob
from ops.stack.config import DEMO_MODEL
from shared.golden import Baseline
from shared.sampling import Sampling

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
    assert lab.prober.in_a_row == 2, lab.prober.deviation


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
