"""The fused EAGLE layer against the same weights computed operation by operation."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpu_worker.layers.attention import AttentionShape, AttentionWeights
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.embedding import Embedding
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.fused_decoder import fusing_library
from gpu_worker.layers.gated_mlp import GatedWeights
from gpu_worker.layers.layer import LayerNorms, LayerWeights
from gpu_worker.layers.linear import Projection
from gpu_worker.layers.norms import NormWeights
from gpu_worker.layers.rope_scaling import RopeParameters, RopeType
from gpu_worker.layers.rotations import Rotations
from gpu_worker.speculative.eagle.fused import FusedEagle
from gpu_worker.speculative.hidden_vectors.form import (
    Candidates,
    DraftLayerWeights,
    EntryStep,
    LayerForm,
    LayerHead,
    PairNorms,
)
from gpu_worker.speculative.hidden_vectors.layered import LayeredForm
from kernels.decoder_stack import StackShape
from kernels.linear import LinearFactory
from kernels.linear.forms import DenseWeight, WeightForm
from tests.gpu_worker.layers.test_fused_decoder import FORMS
from tests.kernels.layer_caches import poisoned_cache
from tests.kernels.poisoned_memory import poisoned_memory

CPU = torch.device("cpu")
SHAPE = StackShape(hidden_size=48, intermediate_size=74, num_heads=6, num_kv_heads=2, head_dim=10, eps=1e-5)
VOCABULARY, BLOCK, MAX_BLOCKS = 203, 4, 5
STARTS, COUNTS = (0, 6, 2, 9), (5, 1, 4, 2)
"""Entries of the sequences before the step, and of the step; the last sequence is not asked for."""

LIMITS = [5, 1, 4]


def forms(
    has_norm: bool, form: str, dtype: torch.dtype, pairs: PairNorms | None = None
) -> tuple[FusedEagle, LayeredForm]:
    generator = torch.Generator().manual_seed(5)

    def random(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)

    def projection(rows: int, columns: int, bias: bool = False) -> Projection:
        weight: WeightForm = FORMS[form](random(rows, columns))
        return Projection(weight, random(1, rows)[0] if bias else None)

    size, inner, dim, num_heads, num_kv_heads = 48, 74, SHAPE.head_dim, SHAPE.num_heads, SHAPE.num_kv_heads

    def normalisation() -> NormWeights:
        return NormWeights((torch.rand(size, generator=generator) + 0.5).to(dtype), 1e-5)

    before_mixer = normalisation() if has_norm else None
    mixer = AttentionWeights(
        AttentionShape(num_heads, num_kv_heads, dim),
        projection((num_heads + 2 * num_kv_heads) * dim, size if pairs is None else 2 * size),
        projection(size, num_heads * dim),
    )
    norms = LayerNorms(before_mixer, before_feed_forward=normalisation())
    layer = LayerWeights(mixer, GatedWeights(projection(2 * inner, size), projection(size, inner)), norms)
    rotations = Rotations([RopeParameters(RopeType.DEFAULT, 1e4, 64)], MAX_BLOCKS * BLOCK, CPU, is_lazy=True)
    inputs = projection(size, 2 * size, bias=True) if pairs is None else pairs
    head = LayerHead(Projection(DenseWeight(random(VOCABULARY, size) * 6)))
    if pairs is not None:
        token_ids = torch.randperm(VOCABULARY, generator=generator)[:60].sort().values.int()
        norm = (torch.rand(size, generator=generator) + 0.5).to(dtype)
        head = LayerHead(Projection(DenseWeight(random(60, size) * 3)), norm, token_ids)
    embedding = random(VOCABULARY, size) * 4
    weights = DraftLayerWeights(Embedding(embedding, embedding.dtype), inputs, layer, head, 1e-5, rotations)
    library = fusing_library(SHAPE, dtype, CPU)
    if library is None:
        pytest.skip("no compiler")
    return FusedEagle(library, SHAPE, weights), LayeredForm(weights, LinearFactory(free_host_bytes))


def steps(dtype: torch.dtype) -> list[EntryStep]:
    """Return the step that writes what the sequences have so far, and the one that is under test, over a cache."""
    generator = torch.Generator().manual_seed(2)
    num_seqs = len(COUNTS)
    tables = torch.randperm(num_seqs * MAX_BLOCKS, generator=generator).int().view(num_seqs, MAX_BLOCKS)
    caches = [poisoned_cache(num_seqs * MAX_BLOCKS, BLOCK, SHAPE.num_kv_heads, SHAPE.head_dim, dtype, CPU)]
    made = []
    for starts, counts in (((0,) * num_seqs, STARTS), (STARTS, COUNTS)):
        rows = [row for row, count in enumerate(counts) if count]
        positions = [torch.arange(starts[row], starts[row] + counts[row]) for row in rows]
        slots = [tables[row][at // BLOCK].long() * BLOCK + at % BLOCK for row, at in zip(rows, positions, strict=True)]
        total = sum(counts)
        lengths = [counts[row] for row in rows]
        ends = [starts[row] + counts[row] for row in rows]
        context = AttentionContext(
            caches,
            torch.cat(slots),
            tables[rows],
            torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            max(lengths),
            max(ends),
        )
        token_ids = torch.randint(VOCABULARY, (total,), generator=generator)
        hidden = torch.randn(total, SHAPE.hidden_size, generator=generator).to(dtype)
        made.append(EntryStep(token_ids, hidden, torch.cat(positions), context, torch.tensor(LIMITS)))
    return made


@torch.inference_mode()
def run(form: LayerForm, dtype: torch.dtype, least_score: float) -> tuple[torch.Tensor, list[list[Candidates]]]:
    before, step = steps(dtype)
    form(before)
    with poisoned_memory():
        return form(step), form.draft(step, LIMITS, 3, least_score)


@pytest.mark.parametrize("form", ["dense", "four bits", "eight bits"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_drafts_are_those_of_the_layer_operation_by_operation(has_norm: bool, form: str) -> None:
    fused, layered = forms(has_norm, form, torch.float32)
    (hidden, found), (expected_hidden, expected) = (run(one, torch.float32, -torch.inf) for one in (fused, layered))
    tolerance = 1e-4 if form == "dense" else 0.2
    torch.testing.assert_close(hidden, expected_hidden, rtol=tolerance, atol=tolerance)
    assert [len(depths) for depths in found] == LIMITS
    if form != "dense":
        # Inputs that are rounded to eight bits may become neighbouring numbers in either form.
        return
    for depths, others in zip(found, expected, strict=True):
        for (token_ids, scores), (others_ids, other_scores) in zip(depths, others, strict=True):
            assert token_ids == others_ids
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(other_scores), rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_rotations_are_computed_when_drafts_come_near_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = forms(True, "dense", torch.float32)
    monkeypatch.setattr("gpu_worker.layers.rotations.CHUNK", 1)
    with poisoned_memory():
        lazy, _ = forms(True, "dense", torch.float32)
    found = []
    for form in (whole, lazy):
        before, step = steps(torch.float32)
        form(before)
        # So many that they come to positions which no step had.
        found.append(form.draft(step, [8] * len(LIMITS), 3, -torch.inf))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_stream_normed", [False, True])
@pytest.mark.parametrize("form", ["dense", "eight bits"])
def test_drafts_of_the_third_version_are_those_operation_by_operation(form: str, is_stream_normed: bool) -> None:
    embedding_norm, hidden_norm = torch.rand(2, 48, generator=torch.Generator().manual_seed(7)) + 0.5
    pairs = PairNorms(embedding_norm, hidden_norm, is_stream_normed)
    fused, layered = forms(False, form, torch.float32, pairs)
    (hidden, found), (expected_hidden, expected) = (run(one, torch.float32, -torch.inf) for one in (fused, layered))
    tolerance = 1e-4 if form == "dense" else 0.2
    torch.testing.assert_close(hidden, expected_hidden, rtol=tolerance, atol=tolerance)
    if form == "dense":
        assert [[token_ids for token_ids, _ in depths] for depths in found] == [
            [token_ids for token_ids, _ in depths] for depths in expected
        ]


def test_bfloat16_drafts_are_about_those_of_float32() -> None:
    fused, _ = forms(False, "dense", torch.bfloat16)
    _, layered = forms(False, "dense", torch.float32)
    (hidden, found), (expected_hidden, expected) = run(fused, torch.bfloat16, -9.0), run(layered, torch.float32, -9.0)
    cosine = torch.nn.functional.cosine_similarity(hidden.float(), expected_hidden, dim=1)
    assert cosine.min() > 0.999
    # Logits are 6 in the mean, and all matrices of eight bits.
    for depths, others in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(depths[0][1]), torch.tensor(others[0][1]), rtol=0.05, atol=0.3)


def test_chain_ends_where_it_is_not_likely_enough() -> None:
    fused, layered = forms(True, "dense", torch.float32)
    _, everything = run(fused, torch.float32, -torch.inf)
    totals = list(itertools.accumulate(scores[0] for _, scores in everything[0]))
    least = (totals[1] + totals[2]) / 2
    (_, found), (_, expected) = (run(one, torch.float32, least) for one in (fused, layered))
    assert [len(depths) for depths in found] == [len(depths) for depths in expected]
    assert len(found[0]) == 3
    assert [ids for ids, _ in found[0]] == [ids for ids, _ in everything[0][:3]]


def test_token_that_is_not_in_the_vocabulary_is_refused() -> None:
    fused, _ = forms(False, "dense", torch.float32)
    _, step = steps(torch.float32)
    step.token_ids[3] = VOCABULARY
    with pytest.raises(IndexError, match="token id"):
        fused.draft(step, LIMITS, 3, 0.0)


@pytest.mark.parametrize(("limits", "num_candidates"), [([0, 1, 1], 3), ([5, 1, 4], 0), ([1] * 5, 3)])
def test_chains_of_nothing_and_for_nobody_are_refused(limits: list[int], num_candidates: int) -> None:
    fused, _ = forms(True, "dense", torch.float32)
    before, step = steps(torch.float32)
    with torch.inference_mode():
        fused(before)
        with pytest.raises(ValueError, match="chains of"):
            fused.draft(step, limits, num_candidates, -9.0)
