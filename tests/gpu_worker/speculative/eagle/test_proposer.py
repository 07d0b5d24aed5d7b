"""What an EAGLE or EAGLE-3 layer proposes while the engine runs, against a dense computation of the whole sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.eagle.layer import is_third, load_eagle_layer
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, EntryStep
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from gpu_worker.speculative.registry import recipe_of_weights
from kernels.layer_cache import LayerCache
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, make_runner, make_sequence, random_prompt, run, save_tiny_model
from tests.gpu_worker.layers.contexts import context_of_one
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.draft_files import (
    Tensors,
    eagle3_config,
    eagle3_outputs,
    eagle3_scores,
    eagle3_tensors,
    eagle_config,
    eagle_outputs,
    eagle_tensors,
    save_draft,
)
from tests.gpu_worker.speculative.recorder import DraftOracle, Listener, Recorder, exact_drafts, recorded_runner

__all__ = ["exact_drafts"]

SIZE, NUM_FEATURES, TAPPED = 48, VOCAB // 2, [1, 0]
LEAST_CHANCE = 0.1
GREEDY = Sampling(max_tokens=20, temperature=0.0)
RUNS = {
    "together": {"token_budget": 200},
    "prompts in chunks": {"token_budget": 21, "arrivals_per_step": 1, "max_num_seqs": 5},
    "preempted": {"num_blocks": 36, "headroom_tokens": 0, "token_budget": 64},
}


class Oracle(DraftOracle):
    """Knows the model, as `transformers` has it, and the layer's tensors."""

    def __init__(self, model: Any, tensors: Tensors) -> None:
        super().__init__(LEAST_CHANCE)
        self.model = model
        self.tensors = tensors

    def following(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        yielded = self.outputs(self.model.model.embed_tokens(token_ids), hidden)[-1]
        return yielded, self.scores(yielded)

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model.model(token_ids[None]).last_hidden_state[0]
        return hidden

    def outputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return eagle_outputs(self.tensors, embedded, hidden)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model.lm_head(hidden).log_softmax(-1)
        return scores


class Eagle3Oracle(Oracle):
    is_stream_normed = False

    def read(self, token_ids: torch.Tensor) -> torch.Tensor:
        streams = self.model.model(token_ids[None], output_hidden_states=True).hidden_states
        return torch.cat([streams[layer][0] for layer in TAPPED], dim=1) @ self.tensors["fc.weight"].T

    def outputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return eagle3_outputs(self.tensors, embedded, hidden, is_stream_normed=self.is_stream_normed)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return eagle3_scores(self.tensors, hidden, VOCAB)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    model = save_tiny_model(directory / "model")
    torch.manual_seed(3)
    tensors = eagle_tensors(SIZE)
    save_draft(directory / "eagle", eagle_config(SIZE, VOCAB), tensors)
    return Oracle(model, tensors)


def sequences(sampling: Sampling = GREEDY) -> list[Sequence]:
    return [make_sequence(str(index), random_prompt(2 + 7 * index, seed=index), sampling) for index in range(6)]


def eagle_runner(
    directory: Path, listener: Listener, draft: str = "eagle", **options: int
) -> tuple[TorchModelRunner, Recorder]:
    """Build a runner whose layer goes on although it costs as much as half of this small model."""
    runner, recorder = recorded_runner(
        directory / "model", listener, speculative="eagle", draft_model=directory / draft, **options
    )
    assert isinstance(recorder.proposer, HiddenVectorProposer)
    recorder.proposer._least_chance = LEAST_CHANCE
    return runner, recorder


def check_run(directory: Path, oracle: Oracle, how: dict[str, int], draft: str = "eagle") -> None:
    oracle.num_checked = oracle.num_deep = 0
    runner, recorder = eagle_runner(directory, oracle.check, draft)
    outcome = run(runner, sequences(), policy=FixedDepth(4), **how)
    assert not recorder.failures
    assert oracle.num_checked > 50
    assert oracle.num_deep > 10
    assert outcome.tokens == run(make_runner(directory / "model"), sequences()).tokens
    assert (outcome.num_preemptions > 0) == ("num_blocks" in how)


@pytest.mark.parametrize("how", RUNS)
def test_drafts_are_those_of_the_dense_layer(directory: Path, oracle: Oracle, how: str) -> None:
    check_run(directory, oracle, RUNS[how])


@pytest.mark.parametrize(("layout", "how"), [*(("authors", how) for how in RUNS), ("speculators", "prompts in chunks")])
def test_drafts_are_those_of_the_dense_eagle3_layer(directory: Path, oracle: Oracle, layout: str, how: str) -> None:
    torch.manual_seed(3)
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
    save_draft(directory / layout, config, tensors)
    third = Eagle3Oracle(oracle.model, tensors)
    third.is_stream_normed = layout == "speculators"
    check_run(directory, third, RUNS[how], layout)


def test_prompt_found_in_the_prefix_cache_has_its_entries_already(directory: Path, oracle: Oracle) -> None:
    runner, recorder = eagle_runner(directory, oracle.check)
    prompt = random_prompt(33, seed=4)
    twice = [make_sequence(name, prompt, GREEDY) for name in "ab"]
    outcome = run(runner, twice, policy=FixedDepth(2), arrivals_per_step=1)
    assert outcome.num_prefix_hits >= 32 - 4
    assert not recorder.failures
    assert outcome.tokens["a"] == outcome.tokens["b"]


def test_more_entries_than_a_step_may_have_are_computed_in_several(directory: Path, oracle: Oracle) -> None:
    runner, recorder = eagle_runner(directory, oracle.check, token_budget=16)
    run(runner, sequences(), policy=FixedDepth(3), token_budget=200)
    assert not recorder.failures


class LateDepth(FixedDepth):
    """No drafts at first."""

    def __init__(self, after: int) -> None:
        super().__init__(3)
        object.__setattr__(self, "left", after)

    def depths(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        object.__setattr__(self, "left", self.left - 1)
        return super().depths(sequences, limits) if self.left < 0 else [0] * len(limits)


def test_drafts_that_begin_late_know_all_that_came_before(directory: Path, oracle: Oracle) -> None:
    oracle.num_checked = 0
    runner, recorder = eagle_runner(directory, oracle.check)
    run(runner, sequences(), policy=LateDepth(9), token_budget=200)
    assert not recorder.failures
    assert oracle.num_checked > 20


def test_vectors_beyond_the_limit_cost_drafts_but_do_no_harm(directory: Path, oracle: Oracle) -> None:
    drafts: list[Draft] = []
    runner, recorder = eagle_runner(directory, lambda _, draft: drafts.append(draft))
    assert isinstance(recorder.proposer, HiddenVectorProposer)
    recorder.proposer._max_num_kept = 20
    outcome = run(runner, sequences(), policy=LateDepth(9), token_budget=30)
    assert not recorder.failures
    assert outcome.tokens == run(make_runner(directory / "model"), sequences()).tokens
    assert all(token_id in range(VOCAB) for draft in drafts for token_id in draft.token_ids)
    assert sum(map(len, drafts)) > 20


def test_more_sequences_than_the_batch_has_rows_are_drafted_for_in_turn(directory: Path, oracle: Oracle) -> None:
    runner, recorder = eagle_runner(directory, oracle.check)
    short = Sampling(max_tokens=3, temperature=0.0)
    asked = [make_sequence(str(index), random_prompt(3, seed=index), short) for index in range(50)]
    run(runner, asked, policy=FixedDepth(1), max_num_seqs=8)
    assert not recorder.failures
    assert all(sequence.num_drafted_tokens > 0 for sequence in asked)


def test_vectors_of_sequences_that_left_do_not_count_against_the_limit(directory: Path, oracle: Oracle) -> None:
    runner, recorder = eagle_runner(directory, oracle.check)
    assert isinstance(recorder.proposer, HiddenVectorProposer)
    run(runner, sequences(), policy=FixedDepth(2), token_budget=200)
    assert recorder.proposer._num_kept == 0
    left = make_sequence("left", [1, 2, 3, 4], GREEDY)
    recorder.proposer.observe([ComputedTokens(left, 0, (1, 2, 3, 4), torch.zeros(3, SIZE))])
    assert recorder.proposer._num_kept == 3
    recorder.proposer.forget(left)
    assert recorder.proposer._num_kept == 0


LAYER_SIZE, LAYER_VOCAB, LENGTH, BLOCK = int(SIZES["hidden_size"]), int(SIZES["vocab_size"]), 12, 4
PairOf = Callable[[str], Pair]


def steps(layer: DraftLayer, token_ids: torch.Tensor, hidden: torch.Tensor, chunks: list[int]) -> Iterator[EntryStep]:
    """Describe a sequence in chunks; what no chunk writes is not a number."""
    shape = (LENGTH // BLOCK, BLOCK, layer.config.num_kv_heads, layer.config.head_dim)
    caches = [LayerCache(*torch.full((2, *shape), torch.nan))]
    first = 0
    for count in chunks:
        positions = torch.arange(first, first + count)
        context = context_of_one(caches, count, first, LENGTH // BLOCK)
        yield EntryStep(token_ids[positions], hidden[positions], positions, context)
        first += count


@pytest.mark.parametrize("has_own_embedding", [False, True])
@pytest.mark.parametrize("has_fc_bias", [False, True])
def test_outputs_are_those_of_the_dense_layer(
    pair_of: PairOf, tmp_path: Path, has_own_embedding: bool, has_fc_bias: bool
) -> None:
    pair = pair_of("llama")
    tensors = eagle_tensors(LAYER_SIZE, has_fc_bias=has_fc_bias, vocab_size=LAYER_VOCAB if has_own_embedding else None)
    save_draft(tmp_path, eagle_config(LAYER_SIZE, LAYER_VOCAB), tensors)
    layer = load_eagle_layer(tmp_path, pair.model)
    token_ids, hidden = torch.randint(LAYER_VOCAB, (LENGTH,)), torch.randn(LENGTH, LAYER_SIZE)
    embedding = tensors.get("embed_tokens.weight", pair.oracle.model.embed_tokens.weight.detach())
    expected = eagle_outputs(tensors, embedding[token_ids], hidden)
    with torch.inference_mode():
        chunks = steps(layer, token_ids, hidden, [5, 1, 4, 2])
        outputs = [layer.forward(step) for step in chunks]
        *_, last = steps(layer, token_ids, hidden, [LENGTH])
        drafts = layer.draft(dataclasses.replace(last, limits=torch.tensor([1])), [1], -torch.inf)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-4)
    assert drafts == [[int(pair.oracle.lm_head(expected[-1]).argmax())]]
    assert recipe_of_weights(tmp_path).name == "eagle"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"hidden_size": LAYER_SIZE * 2}, r"field 'hidden_size' is 128, but must be 64; take weights"),
        ({"vocab_size": LAYER_VOCAB + 1}, r"field 'vocab_size' is 98, but must be 97"),
        ({"num_hidden_layers": 2}, r"field 'num_hidden_layers' is 2, but must be 1"),
        ({"intermediate_size": 44}, r"tensor 'layers\.0\.mlp\.gate_proj\.weight' has shape \[40, 64\]"),
    ],
)
def test_layer_of_another_model_is_refused(
    pair_of: PairOf, tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    save_draft(tmp_path, eagle_config(LAYER_SIZE, LAYER_VOCAB, **fields), eagle_tensors(LAYER_SIZE))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, pair_of("llama").model)


def third(num_layers: int, **fields: object) -> dict[str, object]:
    layers = {"eagle_aux_hidden_state_layer_ids": list(range(num_layers))}
    return eagle3_config(LAYER_SIZE, LAYER_VOCAB, 40, **layers, **fields)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (third(3, norm_before_fc=True), r"field 'norm_before_fc' is true; supported: false"),
        (third(4), r"'eagle_aux_hidden_state_layer_ids' is \[0, 1, 2, 3\]; it must name .* 0 to 2; take weights"),
        (eagle3_config(LAYER_SIZE, LAYER_VOCAB, 40), r"'eagle_aux_hidden_state_layer_ids' is missing, .* a model of 3"),
        (third(3, draft_vocab_size=LAYER_VOCAB + 1), r"field 'draft_vocab_size' is 98; .* from 1 to 97"),
        (third(3, hidden_size=LAYER_SIZE * 2), r"field 'hidden_size' is 128, but must be 64; take weights"),
    ],
)
def test_third_version_with_fields_that_do_not_fit_is_refused(
    pair_of: PairOf, tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    save_draft(tmp_path, config, eagle3_tensors(LAYER_SIZE, LAYER_VOCAB, 40))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, pair_of("llama").model)
    assert recipe_of_weights(tmp_path).name == "eagle"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"d2t": torch.full((40,), LAYER_VOCAB)}, r"tensor 'd2t' leads to a token that is not one of the 97"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, r"tensor 'd2t' must be 40 whole numbers"),
        ({"d2t": torch.zeros(40)}, r"tensor 'd2t' must be 40 whole numbers"),
        ({"d2t": None}, r"tensor 'd2t' is missing, which tells the tokens of 40 features"),
        ({"fc.weight": torch.zeros(LAYER_SIZE, 2 * LAYER_SIZE)}, r"tensor 'fc\.weight' has shape \[64, 128\]"),
        ({"midlayer.hidden_norm.weight": None}, r"has no tensor 'midlayer\.hidden_norm\.weight'"),
    ],
)
def test_third_version_with_tensors_that_do_not_fit_is_refused(
    pair_of: PairOf, tmp_path: Path, tensors: dict[str, torch.Tensor | None], problem: str
) -> None:
    changed = eagle3_tensors(LAYER_SIZE, LAYER_VOCAB, 40) | tensors
    save_draft(tmp_path, third(3), {name: tensor for name, tensor in changed.items() if tensor is not None})
    directory = pair_of("llama").directory
    model = load_model(directory, torch.float32, torch.device("cpu"), tapped_layers=(0, 1, 2))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, model)


@pytest.mark.parametrize(
    ("fields", "is_its"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32}, True),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"speculators_model_type": "eagle3"}, True),
        ({"architectures": ["LlamaForCausalLMEagle"], "vocab_size": 32}, False),
    ],
)
def test_third_version_is_told_by_its_name_or_its_vocabulary(fields: dict[str, Any], is_its: bool) -> None:
    assert is_third(JsonFile(Path("config.json"), fields)) is is_its


def test_model_of_its_own_is_told_apart(pair_of: PairOf) -> None:
    assert recipe_of_weights(pair_of("llama").directory).name == "draft"
