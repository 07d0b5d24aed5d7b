"""A feed-forward block of experts: a router chooses some for each token, and all tokens may get one more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gpu_worker.layers.adapters import ExpertModules
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.experts import ExpertSizes, MixtureNames, experts_module, take_experts
from gpu_worker.layers.layer_source import LayerSource
from gpu_worker.layers.linear import LayerParts, Linear, LinearShape, Partition, Projection, to_stream
from gpu_worker.layers.mlp import GatedMLP, PlainMLP
from kernels.activation import Activation, times_sigmoid
from kernels.activation.experts import RELU_SQUARED, SILU, ExpertActivation, GatedActivation
from kernels.moe import Experts, ExpertWeights, RoutingRule, route

_CHOICE_BIAS = "e_score_correction_bias"
_SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A feed-forward block of experts, of which each token gets some, and one that all tokens get.

    Attributes:
        expert_size: Features between the matrices of an expert.
        rule: Of routing; a bias for the choice is not in it yet.
        activation: Of the experts. The shared expert has SiLU, or squared ReLU without a gate where they have it.
        has_choice_bias: The checkpoint has a bias for the choice alone.
        weighs_inputs: A token's weight multiplies what its expert is given, not what it gives. One expert a token.
        shared_size: Features between the matrices of the shared expert; 0 where there is none.
        shared_scale: What it gives is multiplied by.
        has_shared_gate: The shared expert's result is multiplied by the sigmoid of a score.
        scales: The tensor of numbers, one an expert, that the weights of tokens are multiplied by; None is none.
        latent_size: Features of what experts are given and give back; 0 is the size of the stream, as it is.
    """

    num_experts: int
    expert_size: int
    rule: RoutingRule
    names: MixtureNames = field(default_factory=MixtureNames)
    activation: ExpertActivation = SILU
    has_router_bias: bool = False
    has_choice_bias: bool = False
    has_expert_biases: bool = False
    weighs_inputs: bool = False
    shared_size: int = 0
    shared_scale: float = 1.0
    has_shared_biases: bool = False
    has_shared_gate: bool = False
    scales: str | None = None
    latent_size: int = 0
    has_latent_biases: bool = False

    def __post_init__(self) -> None:
        assert not self.weighs_inputs or self.rule.top_k == 1
        is_known = self.activation in (SILU, RELU_SQUARED)
        assert not self.shared_size or is_known, "a shared expert has SiLU, or squared ReLU without a gate"

    @property
    def expert_sizes(self) -> ExpertSizes:
        """Sizes of all experts."""
        num_projections = self.activation.num_projections
        return ExpertSizes(self.num_experts, self.expert_size, num_projections, self.has_expert_biases)

    def linears(self, names: TensorNames, hidden_size: int) -> dict[str, LinearShape]:
        """Declare all linear layers but those of experts; the router has the first of its names."""
        own, whole = self.names, Partition.REPLICATED
        router = LinearShape((own.router[0],), (self.num_experts,), hidden_size, whole, self.has_router_bias)
        found = {"router": replace(router, is_rounded=False)}
        if self.shared_size:
            *both, down = (f"{own.shared}.{name}" for name in own.shared_matrices)
            inner, count = self.shared_size, self.activation.num_projections
            found["shared.gate_up"] = LinearShape(
                tuple(both),
                (count * inner // len(both),) * len(both),
                hidden_size,
                Partition.COLUMN,
                has_bias=self.has_shared_biases,
                parts=(inner,) * count,
            )
            has_biases, scale = self.has_shared_biases, self.shared_scale
            found["shared.down"] = to_stream(down, hidden_size, inner, has_bias=has_biases, scale=scale)
        if self.shared_size and self.has_shared_gate:
            found["shared.gate"] = LinearShape((own.shared_gate,), (1,), hidden_size, whole, is_rounded=False)
        if self.latent_size:
            sizes, has_bias = (self.latent_size, hidden_size), self.has_latent_biases
            for name, module, rows, columns in zip(("down", "up"), own.latent, sizes, sizes[::-1], strict=True):
                found[f"latent.{name}"] = LinearShape((module,), (rows,), columns, whole, has_bias, is_rounded=False)
        return found

    def take(self, source: LayerSource, prefix: str) -> MixtureWeights:
        """Take the weights of the layer `prefix`."""
        shapes = self.linears(source.block.names, source.hidden_size)
        checkpoint, router = source.checkpoint, self.router_of(source, prefix)
        rule = self.rule
        if self.has_choice_bias:
            # What chooses among scores that differ little must not be rounded with the other weights.
            rule = replace(rule, bias=self._take_choice_bias(source, prefix, router.modules[0]))
        inputs = self.latent_size or source.hidden_size
        gate_up, down = take_experts(source.projections, self.names, prefix, self.expert_sizes, inputs)
        latent = (
            [source.linear(prefix, shapes[f"latent.{name}"]) for name in ("down", "up")] if self.latent_size else []
        )
        return MixtureWeights(
            router=_take_plain(source, prefix, router),
            rule=rule,
            gate_up=gate_up,
            down=down,
            activation=self.activation,
            shared=self._take_shared(source, prefix, shapes) if self.shared_size else None,
            weighs_inputs=self.weighs_inputs,
            scales=checkpoint.take_float32(f"{prefix}.{self.scales}", self.num_experts) if self.scales else None,
            latent=(latent[0], latent[1]) if latent else None,
            modules=self.modules_of(source, prefix),
        )

    def router_of(self, source: LayerSource, prefix: str) -> LinearShape:
        """Declare the router by the name that the checkpoint has for it, or else by the first."""
        names, has = self.names.router, source.checkpoint.has
        router = next((name for name in names if has(f"{prefix}.{name}.weight")), names[0])
        return replace(self.linears(source.block.names, source.hidden_size)["router"], modules=(router,))

    def modules_of(self, source: LayerSource, prefix: str) -> ExpertModules:
        """Name the matrices of all experts as adapters do."""
        module = experts_module(source.projections, self.names, prefix)
        return ExpertModules(
            tuple(f"{module}.{expert}" for expert in range(self.num_experts)),
            tuple(self.names.matrices),
            self.expert_size,
            self.latent_size or source.hidden_size,
            self.rule.top_k,
            layer=prefix,
            is_interleaved=self.names.is_interleaved or self.names.has_interleaved_adapters,
        )

    def _take_choice_bias(self, source: LayerSource, prefix: str, router: str) -> torch.Tensor:
        name = f"{router}.{_CHOICE_BIAS}" if self.names.choice_bias is None else self.names.choice_bias
        row = (1,) if self.names.is_choice_bias_row else ()
        return source.checkpoint.take_float32(f"{prefix}.{name}", *row, self.num_experts).view(self.num_experts)

    def _take_shared(self, source: LayerSource, prefix: str, shapes: Mapping[str, LinearShape]) -> SharedExpertWeights:
        gate_up, gate = source.linear(prefix, shapes["shared.gate_up"]), shapes.get("shared.gate")
        score = None if gate is None else _take_plain(source, prefix, gate)
        return SharedExpertWeights(gate_up, source.linear(prefix, shapes["shared.down"]), score)


def _take_plain(source: LayerSource, prefix: str, shape: LinearShape) -> Projection:
    """Take a router, which most tools leave alone without saying so: it is not a linear layer to them."""
    has, name = source.checkpoint.has, f"{prefix}.{shape.modules[0]}"
    is_quantized = not has(f"{name}.weight") or any(has(f"{name}.{scales}") for scales in _SCALES)
    return source.linear(prefix, shape, None if is_quantized else replace(source.projections, quantized=None))


@dataclass(frozen=True, slots=True)
class SharedExpertWeights:
    """The expert that all tokens get."""

    gate_up: Projection
    down: Projection
    gate: Projection | None = None

    def block(self, parts: LayerParts, activation: ExpertActivation) -> SharedExpert:
        """Make the block, which has a gate where experts of this `activation` have one."""
        first, down = parts.linear(self.gate_up), parts.linear(self.down)
        is_gated = isinstance(activation, GatedActivation)
        block = GatedMLP(first, down) if is_gated else PlainMLP(first, down, Activation.RELU_SQUARED)
        return SharedExpert(block, None if self.gate is None else parts.linear(self.gate))


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts.

    Attributes:
        router: `[num_experts, hidden_size]`.
        rule: From the router's logits to experts and their weights.
        activation: Of all experts; without gates, the shared one has none either.
        weighs_inputs: A token's weight multiplies what its expert is given.
        scales: `[num_experts]` float32, what the weights of tokens are multiplied by, if anything.
        latent: To what experts are given, and back from what they give, where that is not the stream.
        modules: What adapters call the matrices of experts, and their sizes on all ranks.
    """

    router: Projection
    rule: RoutingRule
    gate_up: ExpertWeights
    down: ExpertWeights
    activation: ExpertActivation
    shared: SharedExpertWeights | None = None
    weighs_inputs: bool = False
    scales: torch.Tensor | None = None
    latent: tuple[Projection, Projection] | None = None
    modules: ExpertModules | None = None

    def block(self, parts: LayerParts) -> Mixture:
        """Make the block."""
        latent = None if self.latent is None else (parts.linear(self.latent[0]), parts.linear(self.latent[1]))
        return Mixture(
            parts.linear(self.router),
            self.rule,
            parts.experts(self.gate_up, self.down, self.activation, self.modules),
            None if self.shared is None else self.shared.block(parts, self.activation),
            weighs_inputs=self.weighs_inputs,
            scales=self.scales,
            latent=latent,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """The expert of all tokens, whose result may be weighed by a score of the token's own.

    Source: Dai et al., DeepSeekMoE, arXiv 2401.06066, section 3.2; the gate is Qwen2-MoE's.
    """

    block: GatedMLP | PlainMLP
    gate: Linear | None

    def __call__(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        result = self.block(x, context)
        return result if self.gate is None else times_sigmoid(result, self.gate.to_float32(x, context))


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A mixture of experts.

    Source: Shazeer et al., arXiv 1701.06538; the rules of routing are those of `kernels.moe`.
    """

    router: Linear
    rule: RoutingRule
    experts: Experts
    shared: SharedExpert | None = None
    weighs_inputs: bool = False
    scales: torch.Tensor | None = None
    latent: tuple[Linear, Linear] | None = None

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """How many tokens each expert got since the block was made: `[num_experts]` int64, on the device."""
        return self.experts.tokens_per_expert

    def __call__(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Transform `x: [num_tokens, hidden_size]`."""
        return self.transform(x, x, context)

    def transform(self, x: torch.Tensor, scored: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Transform `x` by the experts that the router chooses by `scored`; both are `[num_tokens, hidden_size]`."""
        ids, weights = route(self.router.to_float32(scored, context), self.rule)
        if self.scales is not None:
            weights = weights * self.scales[ids]
        given = x if self.latent is None else self.latent[0](x, context)
        if self.weighs_inputs:
            given, weights = given * weights.to(x.dtype), torch.ones_like(weights)
        result = self.experts(given, ids, weights, context.adapters)
        if self.latent is not None:
            result = self.latent[1](result, context)
        return result if self.shared is None else result + self.shared(x, context)


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens on experts since the model was loaded.

    Attributes:
        tokens: Times that an expert was given a token, over all layers.
        imbalance: The most that an expert got over the mean of its layer, in the layer where that is most; 0 before
            the first token.
        unused: Experts, over all layers, that no token went to.
    """

    tokens: int
    imbalance: float
    unused: int


class ExpertLoads:
    """Reads the counters of a model's mixtures; any thread may do so while steps are computed. It waits for a GPU."""

    def __init__(self, tokens_per_expert: Sequence[torch.Tensor]) -> None:
        self._counters = tuple(tokens_per_expert)
        self._sizes = [len(counter) for counter in self._counters]
        device = self._counters[0].device
        # A stream of its own, because that of the model has steps before and behind whatever is put into it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def by_layer(self) -> list[torch.Tensor]:
        """Return the tokens that each expert got since the model was loaded, `[num_experts]` int64 a layer."""
        with torch.cuda.stream(self._stream):
            # One copy from the device, however many layers there are.
            return list(torch.cat(self._counters).cpu().split_with_sizes(self._sizes))

    def read(self) -> ExpertLoad:
        """Return the numbers of this moment."""
        counts = [counter.double() for counter in self.by_layer()]
        busiest = [float(layer.max() / layer.mean()) for layer in counts if layer.any()]
        unused = sum(int((layer == 0).sum()) for layer in counts)
        return ExpertLoad(int(sum(float(layer.sum()) for layer in counts)), max(busiest, default=0.0), unused)
