from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu_worker.speculative.draft_files import (
    eagle3_config,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    save_draft,
)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with drafters for the demo model, by the names of their proposers, and one for another model."""
    directory = tmp_path_factory.mktemp("drafts")
    torch.manual_seed(1)
    save_draft(directory / "eagle", eagle_config(256, 4096), eagle_tensors(256))
    save_draft(directory / "another", eagle_config(64, 4096), eagle_tensors(64))
    save_draft(directory / "eagle3", eagle3_config(256, 4096, 500), eagle3_tensors(256, 4096, 500))
    return directory
