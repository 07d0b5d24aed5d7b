"""Prompts of latent attention whose keys and values are made for the step: the same tokens, whatever the form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.layers import latent_attention
from gpu_worker.layers.latent_attention import LatentAttention
from gpu_worker.models.decoder import CausalLM
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import Outcome, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.latent_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case

GREEDY = Sampling(temperature=0.0, max_tokens=6)


def answer(model: CausalLM) -> Outcome:
    """Prompts in several chunks beside decodes, and one that is in the cache already."""
    runner = make_device_runner(model, is_graphed=False, num_blocks=300, max_num_seqs=6, max_model_len=128)
    prompts = [random_prompt(length, seed=length) for length in (100, 7, 60, 100)]
    sequences = [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]
    return run(runner, sequences, max_num_seqs=6, token_budget=TOKEN_BUDGET, arrivals_per_step=1)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_prompts_in_either_form_have_the_same_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_case(CASES[name], tmp_path)
    expected = answer(load(tmp_path, "cpu"))
    make, attend = LatentAttention.__init__, latent_attention.expanded_attention
    lengths: list[int] = []

    def make_both(self: LatentAttention, index: int, weights: Any, parts: Any) -> None:
        make(self, index, weights, parts)
        self._expansion = weights.key_up, weights.value_up

    def counted(query: Any, *args: Any) -> Any:
        lengths.append(len(query))
        return attend(query, *args)

    monkeypatch.setattr(LatentAttention, "__init__", make_both)
    monkeypatch.setattr(latent_attention, "is_expansion_less", lambda *sizes: sizes[3] > 8)
    monkeypatch.setattr(latent_attention, "expanded_attention", counted)
    outcome = answer(load(tmp_path, "cpu"))
    assert outcome.tokens == expected.tokens
    # Each layer, in each step with a chunk of more than eight tokens.
    assert len(lengths) >= 2 * 3
    assert max(lengths) == TOKEN_BUDGET


def test_a_cpu_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a token's result does not depend on how its prompt was cut."""
    save_case(CASES["deepseek-v3"], tmp_path)
    monkeypatch.setattr(latent_attention, "is_expansion_less", lambda *_: pytest.fail("asked"))
    answer(load(tmp_path, "cpu"))
