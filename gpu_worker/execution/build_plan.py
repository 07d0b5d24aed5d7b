"""Properties of a runner that are known before anything is loaded: types, cache layout, memory needed."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from functools import partial

import torch

from gpu_worker.execution.memory.budget import CacheDemand
from gpu_worker.execution.memory.group_shares import GroupShares
from gpu_worker.execution.memory.kv_cache import fixed_num_blocks, slot_bytes, state_pool_bytes
from gpu_worker.execution.memory.state_sizes import num_sure_slots
from gpu_worker.execution.runner_config import RunnerConfig, choose_dtype, choose_kv_cache_dtype
from gpu_worker.layers.cache_layout import ReadsLayer
from gpu_worker.layers.layer import LayerTraits
from gpu_worker.layers.ranks.division import Division, IndivisibleError, divided_layer
from gpu_worker.layers.ranks.rank import layers_of_stage
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import is_fused
from gpu_worker.models.loader import weights_bytes
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.vision.registry import read_vision, tower_bytes
from gpu_worker.models.vision.vision_config import VisionConfig
from kernels.linear.dense import keeps_half
from shared.errors import ConfigError

# Of the setting `tensor_parallel_size`.
_MAX_RANKS = 62


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What follows from the settings and the model's files alone.

    Attributes:
        shares: How the cache's memory is divided among groups of layers.
        demand: What the cache takes for a block, and at least.
        fixed: The setting that fixes the size of the cache and the blocks that it means; None sizes it by memory.
        weights_bytes: Memory of a rank's part of the weights, about so where there are several; the tower's, too.
        vision: How the model sees, if it does and is asked to.
        tower_bytes: Memory of the vision tower's weights.
    """

    config: RunnerConfig
    model_config: ModelConfig
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    device: torch.device
    shares: GroupShares
    demand: CacheDemand
    fixed: tuple[str, int] | None
    weights_bytes: int
    vision: VisionConfig | None = None
    tower_bytes: int = 0

    @property
    def shared_demand(self) -> CacheDemand:
        """The same demand with what the proposer of drafts keeps for each block."""
        block_bytes = self.demand.block_bytes + self.config.proposer_block_bytes
        return dataclasses.replace(self.demand, block_bytes=block_bytes)

    @property
    def state_bytes(self) -> int:
        """Memory of the states of recurrent layers that are there however large the cache is."""
        return state_pool_bytes(self.shares.layout, self.num_state_slots(0), self.config.max_draft_tokens)

    def num_state_slots(self, num_blocks: int) -> int:
        """Return the slots of states beside a number of blocks."""
        sure = num_sure_slots(self.config.max_num_seqs, has_blocks=self.demand.block_bytes > 0)
        return sure + self.shares.num_checkpoints(num_blocks)

    @property
    def media_bytes(self) -> int:
        """Memory for encoding images: the embeddings that are kept, and the largest images in the tower."""
        vision = self.vision
        if vision is None:
            return 0
        rows = vision.max_kept_rows * self.model_config.hidden_size * (1 + len(vision.deep))
        return (rows + vision.working_numbers) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """The type that the model computes in."""
        return _dtype_name(self.dtype)

    @property
    def matrix_dtype_name(self) -> str:
        """The type that matrices have in memory."""
        stored = self.model_config.dtype
        is_kept = keeps_half(stored, self.model_config.hidden_size, self.dtype, self.device, compiles=False)
        return _dtype_name(stored if is_kept else self.dtype)


def _with_redundant(weights: int, model: ModelConfig, num_redundant: int) -> int:
    """Return the bytes of weights with more copies of experts: about so, for nearly all are theirs."""
    num_experts = [layer.mixture.num_experts for layer in model.layers if layer.mixture is not None]
    return weights + weights * num_redundant // max(num_experts) if num_experts else weights


def _weights_bytes(model: ModelConfig, config: RunnerConfig, dtype: torch.dtype, *, compiles: bool) -> int:
    """Return the bytes of a rank's weights: about so, as if all were divided but for those that each rank has."""
    measure = partial(
        weights_bytes,
        config.model,
        dtype,
        torch.device(config.device),
        is_tied=model.tie_word_embeddings,
        names=model.block.names,
        compiles=compiles,
    )
    whole = measure()
    divided = measure(without=_mixer_tensors(model)) if config.num_parts > 1 else whole
    return whole - divided + _with_redundant(divided, model, config.num_redundant_experts) // config.num_ranks


def _mixer_tensors(model: ModelConfig) -> str:
    """Return a pattern of the names of tensors that belong to layers of what mixes tokens."""
    shapes = [
        shape
        for layer in model.layers
        if layer.mixer is not None
        for shape in layer.mixer.linears(model.block.names, model.hidden_size).values()
    ]
    modules = {re.escape(module) for shape in shapes for module in shape.modules}
    return rf"model\.layers\.\d+\.({'|'.join(sorted(modules))})\..*"


def _may_be_fused(config: RunnerConfig) -> bool:
    """Return whether each rank has all layers, and a part of the features of each."""
    is_divided_otherwise = config.enable_expert_parallel or config.enable_dp_attention
    return config.pipeline_parallel_size * config.decode_context_parallel_size == 1 and not is_divided_otherwise


def make_plan(config: RunnerConfig, stage: int = 0, *, compiles: bool = True) -> BuildPlan:
    """Read the model's configuration and settle what depends on it, for a rank of a stage; nothing is loaded.

    Without `compiles`, kernels that a compiler could make are taken to be there.

    Raises:
        HeadraceError: The model cannot be read.
        ConfigError: A setting cannot be used.
    """
    device = torch.device(config.device)
    model_config = read_model_config(config.model)
    own = _of_stage(_of_one_rank(model_config, config), config, stage)
    dtype = choose_dtype(config.dtype, model_config.dtype, device)
    max_model_len = min(config.max_model_len or model_config.max_model_len, model_config.max_model_len)
    kv_cache_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    layout = own.cache_layout.within(max_model_len)
    num_ranks = config.tensor_parallel_size
    is_flat = config.keeps_all_tokens or config.num_parts > 1
    if is_flat or (_may_be_fused(config) and is_fused(model_config, dtype, device, num_ranks, compiles=compiles)):
        layout = layout.flat()
    shares = GroupShares(
        layout,
        config.block_size,
        max_model_len,
        config.max_num_batched_tokens,
        kv_cache_dtype,
        slot_bytes(layout, config.max_draft_tokens),
        config.state_checkpoint_ratio,
        config.decode_context_parallel_size,
    )
    demand = shares.demand
    weights = _weights_bytes(model_config, config, dtype, compiles=compiles)
    fixed = fixed_num_blocks(config, demand)
    vision = read_vision(config.model) if config.takes_images else None
    seeing = 0 if vision is None else tower_bytes(config.model, vision, dtype)
    weights += seeing
    return BuildPlan(
        config, model_config, dtype, kv_cache_dtype, device, shares, demand, fixed, weights, vision, seeing
    )


def _of_one_rank(model: ModelConfig, config: RunnerConfig) -> ModelConfig:
    """Return the model with the heads that a rank has."""
    size, layers = config.tensor_parallel_size, model.layers
    if size == 1:
        return model
    problem = "models that attend in both directions are not divided" if model.is_bidirectional else None
    if config.enable_eplb and not any(layer.mixture for layer in layers):
        raise ConfigError("HEADRACE_ENABLE_EPLB", "is set, but the model has no experts")
    if config.enable_dp_attention and model.has_states:
        raise ConfigError("HEADRACE_ENABLE_DP_ATTENTION", "is set, but states of recurrent layers are not divided so")
    if config.tapped_layers:
        problem = "proposers of drafts that read the model's hidden vectors do not go with several ranks"
    try:
        layers = _divided(model, config, size)
    except IndivisibleError as error:
        problem = problem or f"{error}; {_numbers_of_ranks(model, config)}"
    if problem is not None:
        raise ConfigError("HEADRACE_TENSOR_PARALLEL_SIZE", f"is {size}: {problem}")
    return dataclasses.replace(model, layers=layers)


def _of_stage(model: ModelConfig, config: RunnerConfig, stage: int) -> ModelConfig:
    """Return the model with the layers of a stage; all stages keep the same kinds of things of a sequence."""
    count = config.pipeline_parallel_size
    if count == 1:
        return model
    problem = None
    if model.num_layers < count:
        problem = f"the model has {model.num_layers} layers"
    elif model.is_bidirectional or model.has_states or _has_other_inputs(model):
        kinds = "recurrent layers, learned positions, inputs of each layer, or attention in both directions"
        problem = f"models with {kinds} have one stage"
    elif any(isinstance(memory, ReadsLayer) for memory in model.cache_layout.layers):
        problem = "models whose layers attend to the keys and values of others have one stage"
    elif config.max_draft_tokens or config.tapped_layers:
        problem = "drafts (HEADRACE_SPECULATIVE) need a pipeline of one stage"
    if problem is None:
        stages = [_layers_of(model, number, count) for number in range(count)]
        if len({tuple(group.window for group in each.cache_layout.groups) for each in stages}) == 1:
            return stages[stage]
        problem = "each stage must have layers with the same windows as the others"
    raise ConfigError("HEADRACE_PIPELINE_PARALLEL_SIZE", f"is {count}: {problem}")


def _has_other_inputs(model: ModelConfig) -> bool:
    block = model.block
    return not (block.layer_inputs is None and block.positions is None and block.embeddings is None)


def _layers_of(model: ModelConfig, stage: int, num_stages: int) -> ModelConfig:
    own = layers_of_stage(model.num_layers, stage, num_stages)
    return dataclasses.replace(model, layers=model.layers[own.start : own.stop], num_layers=len(own))


def _divided(model: ModelConfig, config: RunnerConfig, size: int) -> tuple[LayerTraits, ...]:
    count = config.decode_context_parallel_size
    if size % count:
        raise IndivisibleError(f"{size} ranks are no multiple of {count}")
    division = Division(
        0, size, config.enable_expert_parallel, config.moved_experts, count, has_whole_mixers=config.num_parts > 1
    )
    return tuple(divided_layer(layer, division) for layer in model.layers)


def _numbers_of_ranks(model: ModelConfig, config: RunnerConfig) -> str:
    found = []
    for size in range(2, _MAX_RANKS + 1):
        with contextlib.suppress(IndivisibleError):
            _divided(model, config, size)
            found.append(str(size))
    return f"numbers that work: {', '.join(found)}" if found else "no other number works"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
