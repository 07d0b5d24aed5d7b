"""Runs calibration windows through one layer after another, so that a model need not fit into memory.

The layer is the engine's own, with a KV cache, or a state, for one window. Of layers whose keys and values later ones
read, the caches of all windows are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.execution.memory.kv_cache import allocate_groups, allocate_states
from gpu_worker.layers.adapters import ExpertModules
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.cache_layout import CacheLayout, ReadsLayer
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.layers.layer import DecoderLayer, LayerWeights
from gpu_worker.layers.layer_inputs import TABLE, layer_inputs_over
from gpu_worker.layers.linear import LayerParts, LinearShape
from gpu_worker.layers.rotations import Rotations
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from kernels.activation.experts import ExpertActivation
from kernels.layer_cache import LayerCache
from kernels.linear import Linear, LinearFactory
from kernels.moe import Experts, ExpertWeights
from kernels.moe.layers import ExpertLayers, LinearExperts
from kernels.state_rows import StateRows
from ops.quantize.layer_blocks import expert_names, matrix_of
from shared.errors import ConfigError


@dataclass(slots=True)
class InputMoments:
    """Sums over all tokens that one input has seen.

    Attributes:
        gram: `inputs.T @ inputs`, `[in_features, in_features]` float32.
        num_tokens: How many.
    """

    gram: torch.Tensor
    num_tokens: int = 0

    @classmethod
    def none(cls, in_features: int, device: torch.device) -> InputMoments:
        """Begin with no tokens."""
        return cls(torch.zeros(in_features, in_features, device=device))

    def add(self, inputs: torch.Tensor) -> None:
        """Add tokens, `[num_tokens, in_features]`."""
        inputs = inputs.float()
        self.gram.addmm_(inputs.T, inputs)
        self.num_tokens += len(inputs)


@dataclass(frozen=True, slots=True)
class RecordingLinear:
    """A linear layer that adds its inputs to the sums."""

    linear: Linear
    moments: InputMoments

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Record and multiply."""
        self.moments.add(x)
        return self.linear(x)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """Record and multiply."""
        self.moments.add(x)
        return self.linear.to_float32(x)


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """The vectors of all windows.

    Attributes:
        layers: Of each layer `[num_different_tokens, size]` float32.
        places: `[num_windows, length]` int64, where each token's vectors are.
    """

    layers: Sequence[torch.Tensor]
    places: torch.Tensor

    def of(self, layer: int, window: int) -> torch.Tensor:
        """Return what a layer is given of a window's tokens, `[length, size]`."""
        return self.layers[layer].index_select(0, self.places[window])


def take_token_vectors(
    config: ModelConfig, checkpoint: Checkpoint, windows: torch.Tensor, embedding: torch.Tensor, device: torch.device
) -> TokenVectors | None:
    """Make the vectors on the device of the checkpoint, and keep them where the windows are; None in a model without.

    Shapes:
        windows: `[num_windows, length]` int64, tokens
        embedding: `[vocab_size, hidden_size]` float32, of tokens
    """
    shape = config.block.layer_inputs
    if shape is None:
        return None
    tokens, places = torch.unique(windows, return_inverse=True)
    rows = [checkpoint.take_raw_item(TABLE, token).float() for token in tokens.tolist()]
    source = config.layer_source(checkpoint)
    parts = LayerParts.made_by(LinearFactory(free_host_bytes), Rotations((), 1, device))
    inputs = layer_inputs_over(torch.stack(rows), source, parts, shape, torch.float32)
    embedded = embedding.index_select(0, tokens).to(device) * config.block.embedding_scale
    vectors = inputs(torch.arange(len(tokens), device=device), embedded)
    return TokenVectors([layer.to(windows.device) for layer in vectors], places)


_BLOCK_SIZE = 16
# Of free memory; a layer's weights, second moments and their factors need the rest.
_STREAM_SHARE = 0.5


def num_kept(config: ModelConfig) -> int:
    """Return how many numbers of a token are kept beside the stream: keys and values that later layers read."""
    layout = config.cache_layout
    shapes = [layout.shape_of(layer) for layer in _read_layers(layout)]
    return sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)


def _read_layers(layout: CacheLayout) -> set[int]:
    return {memory.layer for memory in layout.layers if isinstance(memory, ReadsLayer)}


def check_stream_fits(num_windows: int, length: int, num_features: int, free_bytes: int) -> None:
    """Check, before anything is computed, that `num_features` of each token of all windows fit.

    Raises:
        ConfigError: It does not; says how many windows would.
    """
    window_bytes = length * num_features * torch.float32.itemsize
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

    def __init__(
        self,
        config: ModelConfig,
        embedded: torch.Tensor,
        device: torch.device,
        token_vectors: TokenVectors | None = None,
    ) -> None:
        """Begin with the windows' embeddings, which are kept where they are; layers are computed on `device`.

        Shapes:
            embedded: `[num_windows, length, hidden_size]` float32
        """
        self._device = device
        self._layout = config.cache_layout
        self._token_vectors = token_vectors
        self._read = _read_layers(self._layout)
        # Of the layers that others read, by number: of each window, where the stream is.
        self._kept: dict[int, list[LayerCache]] = {}
        self.hidden = embedded
        length = embedded.shape[1]
        self._parts = LayerParts.made_by(LinearFactory(free_host_bytes), Rotations(config.ropes, length, device))
        self._positions = torch.arange(length, device=device)

    def observe(
        self, index: int, weights: LayerWeights, matrices: Mapping[str, LinearShape]
    ) -> dict[str, InputMoments]:
        """Return what these matrices of layer `index` are given; the stream stays where it is.

        An expert is given what the router gives it, which may be nothing.
        """
        moments = {name: InputMoments.none(linear.columns, self._device) for name, linear in matrices.items()}
        by_modules = {linear.modules: moments[name] for name, linear in matrices.items()}

        def observer(modules: tuple[str, ...], inputs: torch.Tensor) -> None:
            if modules in by_modules:
                by_modules[modules].add(inputs)

        def recording(name: str) -> RecordingLinear:
            return RecordingLinear(self._parts.product(matrix_of(weights, name)), moments[name])

        def experts(
            gate_up: ExpertWeights, down: ExpertWeights, activation: ExpertActivation, _: ExpertModules | None
        ) -> Experts:
            assert gate_up.num_experts == down.num_experts
            names = map(expert_names, range(gate_up.num_experts))
            layers = [ExpertLayers(recording(first), recording(second)) for first, second in names]
            return LinearExperts(layers, activation, 0, self._device)

        layer = DecoderLayer(0, weights, replace(self._parts, experts=experts))
        context = structs.replace(self._context_of(index), observer=observer)
        for number in range(len(self.hidden)):
            self._run(index, layer, number, context)
        return moments

    def advance(self, index: int, weights: LayerWeights) -> None:
        """Move the stream through layer `index`, which has these weights."""
        layer = DecoderLayer(0, weights, self._parts)
        context = self._context_of(index)
        if index in self._read:
            self._kept[index] = []
        for number, window in enumerate(self.hidden):
            window.copy_(self._run(index, layer, number, context))
            if index in self._read:
                self._kept[index].append(_copied(context.caches[0], self.hidden.device))

    def _run(
        self,
        index: int,
        layer: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        number: int,
        context: AttentionContext,
    ) -> torch.Tensor:
        memory, vectors = self._layout.layers[index], self._token_vectors
        if isinstance(memory, ReadsLayer):
            context = structs.replace(context, caches=[_copied(self._kept[memory.layer][number], self._device)])
        inputs = None if vectors is None else vectors.of(index, number).to(self._device)
        window = self.hidden[number].to(self._device, copy=True)
        added, stream = layer(window, None, self._positions, context, inputs)
        return stream + added

    def _context_of(self, index: int) -> AttentionContext:
        """Return the context of one window, with what a layer keeps of it; a state begins anew with each."""
        length, device = self.hidden.shape[1], self._device
        memory = self._layout.layers[index]
        # The keys that a layer reads of another come with each window.
        own = None if isinstance(memory, ReadsLayer) else memory
        layout, num_blocks = CacheLayout((own,)).flat(), -(-length // _BLOCK_SIZE)
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


def _copied(cache: LayerCache, device: torch.device) -> LayerCache:
    """Return the entries of a cache, which the next window will overwrite."""
    assert cache.scales is None
    return LayerCache(cache.keys.to(device, copy=True), cache.values.to(device, copy=True))
