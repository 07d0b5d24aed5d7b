"""What drafts learn from: rows of tokens, and what the target made of them, computed once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_worker.text.tokenizer import ModelTokenizer
from ops.quantize.calibration import read_text
from ops.train_draft.target import HiddenVectors
from shared.errors import ConfigError

HIDDEN_DTYPE = torch.bfloat16
"""What the target's hidden vectors are kept in."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows.

    Attributes:
        token_ids: `[num_rows, length]` int64
        hidden: `[num_rows, length, hidden_size]` float32, what the target made of them
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor


def encode_files(
    tokenizer: ModelTokenizer, files: tuple[Path, ...], least: int, variable: str = "HEADRACE_TEXT"
) -> torch.Tensor:
    """Return the token ids of text files, end to end.

    Special tokens that are spelled in a text are such tokens, so that ends of documents can be told.

    Shapes:
        result: `[num_tokens]` int64

    Raises:
        ConfigError: A file cannot be read, or all together have fewer than `least` tokens; names `variable`.
    """
    texts = [read_text(file, variable) for file in files]
    token_ids = [token for text in texts if text for token in tokenizer.encode_text(text)]
    if len(token_ids) < least:
        problem = f"has {len(token_ids)} tokens in all; training needs at least {least}: give more text, or less window"
        raise ConfigError(variable, problem)
    return torch.tensor(token_ids)


def cut(token_ids: torch.Tensor, length: int) -> torch.Tensor:
    """Cut a text into rows that do not overlap.

    Shapes:
        result: `[num_tokens // length, length]`
    """
    return token_ids[: len(token_ids) // length * length].view(-1, length)


class Rows:
    """Owns the rows and the target's hidden vectors for them."""

    def __init__(self, token_ids: torch.Tensor, hidden_size: int) -> None:
        """Begin without hidden vectors; `compute` makes them.

        Shapes:
            token_ids: `[num_rows, length]` int64
        """
        self.token_ids = token_ids
        self._hidden = torch.zeros(*token_ids.shape, hidden_size, dtype=HIDDEN_DTYPE)

    def compute(self, target: HiddenVectors) -> Iterator[int]:
        """Compute the hidden vectors, reporting each row's number of tokens when it is done."""
        for row, kept in zip(self.token_ids, self._hidden, strict=True):
            kept.copy_(target.of(row))
            yield len(row)

    def batch(self, numbers: torch.Tensor) -> Batch:
        """Return the rows of these numbers."""
        return Batch(self.token_ids[numbers], self._hidden[numbers].float())

    def batches(self, num_rows: int, generator: torch.Generator) -> Iterator[Batch]:
        """Draw batches without end, in a new random order each time that the rows have been through."""
        while True:
            order = torch.randperm(len(self.token_ids), generator=generator)
            for start in range(0, max(1, len(order) - num_rows + 1), num_rows):
                yield self.batch(order[start : start + num_rows])
