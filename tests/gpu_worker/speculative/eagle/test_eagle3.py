"""What an EAGLE-3 layer proposes while the engine runs, against a dense computation of the whole sequence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution import runner_config
from gpu_worker.execution.drafts.proposer import DraftRequest
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, make_runner, make_sequence, random_prompt, run, save_tiny_model
from tests.gpu_worker.speculative.draft_files import (
    Tensors,
    eagle3_config,
    eagle3_outputs,
    eagle3_scores,
    eagle3_tensors,
    save_draft,
)
from tests.gpu_worker.speculative.recorder import recorded_runner

SIZE, NUM_FEATURES, TAPPED = 48, VOCAB // 2, [1, 0]
LEAST_CHANCE = 0.1
GREEDY = Sampling(max_tokens=20, temperature=0.0)


@pytest.fixture(autouse=True)
def exact_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in float32, where a CPU would draft in bfloat16."""
    monkeypatch.setattr(runner_config, "choose_draft_dtype", lambda model, device: model)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return save_tiny_model(directory / "model")


class Oracle:
    """Knows the model, as `transformers` has it, and the layer's tensors."""

    def __init__(self, model: Any, tensors: Tensors, *, is_stream_normed: bool) -> None:
        self.model = model
        self.tensors = tensors
        self.is_stream_normed = is_stream_normed
        self.num_checked = 0
        self.num_deep = 0

    @torch.no_grad()
    def check(self, request: DraftRequest, draft: Draft) -> None:
        """Assert that a draft is what the layer predicts from the whole sequence."""
        if request.sequence.num_output_tokens == 0:
            assert draft == NO_DRAFT
            return
        token_ids = torch.tensor(request.sequence.token_ids)
        streams = self.model.model(token_ids[None], output_hidden_states=True).hidden_states
        read = torch.cat([streams[layer][0, :-1] for layer in TAPPED], dim=1)
        hidden = read @ self.tensors["fc.weight"].T
        total = 0.0
        for token_id in draft.token_ids:
            assert total >= math.log(LEAST_CHANCE)
            embedded = self.model.model.embed_tokens(token_ids[1:])
            outputs = eagle3_outputs(self.tensors, embedded, hidden, is_stream_normed=self.is_stream_normed)
            hidden = torch.cat((hidden, outputs[-1:]))
            score, likeliest = eagle3_scores(self.tensors, hidden[-1], VOCAB).max(-1)
            assert likeliest == token_id
            total += float(score)
            token_ids = torch.cat((token_ids, likeliest[None]))
        assert len(draft) == request.num_tokens or total < math.log(LEAST_CHANCE)
        self.num_deep += len(draft) > 2
        self.num_checked += 1


def sequences() -> list[Sequence]:
    return [make_sequence(str(index), random_prompt(2 + 7 * index, seed=index), GREEDY) for index in range(6)]


@pytest.mark.parametrize(
    "how",
    [
        {"token_budget": 200},
        {"token_budget": 21, "arrivals_per_step": 1, "max_num_seqs": 5},
        {"num_blocks": 36, "headroom_tokens": 0, "token_budget": 64},
    ],
    ids=["together", "prompts in chunks", "preempted"],
)
@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_drafts_are_those_of_the_dense_layer(directory: Path, model: Any, layout: str, how: dict[str, int]) -> None:
    torch.manual_seed(3)
    folder = directory / layout
    if layout == "authors":
        tensors = eagle3_tensors(SIZE, VOCAB, NUM_FEATURES, num_tapped=2)
        config = eagle3_config(SIZE, VOCAB, NUM_FEATURES, eagle_aux_hidden_state_layer_ids=TAPPED)
    else:
        tensors = eagle3_tensors(SIZE, VOCAB, NUM_FEATURES, num_tapped=2, prefix="layers.0")
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": NUM_FEATURES,
            "eagle_aux_hidden_state_layer_ids": TAPPED,
            "transformer_layer_config": eagle3_config(SIZE, VOCAB, NUM_FEATURES),
        }
    save_draft(folder, config, tensors)
    oracle = Oracle(model, tensors, is_stream_normed=layout == "speculators")
    runner, recorder = recorded_runner(directory / "model", oracle.check, speculative="eagle", draft_model=folder)
    assert isinstance(recorder.proposer, HiddenVectorProposer)
    recorder.proposer._least_chance = LEAST_CHANCE
    outcome = run(runner, sequences(), policy=FixedDepth(4), **how)
    assert not recorder.failures
    assert oracle.num_checked > 50
    assert oracle.num_deep > 10
    assert outcome.tokens == run(make_runner(directory / "model"), sequences()).tokens
