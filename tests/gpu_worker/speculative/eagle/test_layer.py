from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.models.errors import CheckpointError
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.eagle.layer import load_eagle_layer
from gpu_worker.speculative.hidden_vectors.layer import DraftLayer, EntryStep
from gpu_worker.speculative.registry import recipe_of_weights
from kernels.layer_cache import LayerCache
from tests.gpu_worker.layers.contexts import context_of_one
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.draft_files import (
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_outputs,
    eagle_tensors,
    save_draft,
)

SIZE, VOCAB, LENGTH, BLOCK = int(SIZES["hidden_size"]), int(SIZES["vocab_size"]), 12, 4
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
    tensors = eagle_tensors(SIZE, has_fc_bias=has_fc_bias, vocab_size=VOCAB if has_own_embedding else None)
    save_draft(tmp_path, eagle_config(SIZE, VOCAB), tensors)
    layer = load_eagle_layer(tmp_path, pair.model)
    token_ids, hidden = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, SIZE)
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
        ({"hidden_size": SIZE * 2}, r"field 'hidden_size' is 128, but must be 64; take weights"),
        ({"vocab_size": VOCAB + 1}, r"field 'vocab_size' is 98, but must be 97"),
        ({"num_hidden_layers": 2}, r"field 'num_hidden_layers' is 2, but must be 1"),
        ({"intermediate_size": 44}, r"tensor 'layers\.0\.mlp\.gate_proj\.weight' has shape \[40, 64\]"),
    ],
)
def test_layer_of_another_model_is_refused(
    pair_of: PairOf, tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    save_draft(tmp_path, eagle_config(SIZE, VOCAB, **fields), eagle_tensors(SIZE))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, pair_of("llama").model)


def third(num_layers: int, **fields: object) -> dict[str, object]:
    layers = {"eagle_aux_hidden_state_layer_ids": list(range(num_layers))}
    return eagle3_config(SIZE, VOCAB, 40, **layers, **fields)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (third(3, norm_before_fc=True), r"field 'norm_before_fc' is true, which is not supported"),
        (third(4), r"'eagle_aux_hidden_state_layer_ids' is \[0, 1, 2, 3\]; it must name .* 0 to 2; take weights"),
        (eagle3_config(SIZE, VOCAB, 40), r"'eagle_aux_hidden_state_layer_ids' is missing, .* a model of 3"),
        (third(3, draft_vocab_size=VOCAB + 1), r"field 'draft_vocab_size' is 98; .* from 1 to 97"),
        (third(3, hidden_size=SIZE * 2), r"field 'hidden_size' is 128, but must be 64; take weights"),
    ],
)
def test_third_version_with_fields_that_do_not_fit_is_refused(
    pair_of: PairOf, tmp_path: Path, config: dict[str, object], problem: str
) -> None:
    save_draft(tmp_path, config, eagle3_tensors(SIZE, VOCAB, 40))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, pair_of("llama").model)
    assert recipe_of_weights(tmp_path).name == "eagle"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"d2t": torch.full((40,), VOCAB)}, r"tensor 'd2t' leads to a token that is not one of the 97"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, r"tensor 'd2t' must be 40 whole numbers"),
        ({"d2t": torch.zeros(40)}, r"tensor 'd2t' must be 40 whole numbers"),
        ({"d2t": None}, r"tensor 'd2t' is missing, which tells the tokens of 40 features"),
        ({"fc.weight": torch.zeros(SIZE, 2 * SIZE)}, r"tensor 'fc\.weight' has shape \[64, 128\]"),
        ({"midlayer.hidden_norm.weight": None}, r"has no tensor 'midlayer\.hidden_norm\.weight'"),
    ],
)
def test_third_version_with_tensors_that_do_not_fit_is_refused(
    pair_of: PairOf, tmp_path: Path, tensors: dict[str, torch.Tensor | None], problem: str
) -> None:
    changed = eagle3_tensors(SIZE, VOCAB, 40) | tensors
    save_draft(tmp_path, third(3), {name: tensor for name, tensor in changed.items() if tensor is not None})
    directory = pair_of("llama").directory
    model = load_model(directory, torch.float32, torch.device("cpu"), tapped_layers=(0, 1, 2))
    with pytest.raises(CheckpointError, match=problem):
        load_eagle_layer(tmp_path, model)


def test_model_of_its_own_is_told_apart(pair_of: PairOf) -> None:
    assert recipe_of_weights(pair_of("llama").directory).name == "draft"
