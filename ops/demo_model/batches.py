"""Batches of packed windows, and the schedule of their lengths.

Documents are laid end to end in a new random order each epoch and cut into windows; the end-of-text token marks where
one document stops and the next begins. Short windows come first, because attention over them is cheap, and long ones
last, so that positions up to the model's limit have been trained.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

LENGTHS = ((0.0, 256), (0.5, 512), (0.8, 1024), (0.95, 2048))
"""Window length from each fraction of the training time on."""
CHAT_SHARE = 1 / 3
"""Share of the conversations that one epoch takes; they repeat text that the files have too."""


def window_length(fraction: float) -> int:
    """Return the window length at a fraction of the training time."""
    return next(length for start, length in reversed(LENGTHS) if fraction >= start)


class BatchSource:
    """Draws batches without end; owns the random order and the position in the current epoch."""

    def __init__(self, files: list[list[int]], chats: list[list[int]], tokens_per_batch: int, seed: int) -> None:
        """Take the encoded documents; each ends with the end-of-text token."""
        self._files = files
        self._chats = chats
        self._tokens_per_batch = tokens_per_batch
        self._rng = random.Random(seed)
        self._length = 0
        self._windows: Iterator[Tensor] = iter(())

    def next_batch(self, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, `[tokens_per_batch // length, length]` each."""
        if length != self._length:
            self._length, self._windows = length, self._endless_windows(length)
        batch = torch.stack([next(self._windows) for _ in range(self._tokens_per_batch // length)])
        return batch[:, :-1], batch[:, 1:]

    def _endless_windows(self, length: int) -> Iterator[Tensor]:
        while True:
            chats = self._rng.sample(self._chats, int(len(self._chats) * CHAT_SHARE))
            documents = self._files + chats
            self._rng.shuffle(documents)
            tokens = torch.tensor([token for document in documents for token in document])
            starts = list(range(self._rng.randrange(length), len(tokens) - length, length))
            self._rng.shuffle(starts)
            for start in starts:
                yield tokens[start : start + length + 1]
