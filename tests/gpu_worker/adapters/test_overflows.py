"""Adapters whose products overflow end the answers that they are for; those beside them keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.memory.state_sizes import state_config
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, write_adapter
from tests.gpu_worker.adapters.test_merged import place
from tests.gpu_worker.execution.engine_run import make_runner, random_prompt, run, save_tiny_model
from tests.gpu_worker.models.families.dense_cases import CASES as DENSE
from tests.gpu_worker.models.families.mixture_cases import CASES as MIXTURES
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent

MODELS: dict[str, Callable[[Path], Any]] = {
    "llama": save_tiny_model,
    "gemma2": lambda path: save_case(DENSE["gemma2"], path),
    "qwen3-moe": lambda path: save_case(MIXTURES["qwen3-moe"], path),
    "qwen2-moe": lambda path: save_case(MIXTURES["qwen2-moe"], path),
    "qwen3_5_moe": lambda path: save_recurrent("qwen3_5_moe", path, eos_token_id=None),
    "bamba": lambda path: save_recurrent("bamba", path, eos_token_id=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_adapter_that_overflows_ends_its_own_answers_alone(name: str, tmp_path: Path) -> None:
    oracle = MODELS[name](tmp_path / "model")
    sizes = linear_sizes(oracle)
    sizes.pop("lm_head")
    adapter = write_adapter(tmp_path / "adapter", sizes, strength=1e38)
    runner = make_runner(tmp_path / "model", max_model_len=96, dtype="float32", max_loras=1)
    place(runner.model, 0, adapter)
    state = state_config(runner.num_state_slots, runner.block_size) if runner.model_config.has_states else None

    def sequences(step: int) -> list[Sequence]:
        found = []
        for number in range(0, 8, step):
            prompt = [token_id % oracle.config.vocab_size for token_id in random_prompt(9 + 2 * number, seed=number)]
            sampling = Sampling(temperature=0.8 * (number > 3), seed=number, max_tokens=12, logprobs=2)
            sequence = Sequence(str(number), prompt, len(prompt), sampling, max_tokens=12)
            if number % 2:
                sequence.adapter, sequence.salt = 0, b"adapter"
            found.append(sequence)
        return found

    how: dict[str, Any] = {"state": state, "arrivals_per_step": 2, "token_budget": 32}
    # Afterwards others get the blocks that numbers which are none were written to.
    alone, beside, after = (run(runner, sequences(step), **how) for step in (2, 1, 2))
    assert set(beside.errors) == {"1", "3", "5", "7"}
    assert all("logits are not numbers" in error for error in beside.errors.values())
    assert alone.logprobs == after.logprobs == {name: beside.logprobs[name] for name in alone.logprobs}
