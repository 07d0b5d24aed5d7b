"""Steps that copy states on their way are replayed as all others: copies have places in a captured step."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_worker.core.scheduler_config import StateConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.graphs import ComputedRows, StepGraphs
from gpu_worker.execution.batch.step_table import HostStep
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.decoder import CausalLM
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import Outcome, make_sequence, random_prompt, run
from tests.gpu_worker.models.recurrent_models import save_case

NUM_SEQS, NUM_SLOTS = 6, 14
GREEDY = Sampling(temperature=0.0, max_tokens=9)


def make_runner(model: CausalLM, *, is_graphed: bool) -> TorchModelRunner:
    sizes = {"max_num_seqs": NUM_SEQS, "max_model_len": 64, "num_state_slots": NUM_SLOTS}
    return make_device_runner(model, is_graphed=is_graphed, num_blocks=200, **sizes)


def sequences(turn: int) -> list[Sequence]:
    """Prompts of which some begin alike, and in the second turn as in the first."""
    common = random_prompt(18, seed=1)
    tails = [random_prompt(length, seed=length + turn) for length in (3, 9, 30)]
    prompts = [[*common, *tail] for tail in tails] + [random_prompt(21, seed=2)]
    return [make_sequence(f"{turn}-{index}", prompt, GREEDY) for index, prompt in enumerate(prompts)]


def answer(runner: TorchModelRunner) -> Outcome:
    limits = {"token_budget": TOKEN_BUDGET, "max_num_seqs": NUM_SEQS, "arrivals_per_step": 1}
    return run(runner, [*sequences(0), *sequences(1)], state=StateConfig(NUM_SLOTS, 2), **limits)


class CountedGraphs:
    """Lets steps run, and counts those that copy states."""

    def __init__(self, graphs: StepGraphs) -> None:
        self._run = graphs.run
        self.num_copying: dict[bool, int] = {True: 0, False: 0}

    def run(self, shape: GraphShape, layout: HostStep) -> ComputedRows:
        if layout.save_starts is not None:
            self.num_copying[shape.has_logits] += 1
        return self._run(shape, layout)


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "falcon_h1", "mamba2"))]
)
def test_steps_that_copy_states_are_replayed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_case(name, tmp_path, eos_token_id=None)
    model = load(tmp_path, "cpu")
    expected = answer(make_runner(model, is_graphed=False))
    runner = make_runner(model, is_graphed=True)
    monkeypatch.setattr(runner, "_launch", lambda *_: pytest.fail("launched one kernel after the other"))
    graphs = runner._graphs
    assert graphs is not None
    counted = CountedGraphs(graphs)
    monkeypatch.setattr(graphs, "run", counted.run)
    outcome = answer(runner)
    assert outcome.tokens == expected.tokens
    assert outcome.num_prefix_hits == expected.num_prefix_hits > 0
    # Both of decodes, at the ends of blocks, and of steps with prompt tokens.
    assert min(counted.num_copying.values()) > 0
