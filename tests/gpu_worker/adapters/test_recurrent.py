"""Adapters beside recurrent layers: log probabilities of merged weights, whose bits neither drafts nor room change."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.speculative.ngram.proposer import NgramProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, merge, write_adapter
from tests.gpu_worker.adapters.test_merged import place
from tests.gpu_worker.execution.engine_run import Outcome, make_runner, random_prompt, run
from tests.gpu_worker.models.recurrent_models import save_case
from tests.gpu_worker.models.variants import oracle_logits

NUM_TOKENS = 24
LOGPROBS = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=5)


def _sequences(vocab_size: int, expected: Outcome | None = None) -> list[Sequence]:
    """Return sequences, every other one with the adapter; with `expected`, most of their next tokens are drafted."""
    found = []
    for number in range(6):
        prompt = [token_id % vocab_size for token_id in random_prompt(9 + 5 * number, seed=number)]
        sequence = Sequence(str(number), prompt, len(prompt), LOGPROBS, max_tokens=NUM_TOKENS)
        if number % 2:
            sequence.adapter, sequence.salt = 0, b"adapter"
        if expected is not None:
            coming = expected.tokens[sequence.id]
            sequence.prediction = tuple(
                (token_id + (n in (5, 11, 12, 18))) % vocab_size for n, token_id in enumerate(coming)
            )
        found.append(sequence)
    return found


@pytest.mark.parametrize("name", ["qwen3_5_moe", "bamba", "lfm2", "nemotron_h-experts"])
def test_drafts_and_preemptions_leave_the_bits_of_merged_weights(name: str, tmp_path: Path) -> None:
    oracle = save_case(name, tmp_path / "model", eos_token_id=None)
    vocab_size = oracle.config.vocab_size
    sizes = linear_sizes(oracle)
    sizes.pop("lm_head")
    adapter = write_adapter(tmp_path / "adapter", sizes, seed=6)

    def answer(expected: Outcome | None = None, **changes: int) -> Outcome:
        proposer = None if expected is None else NgramProposer(10_000)
        settings = {"max_model_len": 96, "dtype": "float32", "max_loras": 1, "max_draft_tokens": 4}
        runner = make_runner(tmp_path / "model", proposer=proposer, **settings)
        place(runner.model, 0, adapter)
        state = state_config(runner.num_state_slots, runner.block_size)
        how = {"arrivals_per_step": 2, "token_budget": 24, "headroom_tokens": 1, "state": state, **changes}
        policy = None if expected is None else FixedDepth(4)
        return run(runner, _sequences(vocab_size, expected), policy=policy, **how)

    expected = answer()
    drafted, crowded = answer(expected), answer(expected, num_blocks=48)
    assert drafted.speculation is not None
    assert drafted.speculation.num_accepted_tokens > 20
    assert crowded.num_preemptions > 0
    assert expected.logprobs == drafted.logprobs == crowded.logprobs
    merged = copy.deepcopy(oracle)
    merge(merged, adapter)
    for sequence in _sequences(vocab_size):
        tokens = torch.tensor([*sequence.token_ids, *expected.tokens[sequence.id]])
        model = oracle if sequence.adapter is None else merged
        scores = oracle_logits(model, tokens).log_softmax(-1)[sequence.num_prompt_tokens - 1 : -1]
        for entry, row in zip(expected.logprobs[sequence.id], scores, strict=True):
            assert all(abs(logprob - row[token_id].item()) < 1e-3 for token_id, logprob in entry.top)
