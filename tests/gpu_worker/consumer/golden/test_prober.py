"""Golden probes on a real model: what is wrong is found within two probes, and what is right is never blamed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.consumer.golden.prober import GoldenProber, ProbeSizes
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import SequenceEvent
from gpu_worker.engine.engine import Engine, EngineStats
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.golden.prompts import default_prompts
from ops.quantize.job import quantize
from ops.quantize.job_settings import QuantizeJob
from ops.stack.config import DEMO_MODEL
from shared.golden import NUM_ANSWER_TOKENS, NUM_TOP, Baseline, GoldenPrompt
from shared.sampling import Sampling
from tests.clock import Clock

Weights = dict[str, torch.Tensor]


BLOCK = 16
# Of the default prompts: the anchor, one more long one, and two short ones.
CHOSEN = (0, 3, 4, 7)
MAX_TOKENS = 640


class Lab:
    """An engine of a checkpoint, and a prober in it; events of other sequences are kept."""

    def __init__(
        self,
        model: Path,
        baseline: Baseline | None = None,
        *,
        dtype: str = "float32",
        num_blocks: int = 300,
        token_budget: int = 512,
        share: float = 1.0,
    ) -> None:
        config = RunnerConfig(
            model, dtype, num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=token_budget,
            max_model_len=1024, num_threads=2,
        )  # fmt: skip
        self.runner = build_runner(config)
        sizes = SchedulerConfig(BLOCK, num_blocks, 16, token_budget, 1024)
        self.engine = Engine(Scheduler(sizes), self.runner)
        self.clock = Clock(0.0)
        self.others: list[SequenceEvent] = []
        self.prober: Any = None
        if baseline is not None:
            self.prober = GoldenProber(self, baseline, share, lambda: self.clock.now, ProbeSizes(1024, BLOCK))

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def add(self, sequence: Sequence) -> None:
        self.engine.add(sequence)

    def abort(self, sequence_id: str) -> None:
        self.engine.abort(sequence_id)

    def step(self) -> None:
        for event in self.engine.step():
            if self.prober is None or not self.prober.take(event):
                self.others.append(event)
        assert self.engine.last_error is None

    def probe(self, during: Callable[[], object] = lambda: None) -> float:
        """Run one probe to its end and return its deviation."""
        before = self.prober.num_probes
        # Whatever is owed is paid.
        self.clock.now += 1e6
        self.prober.tick(may_begin=True)
        while self.prober.num_probes == before:
            during()
            self.step()
            assert not self.prober.num_given_up
        return float(self.prober.deviation)

    def run(self, sequence: Sequence) -> list[SequenceEvent]:
        self.engine.add(sequence)
        while self.engine.has_work():
            self.step()
        events, self.others = self.others, []
        return events


def record(model: Path, name: str = "demo", **settings: Any) -> Baseline:
    """Record as `headrace golden record` does, straight from the engine."""
    tokenizer = ModelTokenizer(read_model_directory(DEMO_MODEL))
    texts = default_prompts()
    lab, prompts = Lab(model, **settings), []
    for number in CHOSEN:
        ids = tokenizer.encode_text(texts[number], add_special_tokens=False)[:MAX_TOKENS]
        sequence = Sequence(f"s{number}", list(ids), len(ids), Sampling(temperature=0, prompt_logprobs=0), 0)
        scores = [entry.logprob for event in lab.run(sequence) for entry in event.prompt_logprobs]
        prompts.append(GoldenPrompt(tuple(ids), tuple(scores)))
    anchor = list(prompts[0].token_ids)
    sampling = Sampling(temperature=0, logprobs=NUM_TOP, ignore_eos=True)
    events = lab.run(Sequence("answer", list(anchor), len(anchor), sampling, NUM_ANSWER_TOKENS))
    answer = tuple(entry.top for event in events for entry in event.logprobs)
    return Baseline(model=name, recorded=0.0, noise=0.0, prompts=tuple(prompts), answer=answer)


def changed_copy(
    target: Path,
    weights: Callable[[dict[str, torch.Tensor]], None] | None = None,
    config: dict[str, Any] | None = None,
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
    return record(DEMO_MODEL)


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
    lab = Lab(WRONG[name](tmp_path / "model"), baseline)
    lab.probe()
    lab.probe()
    assert lab.prober.in_a_row == 2, lab.prober.deviation


@pytest.mark.parametrize("place", [0, 14, 30])
def test_stale_block_of_the_prefix_cache_fails_the_next_probe(place: int, baseline: Baseline) -> None:
    lab = Lab(DEMO_MODEL, baseline)
    lab.probe()
    anchor = lab.prober._sequence(baseline.prompts[0].token_ids, Sampling(), 1)
    blocks = lab.engine.scheduler._blocks._cache.match(anchor)  # type: ignore[union-attr]
    other = blocks[(place + 9) % len(blocks)]
    for stack in lab.runner._cache.groups[0].stacks:
        for tensor in (stack.keys, stack.values):
            tensor[:, blocks[place]] = tensor[:, other]
    lab.probe()
    lab.probe()
    assert lab.prober.in_a_row == 2, lab.prober.deviation


def _crowd(lab: Lab, rng: random.Random) -> Callable[[], None]:
    """Let people and jobs come and go beside a probe, more than the blocks hold, so that probes are preempted too."""
    names = iter(range(10**9))

    def come() -> None:
        stats = lab.stats
        if stats.running + stats.waiting < 6 and rng.random() < 0.3:
            length = rng.randrange(1, 300)
            prompt = [rng.randrange(1, 4096) for _ in range(length)]
            lane = rng.choice(("interactive", "batch"))
            sampling = Sampling(temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(1000), ignore_eos=True)
            lab.engine.add(
                Sequence(f"o{next(names)}", prompt, length, sampling, rng.randrange(1, 24), lane=lane, arrival=0.0)
            )

    return come


def _probe_in_a_crowd(lab: Lab, number: int, rng: random.Random) -> None:
    for _ in range(number):
        lab.probe(_crowd(lab, rng))
        assert lab.prober.in_a_row == 0, lab.prober.deviation
        while lab.engine.has_work():
            lab.step()
        lab.others.clear()


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float16"))]
)
def test_right_model_passes_though_its_probe_is_preempted(dtype: str, baseline: Baseline) -> None:
    lab = Lab(DEMO_MODEL, baseline, dtype=dtype, num_blocks=64, token_budget=256)
    # While the anchor runs, a job of 40 blocks, a person comes who needs as many.
    prompt = [1 + number % 4000 for number in range(39 * BLOCK)]
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
def test_many_probes_raise_no_alarm(baseline: Baseline) -> None:
    rng = random.Random(5)
    for dtype, num_blocks, token_budget in (("bfloat16", 90, 256), ("bfloat16", 300, 512), ("float16", 120, 64)):
        lab = Lab(DEMO_MODEL, baseline, dtype=dtype, num_blocks=num_blocks, token_budget=token_budget)
        _probe_in_a_crowd(lab, 40, rng)


@pytest.mark.parametrize(("num_people", "num_prompt_tokens"), [(16, 16), (1, 900)], ids=["slots", "blocks"])
def test_worker_that_is_always_busy_is_probed_too(num_people: int, num_prompt_tokens: int, baseline: Baseline) -> None:
    lab = Lab(DEMO_MODEL, baseline, num_blocks=110)
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
        lab.clock.now += 60.0
        lab.step()
    assert lab.prober.age_s == 600.0
    lab.prober.tick(may_begin=True)
    while lab.engine.has_work():
        lab.step()
    assert (lab.prober.num_probes, lab.prober.num_failed, lab.prober.age_s) == (1, 0, 0.0)


def test_probes_take_their_share_of_the_time_at_most(baseline: Baseline) -> None:
    lab = Lab(DEMO_MODEL, baseline, share=0.001)
    spent_s, largest_s = 0.0, 0.0
    while lab.prober.num_probes < 3:
        lab.prober.tick(may_begin=True)
        while lab.engine.has_work():
            lab.step()
        largest_s = max(largest_s, lab.prober.device_s - spent_s)
        spent_s = lab.prober.device_s
        assert spent_s <= 0.001 * lab.clock.now + largest_s
        lab.clock.now += 10.0
    assert lab.clock.now > 1000 * (spent_s - largest_s)


def test_failure_is_confirmed_at_once_though_the_share_is_used_up(baseline: Baseline, tmp_path: Path) -> None:
    lab = Lab(WRONG["rotation base"](tmp_path / "model"), baseline, share=0.001)
    for _ in range(4):
        lab.prober.tick(may_begin=True)
        while lab.engine.has_work():
            lab.step()
        lab.clock.now += 1.0
    assert lab.prober.num_probes == 2
