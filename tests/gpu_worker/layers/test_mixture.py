"""What a block of experts declares, beside the experts themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gpu_worker.layers import linear
from gpu_worker.layers.adapters import ExpertModules, ExpertShare
from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.layers.experts import MixtureNames
from gpu_worker.layers.linear import LayerParts, LinearShape, Partition
from gpu_worker.layers.mixture import ExpertLoads, MixtureShape
from gpu_worker.layers.rotations import Rotations
from kernels.activation.experts import RELU_SQUARED, SILU, ExpertActivation
from kernels.linear import LinearFactory
from kernels.moe import ExpertWeights, RoutingRule

HIDDEN, WHOLE = 12, Partition.REPLICATED
ROUTER = LinearShape(("mlp.gate",), (8,), HIDDEN, WHOLE, is_rounded=False)
SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")


def declared(names: MixtureNames | None = None, **fields: object) -> dict[str, LinearShape]:
    shape = MixtureShape(8, 5, RoutingRule(2), names or MixtureNames(), **fields)  # type: ignore[arg-type]
    return shape.linears(TensorNames(), HIDDEN)


def assert_equal(found: dict[str, LinearShape], expected: dict[str, LinearShape]) -> None:
    as_fields = [{name: dataclasses.asdict(shape) for name, shape in shapes.items()} for shapes in (found, expected)]
    assert as_fields[0] == as_fields[1]


def test_router_alone_is_declared_where_there_is_nothing_else() -> None:
    assert_equal(declared(), {"router": ROUTER})
    assert_equal(declared(has_shared_gate=True), {"router": ROUTER})
    router = LinearShape(("a",), (8,), HIDDEN, WHOLE, has_bias=True, is_rounded=False)
    assert_equal(declared(MixtureNames(router=("a", "b")), has_router_bias=True), {"router": router})


@pytest.mark.parametrize("has_biases", [False, True])
def test_shared_expert_is_divided_like_a_plain_block_and_its_score_is_whole(has_biases: bool) -> None:
    found = declared(shared_size=6, shared_scale=0.5, has_shared_biases=has_biases, has_shared_gate=True)
    expected = {
        "router": ROUTER,
        "shared.gate_up": LinearShape(SHARED[:2], (6, 6), HIDDEN, Partition.COLUMN, has_biases, parts=(6, 6)),
        "shared.down": LinearShape(SHARED[2:], (HIDDEN,), 6, Partition.ROW, has_biases, scales=((HIDDEN, 0.5),)),
        "shared.gate": LinearShape(("mlp.shared_expert_gate",), (1,), HIDDEN, WHOLE, is_rounded=False),
    }
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("matrices", "activation", "rows", "parts"),
    [
        # The first two are one.
        (("in", "out"), None, (12,), (6, 6)),
        # There is no gate.
        (("in", "out"), RELU_SQUARED, (6,), (6,)),
    ],
)
def test_shared_expert_of_two_matrices_has_both_projections_in_the_first_or_no_gate(
    matrices: tuple[str, ...], activation: ExpertActivation | None, rows: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    fields = {} if activation is None else {"activation": activation}
    first = declared(MixtureNames(shared_matrices=matrices), shared_size=6, **fields)["shared.gate_up"]
    assert (first.modules, first.rows, first.parts) == (("mlp.shared_expert.in",), rows, parts)


@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_of_a_smaller_size_are_given_it_and_give_it_back(has_biases: bool) -> None:
    found = declared(latent_size=4, has_latent_biases=has_biases)
    expected = {
        "router": ROUTER,
        "latent.down": LinearShape(("mlp.fc1_latent_proj",), (4,), HIDDEN, WHOLE, has_biases, is_rounded=False),
        "latent.up": LinearShape(("mlp.fc2_latent_proj",), (HIDDEN,), 4, WHOLE, has_biases, is_rounded=False),
    }
    assert_equal(found, expected)


def test_loads_of_all_layers_are_one_copy_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the device once more."""
    copied: list[list[int]] = []

    def copy(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        copied.append(self.tolist())
        return self

    for name in ("cpu", "to", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, copy)
    loads = ExpertLoads([torch.tensor(counts) for counts in ([3, 1], [0, 0, 6], [5])])
    by_layer = loads.by_layer()
    assert copied == [[3, 1, 0, 0, 6, 5]]
    assert [layer.tolist() for layer in by_layer] == [[3, 1], [0, 0, 6], [5]]
    assert loads.read().tokens == 15


def test_experts_know_among_how_many_places_of_all_ranks_tokens_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that a GPU estimates the rows of each: two experts of eight, one of which is on two ranks."""
    made: list[tuple[Any, ...]] = []
    make = linear.make_experts
    monkeypatch.setattr(linear, "make_experts", lambda *args: made.append(args[4:]) or make(*args))
    share = ExpertShare(8, (*range(8), 3, 5), range(4, 6))
    names = ("gate_proj", "up_proj", "down_proj")
    modules = ExpertModules(("4", "5"), names, 16, 8, 2, "mlp", is_interleaved=False, share=share)
    parts = LayerParts.made_by(LinearFactory(lambda: 0), Rotations([], 8, torch.device("cpu")))
    weights = ExpertWeights.dense(torch.zeros(2, 32, 8)), ExpertWeights.dense(torch.zeros(2, 8, 16))
    parts.experts(*weights, SILU, modules)
    parts.experts(*weights, SILU, None)
    assert made == [(4, 10), (0, None)]
