"""What `--model` may name, and that files of other content have another revision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.models.revision import model_revision
from gpu_worker.quantization.gguf.model_file import find_gguf
from gpu_worker.text.model_directory import read_model_directory
from shared.errors import ConfigError
from tests.gpu_worker.quantization.gguf.conftest import GGUFPair


def test_file_and_its_directory_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert find_gguf(file) == file
    assert find_gguf(tmp_path) == file


def test_directory_in_hugging_faces_format_is_left_alone(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "config.json"):
        (tmp_path / name).touch()
    assert find_gguf(tmp_path) is None


@pytest.mark.parametrize("name", ["none", "none.gguf", "model.safetensors"])
def test_other_paths_are_no_gguf_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path / name) is None
    with pytest.raises(
        ConfigError, match=r"name a folder in Hugging Face's format, a \.gguf file, or an id at the hub"
    ):
        read_model_directory(tmp_path / name)


def test_directory_with_two_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        find_gguf(tmp_path)


def test_revision_follows_the_files_content(gguf_pair: Callable[[str], GGUFPair], tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf_pair("llama-Q8_0").path, tmp_path / "model.gguf"))
    before = model_revision(path, "auto")
    assert model_revision(tmp_path, "auto") == before
    content = bytearray(path.read_bytes())
    content[:4096] = bytes(4096)
    path.write_bytes(content)
    assert model_revision(path, "auto") != before
