"""Mixtures of experts: which experts a token gets, and the product of tokens with the matrices of their experts.

`route` chooses, by a `RoutingRule`. `make_experts` turns the `ExpertWeights` of a layer into what its device multiplies
by; `experts_reference` is the plain formula of both.
"""

from kernels.moe.dispatch import route
from kernels.moe.expert_weights import ExpertWeights
from kernels.moe.layers import AdaptableExperts, Experts, ReplaceableExperts, make_experts
from kernels.moe.reference import RoutingRule, experts_reference, route_reference

__all__ = [
    "AdaptableExperts", "ExpertWeights", "Experts", "ReplaceableExperts", "RoutingRule", "experts_reference",
    "make_experts", "route", "route_reference",
]  # fmt: skip
