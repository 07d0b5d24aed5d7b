"""Builds a runner that is ready to serve: loads the model, sizes its KV cache, runs every kind of step once.

On a GPU what the weights, the largest step and the graphs take is measured, and the KV cache gets the rest.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.memory.budget import CacheDemand, MemoryBudget, MemoryUse, check_weights_fit, shown_bytes
from gpu_worker.execution.memory.group_shares import GroupShares
from gpu_worker.execution.memory.host import (
    ask_for_huge_pages,
    check_host_cache_fits,
    check_host_states_fit,
    check_host_weights_fit,
    host_num_blocks,
)
from gpu_worker.execution.memory.kv_cache import KVCache, allocate_groups, fixed_num_blocks
from gpu_worker.execution.memory.probe import CudaMemory, DeviceMemory, MemoryProbe
from gpu_worker.execution.memory.state_pool import slot_bytes, state_pool_bytes
from gpu_worker.execution.memory.state_sizes import num_sure_slots
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import (
    RunnerConfig,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_num_threads,
    num_usable_cores,
)
from gpu_worker.execution.start_up import Stage, StartUp
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import CausalLM, is_fused
from gpu_worker.models.layer_memory import cache_layout
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.weights_size import weights_bytes
from kernels.linear import LinearFactory
from kernels.linear.dense import keeps_half
from shared.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known before anything is loaded."""

    config: RunnerConfig
    model_config: ModelConfig
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    device: torch.device
    shares: GroupShares
    demand: CacheDemand
    fixed: tuple[str, int] | None
    weights: int

    @property
    def shared_demand(self) -> CacheDemand:
        """Blocks with what the proposer of drafts keeps beside each of them."""
        block_bytes = self.demand.block_bytes + self.config.proposer_block_bytes
        return dataclasses.replace(self.demand, block_bytes=block_bytes)

    @property
    def state_bytes(self) -> int:
        """Memory of the states of recurrent layers that are there however large the cache is."""
        return state_pool_bytes(self.shares.layout, self.num_state_slots(0), self.config.max_draft_tokens)

    def num_state_slots(self, num_blocks: int) -> int:
        """Return the slots of states beside so many blocks."""
        sure = num_sure_slots(self.config.max_num_seqs, has_blocks=self.demand.block_bytes > 0)
        return sure + self.shares.num_checkpoints(num_blocks)

    @property
    def dtype_name(self) -> str:
        return _name(self.dtype)

    @property
    def matrix_dtype_name(self) -> str:
        """The type that matrices have in memory."""
        stored = self.model_config.dtype
        is_kept = keeps_half(stored, self.model_config.hidden_size, self.dtype, self.device)
        return _name(stored if is_kept else self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_runner(
    config: RunnerConfig, start_up: StartUp | None = None, memory: DeviceMemory | None = None
) -> TorchModelRunner:
    """Build the runner that the device calls for.

    Args:
        config: The settings.
        start_up: Learns what takes how long.
        memory: Measures the device; None measures a GPU, and on a CPU takes a share of what is free.

    Raises:
        HeadraceError: The model cannot be loaded.
        ConfigError: A setting cannot be used, or the memory is not enough.
    """
    start_up = start_up or StartUp()
    plan = _plan(config)
    if memory is None and plan.device.type == "cuda":
        memory = CudaMemory(plan.device)
    if memory is not None:
        return _build_device_runner(plan, memory, start_up)
    return _build_host_runner(plan, start_up)


def check_fits(config: RunnerConfig) -> int | None:
    """Check, without loading anything, that a model and its cache fit; a GPU's memory is measured at load alone.

    Returns:
        The tokens that the cache would hold, None where that is measured.

    Raises:
        HeadraceError: The model cannot be read.
        ConfigError: A setting cannot be used, or the memory is not enough.
    """
    plan = _plan(config)
    if plan.device.type == "cuda":
        return None
    _check_host(plan)
    return _host_num_blocks(plan, free_host_bytes() - plan.weights) * config.block_size


def _plan(config: RunnerConfig) -> _Plan:
    device = torch.device(config.device)
    model_config = read_model_config(config.model)
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    max_model_len = min(config.max_model_len or model_config.max_model_len, model_config.max_model_len)
    kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    layout = cache_layout(model_config).within(max_model_len)
    if config.keeps_all_tokens or is_fused(model_config, dtype, device):
        layout = layout.flat()
    shares = GroupShares(
        layout,
        config.block_size,
        max_model_len,
        config.max_num_batched_tokens,
        kv_cache_dtype,
        slot_bytes(layout, config.max_draft_tokens),
        config.state_checkpoint_ratio,
    )
    demand = shares.demand
    weights = weights_bytes(
        config.model, dtype, device, is_tied=model_config.tie_word_embeddings, names=model_config.block.names
    )
    fixed = fixed_num_blocks(config, demand)
    return _Plan(config, model_config, dtype, kv_cache_dtype, device, shares, demand, fixed, weights)


def _load(plan: _Plan, start_up: StartUp) -> CausalLM:
    with start_up.stage(Stage.LOAD) as progress:
        model = load_model(
            plan.config.model,
            plan.dtype,
            plan.device,
            max_model_len=plan.demand.max_model_len,
            tapped_layers=plan.config.tapped_layers,
            progress=progress,
            linears=LinearFactory(free_host_bytes),
        )
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
    logger.info("loaded %s in %s on %s", plan.config.model, plan.dtype_name, plan.device)
    return model


def _allocate(plan: _Plan, num_blocks: int) -> KVCache:
    blocks = plan.shares.num_blocks(num_blocks)
    return allocate_groups(plan.shares.layout, blocks, plan.config.block_size, plan.kv_cache_dtype, plan.device)


def _make_runner(plan: _Plan, model: CausalLM, cache: KVCache, is_asynchronous: bool | None = None) -> TorchModelRunner:
    config = plan.config
    return TorchModelRunner(
        model,
        cache,
        config.max_num_seqs,
        plan.demand.max_model_len,
        config.max_num_batched_tokens,
        config.max_draft_tokens,
        is_asynchronous=is_asynchronous,
        captured=CapturedSteps(config.cuda_graphs),
        num_state_slots=plan.num_state_slots(cache.num_blocks),
    )


def _check_host(plan: _Plan) -> None:
    check_host_weights_fit(plan.weights, plan.matrix_dtype_name, free_host_bytes())
    check_host_states_fit(plan.state_bytes, plan.config.max_num_seqs, free_host_bytes() - plan.weights)
    if plan.fixed is not None:
        check_host_cache_fits(*plan.fixed, plan.demand, free_host_bytes() - plan.weights)


def _host_num_blocks(plan: _Plan, free_bytes: int) -> int:
    """Return the blocks that were asked for, or those that a share of the bytes beside the weights holds."""
    if plan.fixed is not None:
        return plan.fixed[1]
    room = max(0, free_bytes - plan.config.proposer_bytes - plan.state_bytes)
    return host_num_blocks(plan.shared_demand, plan.config.max_num_seqs, room)


def _build_host_runner(plan: _Plan, start_up: StartUp) -> TorchModelRunner:
    config, demand = plan.config, plan.demand
    num_threads = choose_num_threads(config.num_threads)
    torch.set_num_threads(num_threads)
    logger.info("CPU operations use %d of %d cores (HEADRACE_NUM_THREADS)", num_threads, num_usable_cores())
    ask_for_huge_pages()
    _check_host(plan)
    model = _load(plan, start_up)
    num_blocks = _host_num_blocks(plan, free_host_bytes())
    cache = _allocate(plan, num_blocks)
    logger.info(
        "KV cache: %d blocks of %d, %s", num_blocks, demand.block_size, shown_bytes(demand.num_bytes(num_blocks))
    )
    runner = _make_runner(plan, model, cache)
    with start_up.stage(Stage.PROFILE):
        runner.warm_up()
    return runner


def _build_device_runner(plan: _Plan, memory: DeviceMemory, start_up: StartUp) -> TorchModelRunner:
    config, demand = plan.config, plan.demand
    probe = MemoryProbe(memory)
    check_weights_fit(plan.weights, plan.dtype_name, _budget(plan, probe, MemoryUse()))
    with _out_of_memory("HEADRACE_MODEL", "while the weights were loaded", memory, _smaller_model(plan)):
        model = _load(plan, start_up)

    def make_runner(num_blocks: int) -> TorchModelRunner:
        return _make_runner(plan, model, _allocate(plan, num_blocks), is_asynchronous=True)

    least = -(-min(demand.max_model_len, config.max_num_batched_tokens) // config.block_size)
    with (
        _out_of_memory("HEADRACE_MAX_NUM_BATCHED_TOKENS", "in the largest step", memory, _smaller_step(config)),
        start_up.stage(Stage.PROFILE) as progress,
    ):
        use = probe.measure(lambda: make_runner(least), demand.num_bytes(least), progress)
    use = dataclasses.replace(use, proposer=config.proposer_bytes)
    num_blocks = _device_num_blocks(plan, _budget(plan, probe, use))
    with (
        _out_of_memory(
            "HEADRACE_GPU_MEMORY_UTILIZATION", "for the KV cache and the graphs", memory, _smaller_share(config)
        ),
        start_up.stage(Stage.CAPTURE) as progress,
    ):
        runner = make_runner(num_blocks)
        runner.capture_graphs(progress)
    return runner


def _device_num_blocks(plan: _Plan, budget: MemoryBudget) -> int:
    """Return the blocks as set, or what the budget leaves, and log where the memory goes."""
    demand = plan.shared_demand
    if plan.fixed is None:
        num_blocks = budget.num_blocks(demand)
    else:
        variable, num_blocks = plan.fixed
        budget.check_fixed(variable, num_blocks, demand)
    logger.info(budget.summary(demand, num_blocks))
    for line in budget.lines(demand, num_blocks):
        logger.info("memory: %s", line)
    return num_blocks


def _budget(plan: _Plan, probe: MemoryProbe, use: MemoryUse) -> MemoryBudget:
    config = plan.config
    return MemoryBudget(
        probe.device_bytes,
        probe.used_before,
        config.gpu_memory_utilization,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        use,
    )


@contextmanager
def _out_of_memory(variable: str, when: str, memory: DeviceMemory, remedy: str) -> Iterator[None]:
    """Tell in one line that the device ran out of memory, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = memory.free(), memory.total()
        raise ConfigError(
            variable,
            f"the device ran out of memory {when}: {shown_bytes(free)} of {shown_bytes(total)} are free, "
            f"{shown_bytes(memory.reserved())} are ours. To make it fit, {remedy}",
        ) from None


def _smaller_model(plan: _Plan) -> str:
    return (
        f"end other processes on the device, or serve a quantized or a smaller model: "
        f"these weights need {shown_bytes(plan.weights)} in {plan.dtype_name}"
    )


def _smaller_step(config: RunnerConfig) -> str:
    """Suggest half of what makes a step large, as far as settings allow."""
    remedies = []
    if config.max_num_batched_tokens // 2 >= config.max_num_seqs:
        remedies.append(f"lower HEADRACE_MAX_NUM_BATCHED_TOKENS to {config.max_num_batched_tokens // 2}")
    if config.max_num_seqs > 1:
        remedies.append(f"lower HEADRACE_MAX_NUM_SEQS to {config.max_num_seqs // 2}")
    return ", or ".join(remedies) or "serve a quantized or a smaller model"


def _smaller_share(config: RunnerConfig) -> str:
    if config.num_blocks is not None or config.kv_cache_bytes is not None:
        return "lower HEADRACE_NUM_BLOCKS or HEADRACE_KV_CACHE_BYTES"
    return f"lower HEADRACE_GPU_MEMORY_UTILIZATION to {max(0.05, config.gpu_memory_utilization - 0.05):.2f}"
