"""Runs calibration windows through one layer after another, so that a model need not fit into memory.

The layer is the engine's own, with a KV cache, or a state, for one window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.execution.memory.kv_cache import allocate_groups
from gpu_worker.execution.memory.state_pool import allocate_states
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import CacheLayout
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer_parts import LayerParts
from gpu_worker.layers.layer_weights import LayerWeights, MixtureWeights, Projection
from gpu_worker.layers.layered_decoder import DecoderLayer
from gpu_worker.layers.rotations import Rotations
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.layer_memory import cache_layout
from kernels.linear import Linear, LinearFactory
from kernels.moe import Experts
from kernels.moe.layers import ExpertLayers, LinearExperts
from kernels.state_rows import StateRows
from ops.quantize.layer_blocks import expert_names, is_of_expert, matrix_of
from ops.quantize.layer_inputs import InputMoments, RecordingLinear
from shared.errors import ConfigError

_BLOCK_SIZE = 16
# Of free memory; a layer's weights, second moments and their factors need the rest.
_STREAM_SHARE = 0.5


def check_stream_fits(num_windows: int, length: int, hidden_size: int, free_bytes: int) -> None:
    """Check, before anything is computed, that the residual stream of all windows fits.

    Raises:
        ConfigError: It does not; says how many windows would.
    """
    window_bytes = length * hidden_size * torch.float32.itemsize
    allowed = int(free_bytes * _STREAM_SHARE) // window_bytes
    if num_windows > allowed:
        needed, free = shown_bytes(num_windows * window_bytes), shown_bytes(free_bytes)
        remedy = f"use {allowed} at most, or shorter ones" if allowed else "use shorter windows (HEADRACE_WINDOW)"
        problem = f"{num_windows} windows of {length} tokens need {needed}, more than half of the {free} that are free"
        raise ConfigError("HEADRACE_SAMPLES", f"{problem}; {remedy}")


class LayerPass:
    """Owns the residual stream of all windows, which each layer's `advance` moves on.

    Attributes:
        hidden: `[num_windows, length, hidden_size]` float32, the input of the next layer.
    """

    def __init__(self, config: ModelConfig, embedded: torch.Tensor, device: torch.device) -> None:
        """Begin with the windows' embeddings.

        Shapes:
            embedded: `[num_windows, length, hidden_size]` float32; kept where it is
        """
        self._device = device
        self._layout = cache_layout(config)
        self.hidden = embedded
        length = embedded.shape[1]
        self._parts = LayerParts.made_by(LinearFactory(free_host_bytes), Rotations(config.ropes, length, device))
        self._positions = torch.arange(length, device=device)

    def observe(self, index: int, weights: LayerWeights, names: Sequence[str]) -> dict[str, InputMoments]:
        """Return what matrices of these names in layer `index` are given; the stream stays where it is.

        An expert is given what the router gives it, which may be nothing.
        """
        moments = {name: InputMoments.none(matrix_of(weights, name).weight.shape[1], self._device) for name in names}
        named = {id(matrix_of(weights, name)): name for name in names if not is_of_expert(name)}

        def recording(projection: Projection, name: str | None) -> Linear:
            linear = self._parts.linear(projection)
            return linear if name is None else RecordingLinear(linear, moments[name])

        def record(projection: Projection) -> Linear:
            return recording(projection, named.get(id(projection)))

        def experts(mixture: MixtureWeights) -> Experts:
            layers = [
                ExpertLayers(*(recording(matrix_of(weights, name), name) for name in expert_names(expert)))
                for expert in range(mixture.gate_up.num_experts)
            ]
            return LinearExperts(layers, mixture.activation, 0, self._device)

        layer = DecoderLayer(0, weights, replace(self._parts, linear=record, experts=experts))
        context = self._context_of(index)
        for window in self.hidden:
            self._run(layer, window, context)
        return moments

    def advance(self, index: int, weights: LayerWeights) -> None:
        """Move the stream through layer `index`, which has these weights."""
        layer = DecoderLayer(0, weights, self._parts)
        context = self._context_of(index)
        for window in self.hidden:
            window.copy_(self._run(layer, window, context))

    def _run(
        self, layer: Callable[..., tuple[torch.Tensor, torch.Tensor]], window: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        added, stream = layer(window.to(self._device, copy=True), None, self._positions, context)
        return stream + added

    def _context_of(self, index: int) -> AttentionContext:
        """Return the context of one window, with what a layer keeps of it; a state begins anew with each."""
        length, device = self.hidden.shape[1], self._device
        layout, num_blocks = CacheLayout((self._layout.layers[index],)).flat(), -(-length // _BLOCK_SIZE)
        states = allocate_states(layout, 1, 0, device)
        query_starts = torch.tensor([0, length], dtype=torch.int32, device=device)
        context_lens = torch.tensor([length], dtype=torch.int32, device=device)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        return AttentionContext(
            caches=allocate_groups(layout, [num_blocks], _BLOCK_SIZE, torch.float32, device).layers,
            slot_mapping=torch.arange(length, device=device),
            block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            query_starts=query_starts,
            context_lens=context_lens,
            max_query_len=length,
            max_context_len=length,
            states=() if states is None else states.layers,
            state_rows=None if states is None else StateRows(slots, query_starts, context_lens, length),
        )
