"""Builds the engine that the settings ask for: the model's own, or the simulated one.

Torch is imported only for a real model, so that a simulated worker starts at once and runs without torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker.adapters.config import parse_modules
from gpu_worker.core.adaptive_depth import AdaptiveDepth
from gpu_worker.core.constraint import SharedConstraints
from gpu_worker.core.media import SharedImages
from gpu_worker.core.model_runner import ModelRunner
from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import MediaConfig, SchedulerConfig
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step_interrupt import StepInterrupt
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.simulated_runner import SimulatedRunner
from gpu_worker.execution.start_up import Stage, StartUp
from gpu_worker.speculative.registry import Recipe, find_recipe
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.ended_thread import run_in_ended_thread
from gpu_worker.start.host_settings import check_ranks
from gpu_worker.start.proposer_setup import build_proposer, check_speculation, with_room_for_proposer
from gpu_worker.start.tier_setup import build_tiers, check_tiers
from gpu_worker.text.model_directory import ModelDirectory, read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.adapters.reader import PackedAdapter
    from gpu_worker.execution.ranks.runner import GroupRunner
    from gpu_worker.execution.runner import TorchModelRunner
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.execution.tiers.block_tiers import BlockTiers
    from gpu_worker.layers.mixture import ExpertLoads
    from gpu_worker.models.config import ModelConfig
    from gpu_worker.models.vision.processor import MediaProcessor
    from gpu_worker.models.vision.vision_config import VisionConfig

SIMULATED_NUM_BLOCKS = 32_768
CPU_BATCHED_TOKENS = 512
GPU_BATCHED_TOKENS = 8192

_log = logging.getLogger(__name__)


class Adapting(NamedTuple):
    """How many adapters may be in memory, what reads one in any thread, and what places it in a slot between steps.

    Attributes:
        place: None clears the slot.
        check: Raises why an adapter is not served, by its configuration and header alone; in any thread.
        forget: Called once an adapter that was read is placed, or will not be.
    """

    num_slots: int
    read: Callable[[Path], PackedAdapter]
    place: Callable[[int, PackedAdapter | None], None]
    forget: Callable[[PackedAdapter], object] = lambda _: None
    check: Callable[[Path], object] = lambda _: None


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """An engine and the sizes it was built with.

    Attributes:
        gpu_uuid: Of the GPU that it runs on, as NVML spells it; None for a CPU.
        experts: Reads how tokens fall on the model's experts; None where it has none.
        adapting: Where adapters may be; None where none can.
        group: Runs a model that is divided among ranks; None where one process has it all.
        tiers: The tiers below the device's memory; None if there are none.
        media: Prepares images; None where none are taken.
        eviction_problem: Why tokens of a sequence cannot leave the KV cache; None where they can.
    """

    engine: Engine
    scheduler: SchedulerConfig
    gpu_uuid: str | None = None
    experts: ExpertLoads | None = None
    group: GroupRunner | None = None
    tiers: BlockTiers | None = None
    media: MediaProcessor | None = None
    adapting: Adapting | None = None
    eviction_problem: str | None = None


def build_engine(
    config: WorkerConfig, directory: ModelDirectory, tokenizer: ModelTokenizer, start_up: StartUp | None = None
) -> EngineSetup:
    """Build the engine; loading a real model takes a while, which `start_up` can follow.

    `HeadraceError` if the settings do not fit the model or the machine.
    """
    _check_settings(config, tokenizer)
    recipe = find_recipe(config.speculative)
    speculation = None if recipe is None else Speculation(_policy(config, recipe))
    gpu_uuid = experts = group = tiers = media = adapting = problem = None
    constraints, images = SharedConstraints(), SharedImages()
    interrupt: StepInterrupt | None = StepInterrupt()
    if config.simulate is not None:
        runner: ModelRunner = SimulatedRunner(
            config.simulate,
            tokenizer.plain_token_ids,
            growth=config.simulate_growth,
            hidden_size=directory.hidden_size,
            constraints=constraints,
            interrupt=interrupt,
        )
        scheduler = _simulated_sizes(config, directory)
    else:
        load = partial(_load_model, config, directory, start_up or StartUp(), constraints, images)
        loaded, divided, scheduler = load() if _device(config) == "cpu" else run_in_ended_thread(load)
        experts = loaded.model.expert_loads()
        runner, group = divided or loaded, divided
        interrupt = loaded.interrupt
        adapting = _adapting(config, loaded, divided)
        gpu_uuid = _gpu_uuid(config.device)
        tiers = build_tiers(config, loaded)
        if scheduler.media is not None:
            from gpu_worker.models.vision.registry import read_processor

            media = read_processor(directory.path)
        problem = _eviction_problem(config, loaded.model_config, scheduler)
    sizes = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    settings = {"simulate": config.simulate, "speculative": config.speculative}
    _log.info("engine ready", extra={name: getattr(scheduler, name) for name in sizes} | settings)
    engine = Engine(Scheduler(scheduler, speculation, constraints, tiers, images), runner, interrupt=interrupt)
    return EngineSetup(engine, scheduler, gpu_uuid, experts, group, tiers, media, adapting, problem)


def check_engine(config: WorkerConfig, directory: ModelDirectory, tokenizer: ModelTokenizer) -> int | None:
    """Refuse with `HeadraceError` what `build_engine` would, as far as that is known before a model is loaded.

    Return the tokens that the KV cache would hold, None where that is measured at load, or simulated.
    """
    _check_settings(config, tokenizer)
    if config.simulate is not None:
        _simulated_sizes(config, directory)
        return None
    from gpu_worker.execution.build import check_fits

    runner_config, _ = _runner_config(config, directory)
    return check_fits(with_room_for_proposer(config, runner_config))


def _check_settings(config: WorkerConfig, tokenizer: ModelTokenizer) -> None:
    check_speculation(config, tokenizer)
    check_ranks(config)
    check_tiers(config)
    lora_modules(config)


def rank_settings(config: WorkerConfig) -> RunnerConfig:
    """Return the settings of each rank's runner, without loading anything; `HeadraceError` if they do not fit."""
    assert config.model is not None
    runner_config, _ = _runner_config(config, read_model_directory(config.model))
    return with_room_for_proposer(config, runner_config)


def _eviction_problem(config: WorkerConfig, model: ModelConfig, sizes: SchedulerConfig) -> str | None:
    from gpu_worker.models.config import eviction_problem

    if config.speculative not in ("off", "ngram", "draft"):
        return f"its drafts are made of what the KV cache holds (HEADRACE_SPECULATIVE is {config.speculative})"
    if config.decode_context_parallel_size > 1:
        return "its ranks share the tokens of sequences (HEADRACE_DECODE_CONTEXT_PARALLEL_SIZE)"
    if config.enable_dp_attention:
        return "its ranks divide sequences among them (HEADRACE_ENABLE_DP_ATTENTION)"
    return eviction_problem(model, sizes.max_model_len)


def _load_model(
    config: WorkerConfig,
    directory: ModelDirectory,
    start_up: StartUp,
    constraints: SharedConstraints,
    images: SharedImages,
) -> tuple[TorchModelRunner, GroupRunner | None, SchedulerConfig]:
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.warm_up import warm_up_proposer
    from kernels.cpu_library import compile_cpu_library

    runner_config, sizes = _runner_config(config, directory)
    if runner_config.device == "cpu":
        with start_up.stage(Stage.COMPILE) as progress:
            compile_cpu_library(progress)
    # A draft model's own runner needs no such room: it is built from `runner_config`.
    with_room = with_room_for_proposer(config, runner_config)
    divided = None
    if runner_config.num_ranks > 1:
        divided = _build_group(config, with_room, start_up, constraints, images)
        runner = divided.own
    else:
        runner = build_runner(with_room, start_up, constraints=constraints, images=images)
    if find_recipe(config.speculative) is not None:
        runner.verify_drafts_of(build_proposer(config, runner_config, runner))
        if runner.is_asynchronous:
            warm_up_proposer(runner)
    state = None if sizes.state is None else state_config(runner.num_state_slots, config.block_size)
    sizes = dataclasses.replace(
        sizes, num_blocks=runner.num_blocks, num_parts=runner.num_parts, windows=runner.windows, state=state
    )
    return runner, divided, sizes


def _build_group(
    config: WorkerConfig,
    runner_config: RunnerConfig,
    start_up: StartUp,
    constraints: SharedConstraints,
    images: SharedImages,
) -> GroupRunner:
    from gpu_worker.execution.build import check_fits
    from gpu_worker.execution.ranks.group import RankGroup
    from gpu_worker.execution.ranks.runner import build_group_runner
    from gpu_worker.start.host_settings import listen_for_hosts

    # What cannot be divided is refused before a process is started.
    check_fits(runner_config)
    remote = listen_for_hosts(config)
    group = RankGroup(runner_config, config.log_level, config.log_format, exits_when_stuck=True, remote=remote)
    return build_group_runner(runner_config, group, start_up, constraints, images)


def _adapting(config: WorkerConfig, runner: TorchModelRunner, group: GroupRunner | None) -> Adapting | None:
    targets = runner.model.adapters
    if targets is not None:
        from gpu_worker.adapters.reader import check_adapter, read_packed
        from gpu_worker.execution.ranks.beside import encoded_pieces

        def place(slot: int, adapter: PackedAdapter | None) -> None:
            if adapter is None:
                targets.place(slot, None)
            else:
                targets.place(slot, adapter.packed, adapter.max_rank)

        renamed = runner.model_config.block.names.renamed
        read = partial(read_packed, targets=targets, renamed=renamed)
        check = partial(check_adapter, targets=targets, renamed=renamed)
        if group is None:
            return Adapting(targets.num_slots, read, place, check=check)

        def read_for_all(directory: Path) -> PackedAdapter:
            adapter = read(directory, encode=encoded_pieces)
            group.prepare_adapter(adapter)
            return adapter

        return Adapting(targets.num_slots, read_for_all, group.place_adapter, group.forget_adapter, check)
    if lora_modules(config):
        raise ConfigError("HEADRACE_LORA_MODULES", "is set, but this model cannot have adapters")
    return None


def lora_modules(config: WorkerConfig) -> dict[str, Path]:
    """Return the adapters of the settings by their names; `ConfigError` where there can be none."""
    if config.lora_modules is None and not config.max_loras:
        return {}
    variable = "HEADRACE_MAX_LORAS" if config.lora_modules is None else "HEADRACE_LORA_MODULES"
    if config.simulate is not None:
        raise ConfigError(variable, "is set, but a simulated engine has no model to adapt")
    return {} if config.lora_modules is None else parse_modules(config.lora_modules)


def _runner_config(config: WorkerConfig, directory: ModelDirectory) -> tuple[RunnerConfig, SchedulerConfig]:
    from gpu_worker.execution.runner_config import RunnerConfig
    from gpu_worker.models.registry import read_model_config

    device = _device(config)
    # Refuses sizes that do not go together before the model is loaded.
    sizes = _sizes(config, read_model_config(directory.path), device, _vision(config, directory))
    runner_config = RunnerConfig(
        model=directory.path,
        dtype=config.dtype,
        device=device,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_threads=config.num_threads,
        state_checkpoint_ratio=config.state_checkpoint_ratio if config.enable_prefix_caching else 0.0,
        cuda_graphs=config.cuda_graphs,
        **config.of_ranks(),
        takes_images=sizes.media is not None,
        max_loras=max(config.max_loras, len(lora_modules(config))),
    )
    return runner_config, sizes


def _vision(config: WorkerConfig, directory: ModelDirectory) -> VisionConfig | None:
    from gpu_worker.models.vision.registry import read_vision

    vision = read_vision(directory.path)
    is_divided = config.pipeline_parallel_size * config.decode_context_parallel_size > 1 or config.enable_dp_attention
    if vision is None or not is_divided:
        return vision
    _log.warning(
        "the model is served for text alone: there are no images with HEADRACE_PIPELINE_PARALLEL_SIZE or "
        "HEADRACE_DECODE_CONTEXT_PARALLEL_SIZE above 1, nor with HEADRACE_ENABLE_DP_ATTENTION"
    )
    return None


def _device(config: WorkerConfig) -> str:
    import torch

    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("HEADRACE_DEVICE", "is cuda, but PyTorch finds no CUDA device here; allowed: auto, cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _gpu_uuid(device: str) -> str | None:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


def _sizes(config: WorkerConfig, model: ModelConfig, device: str, vision: VisionConfig | None) -> SchedulerConfig:
    longest = model.max_model_len
    if (config.max_model_len or 0) > longest:
        problem = f"is {config.max_model_len}, but the model was made for {longest} tokens; lower it to that, or less"
        raise ConfigError("HEADRACE_MAX_MODEL_LEN", problem)
    max_model_len = config.max_model_len or longest
    default_budget = CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS
    if model.is_bidirectional:
        # A prompt is computed in one step.
        default_budget = max(default_budget, max_model_len)
    media = None
    if vision is not None:
        from gpu_worker.models.vision.registry import media_config

        media = media_config(vision, model)
        default_budget = max(default_budget, config.max_num_seqs + media.bidirectional_tokens)
    sizes = _scheduler_config(config, 1, max_model_len, default_budget, media)
    if not model.has_states:
        return sizes
    return dataclasses.replace(sizes, state=state_config(config.max_num_seqs, config.block_size))


def _simulated_sizes(config: WorkerConfig, directory: ModelDirectory) -> SchedulerConfig:
    max_model_len = min(config.max_model_len or directory.max_model_len, directory.max_model_len)
    return _scheduler_config(config, config.num_blocks or SIMULATED_NUM_BLOCKS, max_model_len, GPU_BATCHED_TOKENS)


def _policy(config: WorkerConfig, recipe: Recipe) -> AdaptiveDepth:
    return AdaptiveDepth(config.num_speculative_tokens, drafts_predictions=recipe.drafts_predictions)


def _scheduler_config(
    config: WorkerConfig, num_blocks: int, max_model_len: int, default_budget: int, media: MediaConfig | None = None
) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or max(default_budget, config.max_num_seqs),
            max_model_len=max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            batch_slowdown=config.batch_slowdown,
            retained_share=config.kv_retained_share,
            num_groups=config.pipeline_parallel_size,
            media=media,
        )
    except ValueError as error:
        raise ConfigError("HEADRACE_MAX_NUM_BATCHED_TOKENS", str(error)) from None
