"""Builds a runner that is ready to serve: loads the model, sizes its KV cache, runs every kind of step once.

On a GPU what the weights, the largest step and the graphs take is measured, and the KV cache gets the rest.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from gpu_worker.core.constraint import ConstraintSource
from gpu_worker.core.media import SharedImages
from gpu_worker.execution.batch.graph_shapes import CapturedSteps
from gpu_worker.execution.build_plan import BuildPlan, make_plan
from gpu_worker.execution.encoder import ImageEncoder
from gpu_worker.execution.memory import probe
from gpu_worker.execution.memory.budget import (
    MemoryBudget,
    MemoryUse,
    check_host_cache_fits,
    check_host_states_fit,
    check_host_weights_fit,
    check_weights_fit,
    host_num_blocks,
    shown_bytes,
)
from gpu_worker.execution.memory.kv_cache import allocate_groups
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig, choose_num_threads, num_usable_cores
from gpu_worker.execution.start_up import Stage, StartUp
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from gpu_worker.models.vision.registry import load_tower
from kernels.linear import LinearFactory

logger = logging.getLogger(__name__)


def build_runner(
    config: RunnerConfig,
    start_up: StartUp | None = None,
    memory: probe.DeviceMemory | None = None,
    constraints: ConstraintSource | None = None,
    ranks: Ranks = ALONE,
    images: SharedImages | None = None,
) -> TorchModelRunner:
    """Build the runner that the device calls for.

    Args:
        config: The settings.
        start_up: Records how long each stage takes.
        memory: Measures the device; None measures a GPU, and on a CPU takes a share of the free memory.
        constraints: Supplies the constraints of sequences with a grammar.
        ranks: Among which the model is divided; each builds its runner at the same time.
        images: Pixels of the images that plans name, where `config.takes_images`.

    Raises:
        HeadraceError: The model cannot be loaded.
        ConfigError: A setting cannot be used, or the memory is not enough.
    """
    build = _Build(make_plan(config, ranks.stage), ranks, start_up or StartUp(), constraints, images)
    if memory is None and build.plan.device.type == "cuda":
        memory = probe.DeviceMemory(build.plan.device)
    return build.on_host() if memory is None else build.on_device(memory)


def build_replacement(config: RunnerConfig, num_blocks: int, ranks: Ranks) -> TorchModelRunner:
    """Build the runner of a rank that replaces a lost one: nothing is measured, and no other rank is met.

    Raises:
        HeadraceError: The model cannot be loaded.
        ConfigError: A setting cannot be used.
    """
    build, is_cpu = _Build(make_plan(config, ranks.stage), ranks), config.device == "cpu"
    if is_cpu:
        _prepare_host(config)
    return build.runner(build.load(), num_blocks, build.load_encoder(), None if is_cpu else True)


def check_fits(config: RunnerConfig) -> int | None:
    """Check, without loading or compiling anything, that a model and its cache fit.

    A GPU's memory is measured at load alone.

    Returns:
        The tokens that the cache would hold, None where that is measured.

    Raises:
        HeadraceError: The model cannot be read.
        ConfigError: A setting cannot be used, or the memory is not enough.
    """
    plan = make_plan(config, compiles=False)
    if plan.device.type == "cuda":
        return None
    _check_host(plan)
    return _host_num_blocks(plan, _free_bytes(plan) - plan.weights_bytes) * config.block_size * config.num_parts


@dataclass(frozen=True, slots=True)
class _Build:
    """What a runner is built from."""

    plan: BuildPlan
    ranks: Ranks
    start_up: StartUp = field(default_factory=StartUp)
    constraints: ConstraintSource | None = None
    images: SharedImages | None = None

    def load(self) -> CausalLM:
        plan = self.plan
        with self.start_up.stage(Stage.LOAD) as progress:
            model = load_model(
                plan.config.model,
                plan.dtype,
                plan.device,
                max_model_len=plan.demand.max_model_len,
                tapped_layers=plan.config.tapped_layers,
                progress=progress,
                linears=LinearFactory(free_host_bytes, plan.dtype),
                make=partial(CausalLM, ranks=self.ranks),
                num_adapters=plan.config.max_loras,
            )
            if plan.device.type == "cuda":
                torch.cuda.synchronize(plan.device)
        logger.info("loaded %s in %s on %s", plan.config.model, plan.dtype_name, plan.device)
        return model

    def load_encoder(self) -> ImageEncoder | None:
        plan, vision, tower = self.plan, self.plan.vision, None
        if vision is None:
            return None
        if self.ranks.rank == 0:
            assert self.images is not None, "a runner that takes images needs their pixels"
            tower = load_tower(plan.config.model, vision, plan.dtype, plan.device)
            logger.info("loaded the vision tower, %d layers, %s", vision.num_layers, shown_bytes(plan.tower_bytes))
        like = torch.empty(plan.model_config.hidden_size, dtype=plan.dtype, device=plan.device)
        return ImageEncoder(vision, tower, self.images or SharedImages(), like, self.ranks.share)

    def runner(
        self,
        model: CausalLM,
        num_blocks: int,
        encoder: ImageEncoder | None = None,
        is_asynchronous: bool | None = None,
    ) -> TorchModelRunner:
        plan, config, shares = self.plan, self.plan.config, self.plan.shares
        blocks, where = shares.num_blocks(num_blocks), (plan.kv_cache_dtype, plan.device, self.ranks.tokens)
        part = self.ranks.rank % config.num_parts, config.num_parts
        return TorchModelRunner(
            model,
            allocate_groups(shares.layout, blocks, config.block_size, *where, *part),
            config.max_num_seqs,
            plan.demand.max_model_len,
            config.max_num_batched_tokens,
            config.max_draft_tokens,
            is_asynchronous=is_asynchronous,
            # How many rows are a rank's own differs from step to step.
            captured=CapturedSteps.OFF if config.num_parts > 1 else CapturedSteps(config.cuda_graphs),
            num_state_slots=plan.num_state_slots(num_blocks),
            constraints=self.constraints,
            encoder=encoder,
        )

    def on_host(self) -> TorchModelRunner:
        plan, demand = self.plan, self.plan.demand
        _prepare_host(plan.config)
        if plan.config.num_ranks == 1:
            # Of several, who comes late would count what the others have taken: that was checked before they started.
            _check_host(plan)
        model, encoder = self.load(), self.load_encoder()
        num_blocks = self.ranks.least(_host_num_blocks(plan, _free_bytes(plan)))
        runner = self.runner(model, num_blocks, encoder)
        size = shown_bytes(demand.num_bytes(num_blocks))
        logger.info("KV cache: %d blocks of %d, %s", num_blocks, demand.block_size, size)
        with self.start_up.stage(Stage.PROFILE):
            runner.warm_up()
        return runner

    def on_device(self, memory: probe.DeviceMemory) -> TorchModelRunner:
        plan, config, demand = self.plan, self.plan.config, self.plan.demand
        before = probe.MemoryProbe(memory)
        check_weights_fit(plan.weights_bytes, plan.dtype_name, _budget(plan, before, MemoryUse()))
        remedy = probe.smaller_model(plan.weights_bytes, plan.dtype_name)
        with probe.reporting_out_of_memory("HEADRACE_MODEL", "while the weights were loaded", memory, remedy):
            model, encoder = self.load(), self.load_encoder()
        least = -(-min(demand.max_model_len, config.max_num_batched_tokens) // config.block_size)
        variable, remedy = "HEADRACE_MAX_NUM_BATCHED_TOKENS", probe.smaller_step(config)
        with (
            probe.reporting_out_of_memory(variable, "in the largest step", memory, remedy),
            self.start_up.stage(Stage.PROFILE) as progress,
        ):
            use = before.measure(lambda: self.runner(model, least, encoder, True), demand.num_bytes(least), progress)
        use = dataclasses.replace(use, proposer=config.proposer_bytes + plan.media_bytes)
        num_blocks = self.ranks.least(_device_num_blocks(plan, _budget(plan, before, use)))
        variable, remedy = "HEADRACE_GPU_MEMORY_UTILIZATION", probe.smaller_share(config)
        with (
            probe.reporting_out_of_memory(variable, "for the KV cache and the graphs", memory, remedy),
            self.start_up.stage(Stage.CAPTURE) as progress,
        ):
            runner = self.runner(model, num_blocks, encoder, True)
            runner.capture_graphs(progress)
        return runner


def _free_bytes(plan: BuildPlan) -> int:
    return free_host_bytes() // plan.config.ranks_per_host


def _check_host(plan: BuildPlan) -> None:
    free_bytes = _free_bytes(plan)
    check_host_weights_fit(plan.weights_bytes, plan.matrix_dtype_name, free_bytes)
    check_host_states_fit(plan.state_bytes, plan.config.max_num_seqs, free_bytes - plan.weights_bytes)
    if plan.fixed is not None:
        check_host_cache_fits(*plan.fixed, plan.demand, free_bytes - plan.weights_bytes)


def _host_num_blocks(plan: BuildPlan, free_bytes: int) -> int:
    if plan.fixed is not None:
        return plan.fixed[1]
    room = max(0, free_bytes - plan.config.proposer_bytes - plan.state_bytes - plan.media_bytes)
    return host_num_blocks(plan.shared_demand, plan.config.max_num_seqs, room)


def _prepare_host(config: RunnerConfig) -> None:
    num_threads = choose_num_threads(config.num_threads, config.ranks_per_host)
    torch.set_num_threads(num_threads)
    logger.info("CPU operations use %d of %d cores (HEADRACE_NUM_THREADS)", num_threads, num_usable_cores())
    ask_for_huge_pages()


def ask_for_huge_pages() -> None:
    """Let torch ask the kernel for pages of 2 MiB for large tensors. Call it before the process makes its first tensor.

    Weights are read once a step, from end to end. With pages of 4 KiB the processor looks up an address for every 64
    cache lines, and its prefetcher starts anew. A value that is set already stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """Compute with zeros in place of subnormal numbers on CPUs: in this thread, and in those started from it meanwhile.

    Adapters come from strangers: products of numbers near 1e-39, or of two near 1e-20, take 15 times as long as others
    in float32, while all sequences of the step wait. Enter it before the thread computes: pools that it has started
    stay as they are.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _device_num_blocks(plan: BuildPlan, budget: MemoryBudget) -> int:
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


def _budget(plan: BuildPlan, before: probe.MemoryProbe, use: MemoryUse) -> MemoryBudget:
    config = plan.config
    return MemoryBudget(
        before.device_bytes,
        before.used_before,
        config.gpu_memory_utilization,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        use,
    )
