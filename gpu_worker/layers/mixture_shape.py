"""What a mixture of experts consists of: its sizes and options, and what checkpoints call its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.moe import RELU_SQUARED, SILU, ExpertActivation, RoutingRule


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """What a family calls the parts of a mixture, below the name of the layer.

    Where checkpoints of a family differ, because tools rename what they save, there are several names: the first that
    the checkpoint has is meant.

    Attributes:
        router: The module that scores the experts.
        experts: The module that holds them all.
        matrices: An expert's gate, up and down projections, below that module and the expert's number; two, where
            experts have no gates.
        stacked: Tensors `[num_experts, ...]` of the gates and up projections together, and of the down projections.
        is_transposed: Stacked matrices are `[in_features, out_features]`; None is as each one's shape says.
        is_interleaved: In stacked matrices the features of gate and up projection alternate.
        choice_bias: The bias for the choice; None is the router's `e_score_correction_bias`.
        is_choice_bias_row: It is stored as a matrix of one row.
        shared: The module of the expert that all tokens get, which is stored as a plain block is.
        shared_matrices: Its gate, up and down projections below that module; two, where the first two are one, or
            there is no gate.
        shared_gate: The module that weighs its result.
        latent: The modules from the stream to what experts are given, and from what they give back.
    """

    router: Sequence[str] = ("mlp.gate",)
    experts: Sequence[str] = ("mlp.experts",)
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: Sequence[tuple[str, str]] = (("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),)
    is_transposed: bool | None = False
    is_interleaved: bool = False
    choice_bias: str | None = None
    is_choice_bias_row: bool = False
    shared: str = "mlp.shared_expert"
    shared_matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str = "mlp.shared_expert_gate"
    latent: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """A feed-forward block of experts, of which each token gets some, and one that all tokens get.

    Attributes:
        expert_size: Features between the matrices of an expert.
        rule: Of routing; a bias for the choice is not in it yet.
        activation: Of the experts. The shared expert has SiLU, or squared ReLU without a gate where they have it.
        has_router_bias: Logits of the router have a bias.
        has_choice_bias: The checkpoint has a bias for the choice alone.
        has_expert_biases: The projections of experts have biases.
        weighs_inputs: A token's weight multiplies what its expert is given, not what it gives. One expert a token.
        shared_size: Features between the matrices of the shared expert; 0 where there is none.
        shared_scale: What it gives is multiplied by.
        has_shared_biases: Its projections have biases.
        has_shared_gate: The shared expert's result is multiplied by the sigmoid of a score.
        scales: The tensor of numbers, one an expert, that the weights of tokens are multiplied by; None is none.
        latent_size: Features of what experts are given and give back; 0 is the size of the stream, as it is.
        has_latent_biases: The projections to those features and back have biases.
    """

    num_experts: int
    expert_size: int
    rule: RoutingRule
    names: MixtureNames = MixtureNames()
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
