"""What submitting a step does, and does not do, whatever it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import ScheduledSequence, StepPlan
from gpu_worker.execution.device_runner import DeviceModelRunner
from gpu_worker.execution.device_step import DeviceStep
from gpu_worker.execution.token_choice import InvalidLogitsError
from gpu_worker.models.decoder import CausalLM
from shared.messages import Sampling
from tests.gpu_worker.execution.device_runs import DEVICES, load, make_device_runner
from tests.gpu_worker.execution.engine_run import BLOCK, make_sequence, random_prompt, run, save_tiny_model

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
# What makes the host wait for a device, or copy in a way that does.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique2")


class FailsOnWaits(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").split(".")[0]
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("index", "index_put_", "index_put"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), "a mask is counted"
        # In inference mode operations that are made of others arrive whole.
        with self:
            result = function.decompose(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if result is NotImplemented else result


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Fail when anything waits for the device."""

    def fail(*_: object) -> None:
        raise AssertionError("values of a tensor are read")

    with pytest.MonkeyPatch.context() as monkeypatch, FailsOnWaits():
        monkeypatch.setattr(torch.Tensor, "tolist", fail)
        monkeypatch.setattr(torch.Tensor, "item", fail)
        monkeypatch.setattr(torch.Tensor, "cpu", fail)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, directory: Path) -> CausalLM:
    return load(directory, request.param)


def running(name: str, length: int, sampling: Sampling, first_block: int) -> Sequence:
    """Make a sequence that holds blocks for 16 tokens more."""
    sequence = make_sequence(name, random_prompt(length, seed=length), sampling)
    sequence.block_table = list(range(first_block, first_block + -(-(length + 16) // BLOCK)))
    return sequence


def plan(*shares: tuple[Sequence, int, int], departed: tuple[Sequence, ...] = ()) -> StepPlan:
    items = [ScheduledSequence(s, start, count, start + count >= len(s.token_ids)) for s, start, count in shares]
    return StepPlan(1, items, sum(count for _, _, count in shares), list(departed))


def tokens_of(step: DeviceStep) -> list[tuple[int, ...]]:
    return [sampled.token_ids for sampled in step.result().sampled]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=5), EVERYTHING], ids=["0", "1", "all"])
def test_steps_are_submitted_without_waiting_for_the_device(model: CausalLM, sampling: Sampling) -> None:
    """A prompt in two chunks, beside decodes, then decodes whose tokens only the device knows."""
    runner = make_device_runner(model, is_graphed=True)
    departed: tuple[Sequence, ...] = ()
    # The first time may wait: on a GPU kernels are compiled, and pinned memory is taken.
    for guard in (nullcontext(), no_waiting(model.device)):
        first, second = running("a", 9, sampling, 0), running("b", 11, sampling, 20)
        plans = [
            plan((first, 0, 9), departed=departed),
            plan((first, 9, 1), (second, 0, 6)),
            plan((first, 10, 1), (second, 6, 5)),
            *(plan((first, 11 + step, 1), (second, 11 + step, 1)) for step in range(3)),
        ]
        with guard:
            steps = [runner.submit(each) for each in plans]
        departed = (first, second)
        sampled = [[len(tokens) for tokens in tokens_of(step)] for step in steps]
        assert sampled == [[1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 1]]


def test_guard_notices_what_waits() -> None:
    numbers = torch.tensor([1, 2, 0])
    with pytest.raises(AssertionError, match="are read"), no_waiting(numbers.device):
        numbers.tolist()
    with pytest.raises(AssertionError, match="mask"), no_waiting(numbers.device):
        numbers[numbers > 0].abs()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), no_waiting(numbers.device):
        int(numbers[0])
    with pytest.raises(AssertionError, match="nonzero"), no_waiting(numbers.device), torch.inference_mode():
        torch.where(numbers > 0)


def test_tokens_in_flight_are_those_of_the_result(model: CausalLM) -> None:
    """Four decodes submitted at once equal four decodes whose tokens the host has seen."""
    outcomes = []
    for knows in (True, False):
        runner = make_device_runner(model, is_graphed=True)
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
        caches.append([tensor.cpu() for tensor in (*runner._cache.keys, *runner._cache.values)])
    for graphed, eager in zip(*caches, strict=True):
        torch.testing.assert_close(graphed, eager, equal_nan=True, rtol=1e-4, atol=1e-4)
        assert graphed.isnan().any()


def test_row_is_kept_in_the_batch_and_given_to_another_afterwards(model: CausalLM) -> None:
    runner = make_device_runner(model, is_graphed=False, max_num_seqs=2)
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
    assert tokens_of(step) == tokens_of(alone.submit(plan((running("d", 6, Sampling(temperature=0.0), 3), 0, 6))))


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
def test_logits_that_are_no_numbers_fail_their_step_only(
    model: CausalLM, is_graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_device_runner(model, is_graphed=is_graphed)
    first, second = running("a", 5, Sampling(temperature=0.0), 0), running("b", 6, Sampling(), 10)
    runner.submit(plan((first, 0, 5), (second, 0, 6)))
    sample = runner._sampler.sample

    def broken(logits: torch.Tensor, *rest: Any) -> Any:
        logits[1] = float("nan")
        return sample(logits, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(runner._sampler, "sample", broken)
        failing = runner.submit(plan((first, 5, 1), (second, 6, 1)))
    behind = runner.submit(plan((first, 6, 1), (second, 7, 1)))
    with pytest.raises(InvalidLogitsError):
        failing.result()
    assert [len(tokens) for tokens in tokens_of(behind)] == [1, 1]


def test_host_arrays_may_change_once_a_step_is_submitted(model: CausalLM) -> None:
    runner: DeviceModelRunner = make_device_runner(model, is_graphed=True)
    sequence = running("a", 9, Sampling(temperature=0.0), 0)
    steps = [runner.submit(plan((sequence, 0, 9)))]
    expected = tokens_of(steps[0])
    again = make_device_runner(model, is_graphed=True)
    other = running("a", 9, Sampling(temperature=0.0), 0)
    step = again.submit(plan((other, 0, 9)))
    other.token_ids[:] = [0] * 9
    again._rows.tables[:] = 77
    assert tokens_of(step) == expected
