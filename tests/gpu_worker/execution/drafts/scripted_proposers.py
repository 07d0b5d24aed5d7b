"""Proposers that know how sequences go on, and mix right draft tokens with wrong ones, ."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Values

import torch

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from tests.gpu_worker.execution.engine_run import VOCAB


class ChainProposer:
    """Drafts the next tokens, each rightly with a set probability."""

    wants_hidden = False

    def __init__(self, right: dict[str, list[int]], share_right: float) -> None:
        self.right = right
        self.share_right = share_right
        self.random = random.Random(3)
        self.running: set[BatchSequence] = set()

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        self.running |= {request.sequence for request in requests}
        return [self.draft(self.next_tokens(request.sequence), request.num_tokens) for request in requests]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        raise AssertionError("it does not want to know")

    def forget(self, sequence: BatchSequence) -> None:
        self.running.discard(sequence)

    def next_tokens(self, sequence: BatchSequence) -> list[int]:
        return self.right[sequence.id][sequence.num_output_tokens :]

    def token(self, token_id: int) -> int:
        return token_id if self.random.random() < self.share_right else self.random.randrange(VOCAB)

    def draft(self, coming: list[int], count: int) -> Draft:
        return Draft(tuple(self.token(token_id) for token_id in coming[: self.random.randint(0, count)]))


class HostileProposer(ChainProposer):
    """Proposes what is not a token, or too much."""

    def draft(self, coming: list[int], count: int) -> Draft:
        token_ids = tuple(self.random.choice([0, VOCAB - 1, VOCAB, -1, 10**12, *coming[:1]]) for _ in range(count + 2))
        return Draft(token_ids)


class WatchingProposer(ChainProposer):
    """Keeps the hidden vectors that it was shown of each sequence, by position."""

    wants_hidden = True

    def __init__(self, right: dict[str, list[int]], share_right: float) -> None:
        super().__init__(right, share_right)
        self.seen: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        for part in computed:
            of_sequence = self.seen.setdefault(part.sequence.id, {})
            assert len(part.hidden) == len(part.token_ids) - 1
            for offset, (token_id, row) in enumerate(zip(part.token_ids[:-1], part.hidden, strict=True)):
                of_sequence[part.start + offset] = (token_id, row)
