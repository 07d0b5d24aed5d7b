"""A model of this machine's engine, without threads and servers, that golden probes run in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from ops.stack.config import DEMO_MODEL
from shared.golden import NUM_ANSWER_TOKENS, NUM_TOP, Baseline, GoldenPrompt
from shared.sampling import Sampling
from tests.clock import Clock

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
