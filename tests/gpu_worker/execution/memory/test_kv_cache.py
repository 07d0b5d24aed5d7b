from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.core.scheduler_config import SchedulerConfig, WindowConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.memory.group_shares import GroupShares
from gpu_worker.execution.memory.kv_cache import (
    allocate_groups,
    allocate_kv_cache,
    bytes_per_block,
    fixed_num_blocks,
    group_block_bytes,
)
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import (
    RunnerConfig,
    choose_draft_dtype,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_num_threads,
    num_usable_cores,
)
from gpu_worker.layers.cache_layout import CacheLayout, KeepsTokens, ReadsLayer
from gpu_worker.models.registry import read_model_config
from kernels.layer_cache import CacheShape
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run

CPU = torch.device("cpu")
DEMO_MODEL = Path(__file__).parents[4] / "ops" / "demo_model" / "model"
DEMAND = CacheDemand(block_bytes=1 << 20, block_size=16, max_model_len=1000)


def config(**settings: object) -> RunnerConfig:
    return RunnerConfig(Path("model"), **settings)  # type: ignore[arg-type]


def test_set_sizes_win() -> None:
    assert fixed_num_blocks(config(num_blocks=70), DEMAND) == ("HEADRACE_NUM_BLOCKS", 70)
    assert fixed_num_blocks(config(kv_cache_bytes=100 << 20), DEMAND) == ("HEADRACE_KV_CACHE_BYTES", 100)
    assert fixed_num_blocks(config(num_blocks=70, kv_cache_bytes=1), DEMAND) == ("HEADRACE_NUM_BLOCKS", 70)
    assert fixed_num_blocks(config(), DEMAND) is None


@pytest.mark.parametrize(
    ("settings", "variable"),
    [({"num_blocks": 62}, "HEADRACE_NUM_BLOCKS"), ({"kv_cache_bytes": 62 << 20}, "HEADRACE_KV_CACHE_BYTES")],
)
def test_cache_smaller_than_one_sequence_is_refused(settings: dict[str, int], variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}.*{63 << 20} bytes.*HEADRACE_MAX_MODEL_LEN to 992"):
        fixed_num_blocks(config(**settings), DEMAND)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_eight_bits_hold_nearly_twice_the_tokens(kv_cache_dtype: str, head_dim: int) -> None:
    model = replace(read_model_config(DEMO_MODEL), head_dim=head_dim)
    names = ("auto", kv_cache_dtype)
    dtypes = [choose_kv_cache_dtype(name, torch.bfloat16, CPU) for name in names]
    blocks = [2**30 // bytes_per_block(16, model, dtype) for dtype in dtypes]
    assert 1.9 < blocks[1] / blocks[0] < 2
    for dtype in dtypes:
        cache = allocate_kv_cache(5, 16, model, dtype, CPU)
        tensors = [tensor for layer in cache.layers for tensor in layer.tensors]
        assert sum(tensor.nbytes for tensor in tensors) == 5 * bytes_per_block(16, model, dtype)
        assert {len(tensor) for tensor in tensors} == {5}


def test_auto_kv_cache_dtype_is_the_models() -> None:
    assert choose_kv_cache_dtype("auto", torch.float16, CPU) == torch.float16


def test_unknown_kv_cache_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"HEADRACE_KV_CACHE_DTYPE.*auto, fp8, int8"):
        choose_kv_cache_dtype("fp4", torch.float16, CPU)


def test_fp8_on_a_gpu_without_instructions_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"HEADRACE_KV_CACHE_DTYPE.*8\.9.*8\.6.*int8"):
        choose_kv_cache_dtype("fp8", torch.bfloat16, gpu)
    assert choose_kv_cache_dtype("int8", torch.bfloat16, gpu) == torch.int8
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_kv_cache_dtype("fp8", torch.bfloat16, gpu) == torch.float8_e4m3fn


def test_cache_without_a_block_suggests_no_length() -> None:
    with pytest.raises(ConfigError, match=r"Allow 66060288 bytes \(63 blocks\)$"):
        fixed_num_blocks(config(kv_cache_bytes=5), DEMAND)


def test_auto_dtype_on_a_cpu_never_runs_float16() -> None:
    assert choose_dtype("auto", torch.float16, CPU) == torch.float32
    assert choose_dtype("auto", torch.float32, CPU) == torch.float32
    assert choose_draft_dtype(torch.float16, CPU) == torch.float16
    assert choose_draft_dtype(torch.float32, CPU) == choose_dtype("auto", torch.bfloat16, CPU)
    assert choose_draft_dtype(torch.float32, torch.device("cuda")) == torch.float32
    assert choose_dtype("auto", torch.bfloat16, CPU) in (torch.bfloat16, torch.float32)
    assert choose_dtype("float16", torch.float32, CPU) == torch.float16


def test_auto_dtype_on_a_gpu_is_the_checkpoints() -> None:
    assert choose_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_DTYPE"):
        choose_dtype("int3", torch.float32, CPU)


def test_requested_threads_win_and_automatic_ones_fit_the_machine() -> None:
    assert choose_num_threads(7) == 7
    assert 1 <= choose_num_threads(None) <= num_usable_cores()


def test_groups_have_blocks_of_their_own_and_shapes_by_layer() -> None:
    wide, narrow, latent = CacheShape(1, 32, 32), CacheShape(2, 16, 8), CacheShape(1, 24, 20, is_latent=True)
    layout = CacheLayout(
        (
            KeepsTokens(narrow, 64),
            KeepsTokens(wide),
            ReadsLayer(0),
            KeepsTokens(narrow, 64),
            KeepsTokens(latent),
            KeepsTokens(narrow),
            None,
        )
    )
    cache = allocate_groups(layout, [7, 3], 4, torch.float32, CPU)
    assert [group.num_blocks for group in cache.groups] == [7, 3]
    assert [tuple(layer.keys.shape) for layer in cache.layers[:6]] == [
        (3, 4, 2, 16),
        (7, 4, 1, 32),
        (3, 4, 2, 16),
        (3, 4, 2, 16),
        (7, 4, 1, 24),
        (7, 4, 2, 16),
    ]
    assert cache.layers[2] is cache.layers[0]
    assert cache.layers[6].block_bytes == 0
    own = [cache.layers[layer] for layer in (0, 1, 3, 4, 5)]
    assert len({layer.keys.data_ptr() for layer in own}) == 5
    block_bytes = group_block_bytes(layout, 4, torch.float32)
    assert block_bytes == [4 * 4 * (64 + 24 + 48), 4 * 4 * 2 * 48]
    by_group = [sum(own[place].block_bytes for place in places) for places in ((1, 3, 4), (0, 2))]
    assert by_group == block_bytes


GREEDY = Sampling(temperature=0.0, max_tokens=30)
PROMPTS = [random_prompt(length, seed=length) for length in (1, 3, 4, 5, 17, 40, 64, 90, 33, 8)]
PROMPTS += [random_prompt(24, seed=99) + random_prompt(length, seed=length + 1000) for length in (1, 7, 20)]


def sequences(prompts: list[list[int]]) -> list[Sequence]:
    return [make_sequence(str(index), prompt, GREEDY) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def runner(request: pytest.FixtureRequest, directory: Path) -> TorchModelRunner:
    return make_runner(directory, kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def alone(runner: TorchModelRunner) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for sequence in sequences(PROMPTS):
        tokens |= run(runner, [sequence]).tokens
    assert len({tuple(found) for found in tokens.values()}) == len(PROMPTS)
    return tokens


def test_batch_says_what_each_says_alone(runner: TorchModelRunner, alone: dict[str, list[int]]) -> None:
    assert run(runner, sequences(PROMPTS)).tokens == alone


def test_logprobs_are_nearly_those_of_the_models_dtype(runner: TorchModelRunner, directory: Path) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = random_prompt(150, seed=3)
    found = []
    for some in (runner, make_runner(directory)):
        entries = run(some, [make_sequence("0", prompt, sampling)]).prompt_logprobs["0"]
        found.append(torch.tensor([entry.logprob for entry in entries]))
    difference = (found[0] - found[1]).abs().mean()
    # This random model's logits are sharp. fp8 has three bits of fraction, int8 seven below the largest.
    assert 0 < difference < (0.04 if runner.cache.layers[0].keys.dtype == torch.int8 else 0.2)


def test_plain_torch_says_the_same(
    monkeypatch: pytest.MonkeyPatch, runner: TorchModelRunner, directory: Path, alone: dict[str, list[int]]
) -> None:
    for module in ("paged_attention", "rope_kv_write"):
        monkeypatch.setattr(f"kernels.{module}.dispatch.cpu_library", lambda: None)
    monkeypatch.setattr("gpu_worker.models.decoder.cpu_library", lambda: None)
    dtype = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[runner.cache.layers[0].keys.dtype]
    plain = run(make_runner(directory, kv_cache_dtype=dtype), sequences(PROMPTS), token_budget=20)
    agreeing = sum(plain.tokens[name][:8] == tokens[:8] for name, tokens in alone.items())
    assert agreeing >= len(PROMPTS) - 2


BLOCK = 16
META = torch.device("meta")
SHAPE = CacheShape(2, 64, 64)
WINDOW = 1024


def layout_of(*windows: int | None) -> CacheLayout:
    return CacheLayout(tuple(KeepsTokens(SHAPE, window) for window in windows))


HYBRID = layout_of(*([WINDOW] * 5 + [None]) * 2)


def shares_of(layout: CacheLayout, max_model_len: int = 1 << 17, dtype: torch.dtype = torch.float16) -> GroupShares:
    return GroupShares(layout, BLOCK, max_model_len, max_num_batched_tokens=2048, dtype=dtype)


def total_bytes(layout: CacheLayout, num_blocks: list[int]) -> int:
    cache = allocate_groups(layout, num_blocks, BLOCK, torch.bfloat16, META)
    return sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors)


def num_admitted(layout: CacheLayout, num_bytes: int, num_tokens: int) -> int:
    """Admit sequences with prompts of a length, as long as pools of a size hold them."""
    shares = shares_of(layout, dtype=torch.bfloat16)
    blocks = shares.num_blocks(shares.demand.num_blocks(num_bytes))
    assert total_bytes(layout, blocks) <= num_bytes
    groups = zip(layout.groups, blocks, strict=True)
    windows = tuple(WindowConfig(group.window, count) for group, count in groups if group.window is not None)
    pools = SequenceBlocks(SchedulerConfig(BLOCK, blocks[0], 1000, 2048, 1 << 17, windows=windows))
    holders: list[Sequence] = []
    while True:
        sequence = Sequence(str(len(holders)), [len(holders)] * num_tokens, num_tokens, Sampling(), 128)
        sequence.max_num_tokens = num_tokens + 128
        if not pools.fits(sequence):
            pools.check_integrity(holders)
            return len(holders)
        pools.admit(sequence)
        holders.append(sequence)


def test_hybrid_admits_three_times_the_sequences_of_the_flat_layout() -> None:
    num_bytes, num_tokens = 8 << 30, 32 << 10
    flat, hybrid = (num_admitted(layout, num_bytes, num_tokens) for layout in (HYBRID.flat(), HYBRID))
    assert (flat, hybrid) == (42, 155)
    assert hybrid >= 3 * flat


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(HYBRID, id="hybrid"),
        pytest.param(HYBRID.flat(), id="flat"),
        pytest.param(layout_of(64, 64), id="windows-only"),
        pytest.param(layout_of(None, 64, 512), id="two-windows"),
    ],
)
@pytest.mark.parametrize("num_bytes", [50 << 20, 1 << 30])
def test_memory_is_used_and_not_exceeded(layout: CacheLayout, num_bytes: int) -> None:
    shares = shares_of(layout, max_model_len=4096)
    demand = shares.demand
    blocks = shares.num_blocks(demand.num_blocks(num_bytes))
    used = total_bytes(layout, blocks)
    assert 0.98 * num_bytes < used <= demand.num_bytes(blocks[0]) <= num_bytes
    assert demand.num_bytes(0) == sum(
        size * count
        for size, count in zip(group_block_bytes(layout, BLOCK, torch.float16), shares.num_blocks(0), strict=True)
    )


def test_every_group_of_windows_holds_a_window_and_the_largest_step() -> None:
    _, near, far = shares_of(layout_of(None, 64, 512)).num_blocks(0)
    assert (near, far) == (128 + 5, 128 + 33)


def test_blocks_that_take_no_memory_are_enough_for_sequences_of_any_length() -> None:
    shares = shares_of(layout_of(64, 64), max_model_len=4096)
    whole, windows = shares.num_blocks(shares.demand.num_blocks(1 << 28))
    fixed = shares.num_blocks(0)[1]
    assert (windows - fixed) // 5 == whole // 256


def test_window_that_holds_the_longest_sequence_keeps_all_tokens() -> None:
    assert layout_of(64, 512).within(512) == layout_of(64, None)
    assert layout_of(64, 512).within(513) == layout_of(64, 512)


def test_checkpoints_get_their_ratio_of_the_same_bytes() -> None:
    layout, slot_bytes, num_bytes = layout_of(None, None), 3_000_017, 1 << 30
    shares = dataclasses.replace(shares_of(layout), slot_bytes=slot_bytes, checkpoint_ratio=0.5)
    num_blocks = shares.demand.num_blocks(num_bytes)
    of_states = shares.num_checkpoints(num_blocks) * slot_bytes
    of_blocks = total_bytes(layout, [num_blocks])
    assert of_states + of_blocks <= num_bytes
    assert of_states + of_blocks > num_bytes - 2 * slot_bytes
    assert of_states == pytest.approx(0.5 * of_blocks, rel=0.02)


def test_no_block_has_more_than_one_checkpoint() -> None:
    shares = dataclasses.replace(shares_of(layout_of(None)), slot_bytes=1000, checkpoint_ratio=0.9)
    (block_bytes,) = group_block_bytes(shares.layout, BLOCK, torch.float16)
    assert shares.num_checkpoints(77) == 77
    assert shares.demand.block_bytes == block_bytes + 1000


def test_model_without_states_gives_nothing_to_checkpoints() -> None:
    plain = shares_of(HYBRID)
    assert dataclasses.replace(plain, checkpoint_ratio=0.9).demand == plain.demand
    assert plain.num_checkpoints(1000) == 0
