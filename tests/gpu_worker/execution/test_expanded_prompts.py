"""Prompts of latent attention whose keys and values are made for the step: the same tokens, whatever the form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.warm_up import StepLimits, warm_up_plans
from gpu_worker.layers import latent_attention
from gpu_worker.layers.attention_context import StepSizes
from gpu_worker.layers.latent_attention import LatentShape
from gpu_worker.models.decoder import CausalLM
from kernels.layer_cache import EVERY_TOKEN, CachedTokens
from kernels.paged_attention import ExpandedBlocks
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import DEVICES, TOKEN_BUDGET, load, make_device_runner
from tests.gpu_worker.execution.engine_run import Outcome, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.latent_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.plans import shares_of

GREEDY = Sampling(temperature=0.0, max_tokens=6)


@pytest.fixture(params=["deepseek-v2-lite", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_case(CASES[request.param], tmp_path)
    return tmp_path


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a CPU have both forms, as a GPU has; return the tokens of each step and layer that makes keys and values."""
    lengths: list[int] = []
    attend = latent_attention.expanded_attention

    def counted(query: Any, *args: Any, **settings: Any) -> Any:
        lengths.append(len(query))
        return attend(query, *args, **settings)

    monkeypatch.setattr(LatentShape, "can_expand", lambda *_: True)
    monkeypatch.setattr(latent_attention, "is_expansion_less", lambda *sizes: sizes[4] > 36)
    monkeypatch.setattr(latent_attention, "expanded_attention", counted)
    return lengths


def answer(model: CausalLM, *, is_graphed: bool = False, captured: CapturedSteps = CapturedSteps.ALL) -> Outcome:
    """Prompts in several chunks beside decodes, and one that is in the cache already."""
    sizes: dict[str, Any] = {"num_blocks": 300, "max_num_seqs": 6, "max_model_len": 512}
    runner = make_device_runner(model, is_graphed=is_graphed, captured=captured, **sizes)
    prompts = [random_prompt(length, seed=length) for length in (100, 7, 60, 100)]
    sequences = [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]
    return run(runner, sequences, max_num_seqs=6, token_budget=TOKEN_BUDGET, arrivals_per_step=1)


def test_prompts_in_either_form_have_the_same_answers(
    model: Path, monkeypatch: pytest.MonkeyPatch, expanded: list[int]
) -> None:
    found, find = [], ExpandedBlocks.of
    monkeypatch.setattr(ExpandedBlocks, "of", lambda *args: found.append(args) or find(*args))
    loaded = load(model, "cpu")
    outcome = answer(loaded)
    # Blocks are found once a step for all layers.
    assert len(expanded) == loaded.config.num_layers * len(found)
    # Each layer, in each step with a prompt of more than eight tokens.
    assert len(expanded) >= 2 * 3
    assert max(expanded) == TOKEN_BUDGET
    monkeypatch.undo()
    assert outcome.tokens == answer(load(model, "cpu")).tokens


@pytest.mark.parametrize("device", DEVICES)
def test_new_prompts_make_keys_and_values_with_and_without_graphs(
    model: Path, expanded: list[int], device: str
) -> None:
    outcome, eager = answer(load(model, device)), expanded.copy()
    expanded.clear()
    assert answer(load(model, device), is_graphed=True, captured=CapturedSteps.DECODE).tokens == outcome.tokens
    assert expanded == eager != []
    expanded.clear()
    assert answer(load(model, device), is_graphed=True).tokens == outcome.tokens
    # Graphs of one size, to which steps are padded.
    assert set(expanded) == {TOKEN_BUDGET}


@pytest.mark.parametrize("outweighs", [False, True])
def test_a_chunk_behind_a_context_leaves_its_graph_where_it_repays_launches(
    model: Path, expanded: list[int], outweighs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has room for the keys and values of its own tokens alone."""
    outcome = answer(load(model, "cpu"))
    expanded.clear()
    monkeypatch.setattr(LatentShape, "outweighs_launches", lambda *_: outweighs)
    launched: list[int] = []
    launch = TorchModelRunner._launch

    def counted(self: TorchModelRunner, step: Any, staged: Any, inputs: Any) -> Any:
        launched.append(inputs[3])
        return launch(self, step, staged, inputs)

    monkeypatch.setattr(TorchModelRunner, "_launch", counted)
    assert answer(load(model, "cpu"), is_graphed=True).tokens == outcome.tokens
    # Each step that leaves its graph does so for them.
    assert bool(launched) == outweighs
    assert all(launched)


def test_only_large_savings_repay_launches() -> None:
    """DeepSeek-V2-Lite: a new prompt that fits into graphs never does, a chunk behind a long context does."""
    saving = {(2048, 2048): False, (256, 2000): False, (512, 20_000): True, (2048, 6000): True}
    for lengths, expected in saving.items():
        assert LITE.outweighs_launches(sizes_of([lengths], 131_072)) is expected
    # A rank of eight has an eighth of the heads.
    assert not replace(LITE, num_heads=2).outweighs_launches(sizes_of([(512, 20_000)], 131_072))


def test_a_cpu_has_one_form_and_a_gpu_both(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a token's result does not depend on how its prompt was cut."""
    monkeypatch.setattr(latent_attention, "is_expansion_less", lambda *_: pytest.fail("asked"))
    loaded = load(model, "cpu")
    answer(loaded)
    shape = loaded.config.layers[0].mixer
    assert isinstance(shape, LatentShape)
    cuda = torch.device("cuda")
    assert shape.can_expand(cuda, EVERY_TOKEN)
    # Tokens of ranks are read from a message: equal, not the same.
    assert shape.can_expand(cuda, CachedTokens())
    assert not shape.can_expand(cuda, CachedTokens(1, 2))


# The sizes of DeepSeek-V2-Lite.
LITE = LatentShape(16, None, 512, 128, 64, 128, 0.1)


def expands(lengths: list[tuple[int, int]], max_model_len: int = 131_072) -> bool:
    """Of sequences of (tokens of the step, cached ones included)."""
    return LITE.expands(sizes_of(lengths, max_model_len))


def sizes_of(lengths: list[tuple[int, int]], max_model_len: int) -> StepSizes:
    return StepSizes.of([query for query, _ in lengths], [context for _, context in lengths], 16, max_model_len)


def test_sizes_are_exact_sums_over_sequences() -> None:
    lengths = [(5, 5), (3, 40), (1, 17)]
    pairs = sum(context - query + place for query, context in lengths for place in range(1, query + 1))
    assert sizes_of(lengths, 64) == StepSizes(9, pairs, 62, 1 + 3 + 2, 64)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(1024, 1024)], True),
        ([(2048, 2048), *[(1, 200)] * 7], True),
        # A long chunk, a long context, and both: of different sequences.
        ([(512, 512), (1, 60_000)], False),
        ([(2048, 2048), (1, 60_000)], False),
        ([(1, 60_000)] * 2, False),
        ([(512, 60_000), (1, 512)], True),
    ],
)
def test_a_prompt_beside_decodes_is_expanded_where_it_pays_for_their_contexts(
    lengths: list[tuple[int, int]], expected: bool
) -> None:
    assert expands(lengths) is expected


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "context_len", "expected"),
    [(1, 2048, 100_000, True), (2, 2048, 100_000, False), (4, 8192, 2048, True), (4, 8192, 32_768, True)],
)
def test_no_more_tokens_are_gathered_than_the_longest_sequence_has(
    num_seqs: int, num_tokens: int, context_len: int, expected: bool
) -> None:
    assert expands([(num_tokens // num_seqs, context_len)] * num_seqs) is expected


def test_warm_up_makes_keys_and_values_of_a_long_context_with_the_fewest_and_the_most_tokens() -> None:
    limits = StepLimits(64, 32_768, 8192, 16, expands=LITE.expands)
    found = {
        (items[0].num_tokens, items[0].start)
        for items in shares_of(warm_up_plans(limits))
        if expands([(item.num_tokens, item.start + item.num_tokens) for item in items], 32_768)
    }
    assert (8192, 32_768 - 8192) in found
    fewest = min(num_tokens for num_tokens, start in found if start)
    assert fewest == 256
    assert not expands([(fewest - 1, 32_768)], 32_768)


def test_warm_up_takes_the_memory_and_compiles_the_kernels_of_latent_steps_of_all_sizes_too() -> None:
    """The largest step beside a long context, and batches of all sizes with a chunk in each."""
    limits = StepLimits(256, 32_768, 8192, 16, expands=LITE.expands)
    latent = [
        items
        for items in shares_of(warm_up_plans(limits))
        if not expands([(item.num_tokens, item.start + item.num_tokens) for item in items], 32_768)
    ]
    assert max(sum(item.num_tokens for item in items) for items in latent) == 8192
    sizes = {(len(items), items[0].num_tokens) for items in latent}
    assert {(count, length) for count in (2, 64, 256) for length in (1, 2, 16, 128)} <= sizes


def test_warm_up_makes_keys_and_values_of_as_many_tokens_as_a_step_has_room_for() -> None:
    limits = StepLimits(64, 400, 1000, 16, expands=LITE.expands)
    found = [[(item.num_tokens, item.start) for item in items] for items in shares_of(warm_up_plans(limits))]
    assert [(400, 0), (400, 0), (200, 0)] in found


@pytest.mark.parametrize(
    ("max_num_seqs", "max_model_len", "budget"), [(2, 200, 300), (2, 4096, 8192), (4, 2048, 8192), (64, 400, 1000)]
)
def test_warm_up_stays_within_contexts_where_a_step_has_room_for_all_sequences(
    max_num_seqs: int, max_model_len: int, budget: int
) -> None:
    """Behind the longest context there is no block, and no angle. The latent form has a step as large as any."""
    limits = StepLimits(max_num_seqs, max_model_len, budget, 16, expands=LITE.expands)
    latent = []
    for items in shares_of(warm_up_plans(limits)):
        lengths = [(item.num_tokens, item.start + item.num_tokens) for item in items]
        assert max(context for _, context in lengths) <= max_model_len
        if not expands(lengths, max_model_len):
            latent.append(sum(length for length, _ in lengths))
    assert max(latent) >= budget - 1
