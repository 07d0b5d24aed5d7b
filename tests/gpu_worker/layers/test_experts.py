"""Experts as checkpoints store them, written here number by number: all ways give the same matrices.

Parts of matrices that are read from a checkpoint equal those of the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.layers.experts import MixtureNames, take_experts
from gpu_worker.layers.layer_source import Projections, QuantizedLayers
from gpu_worker.layers.mixture import MixtureShape
from gpu_worker.layers.stored_matrix import MatrixSource, PartSource, StoredMatrix, StoredPiece, columns_of, rows_of
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.quantization.gptq import GPTQ, GPTQSettings
from gpu_worker.quantization.mxfp4 import MXFP4
from gpu_worker.quantization.quantization_method import QuantizationMethod
from kernels.linear.forms import DenseWeight, WeightForm
from kernels.moe import ExpertWeights, RoutingRule
from tests.gpu_worker.quantization.packers import gptq, in_order, shuffled

EXPERTS, INNER, HIDDEN = 3, 32, 64
LAYER, MODULE = "model.layers.4", "model.layers.4.mlp.experts"
CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


def shape_of(names: MixtureNames, *, has_biases: bool = False) -> MixtureShape:
    return MixtureShape(EXPERTS, INNER, RoutingRule(2), names, has_expert_biases=has_biases)


def take(
    directory: Path, tensors: Tensors, shape: MixtureShape, method: QuantizationMethod | None = None
) -> tuple[ExpertWeights, ExpertWeights]:
    """Read a checkpoint of these tensors, of which none may be left over."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    with Checkpoint(directory, torch.float32, CPU) as source:
        quantized = None if method is None else QuantizedLayers(method, source)
        taken = take_experts(Projections(source, quantized), shape.names, LAYER, shape.expert_sizes, HIDDEN)
        source.check_all_taken()
    return taken


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


GATE, UP, DOWN = (
    numbers(EXPERTS, INNER, HIDDEN),
    numbers(EXPERTS, INNER, HIDDEN, seed=1),
    numbers(3, HIDDEN, INNER, seed=2),
)
GATE_UP = torch.cat((GATE, UP), dim=1)


def own(gate: str, up: str, down: str) -> Tensors:
    return {
        f"{MODULE}.{expert}.{name}.weight": stack[expert]
        for expert in range(EXPERTS)
        for name, stack in ((gate, GATE), (up, UP), (down, DOWN))
    }


def alternating(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Features of both, in turn, along the second dimension."""
    return torch.stack((first, second), dim=2).flatten(1, 2)


WAYS: dict[str, Callable[[], tuple[Tensors, MixtureNames]]] = {
    "own tensors": lambda: (own("gate_proj", "up_proj", "down_proj"), MixtureNames()),
    "own tensors of Mixtral": lambda: (
        own("w1", "w3", "w2"),
        MixtureNames(experts=("block_sparse_moe.experts", "mlp.experts"), matrices=("w1", "w3", "w2")),
    ),
    "one stack for both": lambda: ({f"{MODULE}.gate_up_proj": GATE_UP, f"{MODULE}.down_proj": DOWN}, MixtureNames()),
    "modules of stacks": lambda: (
        {f"{LAYER}.moe.input.weight": GATE_UP, f"{LAYER}.moe.output.weight": DOWN},
        MixtureNames(stacked=(("moe.input", "moe.output"),)),
    ),
    "transposed": lambda: (
        {f"{MODULE}.gate_up_proj": GATE_UP.mT, f"{MODULE}.down_proj": DOWN.mT},
        MixtureNames(is_transposed=True),
    ),
    "transposed and in turn": lambda: (
        {f"{MODULE}.gate_up_proj": alternating(GATE, UP).mT, f"{MODULE}.down_proj": DOWN.mT},
        MixtureNames(is_transposed=True, is_interleaved=True),
    ),
    "three stacks": lambda: (
        {f"{MODULE}.gate_proj.weight": GATE, f"{MODULE}.up_proj.weight": UP, f"{MODULE}.down_proj.weight": DOWN},
        MixtureNames(),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storage_gives_the_same_matrices(tmp_path: Path, way: str) -> None:
    tensors, names = WAYS[way]()
    gate_up, down = take(tmp_path, tensors, shape_of(names))
    assert torch.equal(torch.stack([form.dequantize() for form in gate_up.forms]), GATE_UP)
    assert torch.equal(torch.stack([form.dequantize() for form in down.forms]), DOWN)


def test_biases_of_stacks_that_alternate_are_put_in_order(tmp_path: Path) -> None:
    gate_bias, up_bias, down_bias = numbers(EXPERTS, INNER), numbers(EXPERTS, INNER, seed=3), numbers(EXPERTS, HIDDEN)
    tensors, names = WAYS["transposed and in turn"]()
    tensors |= {f"{MODULE}.gate_up_proj_bias": alternating(gate_bias, up_bias), f"{MODULE}.down_proj_bias": down_bias}
    gate_up, down = take(tmp_path, tensors, shape_of(names, has_biases=True))
    assert gate_up.bias is not None
    assert torch.equal(gate_up.bias, torch.cat((gate_bias, up_bias), dim=1))
    assert down.bias is not None
    assert torch.equal(down.bias, down_bias)


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks and exponents of all experts, and the matrices that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (EXPERTS, rows, columns), generator=generator)
    exponents = torch.randint(120, 134, (EXPERTS, rows, columns // 32), generator=generator)
    dense = FP4[codes] * torch.pow(2.0, exponents.double() - 127).float().repeat_interleave(32, dim=2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).view(EXPERTS, rows, columns // 32, 16)
    return blocks, exponents.to(torch.uint8), dense


def mxfp4_tensors() -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    both, both_exponents, dense = mxfp4(2 * INNER, HIDDEN, 5)
    down, down_exponents, dense_down = mxfp4(HIDDEN, INNER, 6)
    tensors = {
        f"{MODULE}.gate_up_proj_blocks": both,
        f"{MODULE}.gate_up_proj_scales": both_exponents,
        f"{MODULE}.down_proj_blocks": down,
        f"{MODULE}.down_proj_scales": down_exponents,
    }
    return tensors, torch.cat((dense[:, 0::2], dense[:, 1::2]), dim=1), dense_down


TURNED = MixtureNames(is_transposed=True, is_interleaved=True)


def test_mxfp4_stacks_stand_for_their_numbers(tmp_path: Path) -> None:
    tensors, expected, expected_down = mxfp4_tensors()
    gate_up, down = take(tmp_path, tensors, shape_of(TURNED), MXFP4())
    assert torch.equal(torch.stack([form.dequantize() for form in gate_up.forms]), expected)
    assert torch.equal(torch.stack([form.dequantize() for form in down.forms]), expected_down)
    assert gate_up.num_bytes == expected.numel() * 17 // 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{MODULE}.gate_up_proj_blocks": t[f"{MODULE}.gate_up_proj_blocks"][:2]}), "calls for"),
        (lambda t: t.update({f"{MODULE}.down_proj_blocks": t[f"{MODULE}.down_proj_blocks"].int()}), "torch.uint8"),
        (lambda t: t[f"{MODULE}.down_proj_scales"].fill_(255), "exponents that are NaN"),
        (lambda t: t.pop(f"{MODULE}.down_proj_scales"), "down_proj_scales"),
    ],
)
def test_mxfp4_with_damage_is_refused(tmp_path: Path, change: Callable[[Tensors], object], message: str) -> None:
    tensors, _, _ = mxfp4_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        take(tmp_path, tensors, shape_of(TURNED), MXFP4())


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = own("gate_proj", "up_proj", "down_proj")
    del tensors[f"{MODULE}.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=rf"{MODULE}\.2\.up_proj"):
        take(tmp_path, tensors, shape_of(MixtureNames()))


def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    tensors = {f"{MODULE}.gate_up_proj": GATE_UP[:2], f"{MODULE}.down_proj": DOWN}
    with pytest.raises(CheckpointError, match="has shape"):
        take(tmp_path, tensors, shape_of(MixtureNames()))


COLUMNS, GROUP = 128, 32
ROWS = (16, 24)
METHOD = GPTQ(GPTQSettings(4, GROUP, desc_act=True), has_true_zeros=False)


def stored(directory: Path, group_of: np.ndarray | None, order: torch.Tensor | None = None) -> StoredMatrix:
    """Two matrices side by side, dense or in groups; `group_of` says of which group each input is."""
    tensors, generator = {}, torch.Generator().manual_seed(5)
    for name, count in zip("ab", ROWS, strict=True):
        weight = torch.randn(count, COLUMNS, generator=generator)
        packed = {"weight": weight} if group_of is None else gptq(weight, 4, group_of).tensors
        tensors |= {f"{name}.{end}": tensor for end, tensor in packed.items()}
    save_file(tensors, directory / "model.safetensors")
    checkpoint: PartSource = Checkpoint(directory, torch.float32, torch.device("cpu"))

    def piece(name: str, count: int) -> StoredPiece:
        def read(shown: MatrixSource, shape: tuple[int, int]) -> WeightForm:
            return (
                DenseWeight(shown.take(f"{name}.weight", *shape))
                if group_of is None
                else METHOD.take(shown, name, *shape)
            )

        return StoredPiece(checkpoint, name, (count, COLUMNS), read, is_quantized=group_of is not None)

    return StoredMatrix(tuple(map(piece, "ab", ROWS)), order, torch.arange(1.0, sum(ROWS) + 1))


@pytest.mark.parametrize("order", [None, torch.arange(sum(ROWS)).flip(0)], ids=["in order", "turned round"])
@pytest.mark.parametrize(
    "group_of", [None, in_order(COLUMNS, GROUP), shuffled(COLUMNS, GROUP, 5)], ids=["dense", "groups", "shuffled"]
)
def test_part_of_a_stored_matrix_is_that_of_the_whole(
    tmp_path: Path, group_of: np.ndarray | None, order: torch.Tensor | None
) -> None:
    matrix = stored(tmp_path, group_of, order)
    whole = matrix.dequantize()
    for columns in (range(COLUMNS), range(64), range(64, 128)):
        part, inputs = columns_of(matrix, columns)
        features = torch.arange(columns.start, columns.stop) if inputs is None else inputs
        assert torch.equal(part.dequantize(), whole[:, features])
    for rows in (torch.arange(8, 24), torch.tensor([3, 39, 0])):
        assert torch.equal(rows_of(matrix, rows).dequantize(), whole[rows])
