"""The start-up benchmark: its checkpoints load, its children answer, failures are reported."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu_worker.models.loader import load_model
from ops.bench.make_model import SHAPES, Shape, write_checkpoint
from ops.bench.peers.engines import PeerUnavailableError
from ops.bench.startup import __main__ as startup
from ops.bench.startup.engine_start import memory_said

TINY = Shape(96, 32, 48, 3, 4, 2, is_tied=False, max_len=64)


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1 << 20, 1), (20_000, 4)])
def test_checkpoints_of_any_sharding_load(tmp_path: Path, shard_bytes: int, num_files: int) -> None:
    num_bytes = write_checkpoint(TINY, tmp_path, shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) >= num_files
    assert num_bytes == sum(tensor.nbytes for path in files for tensor in load_file(path).values())
    model = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert model.config.num_layers == 3


def test_failed_child_is_told_with_its_last_words(tmp_path: Path) -> None:
    # Any child: this one takes a number for its first argument.
    with pytest.raises(PeerUnavailableError, match=f"ended with 1: .*convert string to float: '{tmp_path}'"):
        startup.run_child("floor_server", tmp_path, "cpu")


@pytest.mark.slow
def test_group_starts_from_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(TINY, tmp_path, 1 << 20)
    result = startup.run_child("startup.engine_start", tmp_path, "cpu", "2")
    assert 0 < result["load_s"] < result["ready_s"]
    assert result["compiled"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["160m-moe", "160m-hybrid", "160m-latent"])
def test_engine_starts_from_a_checkpoint_of_every_kind(name: str, tmp_path: Path) -> None:
    """Fewer and narrower layers, heads as they are."""
    shape = replace(
        SHAPES[name], vocab_size=96, num_layers=2, intermediate_size=64, attends_every=2 * (name == "160m-hybrid")
    )
    write_checkpoint(shape, tmp_path)
    result = startup.run_child("startup.engine_start", tmp_path, "cpu", "1", "decode")
    assert 0 < result["load_s"] < result["ready_s"]
    assert result["compiled"] == 0


def test_memory_of_the_worker_stands_beside_the_drivers() -> None:
    said = memory_said()
    logger = logging.getLogger("gpu_worker.execution.build")
    for line in ("memory: weights 16.1 GB", "loaded it"):
        logger.info(line)
    found = {"driver_gb": 130.1, "reserved_gb": 120, "kv_cache_gb": 99, "device_gb": 150.8}
    assert startup.memory_lines({"memory": said, "compiled_kernels": ["sort_kernel"], **found}) == [
        "memory: weights 16.1 GB",
        "driver: driver 130.1 GB, reserved 120 GB, kv_cache 99 GB, device 150.8 GB",
        "compiled while serving: sort_kernel",
    ]
    assert startup.memory_lines({"memory": [], "compiled_kernels": []}) == []


def test_files_in_memory_are_never_called_cold() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        directory = Path(name)
        (directory / "model.safetensors").write_bytes(bytes(4096))
        startup.evict(directory)
        assert startup.is_cached(directory)


def test_without_a_gpu_no_checkpoint_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert startup.main(["--shapes", "8b", "--device", "cuda", "--folder", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
