from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.models.errors import CheckpointError
from gpu_worker.speculative.medusa.proposer import MedusaHeads, MedusaProposer, load_medusa_heads
from gpu_worker.speculative.registry import recipe_of_weights
from shared.sampling import Sampling
from tests.gpu_worker.models.pairs import Pair
from tests.gpu_worker.models.variants import SIZES
from tests.gpu_worker.speculative.draft_files import (
    medusa_config,
    medusa_features,
    medusa_logits,
    medusa_tensors,
    save_draft,
)

VOCAB = 50
HEADS, SIZE, MODEL_VOCAB = 3, int(SIZES["hidden_size"]), int(SIZES["vocab_size"])
PairOf = Callable[[str], Pair]


class CountingHeads(MedusaHeads):
    """Heads of which `i` expects the number that the hidden vector names, plus `i`; half as much, ten more."""

    def __init__(self) -> None:
        self.num_heads, self.device = 3, torch.device("cpu")
        self.asked: list[tuple[int, int]] = []

    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        self.asked.append((len(hidden), num_heads))
        logits = torch.full((num_heads, len(hidden), VOCAB), -20.0)
        for head in range(num_heads):
            for row, number in enumerate(hidden[:, 0].int().tolist()):
                logits[head, row, number + head] = 1.0
                logits[head, row, number + head + 10] = 0.0
        return logits


def make_sequence(length: int) -> Sequence:
    return Sequence("s", list(range(length)), length, Sampling(), 100)


def computed(sequence: Sequence, start: int, following: int, numbers: list[int]) -> ComputedTokens:
    """Say that tokens from `start` on left these hidden vectors behind."""
    token_ids = (*sequence.token_ids[start : start + len(numbers)], following)
    return ComputedTokens(sequence, start, token_ids, torch.tensor(numbers)[:, None].float().expand(-1, 4))


def test_drafts_follow_the_token_behind_the_last_hidden_vector() -> None:
    heads = CountingHeads()
    proposer = MedusaProposer(heads)
    first, second = make_sequence(4), make_sequence(6)
    proposer.observe([computed(first, 0, 9, [1, 2, 3, 20]), computed(second, 3, 9, [1, 2, 30])])
    first.token_ids.append(9)
    second.token_ids.append(9)
    drafts = proposer.propose([DraftRequest(first, 1), DraftRequest(second, 5)])
    assert drafts[0] == Draft((20,))
    assert drafts[1].chain().token_ids == (30, 31, 32)
    assert set(drafts[1].paths()[1:]) == {(30,), (40,), (30, 31), (30, 41), (30, 31, 32)}
    assert heads.asked == [(2, 3)]


def test_no_more_heads_are_asked_than_drafts_can_be_deep() -> None:
    heads = CountingHeads()
    proposer = MedusaProposer(heads)
    sequence = make_sequence(1)
    proposer.observe([computed(sequence, 0, 9, [7])])
    sequence.token_ids.append(9)
    proposer.propose([DraftRequest(sequence, 2)])
    assert heads.asked == [(1, 2)]


def test_sequence_whose_end_was_not_computed_gets_no_draft() -> None:
    proposer = MedusaProposer(CountingHeads())
    sequence, unknown, unfinished = make_sequence(3), make_sequence(3), make_sequence(8)
    proposer.observe([computed(sequence, 0, 9, [1, 2, 3]), computed(unfinished, 0, 3, [1, 2, 3])])
    sequence.token_ids += [9, 8]
    assert proposer.propose([DraftRequest(s, 2) for s in (sequence, unknown, unfinished)]) == [NO_DRAFT] * 3
    del sequence.token_ids[-1]
    assert len(proposer.propose([DraftRequest(sequence, 2)])[0]) == 2
    proposer.forget(sequence)
    proposer.forget(sequence)
    assert proposer.propose([DraftRequest(sequence, 2)]) == [NO_DRAFT]


def test_prompt_that_was_computed_for_nothing_but_its_scores_gets_no_draft() -> None:
    proposer = MedusaProposer(CountingHeads())
    sequence = make_sequence(1)
    proposer.observe([ComputedTokens(sequence, 0, (0,), torch.empty(0, 4))])
    assert proposer.propose([DraftRequest(sequence, 2)]) == [NO_DRAFT]


def test_what_is_kept_does_not_grow_while_others_come_and_go() -> None:
    proposer, longest = MedusaProposer(CountingHeads()), make_sequence(3)
    hidden = []
    for _ in range(50):
        other = make_sequence(3)
        step = [computed(longest, 0, 9, [1, 2, 3]), computed(other, 0, 9, [1, 2, 3])]
        hidden += [weakref.ref(item.hidden) for item in step]
        proposer.observe(step)
        proposer.forget(other)
    del step
    assert sum(reference() is not None for reference in hidden) == 1
    longest.token_ids.append(9)
    assert len(proposer.propose([DraftRequest(longest, 2)])[0]) == 2


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("own", [set(), {1}, {0, 1, 2}])
def test_logits_are_those_of_the_formula(pair_of: PairOf, tmp_path: Path, num_blocks: int, own: set[int]) -> None:
    pair = pair_of("llama")
    tensors = medusa_tensors(HEADS, num_blocks, SIZE, MODEL_VOCAB, own)
    save_draft(tmp_path, medusa_config(HEADS, num_blocks), tensors, "medusa_lm_head.safetensors")
    heads = load_medusa_heads(tmp_path, pair.model)
    hidden = torch.randn(5, SIZE)
    for num_heads in (1, HEADS):
        with torch.inference_mode():
            logits = heads.logits(hidden, num_heads)
        assert logits.shape == (num_heads, 5, MODEL_VOCAB)
        for head in range(num_heads):
            expected = medusa_logits(tensors, num_blocks, head, hidden)
            if expected is None:
                expected = pair.oracle.lm_head(medusa_features(tensors, num_blocks, head, hidden)).detach()
            torch.testing.assert_close(logits[head], expected, rtol=1e-4, atol=1e-4)
    assert recipe_of_weights(tmp_path).name == "medusa"


def test_converted_layout_is_read_alike(pair_of: PairOf, tmp_path: Path) -> None:
    model = pair_of("llama").model
    tensors = medusa_tensors(HEADS, 1, SIZE, MODEL_VOCAB, {0, 1, 2})
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
    [
        (SIZE + 2, MODEL_VOCAB, r"the model's hidden vectors have 64 numbers"),
        (SIZE, MODEL_VOCAB + 3, r"the model has 97 tokens"),
    ],
)
def test_heads_of_another_model_are_refused(
    pair_of: PairOf, tmp_path: Path, size: int, vocab_size: int, problem: str
) -> None:
    save_draft(tmp_path, medusa_config(HEADS, 1), medusa_tensors(HEADS, 1, size, vocab_size, {0, 1, 2}))
    with pytest.raises(CheckpointError, match=problem):
        load_medusa_heads(tmp_path, pair_of("llama").model)


def test_heads_that_the_configuration_does_not_count_are_refused(pair_of: PairOf, tmp_path: Path) -> None:
    save_draft(tmp_path, medusa_config(HEADS - 1, 1), medusa_tensors(HEADS, 1, SIZE, MODEL_VOCAB, set()))
    with pytest.raises(CheckpointError, match=r"holds tensor '2\.0\.linear\.bias' and 1 more"):
        load_medusa_heads(tmp_path, pair_of("llama").model)
