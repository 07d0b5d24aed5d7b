"""A second process that gets only encoded plans computes the same tokens, whatever is in the mix."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from gpu_worker.core.block_budget import BlockBudget
from gpu_worker.core.constraint import OutputConstraint, SharedConstraints
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.plan import NewSequence, StepPlan
from gpu_worker.core.pooling import PoolingPlan
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig, StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import CompletedStep, StepResult
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.simulated_runner import SimulatedRunner
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import mixed_sequences, random_prompt, save_tiny_model
from tests.gpu_worker.models.recurrent_models import save_case
from tests.gpu_worker.structured_output.tiny_tokenizer import VOCAB, constraint_of

ROOT = Path(__file__).parents[3]


class OwnConstraints:
    """Makes constraints of the grammars in plans, and advances them by the tokens there."""

    def open(self, new: NewSequence) -> OutputConstraint:
        return constraint_of(new.sampling, new.token_ids[new.num_prompt_tokens :])

    def follow(self, constraint: OutputConstraint, token_ids: list[int]) -> None:
        for token_id in token_ids:
            assert constraint.advance(token_id), "a plan has a token that the grammar does not allow"


def make_runner(config: dict[str, Any], constraints: Any) -> ModelRunner:
    """Make the runner of either process."""
    if config["directory"] is None:
        return SimulatedRunner(0, range(3, VOCAB), constraints=constraints)
    from pathlib import Path

    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.speculative.ngram.proposer import NgramProposer

    runner = build_runner(
        RunnerConfig(
            Path(config["directory"]),
            block_size=4,
            num_blocks=120,
            max_num_seqs=6,
            num_threads=1,
            max_draft_tokens=4,
            state_checkpoint_ratio=0.5,
        ),
        constraints=constraints,
    )
    runner.verify_drafts_of(NgramProposer(100_000))
    return runner


def send(stream: BinaryIO, value: object) -> None:
    data = msgspec.msgpack.encode(value)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    length = stream.read(4)
    return stream.read(struct.unpack("<I", length)[0]) if len(length) == 4 else None


def main() -> None:
    """Make one runner after another, each with the plans for it, behind which an empty message comes."""
    while (config := receive(sys.stdin.buffer)) is not None:
        runner = make_runner(msgspec.msgpack.decode(config), OwnConstraints())
        while data := receive(sys.stdin.buffer):
            send(sys.stdout.buffer, runner.submit(msgspec.msgpack.decode(data, type=StepPlan)).result())


if __name__ == "__main__":
    main()


class Recorder:
    """A runner that keeps all plans, encoded, and their results."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.max_steps_in_flight = runner.max_steps_in_flight
        self.steps: list[tuple[StepPlan, bytes, StepResult]] = []

    def submit(self, plan: StepPlan) -> CompletedStep:
        encoded = msgspec.msgpack.encode(plan)
        result = self._runner.submit(plan).result()
        self.steps.append((plan, encoded, result))
        return CompletedStep(result)


def sequences() -> Iterator[Sequence]:
    for number, sequence in enumerate(mixed_sequences(14)):
        sequence.lane = "batch" if number % 5 == 4 else "interactive"
        yield sequence


def record(config: dict[str, Any], state: StateConfig | None, pooled: Sequence | None) -> tuple[Recorder, Scheduler]:
    """Answer all sequences with few blocks, while people and batch work come one by one."""
    constraints = SharedConstraints()
    runner = Recorder(make_runner(config, constraints))
    sizes = SchedulerConfig(4, 44, 6, 40, max_model_len=120, headroom_tokens=0, state=state)
    speculation = None if config["directory"] is None else Speculation(FixedDepth(4))
    scheduler = Scheduler(sizes, speculation, constraints)
    engine, coming = Engine(scheduler, runner), list(sequences())
    if pooled is not None:
        coming.insert(3, pooled)
    if state is None:
        coming[1].budget = coming[6].budget = BlockBudget(num_blocks=5, num_sinks=1, num_evicted=1, block_size=4)
    while coming or engine.has_work():
        if coming:
            engine.add(coming.pop(0))
        engine.step()
        assert engine.last_error is None
    return runner, scheduler


@pytest.fixture(scope="module")
def other() -> Iterator[subprocess.Popen[bytes]]:
    """The second process."""
    command = [sys.executable, "-m", "tests.gpu_worker.execution.test_plans_alone"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None
        yield process
        process.stdin.close()
    assert process.returncode == 0


def replay(process: subprocess.Popen[bytes], config: dict[str, Any], plans: list[bytes]) -> list[StepResult]:
    """Let a second process compute encoded plans."""
    assert process.stdin is not None
    assert process.stdout is not None
    send(process.stdin, config)
    results = []
    for plan in plans:
        send(process.stdin, msgspec.Raw(plan))
        data = receive(process.stdout)
        assert data is not None, "the process ended"
        results.append(msgspec.msgpack.decode(data, type=StepResult))
    process.stdin.write(bytes(4))
    return results


@pytest.mark.parametrize("kind", ["simulated", "attention", "recurrent"])
def test_process_that_gets_only_encoded_plans_computes_the_same(
    kind: str, tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    config: dict[str, Any] = {"directory": None if kind == "simulated" else str(tmp_path)}
    state, pooled = None, None
    if kind == "attention":
        save_tiny_model(tmp_path)
        prompt = random_prompt(9, seed=77)
        pooled = Sequence("vector", prompt, 9, Sampling(max_tokens=0), max_tokens=0, pooling=PoolingPlan("mean"))
    elif kind == "recurrent":
        save_case("qwen3_5", tmp_path, eos_token_id=None)
        state = StateConfig(num_slots=9, interval_blocks=2)
    recorder, scheduler = record(config, state, pooled)
    plans = [plan for plan, _, _ in recorder.steps]
    assert scheduler.stats.num_preemptions > 0
    assert any(plan.departed for plan in plans)
    assert state is not None or any(plan.evictions for plan in plans)
    if kind != "simulated":
        assert any(plan.forced for plan in plans)
        assert any(result.num_accepted for _, _, step in recorder.steps for result in step.sampled)
        assert any(plan.num_drafts for plan in plans)
    if kind == "recurrent":
        assert any(work.source is not None for plan in plans for _, work in plan.states)
        assert any(work.saves for plan in plans for _, work in plan.states)
    results = replay(other, config, [encoded for _, encoded, _ in recorder.steps])
    assert results == [result for _, _, result in recorder.steps]
