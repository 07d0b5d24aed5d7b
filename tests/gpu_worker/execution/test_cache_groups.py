"""Layers with windows give the same tokens from blocks of their own as from blocks that keep everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.core.group_tables import WindowTable
from gpu_worker.core.scheduler_config import WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.window_groups import WindowGroup
from gpu_worker.execution.memory.kv_cache import allocate_groups
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.ngram.proposer import NgramProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.drafts.scripted_proposers import ChainProposer
from tests.gpu_worker.execution.engine_run import BLOCK, Outcome, make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.dense_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case

WINDOW = 9
MAX_LEN = 64
FEW = (WindowConfig(WINDOW, 8),)
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer that sees all tokens between two that see nine."""
    directory = tmp_path_factory.mktemp("sliding")
    save_case(CASES["gemma3"], directory)
    return directory


def sequences() -> list[Sequence]:
    shared = random_prompt(30, seed=1)
    repeated = random_prompt(6, seed=4) * 6
    prompts = [
        shared,
        random_prompt(3, seed=2),
        [*shared[:22], 5, 6],
        [*shared, 7],
        repeated,
        random_prompt(38, seed=6),
    ]
    sampling = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    return [make_sequence(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(model: Path) -> Answers:
    runner = make_runner(model, max_model_len=MAX_LEN, dtype="float32", keeps_all_tokens=True)
    assert runner.windows == ()
    return run(runner, sequences(), token_budget=64).tokens


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the blocks that sequences hold in the group of windows whenever a step of theirs has landed."""
    collected: list[int] = []
    leave_behind = WindowGroup.leave_behind

    def watched(group: WindowGroup, table: WindowTable, num_written: int) -> None:
        leave_behind(group, table, num_written)
        collected.append(table.num_held)

    monkeypatch.setattr(WindowGroup, "leave_behind", watched)
    return collected


def test_few_blocks_of_windows_give_the_same_tokens(model: Path, expected: Answers, held: list[int]) -> None:
    runner = make_runner(model, max_model_len=MAX_LEN, dtype="float32")
    outcome = run(runner, sequences(), token_budget=24, arrivals_per_step=2, headroom_tokens=1, windows=FEW)
    assert outcome.tokens == expected
    assert outcome.num_prefix_hits > 0
    assert max(held) == FEW[0].most_blocks(BLOCK)


def test_preempted_sequences_give_the_same_tokens(model: Path, expected: Answers) -> None:
    runner = make_runner(model, max_model_len=MAX_LEN, dtype="float32")
    outcome = run(runner, sequences(), num_blocks=20, token_budget=24, headroom_tokens=1, windows=FEW)
    assert outcome.num_preemptions > 0
    assert outcome.tokens == expected


def test_drafts_give_the_same_tokens(model: Path, expected: Answers) -> None:
    runner = make_runner(
        model, max_model_len=MAX_LEN, dtype="float32", proposer=NgramProposer(4000), max_draft_tokens=5
    )
    outcome = run(runner, sequences(), token_budget=40, policy=FixedDepth(5), windows=FEW)
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens > 0
    assert outcome.tokens == expected


def test_accepted_branches_are_moved_in_the_blocks_of_windows_too(tmp_path: Path) -> None:
    case = CASES["gemma3"]
    save_case(replace(case, options={**case.options, "sliding_window": 64}), tmp_path)
    sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings = {"max_model_len": 124, "dtype": "float32", "max_draft_tokens": 12}

    def several() -> list[Sequence]:
        return [make_sequence(str(seed), random_prompt(length, seed), sampling) for seed, length in enumerate((90, 40))]

    right = run(make_runner(tmp_path, **settings, keeps_all_tokens=True), several(), token_budget=64).tokens
    runner = make_runner(tmp_path, **settings, proposer=ChainProposer(right, 0.8))
    assert [group.window for group in runner.windows] == [64]
    outcome = run(runner, several(), token_budget=64, policy=FixedDepth(12))
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens > 10
    assert outcome.tokens == right


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_steps_in_flight_over_blocks_that_nobody_wrote_to_give_the_same_tokens(
    model: Path, expected: Answers, is_graphed: bool
) -> None:
    assert device_answers(model, is_graphed=is_graphed).tokens == expected


def device_answers(directory: Path, *, is_graphed: bool) -> Outcome:
    model = load_model(directory, torch.float32, torch.device("cpu"))
    cache = allocate_groups(model.config.cache_layout, [60, 8], BLOCK, torch.float32, model.device)
    for tensor in (tensor for layer in cache.layers for tensor in layer.tensors):
        tensor.fill_(float("nan"))
    runner = TorchModelRunner(model, cache, 8, MAX_LEN, 24, is_asynchronous=True)
    if is_graphed:
        runner.capture_graphs()
    return run(runner, sequences(), token_budget=24, max_num_seqs=8, arrivals_per_step=2)


def test_eight_bits_keep_the_windows_of_the_flat_cache(model: Path) -> None:
    settings = {"max_model_len": MAX_LEN, "dtype": "float32", "kv_cache_dtype": "int8"}
    runners = [make_runner(model, **settings, keeps_all_tokens=keeps_all) for keeps_all in (True, False)]
    flat, windowed = (run(runner, sequences(), token_budget=64).tokens for runner in runners)
    assert windowed == flat
