"""Parameters at and beyond their bounds, on the real engine: the rest of the batch gets the same tokens as alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from shared.bounds import MAX_TOKEN_ID
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import VOCAB, random_prompt, scheduler_config

NUM_BLOCKS = 400
MAX_NUM_SEQS = 40
Runner = TorchModelRunner
MakeRunner = Callable[[], Runner]

TINY = 5e-324
# The least and the largest that messages allow, and the smallest numbers that are not 0.
LEGAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, TINY, 1e-300, 1e-38, 1e-5, 2.0),
    "top_p": (0.0, TINY, 1e-38, 1.0),
    "min_p": (0.0, TINY, 1e-38, 1.0),
    "top_k": (0, 1, MAX_TOKEN_ID),
    "seed": (-(2**63), 0, 2**63 - 1),
    "presence_penalty": (-2.0, TINY, 2.0),
    "frequency_penalty": (-2.0, TINY, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "logit_bias": tuple(dict.fromkeys(range(VOCAB), bias) for bias in (-100.0, TINY, 100.0)),
    "stop_token_ids": ((), tuple(range(64))),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 20),
    "max_tokens": (1, 10_000_000),
    "ignore_eos": (False, True),
}
# No message can carry these; should one get to the engine all the same, it harms its own request at most.
ILLEGAL: list[dict[str, Any]] = [
    {"repetition_penalty": 1e-38},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.nan},
    {"temperature": math.nan},
    {"temperature": -1.0},
    {"top_k": 2**63},
    {"top_k": -1},
    {"top_p": math.nan},
    {"min_p": math.nan},
    {"min_p": -math.inf},
    {"presence_penalty": math.inf},
    {"frequency_penalty": math.nan},
    {"logit_bias": {3: math.nan}},
    {"logit_bias": {3: math.inf, 5: -math.inf}},
    {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)},
    {"logit_bias": {2**63: 1.0, -1: 1.0}},
    {"seed": 2**64},
    {"logprobs": 2**40},
    {"prompt_logprobs": 2**40},
]
VICTIMS = [
    Sampling(temperature=0.0, max_tokens=12),
    Sampling(temperature=1.0, seed=3, max_tokens=12),
    Sampling(temperature=0.8, seed=4, top_p=0.9, top_k=20, min_p=0.01, max_tokens=12, logprobs=2),
    Sampling(
        temperature=0.7, seed=5, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 2.0}, max_tokens=12
    ),
]


@pytest.fixture(scope="module")
def model(directory: Path) -> CausalLM:
    return load(directory, "cpu", torch.float32)


@pytest.fixture(scope="module", params=["host", "device"])
def make_runner(request: pytest.FixtureRequest, model: CausalLM) -> MakeRunner:
    settings = {"num_blocks": NUM_BLOCKS, "max_num_seqs": MAX_NUM_SEQS, "is_asynchronous": request.param == "device"}
    return lambda: make_device_runner(model, is_graphed=False, **settings)


@pytest.fixture(scope="module")
def alone(make_runner: MakeRunner) -> list[list[int]]:
    """What each victim gets with the engine for itself."""
    return [answers(make_runner(), [victim(number)])[0][0] for number in range(len(VICTIMS))]


def victim(number: int) -> Sequence:
    return sequence_of(VICTIMS[number], f"victim {number}", number)


def sequence_of(sampling: Sampling, name: str, seed: int, length: int = 9) -> Sequence:
    most = 12 if sampling.max_tokens is None else min(sampling.max_tokens, 30)
    return Sequence(name, random_prompt(length, seed), length, sampling, max_tokens=most)


def answers(runner: Runner, sequences: list[Sequence]) -> tuple[list[list[int]], list[str | None], Engine]:
    """Return each sequence's tokens and finish reason."""
    config = scheduler_config(runner, MAX_NUM_SEQS, TOKEN_BUDGET, enable_prefix_caching=False)
    engine = Engine(Scheduler(config), runner)
    tokens: dict[Sequence, list[int]] = {sequence: [] for sequence in sequences}
    finishes: dict[Sequence, str] = {}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work():
        for event in engine.step():
            assert event.num_tokens_before == len(tokens[event.sequence])
            tokens[event.sequence] += event.token_ids
            if event.finish is not None:
                finishes[event.sequence] = event.finish
    return list(tokens.values()), [finishes.get(sequence) for sequence in sequences], engine


def check(make_runner: MakeRunner, alone: list[list[int]], hostile: list[Sequence]) -> tuple[list[str | None], Engine]:
    """Run the victims among hostile sequences; return how these finished."""
    victims = [victim(number) for number in range(len(VICTIMS))]
    middle = len(victims) // 2
    sequences = [*victims[:middle], *hostile, *victims[middle:]]
    tokens, finishes, engine = answers(make_runner(), sequences)
    assert tokens[:middle] + tokens[middle + len(hostile) :] == alone
    for row in tokens:
        assert all(0 <= token_id < VOCAB for token_id in row)
    assert engine.stats.free_blocks == NUM_BLOCKS
    return finishes[middle : middle + len(hostile)], engine


@pytest.mark.parametrize("name", LEGAL)
def test_value_at_its_bound_is_served_and_harms_nobody(
    make_runner: MakeRunner, alone: list[list[int]], name: str
) -> None:
    base = {"temperature": 0.9, "max_tokens": 12}
    hostile = [sequence_of(Sampling(**{**base, name: value}), f"hostile {n}", 9) for n, value in enumerate(LEGAL[name])]
    finishes, engine = check(make_runner, alone, hostile)
    assert set(finishes) <= {"stop", "length"}
    assert engine.stats.num_failed_steps == 0


@given(
    rows=st.lists(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in LEGAL.items()}), max_size=6)
)
@settings(max_examples=25)
def test_any_mixture_of_bounds_is_served_and_harms_nobody(
    make_runner: MakeRunner, alone: list[list[int]], rows: list[dict[str, Any]]
) -> None:
    hostile = [sequence_of(Sampling(**row), f"hostile {number}", number) for number, row in enumerate(rows)]
    finishes, engine = check(make_runner, alone, hostile)
    assert set(finishes) <= {"stop", "length"}
    assert engine.stats.num_failed_steps == 0


@pytest.mark.parametrize("fields", ILLEGAL, ids=str)
def test_value_beyond_its_bound_fails_alone_at_most(
    make_runner: MakeRunner, alone: list[list[int]], fields: dict[str, Any]
) -> None:
    for temperature in (0.0, 0.9):
        sampling = Sampling(**{"temperature": temperature, "max_tokens": 12, **fields})
        finishes, engine = check(make_runner, alone, [sequence_of(sampling, "hostile", 9)])
        assert finishes[0] in ("stop", "length", "failed")
        assert not engine.stats.is_fatal


@pytest.mark.parametrize("token_id", [VOCAB, 2**31 - 1, 2**63])
def test_token_that_the_model_does_not_have_fails_alone(
    make_runner: MakeRunner, alone: list[list[int]], token_id: int
) -> None:
    hostile = sequence_of(Sampling(temperature=0.0), "hostile", 9)
    hostile.token_ids[4] = token_id
    finishes, engine = check(make_runner, alone, [hostile])
    assert finishes == ["failed"]
    assert not engine.stats.is_fatal


def test_many_poisoned_requests_in_one_batch_fail_alone(make_runner: MakeRunner, alone: list[list[int]]) -> None:
    hostile = [sequence_of(Sampling(**fields), f"hostile {n}", n) for n, fields in enumerate(ILLEGAL)]
    finishes, engine = check(make_runner, alone, hostile)
    assert "failed" in finishes
    assert not engine.stats.is_fatal
