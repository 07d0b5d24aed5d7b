"""The decoder stack by the compiled CPU kernel (`cpu.cpp`).

One call a step replaces ten or so an operation and layer, whose dispatch costs more than small models compute.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kernels.cpu_library import CACHE_DTYPE_NUMBERS, DTYPE_NUMBERS, CpuLibrary
from kernels.cpu_structures import (
    MAX_PARTS,
    LayerStructure,
    MatrixStructure,
    StackStructure,
    StepStructure,
    address_of,
    strides_of,
)
from kernels.layer_cache import LayerCache
from kernels.linear.panels import PanelMatrix, matrix_structure
from kernels.low_rank import AdapterRows
from kernels.moe.cpu import CpuMixture

MAX_HEAD_DIM = 256
MAX_QUERY_HEADS_PER_KV_HEAD = 64
_FAULTS = ("", "a token id is not in the vocabulary", "a position is beyond the rotary table")
_HAS_ENDED = len(_FAULTS)


@dataclass(frozen=True, slots=True)
class StackShape:
    """The sizes that all layers share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    def can_run(self) -> bool:
        """Return True where the kernel supports these sizes."""
        return self.head_dim <= MAX_HEAD_DIM and self.num_heads <= MAX_QUERY_HEADS_PER_KV_HEAD * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """Addresses of the tables of adapters (`kernels.low_rank`) beside the matrices of a layer; without, none can be."""

    qkv: Sequence[int] = ()
    gate_up: Sequence[int] = ()
    output: int | None = None
    down: int | None = None
    router: int | None = None


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Weights of a layer; those of normalisations are float32.

    Attributes:
        attention_norm: `[hidden_size]`, or None where attention takes the stream as it is.
        qkv: One matrix, or up to three, side by side, where no single form holds all features.
        gate_up: One matrix, packed with `is_gated`, or two side by side; none in a layer with experts.
        mixture: The experts of a layer that has no `down`.
        query_norm: `[head_dim]`, or None, as is `key_norm`, where heads are not normalised.
        sliding_window: Tokens a query sees, itself included; None is unlimited.
        adapters: Addresses of the tables of adapters beside the matrices.
    """

    attention_norm: torch.Tensor | None
    qkv: Sequence[PanelMatrix]
    output: PanelMatrix
    mlp_norm: torch.Tensor
    gate_up: Sequence[PanelMatrix] = ()
    down: PanelMatrix | None = None
    mixture: CpuMixture | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    sliding_window: int | None = None
    adapters: LayerAdapters = LayerAdapters()


class ReadQueries(NamedTuple):
    """Where a step leaves the rotated queries of some of its tokens.

    Attributes:
        rows: `[num_tokens]` int32, the row of each token; below zero of none.
        queries: `[num_layers, num_rows, num_heads, head_dim]`, of the stack's type.
    """

    rows: torch.Tensor
    queries: torch.Tensor


class StackStep(NamedTuple):
    """The tokens of a step; shapes are those of `kernels.rope_kv_write` and `kernels.paged_attention`.

    A tuple, since one is made in every step: a frozen dataclass with as many fields takes four times as long.

    Attributes:
        adapters: Which tokens have an adapter.
        read: Which queries are to be read; None of none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    caches: Sequence[LayerCache]
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    adapters: AdapterRows | None = None
    read: ReadQueries | None = None


class Collective(Protocol):
    """By what processes sum that divide the layers and the vocabulary among them.

    Attributes:
        address: Where the kernel finds it.
        slot_bytes: Room for the stream of a step, in float32.
    """

    address: int
    slot_bytes: int

    def check(self, has_ended: bool) -> None:
        """Raise if the processes do nothing together any more."""


@dataclass(frozen=True, slots=True)
class StackInputs:
    """How the residual stream begins.

    Attributes:
        embedding: `[vocab_size, hidden_size]`, of the type that the stack computes in, float16 or bfloat16.
        dtype: What the stack computes in: float32 or bfloat16.
        collective: What sums with processes that have other tokens and features; None where all are here.
        vocab_size: How many tokens there are, where the embedding is that of some.
        adapters: Address of the table of adapters beside the embedding.
        first_token: The token of the embedding's first row.
    """

    embedding: torch.Tensor
    dtype: torch.dtype
    collective: Collective | None = None
    vocab_size: int | None = None
    adapters: int | None = None
    first_token: int = 0


class CpuDecoderStack:
    """Embedding, layers and final normalisation. Owns the memory between operations: one thread calls it at a time."""

    def __init__(
        self,
        library: CpuLibrary,
        shape: StackShape,
        inputs: StackInputs,
        layers: Sequence[StackLayer],
        final_norm: torch.Tensor | None,
        cos_sin: torch.Tensor,
        tapped_layers: Sequence[int] = (),
    ) -> None:
        """Describe the model to the kernel.

        Shapes:
            final_norm: `[hidden_size]` float32
            cos_sin: `[max_positions, rotated_dim]` float32
        """
        self.library = library
        self.dtype = inputs.dtype
        self._taps = torch.tensor(tapped_layers, dtype=torch.int32)
        # The structures hold addresses only.
        self._parts = (shape, inputs, layers, final_norm, cos_sin)
        self._collective = collective = inputs.collective
        self._max_tokens = sys.maxsize if collective is None else collective.slot_bytes // (4 * shape.hidden_size)
        self._result_size = shape.hidden_size * (1 + len(self._taps))
        self._layers = (LayerStructure * len(layers))(*map(_layer_structure, layers))
        self._stack = self._structure()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._caches: Sequence[LayerCache] | None = None

    def _structure(self) -> StackStructure:
        shape, inputs, layers, final_norm, cos_sin = self._parts
        embedding, collective = inputs.embedding, inputs.collective
        return StackStructure(
            embedding=embedding.data_ptr(),
            cos_sin=cos_sin.data_ptr(),
            final_norm=address_of(final_norm),
            layers=ctypes.addressof(self._layers),
            tapped_layers=self._taps.data_ptr(),
            num_tapped=len(self._taps),
            num_layers=len(layers),
            vocab_size=inputs.vocab_size or len(embedding),
            max_positions=len(cos_sin),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotated_dim=cos_sin.shape[1],
            dtype=DTYPE_NUMBERS[inputs.dtype],
            embedding_dtype=DTYPE_NUMBERS[embedding.dtype],
            cache_dtype=DTYPE_NUMBERS[inputs.dtype],
            eps=shape.eps,
            scale=shape.head_dim**-0.5,
            exchange=None if collective is None else collective.address,
            first_token=inputs.first_token,
            num_own_tokens=len(embedding),
            embedding_adapters=inputs.adapters,
        )

    def interrupt_at(self, address: int) -> None:
        """End steps with prompts early, and return anything, once the two int64 at this address are equal."""
        self._stack.interrupt = address

    def __call__(self, step: StackStep) -> torch.Tensor:
        """Compute a step: write keys and values into the caches, return the normalised hidden vectors.

        Shapes:
            result: `[num_tokens, (1 + number of tapped layers) * hidden_size]`

        Raises:
            IndexError: A token id or position is out of range.
            Exception: The collective's: processes do nothing together any more.
        """
        stack, structure = self.structures(step)
        # A sixth of what `len` takes of a tensor, here and below: this runs in every step.
        num_tokens = step.token_ids.shape[0]
        assert num_tokens <= self._max_tokens, "the stream of a step has room in what processes share"
        scratch = self.scratch(self.library.decoder_stack_scratch(stack, num_tokens))
        result = torch.empty(num_tokens, self._result_size, dtype=self.dtype)
        num_threads = torch.get_num_threads()
        self._check(self.library.decoder_stack(stack, structure, scratch, result.data_ptr(), num_threads))
        return result

    def from_vectors(
        self, step: StackStep, vectors: torch.Tensor, cos_sin: torch.Tensor, layers: range
    ) -> torch.Tensor:
        """Compute some layers of a step whose tokens are rows of a table of vectors.

        Args:
            step: Its token ids are rows of `vectors`, and its positions rows of `cos_sin`.
            vectors: In place of embeddings, or what the layers before have returned.
            cos_sin: Rotations.
            layers: One or more. Those that include the last return what `__call__` does, without streams that are
                tapped; others return the stream as it is.

        Shapes:
            vectors: `[num_vectors, hidden_size]`, of the stack's type, contiguous
            cos_sin: `[num_rotations, rotated_dim]` float32, contiguous
            result: `[num_tokens, hidden_size]`
        """
        self._place_caches(step)
        stack = type(self._stack).from_buffer_copy(self._stack)
        stack.embedding, stack.embedding_dtype = vectors.data_ptr(), DTYPE_NUMBERS[vectors.dtype]
        stack.vocab_size = len(vectors)
        # All processes have all vectors, and sum what they put down: that with the first tokens does.
        stack.first_token, stack.num_own_tokens = 0, len(vectors) if self._parts[1].first_token == 0 else 0
        stack.cos_sin, stack.max_positions = cos_sin.data_ptr(), len(cos_sin)
        stack.layers += layers.start * ctypes.sizeof(LayerStructure)
        stack.num_tapped = 0
        if layers.stop < stack.num_layers:
            stack.final_norm = None
        stack.num_layers = len(layers)
        result = torch.empty(step.token_ids.shape[0], vectors.shape[1], dtype=self.dtype)
        scratch = self.scratch(self.library.decoder_stack_scratch(ctypes.byref(stack), len(result)))
        _, structure = self.structures(step)
        fault = self.library.decoder_stack(
            ctypes.byref(stack), structure, scratch, result.data_ptr(), torch.get_num_threads()
        )
        self._check(fault)
        return result

    def structures(self, step: StackStep) -> tuple[Any, Any]:
        """Return the stack and the step as the kernel takes them; they hold addresses of the tensors."""
        self._place_caches(step)
        structure = StepStructure(
            step.token_ids.data_ptr(),
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            step.block_tables.data_ptr(),
            step.query_starts.data_ptr(),
            step.context_lens.data_ptr(),
            None if step.adapters is None else step.adapters.cpu.address,
            *((None, None, 0) if step.read is None else _read_addresses(step.read)),
            step.token_ids.shape[0],
            step.context_lens.shape[0],
            step.block_tables.shape[1],
            step.caches[0].keys.shape[1],
        )
        return ctypes.byref(self._stack), ctypes.byref(structure)

    def scratch(self, num_bytes: int) -> int:
        """Return the address of scratch memory of this size, whose contents last until the next call."""
        if self._scratch.shape[0] < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def _check(self, fault: int) -> None:
        """Raise an IndexError for what the kernel refused, if it did, or let the collective say that it has ended."""
        if fault and self._collective is not None:
            self._collective.check(fault == _HAS_ENDED)
        if fault:
            raise IndexError(_FAULTS[fault])

    def _place_caches(self, step: StackStep) -> None:
        if self._caches is step.caches:
            return
        for layer, cache in zip(self._layers, step.caches, strict=True):
            layer.key_cache, layer.value_cache = cache.keys.data_ptr(), cache.values.data_ptr()
            layer.kv_scales = address_of(cache.scales)
        self._stack.key_strides = strides_of(step.caches[0].keys)
        self._stack.value_strides = strides_of(step.caches[0].values)
        self._stack.cache_dtype = CACHE_DTYPE_NUMBERS[step.caches[0].keys.dtype]
        self._caches = step.caches


def _read_addresses(read: ReadQueries) -> tuple[int, int, int]:
    return read.rows.data_ptr(), read.queries.data_ptr(), read.queries.shape[1]


def _layer_structure(layer: StackLayer) -> LayerStructure:
    mixture, adapters = layer.mixture, layer.adapters
    return LayerStructure(
        attention_norm=address_of(layer.attention_norm),
        mlp_norm=layer.mlp_norm.data_ptr(),
        query_norm=address_of(layer.query_norm),
        key_norm=address_of(layer.key_norm),
        qkv=(MatrixStructure * MAX_PARTS)(*map(matrix_structure, layer.qkv)),
        output=matrix_structure(layer.output),
        gate_up=(MatrixStructure * 2)(*map(matrix_structure, layer.gate_up)),
        down=MatrixStructure() if layer.down is None else matrix_structure(layer.down),
        router=MatrixStructure() if mixture is None else matrix_structure(mixture.router),
        routing=None if mixture is None else ctypes.addressof(mixture.routing),
        mixture=None if mixture is None else ctypes.addressof(mixture.experts.structure),
        sliding_window=layer.sliding_window or 0,
        num_qkv=len(layer.qkv),
        num_gate_up=len(layer.gate_up),
        qkv_adapters=(ctypes.c_void_p * MAX_PARTS)(*adapters.qkv),
        gate_up_adapters=(ctypes.c_void_p * 2)(*adapters.gate_up),
        output_adapters=adapters.output,
        down_adapters=adapters.down,
        router_adapters=adapters.router,
    )
