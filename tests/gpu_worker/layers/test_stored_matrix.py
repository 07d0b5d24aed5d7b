"""Parts of matrices that are read from a checkpoint equal those of the whole matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.layers.stored_matrix import MatrixSource, PartSource, StoredMatrix, StoredPiece, columns_of, rows_of
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.quantization.gptq import GPTQ, GPTQSettings
from kernels.linear.forms import DenseWeight, WeightForm
from tests.gpu_worker.quantization.packers import gptq, in_order, shuffled

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
