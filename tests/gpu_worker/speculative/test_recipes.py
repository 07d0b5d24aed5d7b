"""Room for proposers, counted from what they would load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.execution.memory.kv_cache import bytes_per_block
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.json_file import CheckpointError
from gpu_worker.models.registry import read_model_config
from gpu_worker.speculative.draft_files import draft_dtype, open_draft_weights, rows_num_bytes
from gpu_worker.speculative.ngram.proposer import BYTES_PER_TOKEN
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import with_room_for_proposer
from shared.errors import ConfigError
from tests.gpu_worker.models.recurrent_models import save_case
from tests.gpu_worker.speculative.draft_files import eagle_config, eagle_tensors, save_draft

DEMO_MODEL = Path("ops/demo_model/model")
ROWS = 16


def room(**settings: Any) -> RunnerConfig:
    config = WorkerConfig(model=DEMO_MODEL, **settings)
    base = RunnerConfig(DEMO_MODEL, dtype="float32", device="cuda", max_num_seqs=ROWS)
    return with_room_for_proposer(config, base)


def test_without_speculation_nothing_changes() -> None:
    assert room() == RunnerConfig(DEMO_MODEL, dtype="float32", device="cuda", max_num_seqs=ROWS)


def test_proposer_that_loads_nothing_takes_nothing_of_a_gpu() -> None:
    config = room(speculative="ngram", num_speculative_tokens=7)
    assert (config.max_draft_tokens, config.proposer_bytes, config.proposer_block_bytes) == (7, 0, 0)


def test_drafts_are_no_more_than_a_step_verifies() -> None:
    assert room(speculative="ngram", num_speculative_tokens=64).max_draft_tokens == 63


def test_draft_model_takes_its_weights_and_a_cache_of_as_many_tokens() -> None:
    config = room(speculative="draft", draft_model=DEMO_MODEL)
    model = read_model_config(DEMO_MODEL)
    numbers = sum(tensor.numel() for path in DEMO_MODEL.glob("*.safetensors") for tensor in load_file(path).values())
    rows = 2 * 4 * ROWS * model.vocab_size
    assert config.proposer_bytes == 4 * numbers + rows
    assert config.proposer_block_bytes == bytes_per_block(16, model, torch.float32)


def test_pickled_layer_is_to_be_converted_unless_it_stands_beside_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"model\.bin: is pickled, .*; convert its tensors to model\.safetensors"):
        open_draft_weights(tmp_path, torch.float32, torch.device("cpu"))
    save_file({"fc.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_draft_weights(tmp_path, torch.float32, torch.device("cpu")) as weights:
        assert weights.has("fc.weight")


def test_draft_model_whose_states_cannot_take_drafts_back_is_refused(tmp_path: Path) -> None:
    save_case("qwen3_5", tmp_path)
    with pytest.raises(ConfigError, match=r"HEADRACE_DRAFT_MODEL: .* has recurrent layers .* set HEADRACE_SPECULATIVE"):
        room(speculative="draft", draft_model=tmp_path)


def test_eagle_layer_takes_its_weights_and_entries_beside_each_block(tmp_path: Path) -> None:
    layer = eagle_tensors(256)
    save_draft(tmp_path / "eagle", eagle_config(256, 4096), layer)
    config = room(speculative="eagle", draft_model=tmp_path / "eagle")
    assert config.proposer_bytes == sum(4 * tensor.numel() for tensor in layer.values())
    keys = next(tensor for name, tensor in layer.items() if name.endswith("k_proj.weight"))
    assert config.proposer_block_bytes == 2 * 4 * 16 * keys.shape[0]


def test_on_a_cpu_room_is_kept_in_the_memory_of_the_host() -> None:
    base = RunnerConfig(DEMO_MODEL, dtype="float32", max_num_seqs=ROWS)
    config = with_room_for_proposer(WorkerConfig(speculative="draft", draft_model=DEMO_MODEL), base)
    assert config.max_draft_tokens == 5
    model = read_model_config(DEMO_MODEL)
    assert config.proposer_block_bytes == bytes_per_block(16, model, draft_dtype(base))
    assert config.proposer_bytes > rows_num_bytes(base, model)


def test_index_of_ngrams_is_counted_in_the_memory_of_the_host() -> None:
    config = with_room_for_proposer(WorkerConfig(speculative="ngram"), RunnerConfig(DEMO_MODEL, block_size=32))
    assert config.proposer_block_bytes == 32 * BYTES_PER_TOKEN
