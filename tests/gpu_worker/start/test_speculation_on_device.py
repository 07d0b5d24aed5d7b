"""Engines with speculation as a worker with a GPU builds them, on a CPU that stands for the GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.engine.engine import Engine
from gpu_worker.execution import build
from gpu_worker.execution.memory.budget import RESERVE_BYTES
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.execution.start_up import StartUp
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.engine_setup import build_engine
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.fake_memory import MB, FakeMemory
from tests.gpu_worker.models.conftest import one_thread

__all__ = ["one_thread"]

DEMO_MODEL = Path("ops/demo_model/model")


class Machine:
    """Builds device runners; what it has is the memory for KV caches, in all.

    Attributes:
        runners: Those that were built.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.runners: list[TorchModelRunner] = []
        self._memory = FakeMemory(RESERVE_BYTES + room)
        self._build = build.build_runner
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("gpu_worker.start.engine_setup._gpu_uuid", lambda device: None)
        monkeypatch.setattr(build, "build_runner", self._build_runner)

    def _build_runner(self, config: RunnerConfig, start_up: StartUp | None = None, **parts: Any) -> TorchModelRunner:
        assert config.device == "cuda"
        runner = self._build(dataclasses.replace(config, device="cpu"), start_up, self._memory, **parts)
        self._memory.allocate(f"cache {len(self.runners)}", sum(layer.keys.nbytes * 2 for layer in runner.cache.layers))
        self.runners.append(runner)
        return runner


def generate(**settings: Any) -> tuple[list[int], Engine]:
    directory = read_model_directory(DEMO_MODEL)
    config = WorkerConfig(
        model=DEMO_MODEL,
        device="cuda",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=128,
        gpu_memory_utilization=1.0,
        **settings,
    )
    tokenizer = ModelTokenizer(directory)
    engine = build_engine(config, directory, tokenizer).engine
    prompt = tokenizer.encode_text("one two three four. one two three four. one")
    sequence = Sequence("s", list(prompt), len(prompt), Sampling(temperature=0.0, ignore_eos=True), 40)
    engine.add(sequence)
    while engine.has_work():
        engine.step()
    assert engine.last_error is None
    return sequence.token_ids[len(prompt) :], engine


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Machine(monkeypatch, 40 * MB)
        return generate()[0]


@pytest.mark.parametrize(
    "kind", ["draft", "eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ngram", "eagle"))]
)
def test_answers_equal_those_without_drafts(
    kind: str, plain: list[int], drafts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, 200 * MB)
    # The policy would find soon that these do not pay.
    monkeypatch.setattr("gpu_worker.start.engine_setup.AdaptiveDepth", lambda depth, **_: FixedDepth(depth))
    directories = {"draft": DEMO_MODEL} | {name: drafts / name for name in ("eagle", "eagle3")}
    speculative = kind.removesuffix("3")
    tokens, engine = generate(speculative=speculative, draft_model=directories.get(kind), num_speculative_tokens=3)
    assert tokens == plain
    assert engine.stats.spec_decode_num_drafts > 0
    assert machine.runners[0].max_steps_in_flight == 2


def test_draft_model_has_a_cache_of_as_many_blocks_within_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MB)
    generate(speculative="draft", draft_model=DEMO_MODEL)
    target, draft = machine.runners
    assert target.num_blocks == draft.num_blocks
    used = sum(layer.keys.nbytes * 2 for runner in machine.runners for layer in runner.cache.layers)
    # The weights of the draft model, and what its rows and graphs take.
    kept = 2 * 4 * 4 * 4096 + sum(path.stat().st_size for path in DEMO_MODEL.glob("*.safetensors"))
    assert 100 * MB - 2 * kept - 2 * MB < used <= 100 * MB - kept


def test_draft_model_that_does_not_fit_is_told_as_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 100 * MB)
    build_runner = machine._build_runner

    def run_out(config: RunnerConfig, start_up: StartUp | None = None, **parts: Any) -> TorchModelRunner:
        if machine.runners:
            machine._memory.elsewhere = machine._memory.size
        return build_runner(config, start_up, **parts)

    monkeypatch.setattr(build, "build_runner", run_out)
    with pytest.raises(ConfigError, match=r"HEADRACE_DRAFT_MODEL: .* cannot run beside the model: HEADRACE_"):
        generate(speculative="draft", draft_model=DEMO_MODEL)
