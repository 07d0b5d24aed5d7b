"""What kind of draft weights a directory holds, from its configuration and the names of its tensors."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import torch

from gpu_worker.models.json_file import JsonFile
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.speculative.draft_weights import MEDUSA_FILE, open_draft_weights
from gpu_worker.speculative.eagle.config import is_third


class DraftKind(Enum):
    """Kinds of draft weights, as the setting `speculative` names them."""

    MODEL = "draft"
    MEDUSA = "medusa"
    EAGLE = "eagle"


def read_draft_kind(directory: Path) -> DraftKind:
    """Tell a directory's kind.

    Raises:
        HeadraceError: A file is missing or damaged.
    """
    if find_gguf(directory) is not None:
        return DraftKind.MODEL
    config = JsonFile.read(directory / "config.json")
    architectures = config.texts("architectures")
    if (
        (directory / MEDUSA_FILE).exists()
        or config.names() & {"medusa_num_heads", "medusa_num_layers"}
        or config.text("model_type", "") == "medusa"
        or "MedusaModel" in architectures
    ):
        return DraftKind.MEDUSA
    if is_third(config):
        return DraftKind.EAGLE
    with open_draft_weights(directory, torch.float32, torch.device("cpu")) as weights:
        return DraftKind.EAGLE if weights.has("fc.weight") else DraftKind.MODEL
