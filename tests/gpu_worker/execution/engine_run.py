"""Runs the real engine, scheduler and model runner on a tiny random model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_worker.core.batch_sequences import BatchSequences
from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import DraftPolicy, Speculation
from gpu_worker.core.step import LogprobEntry, SequenceEvent
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from shared.grammar import Grammar
from shared.sampling import Sampling
from tests.gpu_worker.structured_output.tiny_tokenizer import EOS, constraint_of

BLOCK = 4
VOCAB = 97
MAX_LEN = 160


def save_tiny_model(directory: Path, seed: int = 5) -> Any:
    """Save a random Llama whose next tokens depend on the whole context, and return it."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (parameter.dim() == 1))
    model.save_pretrained(directory)
    return model


def make_runner(
    directory: Path,
    *,
    num_blocks: int = 400,
    max_num_seqs: int = 40,
    proposer: Proposer | None = None,
    block_size: int = BLOCK,
    **settings: Any,
) -> TorchModelRunner:
    config = RunnerConfig(
        directory, block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs, num_threads=1, **settings
    )
    runner = build_runner(config)
    if proposer is not None:
        runner.verify_drafts_of(proposer)
    return runner


def greedy_by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    result = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = result[0, len(prompt) :].tolist()
    return tokens


def random_prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB) for _ in range(length)]


def make_sequence(name: str, prompt: list[int], sampling: Sampling, emitted: tuple[int, ...] = ()) -> Sequence:
    return Sequence(name, [*prompt, *emitted], len(prompt), sampling, max_tokens=sampling.max_tokens or 16)


@dataclass
class Outcome:
    """What all events of the run add up to."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[LogprobEntry]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[LogprobEntry]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_steps: int = 0
    speculation: Speculation | None = None

    def add(self, event: SequenceEvent) -> None:
        name = event.sequence.id
        self.tokens.setdefault(name, []).extend(event.token_ids)
        self.logprobs.setdefault(name, []).extend(event.logprobs)
        self.prompt_logprobs.setdefault(name, []).extend(event.prompt_logprobs)
        if event.error is not None:
            self.errors[name] = event.error


def scheduler_config(runner: TorchModelRunner, max_num_seqs: int, token_budget: int, **changes: Any) -> SchedulerConfig:
    """Return what schedules all that a runner has, but for `changes`."""
    sizes = {"block_size": runner.block_size, "num_blocks": runner.num_blocks, "windows": runner.windows}
    limits = {"max_num_batched_tokens": token_budget, "max_model_len": runner.max_model_len}
    return SchedulerConfig(max_num_seqs=max_num_seqs, **{**sizes, **limits, **changes})


def answer(engine: Engine, sequences: list[Sequence], arrivals_per_step: int) -> Outcome:
    outcome, coming = Outcome(), list(sequences)
    while coming or engine.has_work():
        for sequence in coming[:arrivals_per_step]:
            engine.add(sequence)
        del coming[:arrivals_per_step]
        for event in engine.step():
            outcome.add(event)
        if engine.last_error is not None:
            raise engine.last_error
    outcome.num_preemptions = engine.stats.num_preemptions
    return outcome


def run(
    runner: TorchModelRunner,
    sequences: list[Sequence],
    *,
    max_num_seqs: int = 40,
    token_budget: int = 64,
    arrivals_per_step: int = 1000,
    policy: DraftPolicy | None = None,
    **changes: Any,
) -> Outcome:
    """Generate until every sequence has finished; `arrivals_per_step` lets them come one after another.

    Blocks are what the runner has, but for `changes` of the scheduler's configuration.
    """
    constraints = SharedConstraints()
    runner._sequences = BatchSequences(constraints)
    config = scheduler_config(runner, min(max_num_seqs, token_budget), token_budget, **changes)
    scheduler = Scheduler(config, None if policy is None else Speculation(policy), constraints)
    outcome = answer(Engine(scheduler, runner), sequences, arrivals_per_step)
    runner.clear()
    scheduler.check_integrity()
    outcome.num_prefix_hits = scheduler.stats.num_prefix_hits
    outcome.num_steps = scheduler.step
    outcome.speculation = scheduler.speculation
    return outcome


LETTERS = Grammar(kind="regex", source="[a-f]+;")
FORCING = Grammar(kind="regex", source="(yes, yes, yes|no, no, no)!")
SAMPLINGS = [
    Sampling(temperature=0.0, logprobs=3),
    Sampling(seed=3, temperature=0.9, grammar=LETTERS),
    Sampling(seed=4, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=6, logprobs=2),
    Sampling(temperature=0.0, grammar=FORCING),
    Sampling(seed=6, temperature=1.1, top_p=0.9, logit_bias={5: 2.0}, prompt_logprobs=1),
    Sampling(seed=7, temperature=0.8, grammar=FORCING, logprobs=0),
    Sampling(seed=8, temperature=0.9, top_k=20, min_p=0.02, bad_words=("x",)),
]


def mixed_sequences(count: int) -> Iterator[Sequence]:
    for number in range(count):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        # Every other prompt repeats itself, which n-grams draft from.
        own = random_prompt(3 + 5 * (number % 4), seed=number)
        prompt = own * 3 if number % 2 else [*random_prompt(10, seed=99), *own]
        sequence = Sequence(
            f"s{number}", prompt, len(prompt), sampling, max_tokens=18, eos_token_ids=frozenset({EOS}), arrival=number
        )
        if sampling.grammar is not None:
            sequence.constraint = constraint_of(sampling)
        if sampling.bad_words:
            sequence.bad_words = ((prompt[0], prompt[1]), (prompt[2],))
        yield sequence
