"""Trees of guesses at the end of sequences, and what attention makes of each of their paths alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.paged_attention.reference import paged_attention_reference
from tests.kernels.paged_batch import PagedBatch, PagedSequence, Shape, make_batch, make_sequence


@dataclass(frozen=True)
class Tree:
    """A sequence whose last tokens are guesses: of each the number of the guess before it, None for the first ones.

    Its queries are the guesses and the `num_before` tokens before them.
    """

    length: int
    parents: Sequence[int | None] = ()
    num_before: int = 1

    @property
    def num_queries(self) -> int:
        return self.num_before + len(self.parents)

    def path(self, query: int) -> list[int]:
        """Return the slots of the tokens that a query sees."""
        trunk, guess = self.length - len(self.parents), query - self.num_before
        if guess < 0:
            return list(range(trunk + guess + 1))
        parent = self.parents[guess]
        before = list(range(trunk)) if parent is None else self.path(self.num_before + parent)
        return [*before, trunk + guess]

    def masks(self) -> list[int]:
        masks = []
        for query in range(self.num_queries):
            own, seen = self.length - self.num_queries + query, set(self.path(query))
            bits = sum(1 << i for i in range(64) if own - i in seen or own - i < 0)
            masks.append(bits - (1 << 64) if bits >> 63 else bits)
        return masks


def random_tree(length: int, num_guesses: int, seed: int, num_before: int = 1) -> Tree:
    generator = random.Random(seed)
    parents = [generator.choice([None, *range(guess)]) for guess in range(num_guesses)]
    return Tree(length, parents, num_before)


@dataclass(frozen=True)
class AnyMasks(Tree):
    """A sequence whose `num_before` last tokens each hide any of the 63 before them, the furthest always."""

    def path(self, query: int) -> list[int]:
        own = self.length - self.num_queries + query
        hidden = {own - 63, *(own - i for i in random.Random(own).sample(range(1, 63), 30))}
        return [slot for slot in range(own + 1) if slot not in hidden]


def deep_tree(length: int, depth: int, num_before: int = 1) -> Tree:
    """A chain of guesses with a branch off its first, its middle, and its last but one."""
    chain = [None, *range(depth - 1)]
    return Tree(length, [*chain, 0, depth // 2, depth - 2], num_before)


def tree_batch(trees: Sequence[Tree], shape: Shape) -> tuple[PagedBatch, torch.Tensor]:
    """Lay sequences into a batch, and return it with its masks."""
    sequences = [make_sequence(tree.length, shape, seed=tree.length) for tree in trees]
    batch = make_batch(sequences, [tree.num_queries for tree in trees], shape)
    return batch, torch.tensor([mask for tree in trees for mask in tree.masks()])


def attend_to_paths(trees: Sequence[Tree], shape: Shape, *options: int | float | None) -> torch.Tensor:
    """Attend from each query of a `tree_batch` alone, as the last token of a sequence that is its path."""
    alone: list[PagedSequence] = []
    for tree in trees:
        sequence = make_sequence(tree.length, shape, seed=tree.length)
        paths = map(tree.path, range(tree.num_queries))
        alone += [PagedSequence(sequence.query[path], sequence.key[path], sequence.value[path]) for path in paths]
    batch = make_batch(alone, [1] * len(alone), shape)
    return paged_attention_reference(*batch.arguments(), *options, kv_scales=batch.kv_scales)
