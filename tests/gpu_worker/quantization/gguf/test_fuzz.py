"""Mutated files are read, or refused with a `GGUFError`: nothing else happens, and little memory is taken."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.models.loader import load_model
from gpu_worker.quantization.gguf.byte_reader import GGUFError
from gpu_worker.quantization.gguf.file import GGUFFile
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.gguf.vocabularies import byte_pair_vocabulary, sentencepiece_vocabulary

MAX_BYTES = 8 << 20
SMALL = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
NUMBERS = [0, 1, 2, 3, 7, 8, 9, 31, 127, 2**8, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63, 2**64 - 1]
SHARED_PATH = [HealthCheck.function_scoped_fixture]


def _write(path: Path, vocabulary: Callable[[Any], None], size: int) -> bytes:
    write_model(path, "llama-Q8_0", vocabulary, vocab_size=size, **SMALL)
    return path.read_bytes()


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    make = {"gpt2": byte_pair_vocabulary, "llama": sentencepiece_vocabulary}[request.param]
    vocabulary = make()
    return _write(tmp_path_factory.mktemp("fuzz") / "model.gguf", vocabulary, len(vocabulary.tokens))


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """One to four changes, most of them in the header: bits, numbers, cuts, and pieces of the file moved elsewhere."""
    steps = draw(st.lists(st.tuples(st.sampled_from("bncs"), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4))
    number = draw(st.sampled_from(NUMBERS))
    width = draw(st.sampled_from([1, 4, 8]))
    bit = draw(st.integers(0, 7))

    def mutate(data: bytes) -> bytes:
        for kind, where, other in steps:
            # Squared, so that the small numbers at the beginning are hit often.
            at, source = int(where**2 * len(data)), int(other**2 * len(data))
            if kind == "b":
                data = data[:at] + bytes(byte ^ (1 << bit) for byte in data[at : at + 1]) + data[at + 1 :]
            elif kind == "n":
                data = data[:at] + (number % 256**width).to_bytes(width, "little") + data[at + width :]
            elif kind == "c":
                data = data[:at]
            else:
                data = data[:at] + data[source : source + 64] + data[at:]
        return data

    return mutate


def _peak_of(action: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(max_examples=100, suppress_health_check=SHARED_PATH)
@given(mutate=mutations())
def test_mutated_file_is_read_or_refused(content: bytes, mutate: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutate(content))

    def read() -> None:
        with contextlib.suppress(GGUFError), GGUFFile(path) as file:
            for info in file.tensors.values():
                assert len(file.rows(info, 0, 1)[0]) == info.row_bytes

    assert _peak_of(read) < MAX_BYTES


@settings(max_examples=100, suppress_health_check=SHARED_PATH)
@given(mutate=mutations())
def test_model_of_a_mutated_file_is_loaded_or_refused(
    content: bytes, mutate: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutate(content))
    with contextlib.suppress(GGUFError):
        load_model(path, torch.float32, torch.device("cpu"), max_model_len=32)
    # The tokenizers library and the chat template have errors of their own, which the worker reports as a setting's.
    with contextlib.suppress(GGUFError, ConfigError):
        ModelTokenizer(read_model_directory(path)).encode_text("some text, 日本\n")
