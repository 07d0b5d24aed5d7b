"""Writes small GGUF files, and reads them beside an oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from gpu_worker.models.loader import load_model
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits

VOCAB_SIZE = 99


@contextmanager
def written(path: Path, architecture: str) -> Iterator[Any]:
    """Give a writer; what it was told is in the file when the block ends."""
    writer: Any = gguf.GGUFWriter(path, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_vocabulary(writer: Any, size: int = VOCAB_SIZE) -> None:
    """Tokens without a meaning; the last two begin and end sequences."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{index}" for index in range(size)])
    writer.add_token_types([1] * (size - 2) + [3, 3])
    writer.add_token_merges([])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)


def names_of(architecture: str, num_layers: int) -> Callable[[str], str]:
    """Return what names a tensor of `transformers` by the package's table; names of files stay as they are."""
    archs = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[architecture], num_layers)

    def name(own: str) -> str:
        stored = own if own.startswith("blk.") else names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert stored is not None, own
        return stored

    return name


def once_each(factory: pytest.TempPathFactory, write: Callable[[Path, str], object]) -> Callable[[str], Path]:
    """Return what gives the file of a name, which is written when it is first asked for."""

    @functools.cache
    def make(name: str) -> Path:
        path = factory.mktemp("gguf") / f"{name}.gguf"
        write(path, name)
        return path

    return make


def file_logits(path: Path, tokens: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    """Load a file in float32, and compute a sequence in chunks of these lengths."""
    run = PagedRun(load_model(path, torch.float32, torch.device("cpu")), [tokens])
    return torch.cat([run.step({0: count})[0] for count in chunks])


def assert_file_equals(path: Path, oracle: Any, chunks: Sequence[int] = (50, 38, 1, 1)) -> None:
    """Compare a file's logits with those of an oracle with the numbers that the file holds.

    Of other sizes and seeds, a few logits of hybrids may differ by up to ten times the tolerance. It is rounding:
    beside an oracle in float64, `transformers` in float32 erred as much as we did (of 390 random models 27 differed
    by over 8e-5, in 16 of them by its error), and float64 moves as far when weights move by half of their last bit.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(oracle.config.get_text_config().vocab_size, (sum(chunks),), generator=generator)
    expected = oracle_logits(oracle, tokens)
    assert expected.std() > 0.05
    torch.testing.assert_close(file_logits(path, tokens, chunks), expected, atol=1e-4, rtol=1e-4)
