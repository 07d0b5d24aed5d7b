"""The budget never exceeds its limit, and what its messages suggest fits when it is done.

Each part of the memory is found where it was taken, by a runner that takes known amounts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpu_worker.execution.memory.budget import (
    RESERVE_BYTES,
    CacheDemand,
    MemoryBudget,
    MemoryUse,
    check_host_weights_fit,
    check_weights_fit,
    host_num_blocks,
    shown_bytes,
)
from gpu_worker.execution.memory.probe import MemoryProbe
from shared.errors import ConfigError
from tests.gpu_worker.execution.fake_memory import MB, FakeMemory

GB, GIB = 10**9, 1 << 30

sizes = st.one_of(st.integers(0, GB), st.integers(0, 30 * GB))
demands = st.builds(
    CacheDemand,
    block_bytes=st.integers(1, 1 << 21),
    block_size=st.sampled_from([1, 4, 16, 64, 1024]),
    max_model_len=st.integers(2, 1 << 15),
)
uses = st.builds(MemoryUse, weights=sizes, rows=st.integers(0, GB), activations=sizes, graphs=sizes, other=sizes)
budgets = st.builds(
    MemoryBudget,
    device_bytes=st.one_of(st.integers(1, 150 * GB), st.integers(40 * GB, 150 * GB)),
    used_before=sizes,
    utilization=st.floats(0.05, 1.0),
    max_num_seqs=st.integers(1, 1024),
    max_num_batched_tokens=st.integers(1, 32768),
    use=uses,
)


def fits(budget: MemoryBudget, demand: CacheDemand) -> bool:
    try:
        budget.num_blocks(demand)
    except ConfigError:
        return False
    return True


def eight_billion(**changes: object) -> MemoryBudget:
    """A model of 16 GB on a device of 24."""
    use = MemoryUse(weights=16 * GB, rows=GB // 10, activations=2 * GB, graphs=GB // 2, other=GB // 4)
    budget = MemoryBudget(24 * GB, GB // 2, 0.9, 256, 8192, use)
    return dataclasses.replace(budget, **changes)  # type: ignore[arg-type]


KV_OF_8B = CacheDemand(block_bytes=16 * 131072, block_size=16, max_model_len=32768)


@given(budgets, demands)
def test_cache_stays_within_share_and_device_and_leaves_no_block_out(budget: MemoryBudget, demand: CacheDemand) -> None:
    assume(fits(budget, demand))
    num_blocks = budget.num_blocks(demand)
    used = budget.use.total + num_blocks * demand.block_bytes
    assert num_blocks * demand.block_size >= demand.max_model_len
    assert used <= budget.device_bytes * budget.utilization
    assert used + budget.used_before <= budget.device_bytes - RESERVE_BYTES
    more = used + demand.block_bytes
    assert more > int(budget.device_bytes * budget.utilization) or more > budget.room


@given(budgets, demands)
def test_suggestions_fit_when_they_are_followed(budget: MemoryBudget, demand: CacheDemand) -> None:
    assume(not fits(budget, demand))
    with pytest.raises(ConfigError) as raised:
        budget.num_blocks(demand)
    message = str(raised.value)
    if found := re.search(r"MAX_MODEL_LEN to (\d+)", message):
        assert 2 <= int(found[1]) < demand.max_model_len
        assert fits(budget, dataclasses.replace(demand, max_model_len=int(found[1])))
    if found := re.search(r"GPU_MEMORY_UTILIZATION to ([\d.]+)", message):
        assert budget.utilization < float(found[1]) <= 1
        assert fits(dataclasses.replace(budget, utilization=float(found[1])), demand)
    if found := re.search(r"MAX_NUM_BATCHED_TOKENS to (\d+)", message):
        tokens = int(found[1])
        assert budget.max_num_seqs <= tokens < budget.max_num_batched_tokens
        activations = budget.use.activations * tokens // budget.max_num_batched_tokens
        use = dataclasses.replace(budget.use, activations=activations)
        assert fits(dataclasses.replace(budget, use=use, max_num_batched_tokens=tokens), demand)


@given(budgets, demands)
def test_a_remedy_that_exists_is_suggested(budget: MemoryBudget, demand: CacheDemand) -> None:
    assume(not fits(budget, demand))
    everything = dataclasses.replace(budget, utilization=1.0)
    assert (budget.fitting_utilization(demand) is not None) == fits(everything, demand)
    shortest = dataclasses.replace(demand, max_model_len=max(2, demand.block_size))
    if fits(budget, shortest):
        assert budget.fitting_max_model_len(demand) is not None


@given(budgets, demands, st.integers(1, 1 << 20))
def test_a_set_size_passes_exactly_when_the_device_has_it(
    budget: MemoryBudget, demand: CacheDemand, num_blocks: int
) -> None:
    has_it = budget.use.total + num_blocks * demand.block_bytes <= budget.room
    if has_it:
        budget.check_fixed("HEADRACE_NUM_BLOCKS", num_blocks, demand)
        return
    with pytest.raises(ConfigError, match=r"HEADRACE_NUM_BLOCKS: asks for .* Lower it to \d+") as raised:
        budget.check_fixed("HEADRACE_NUM_BLOCKS", num_blocks, demand)
    if lower := int(str(raised.value).split()[-1]):
        budget.check_fixed("HEADRACE_NUM_BLOCKS", lower, demand)


def test_last_block_that_fits_is_given_and_the_next_is_refused() -> None:
    budget = eight_billion(utilization=1.0)
    num_blocks = budget.room - budget.use.total
    demand = CacheDemand(block_bytes=1, block_size=1, max_model_len=num_blocks)
    assert budget.num_blocks(demand) == num_blocks
    budget.check_fixed("HEADRACE_NUM_BLOCKS", num_blocks, demand)
    with pytest.raises(ConfigError, match=f"Lower it to {num_blocks}$"):
        budget.check_fixed("HEADRACE_NUM_BLOCKS", num_blocks + 1, demand)


def test_device_that_is_full_already_has_nothing_left() -> None:
    with pytest.raises(ConfigError, match=rf"but {shown_bytes(0)} of .* are left .* Lower it to 0$"):
        eight_billion(device_bytes=10 * GB).check_fixed("HEADRACE_NUM_BLOCKS", 1, KV_OF_8B)


def test_shortage_says_what_is_where_and_what_to_set() -> None:
    with pytest.raises(ConfigError) as raised:
        eight_billion().num_blocks(KV_OF_8B)
    assert str(raised.value) == (
        "HEADRACE_GPU_MEMORY_UTILIZATION: 0.9 of 24.0 GB leaves 2.8 GB for the KV cache beside weights 16.0 GB, "
        "activations 2.0 GB, rows of the batch 100 MB, graphs 500 MB, other 250 MB, but a sequence of "
        "HEADRACE_MAX_MODEL_LEN (32768 tokens) needs 4.3 GB. To make it fit, lower HEADRACE_MAX_MODEL_LEN to 20976, or "
        "lower HEADRACE_MAX_NUM_BATCHED_TOKENS to 1856, or raise HEADRACE_GPU_MEMORY_UTILIZATION to 0.97"
    )


def test_shortage_that_others_cause_names_them() -> None:
    with pytest.raises(ConfigError, match=r"or free some of the 4\.0 GB that others use$"):
        eight_billion(used_before=4 * GB).num_blocks(KV_OF_8B)


def test_hopeless_shortage_names_the_model() -> None:
    budget = eight_billion(use=MemoryUse(weights=23 * GB), utilization=0.5)
    with pytest.raises(ConfigError, match=r"To make it fit, serve a smaller or a quantized model$"):
        budget.num_blocks(KV_OF_8B)


def test_two_processes_share_a_device_by_their_shares() -> None:
    """The other's use does not count against ours as long as both fit."""
    demand = dataclasses.replace(KV_OF_8B, max_model_len=4096)
    alone = eight_billion(device_bytes=48 * GB, used_before=0, utilization=0.45)
    beside = dataclasses.replace(alone, used_before=int(48 * GB * 0.45))
    assert alone.num_blocks(demand) == beside.num_blocks(demand)


@pytest.mark.parametrize(
    ("device_bytes", "message"),
    [
        (17 * GB, r"HEADRACE_GPU_MEMORY_UTILIZATION: the weights need 16\.0 GB in bfloat16, but 0\.9 allows 15\.3 GB"),
        (
            12 * GB,
            r"HEADRACE_MODEL: the weights need 16\.0 GB in bfloat16, but the device has 12\.0 GB, of which 500 MB",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(device_bytes: int, message: str) -> None:
    budget = eight_billion(device_bytes=device_bytes, use=MemoryUse())
    with pytest.raises(ConfigError, match=message):
        check_weights_fit(16 * GB, "bfloat16", budget)
    check_weights_fit(16 * GB, "bfloat16", eight_billion(use=MemoryUse()))


def test_float32_weights_that_do_not_fit_may_be_halved() -> None:
    with pytest.raises(ConfigError, match="set HEADRACE_DTYPE to bfloat16, serve a quantized"):
        check_weights_fit(32 * GB, "float32", eight_billion(use=MemoryUse()))


def test_summary_and_table_add_up() -> None:
    budget = eight_billion(utilization=1.0)
    num_blocks = budget.num_blocks(KV_OF_8B)
    kv = shown_bytes(num_blocks * KV_OF_8B.block_bytes)
    assert budget.summary(KV_OF_8B, num_blocks) == (
        "memory: 23.2 GB of 24.0 GB: weights 16.0 GB, activations 2.0 GB, rows of the batch 100 MB, graphs 500 MB, "
        f"other 250 MB, KV cache {kv} = 2089 blocks of 16 = 33424 tokens, 1.0 sequences of 32768"
    )
    lines = budget.lines(KV_OF_8B, num_blocks)
    assert lines[0].split() == ["this", "process", "23.2", "GB", "96.8%"]
    assert [line.split()[-1] for line in lines[-2:]] == ["2.1%", "1.1%"]


@pytest.mark.parametrize(
    ("size", "text"), [(7, "7 bytes"), (65536, "66 KB"), (412_345_678, "412 MB"), (16_060_000_000, "16.1 GB")]
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert shown_bytes(size) == text


def host_demand(block_bytes: int) -> CacheDemand:
    return CacheDemand(block_bytes, block_size=16, max_model_len=1000)


def test_plenty_of_memory_gives_what_the_batch_can_use() -> None:
    assert host_num_blocks(host_demand(1 << 16), 8, 64 * GIB) == 8 * 63


def test_little_memory_gives_a_quarter_of_it() -> None:
    assert host_num_blocks(host_demand(1 << 20), 64, GIB) == 256


def test_too_little_memory_is_told_with_sizes_that_fit() -> None:
    with pytest.raises(ConfigError) as raised:
        host_num_blocks(host_demand(1 << 20), 64, 100 << 20)
    assert str(raised.value) == (
        "HEADRACE_MAX_MODEL_LEN: a sequence of 1000 tokens needs 66 MB of KV cache, but a share of 0.25 of the 105 MB "
        "that are free is 26 MB. Set HEADRACE_KV_CACHE_BYTES=66060288 or HEADRACE_MAX_MODEL_LEN=400"
    )
    assert host_num_blocks(CacheDemand(1 << 20, 16, 400), 64, 100 << 20) == 25


def test_no_memory_at_all_suggests_nothing_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"Free some memory, or serve a smaller model$"):
        host_num_blocks(host_demand(1 << 20), 64, 1 << 20)


def test_weights_beyond_the_free_memory_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"need 4\.3 GB in float32, but 1\.1 GB of memory are free; set HEADRACE_DTYPE"
    ):
        check_host_weights_fit(4 * GIB, "float32", GIB)
    check_host_weights_fit(GIB, "float32", GIB)


amounts = st.integers(0, 500 * MB)


class FakeRunner:
    """Takes memory as a real one does; gives its tensors back when it is dropped."""

    def __init__(self, memory: FakeMemory, use: MemoryUse, cache_bytes: int) -> None:
        self._memory, self._use = memory, use
        memory.allocate("cache", cache_bytes)
        memory.allocate("rows", use.rows)

    def warm_up(self) -> None:
        # A smaller step after the largest one must not hide it; kernels stay when the runner goes.
        for size in (self._use.activations, self._use.activations // 3):
            self._memory.allocate("step", size)
            self._memory.drop("step")
        self._memory.elsewhere += self._use.other

    def capture_graphs(self, progress: Callable[[int, int], None] | None = None) -> None:
        self._memory.allocate("graphs", self._use.graphs)
        assert progress is not None
        progress(1, 1)

    def __del__(self) -> None:
        for name in ("cache", "rows", "graphs"):
            self._memory.drop(name)


@given(amounts, amounts, amounts, amounts, amounts, amounts, amounts)
def test_every_part_is_measured(
    weights: int, rows: int, activations: int, graphs: int, other: int, cache_bytes: int, used_before: int
) -> None:
    use = MemoryUse(weights, rows, activations, graphs, other)
    memory = FakeMemory(10_000 * MB, elsewhere=used_before)
    probe = MemoryProbe(memory)
    assert (probe.device_bytes, probe.used_before) == (10_000 * MB, used_before)
    memory.allocate("weights", weights)
    # Scratch memory of loading is no use that lasts.
    memory.allocate("scratch", 7 * MB)
    memory.drop("scratch")
    calls: list[tuple[int, int]] = []
    measured = probe.measure(
        lambda: FakeRunner(memory, use, cache_bytes), cache_bytes, lambda *counts: calls.append(counts)
    )
    assert measured == use
    assert calls == [(1, 1)]
    assert memory.tensors == {"weights": weights}


def test_memory_that_others_take_meanwhile_is_counted_and_what_they_return_is_not() -> None:
    for change, expected in ((300 * MB, 300 * MB), (-300 * MB, 0)):
        memory = FakeMemory(10_000 * MB, elsewhere=400 * MB)
        probe = MemoryProbe(memory)
        memory.elsewhere += change
        use = probe.measure(lambda memory=memory: FakeRunner(memory, MemoryUse(), 0), 0, lambda *_: None)  # type: ignore[misc]
        assert use.other == expected
