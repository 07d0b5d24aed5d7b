"""What submitting a step does, and does not do, whatever it computes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.plan_writer import PlanWriter
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.step import SubmittedStep
from gpu_worker.execution.warm_up import WarmUpProposer
from gpu_worker.layers.attention import AttentionShape
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import CacheLayout
from gpu_worker.layers.vocabulary import Vocabulary
from gpu_worker.models.decoder import CausalLM
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import load, make_device_runner
from tests.gpu_worker.execution.engine_run import BLOCK, MAX_LEN, VOCAB, make_sequence, random_prompt, run

EVERYTHING = Sampling(
    temperature=0.8,
    top_p=0.9,
    top_k=30,
    min_p=0.01,
    seed=3,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    logit_bias={3: 1.0},
    logprobs=3,
    prompt_logprobs=2,
)


def running(name: str, length: int, sampling: Sampling, first_block: int) -> Sequence:
    """Make a sequence that holds blocks for 16 tokens more."""
    sequence = make_sequence(name, random_prompt(length, seed=length), sampling)
    sequence.block_table = list(range(first_block, first_block + -(-(length + 16) // BLOCK)))
    return sequence


class Plans:
    """Plans for one runner."""

    def __init__(self) -> None:
        self.writer = PlanWriter()

    def __call__(self, *shares: tuple[Sequence, int, int], departed: tuple[Sequence, ...] = ()) -> StepPlan:
        items = [ScheduledSequence(s, start, count, start + count >= len(s.token_ids)) for s, start, count in shares]
        return self.writer.write_any(items, departed, step=1)


def tokens_of(step: SubmittedStep) -> list[tuple[int, ...]]:
    return [sampled.token_ids for sampled in step.result().sampled]


SAMPLINGS = [Sampling(temperature=0.0), Sampling(seed=5), EVERYTHING]


def all_kinds_of_steps(sampling: Sampling) -> list[StepPlan]:
    """A prompt in two chunks beside decodes, then decodes whose tokens only the device knows."""
    plan = Plans()
    first, second = running("a", 9, sampling, 0), running("b", 11, sampling, 20)
    return [
        plan((first, 0, 9)),
        plan((first, 9, 1), (second, 0, 6)),
        plan((first, 10, 1), (second, 6, 5)),
        *(plan((first, 11 + step, 1), (second, 11 + step, 1)) for step in range(3)),
    ]


def verified_steps(sampling: Sampling) -> list[StepPlan]:
    """Prompts, then two decodes that verify drafts, alone and beside a chunk of a prompt."""
    plan = Plans()
    first, second, third = running("a", 9, sampling, 0), running("b", 11, sampling, 20), running("c", 30, sampling, 40)
    plans = [plan((first, 0, 9), (second, 0, 11))]
    decodes = []
    for sequence in (first, second):
        sequence.token_ids.append(1)
        decodes.append(ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True, 3))
    chunk = ScheduledSequence(third, 0, 20, False)
    plans.append(plan.writer.write_any(decodes, step=2))
    return [*plans, plan.writer.write_any([*decodes, chunk], step=3)]


def tokens_drawn(step: SubmittedStep) -> int:
    return sum(len(drawn.token_ids) for drawn in step._outputs.drawn)


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "free", "everything"])
def test_gpu_is_not_waited_for_by_steps_that_verify_drafts(directory: Path, sampling: Sampling) -> None:
    runner = make_device_runner(load(directory, "cuda"), is_graphed=True, max_draft_tokens=3)
    runner.verify_drafts_of(WarmUpProposer())
    plans = verified_steps(sampling)
    for each in plans:
        runner.submit(each).result()
    runner.clear()
    again = verified_steps(sampling)
    for each in again:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step = runner.submit(each)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # One step at a time: what was accepted decides where the next step starts.
        step.result()


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "free", "everything"])
def test_gpu_is_never_waited_for(directory: Path, sampling: Sampling) -> None:
    runner = make_device_runner(load(directory, "cuda"), is_graphed=True)
    # The first time may wait: kernels are compiled, and pinned memory is taken.
    plans = all_kinds_of_steps(sampling)
    for each in plans:
        runner.submit(each).result()
    runner.clear()
    again = all_kinds_of_steps(sampling)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [runner.submit(each) for each in again]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    sampled = [[len(tokens) for tokens in tokens_of(step)] for step in steps]
    assert sampled == [[1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 1]]


class OneDevice(TorchDispatchMode):
    """Refuses operations between host and device but copies, and tensors made from lists."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        assert name != "lift_fresh", "a list becomes a tensor: on a GPU that is a copy to wait for"
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert len(devices) <= 1 or name in ("copy_", "_to_copy"), f"{name} mixes {devices}"
        return function(*args, **(kwargs or {}))


class ValuelessModel:
    """Has the shapes of a model, on a device whose tensors have no values: reading one raises."""

    config = SimpleNamespace(
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        num_layers=1,
        cache_layout=CacheLayout((None,)),
        attention_shape=lambda layer: AttentionShape(1, 1, 4),
        layer_windows=(None,),
        has_many_launches=False,
    )
    device = torch.device("meta")
    dtype = torch.float32
    adapters = None
    expanding = None
    vocabulary, has_head = Vocabulary(), True

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        sizes = [len(context.block_tables), len(context.query_starts) - 1, len(context.context_lens)]
        assert len(set(sizes)) == 1
        assert len(token_ids) == len(positions) == len(context.slot_mapping)
        return torch.empty(len(token_ids), 4, device=self.device)

    def logits(self, hidden: torch.Tensor, adapters: None = None) -> torch.Tensor:
        return torch.empty(len(hidden), VOCAB, device=self.device)


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "free", "everything"])
@pytest.mark.parametrize(
    ("max_draft_tokens", "plans", "num_drawn"),
    [(0, all_kinds_of_steps, [1, 1, 2, 2, 2, 2]), (3, verified_steps, [2, 8, 8])],
)
def test_submitting_reads_nothing_back_and_mixes_no_devices(
    sampling: Sampling, is_graphed: bool, max_draft_tokens: int, plans: Any, num_drawn: list[int]
) -> None:
    model = cast("CausalLM", ValuelessModel())
    runner = make_device_runner(model, is_graphed=is_graphed, max_draft_tokens=max_draft_tokens)
    runner.verify_drafts_of(WarmUpProposer() if max_draft_tokens else None)
    with OneDevice():
        steps = [runner.submit(each) for each in plans(sampling)]
    assert [tokens_drawn(step) for step in steps] == num_drawn


def break_rows(patch: pytest.MonkeyPatch, runner: TorchModelRunner, rows: list[int]) -> None:
    """Let the logits of some rows be no numbers."""
    sample = runner._sampler.sample

    def broken(logits: torch.Tensor, *rest: Any) -> Any:
        logits[rows] = float("nan")
        return sample(logits, *rest)

    patch.setattr(runner._sampler, "sample", broken)


def test_wrong_logits_behind_a_wrong_draft_harm_nobody(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_device_runner(model, is_graphed=True, max_draft_tokens=3)
    runner.verify_drafts_of(WarmUpProposer())
    prompts, decodes, _ = verified_steps(Sampling(temperature=0.0, logit_bias={0: -100.0}))
    runner.submit(prompts).result()
    break_rows(monkeypatch, runner, [1, 2, 3, 5, 6, 7])
    results = runner.submit(decodes).result().sampled
    assert [(len(tokens.token_ids), tokens.num_drafted, tokens.num_accepted) for tokens in results] == [(1, 3, 0)] * 2


def test_tokens_in_flight_are_those_of_the_result(model: CausalLM) -> None:
    """Four decodes submitted at once equal four decodes whose tokens the host has seen."""
    outcomes = []
    for knows in (True, False):
        runner, plan = make_device_runner(model, is_graphed=True), Plans()
        sequence = running("a", 9, Sampling(seed=5, temperature=1.5, frequency_penalty=0.4), 0)
        steps = []
        for number in range(5):
            share = (sequence, 0, 9) if number == 0 else (sequence, 8 + number, 1)
            steps.append(runner.submit(plan(share)))
            if knows:
                sequence.token_ids += tokens_of(steps[-1])[0]
        outcomes.append([tokens_of(step)[0] for step in steps])
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) > 2


def test_padding_leaves_the_cache_alone(model: CausalLM) -> None:
    caches = []
    for is_graphed in (True, False):
        runner = make_device_runner(model, is_graphed=is_graphed)
        run(runner, [make_sequence(str(n), random_prompt(n, n), Sampling(temperature=0.0)) for n in (3, 9, 14, 2, 30)])
        caches.append([tensor.cpu() for layer in runner.cache.layers for tensor in layer.tensors])
    for graphed, eager in zip(*caches, strict=True):
        torch.testing.assert_close(graphed, eager, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert graphed.isnan().any()


def test_row_is_kept_in_the_batch_and_given_to_another_afterwards(model: CausalLM) -> None:
    runner, plan = make_device_runner(model, is_graphed=False, max_num_seqs=2), Plans()
    first, second = running("a", 5, EVERYTHING, 0), running("b", 6, Sampling(temperature=0.0), 10)
    runner.submit(plan((first, 0, 5), (second, 0, 6)))
    rows = (first.row, second.row)
    runner.submit(plan((second, 6, 1), (first, 5, 1)))
    assert (first.row, second.row) == rows
    assert set(rows) == {0, 1}
    third = running("c", 6, Sampling(temperature=0.0), 20)
    step = runner.submit(plan((third, 0, 6), departed=(first,)))
    assert (first.row, third.row) == (None, rows[0])
    alone = make_device_runner(model, is_graphed=False)
    assert tokens_of(step) == tokens_of(alone.submit(Plans()((running("d", 6, Sampling(temperature=0.0), 3), 0, 6))))


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_logits_that_are_no_numbers_fail_their_row_in_their_step_only(
    model: CausalLM, is_graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, plan = make_device_runner(model, is_graphed=is_graphed), Plans()
    first, second = running("a", 5, Sampling(temperature=0.0), 0), running("b", 6, Sampling(), 10)
    runner.submit(plan((first, 0, 5), (second, 0, 6)))
    with monkeypatch.context() as patch:
        break_rows(patch, runner, [1])
        failing = runner.submit(plan((first, 5, 1), (second, 6, 1)))
    behind = runner.submit(plan((first, 6, 1), (second, 7, 1)))
    sound, failed = failing.result().sampled
    assert (len(sound.token_ids), sound.error) == (1, None)
    assert failed.token_ids == ()
    assert "logits" in (failed.error or "")
    assert [len(tokens) for tokens in tokens_of(behind)] == [1, 1]


def test_host_arrays_may_change_once_a_step_is_submitted(model: CausalLM) -> None:
    runner: TorchModelRunner = make_device_runner(model, is_graphed=True)
    sequence = running("a", 9, Sampling(temperature=0.0), 0)
    steps = [runner.submit(Plans()((sequence, 0, 9)))]
    expected = tokens_of(steps[0])
    again = make_device_runner(model, is_graphed=True)
    other = running("a", 9, Sampling(temperature=0.0), 0)
    step = again.submit(Plans()((other, 0, 9)))
    other.token_ids[:] = [0] * 9
    again._rows.whole.host[:] = 77
    assert tokens_of(step) == expected
