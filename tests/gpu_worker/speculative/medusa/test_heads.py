from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.models.errors import CheckpointError
from gpu_worker.speculative.medusa.heads import load_medusa_heads
from gpu_worker.speculative.registry import recipe_of_weights
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.draft_files import (
    medusa_config,
    medusa_features,
    medusa_logits,
    medusa_tensors,
    save_draft,
)

HEADS, SIZE, VOCAB = 3, int(SIZES["hidden_size"]), int(SIZES["vocab_size"])
PairOf = Callable[[str], Pair]


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("own", [set(), {1}, {0, 1, 2}])
def test_logits_are_those_of_the_formula(pair_of: PairOf, tmp_path: Path, num_blocks: int, own: set[int]) -> None:
    pair = pair_of("llama")
    tensors = medusa_tensors(HEADS, num_blocks, SIZE, VOCAB, own)
    save_draft(tmp_path, medusa_config(HEADS, num_blocks), tensors, "medusa_lm_head.safetensors")
    heads = load_medusa_heads(tmp_path, pair.model)
    hidden = torch.randn(5, SIZE)
    for num_heads in (1, HEADS):
        with torch.inference_mode():
            logits = heads.logits(hidden, num_heads)
        assert logits.shape == (num_heads, 5, VOCAB)
        for head in range(num_heads):
            expected = medusa_logits(tensors, num_blocks, head, hidden)
            if expected is None:
                expected = pair.oracle.lm_head(medusa_features(tensors, num_blocks, head, hidden)).detach()
            torch.testing.assert_close(logits[head], expected, rtol=1e-4, atol=1e-4)
    assert recipe_of_weights(tmp_path).name == "medusa"


def test_converted_layout_is_read_alike(pair_of: PairOf, tmp_path: Path) -> None:
    model = pair_of("llama").model
    tensors = medusa_tensors(HEADS, 1, SIZE, VOCAB, {0, 1, 2})
    save_draft(tmp_path / "authors", medusa_config(HEADS, 1), tensors)
    converted = {}
    for name, tensor in tensors.items():
        head, rest = name.split(".", 1)
        new = f"lm_heads.{head}.weight" if rest == "1.weight" else f"blocks.{head}.layers.{rest.replace('linear.', '')}"
        converted[new] = tensor
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 1}
    save_draft(tmp_path / "converted", config, converted)
    hidden = torch.randn(2, SIZE)
    with torch.inference_mode():
        first, second = (
            load_medusa_heads(tmp_path / name, model).logits(hidden, 3) for name in ("authors", "converted")
        )
    assert torch.equal(first, second)
    assert recipe_of_weights(tmp_path / "converted").name == "medusa"


def test_pickled_heads_are_refused_and_the_remedy_told(pair_of: PairOf, tmp_path: Path) -> None:
    save_draft(tmp_path, medusa_config(HEADS, 1), {}, "other.safetensors")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt: is pickled.*convert"):
        load_medusa_heads(tmp_path, pair_of("llama").model)


@pytest.mark.parametrize(
    ("size", "vocab_size", "problem"),
    [(SIZE + 2, VOCAB, r"the model's hidden vectors have 64 numbers"), (SIZE, VOCAB + 3, r"the model has 97 tokens")],
)
def test_heads_of_another_model_are_refused(
    pair_of: PairOf, tmp_path: Path, size: int, vocab_size: int, problem: str
) -> None:
    save_draft(tmp_path, medusa_config(HEADS, 1), medusa_tensors(HEADS, 1, size, vocab_size, {0, 1, 2}))
    with pytest.raises(CheckpointError, match=problem):
        load_medusa_heads(tmp_path, pair_of("llama").model)


def test_heads_that_the_configuration_does_not_count_are_refused(pair_of: PairOf, tmp_path: Path) -> None:
    save_draft(tmp_path, medusa_config(HEADS - 1, 1), medusa_tensors(HEADS, 1, SIZE, VOCAB, set()))
    with pytest.raises(CheckpointError, match=r"holds tensor '2\.0\.linear\.bias' and 1 more"):
        load_medusa_heads(tmp_path, pair_of("llama").model)
