"""Step times of devices by their roofline: the slower of reading and computing, and what ranks say to each other.

Source: Williams, Waterman, Patterson, Roofline (2009). What steps reach of a device's rates was not measured here. The
three shares were chosen to lie in the middle of TensorRT-LLM's published throughput of Llama 3.3 70B on two H200 (rows
from 19 % below to 20 % above), and by vLLM's steps of an 8B model at batch 1. ops/docs/sizing.md has all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gpu_worker.execution.memory.budget import RESERVE_BYTES
from ops.simulation.step_time import Chunk, HostTimes
from ops.sizing.devices import Device
from ops.sizing.model_size import ModelSize, WeightFormat
from shared.errors import ConfigError

READ_SHARE = 0.75
CACHE_SHARE = 0.45
COMPUTE_SHARE = 0.5
HOST_TIMES = HostTimes(20e-6, 0.9e-6)
"""Between two steps: what planning and settling took on a core of a Zen 5 server, at 1 and at 256 sequences. Launches
of kernels are not in it: no device was there to measure them on."""
_MESSAGE_S = 10e-6
"""Of one all-reduce of few bytes among devices of a host."""
_ACTIVATION_BYTES = 2
_REDUCES_A_LAYER = 2


@dataclass(frozen=True)
class Roofline:
    """A model on one or more devices that divide it among each other.

    Attributes:
        form: Of the weights.
        cache_dtype: Of keys and values.
        ranks: Devices that each step is divided among.
        read_share: Of the memory's bandwidth that steps reach when they read weights.
        cache_share: The same of keys, values and states.
        compute_share: Of the device's operations that they reach.
    """

    size: ModelSize
    device: Device
    form: WeightFormat
    cache_dtype: torch.dtype
    ranks: int = 1
    read_share: float = READ_SHARE
    cache_share: float = CACHE_SHARE
    compute_share: float = COMPUTE_SHARE
    _weights: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.device.flops_8bit is None:
            problem = f"is unsupported: {self.device.name} does not compute in FP8"
            if self.form.computes_8bit:
                raise ConfigError("HEADRACE_WEIGHTS", problem)
            if self.cache_dtype == torch.float8_e4m3fn:
                raise ConfigError("HEADRACE_CACHE_DTYPE", f"{problem}; int8 takes as little memory")
        config = self.size.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads and (heads % self.ranks or (kv_heads % self.ranks and self.ranks % kv_heads)):
            problem = f"{self.ranks} ranks cannot divide {heads} attention heads and {kv_heads} KV heads"
            raise ConfigError("HEADRACE_TENSOR_PARALLEL_SIZE", f"is unsupported: {problem}")

    def seconds(self, num_decodes: int, num_context: int, chunks: Iterable[Chunk]) -> float:
        """Return the time of a step."""
        num_tokens, num_sampled = num_decodes, num_decodes
        attention, read = 0.0, 0.0
        if num_decodes:
            context = num_context // num_decodes
            read += num_decodes * self.size.read_bytes(context, self.cache_dtype)
            attention += num_decodes * self.size.attention_flops(context - 1, 1)
        for start, length in chunks:
            num_tokens, num_sampled = num_tokens + length, num_sampled + 1
            read += self.size.read_bytes(start + length, self.cache_dtype)
            attention += self.size.attention_flops(start, length)
        weight_bytes, flops = self._weights_of(num_tokens)
        head_flops = self.size.flops(0, num_sampled)
        read_s = weight_bytes / self.ranks / self.read_share + read / self._kv_ranks / self.cache_share
        read_s /= self.device.bandwidth
        wide_s = (attention + head_flops) / self.device.flops
        compute_s = (flops / self._matrix_flops + wide_s) / (self.ranks * self.compute_share)
        return max(read_s, compute_s) + self._exchange_s(num_tokens)

    @property
    def weight_bytes(self) -> float:
        """Of all weights, on each device."""
        return self.size.weight_bytes(self.form) / self.ranks

    def num_blocks(self, max_model_len: int, max_num_batched_tokens: int, max_num_seqs: int, utilization: float) -> int:
        """Return how many blocks of keys and values fit beside the weights.

        Raises:
            ConfigError: Not even one sequence does.
        """
        demand = self.size.demand(max_model_len, max_num_batched_tokens, self.cache_dtype)
        states = self.size.config.cache_layout.state_bytes * max_num_seqs
        room = min(self.device.memory_bytes * utilization, self.device.memory_bytes - RESERVE_BYTES)
        left = room - self.weight_bytes - self.activation_bytes(max_num_batched_tokens, max_num_seqs)
        num_blocks = demand.num_blocks(int(max(0.0, left) * self._kv_ranks) - states)
        if num_blocks < demand.blocks_per_sequence:
            raise ConfigError(
                "HEADRACE_DEVICE",
                f"{self.ranks} x {self.device.name}: {self.weight_bytes / 1e9:.1f} GB of weights each leave "
                f"{max(0.0, left) / 1e9:.1f} GB for keys and values, too little for a sequence of {max_model_len}",
            )
        return num_blocks

    def activation_bytes(self, num_tokens: int, num_seqs: int) -> float:
        """Return what the largest step takes besides: the stream twice, the inner features, and logits in 32 bits."""
        config = self.size.config
        features = 2 * config.hidden_size + 2 * config.intermediate_size / self.ranks
        return num_tokens * features * _ACTIVATION_BYTES + num_seqs * config.vocab_size * 4 / self.ranks

    @property
    def _kv_ranks(self) -> int:
        """Among how many devices keys and values are divided: a head is on one at least."""
        return min(self.ranks, max(1, self.size.config.num_kv_heads))

    @property
    def _matrix_flops(self) -> float:
        if self.form.computes_8bit and self.device.flops_8bit is not None:
            return self.device.flops_8bit
        return self.device.flops

    def _weights_of(self, num_tokens: int) -> tuple[float, float]:
        """Return the bytes of weights that a step reads, and the operations of its layers' matrices."""
        found = self._weights.get(num_tokens)
        if found is None:
            found = self.size.step_bytes(self.form, num_tokens), self.size.flops(num_tokens, 0)
            self._weights[num_tokens] = found
        return found

    def _exchange_s(self, num_tokens: int) -> float:
        """Return the time of all all-reduces, two a layer; each moves 2 (n - 1) / n of its bytes over a link.

        Sources: Shoeybi et al., Megatron-LM (2019), section 3; Patarasuk and Yuan, Bandwidth optimal all-reduce (2009).
        """
        if self.ranks == 1:
            return 0.0
        num_bytes = num_tokens * self.size.config.hidden_size * _ACTIVATION_BYTES
        each_s = _MESSAGE_S + 2 * (self.ranks - 1) / self.ranks * num_bytes / self.device.link
        return _REDUCES_A_LAYER * self.size.config.num_layers * each_s
