"""Drafts by heads, each of which predicts one token more from the hidden vector that the model computed last.

No pass of any model is needed, and no memory but what the last step of each sequence left. The heads know nothing of
each other, so their candidates are made into a tree: of all ways to combine them, those that are likeliest together.

Source: Cai et al., "Medusa" (arXiv 2401.10774), sections 2.1 and 2.3; the tree is made anew for each draft, from the
heads' probabilities then, where the paper fixes it beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import Protocol

import torch

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.batch.transfers import Downloads
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from gpu_worker.speculative.likeliest_tree import likeliest_tree

MAX_CANDIDATES = 8
"""Of a head; those behind the eighth are rarely worth verifying."""


class Heads(Protocol):
    """Head `i` scores the token that lies `i + 2` behind the one whose hidden vector it is given."""

    @property
    def device(self) -> torch.device:
        """Where they run."""
        ...

    @property
    def num_heads(self) -> int:
        """How many there are."""
        ...

    def logits(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Score the vocabulary by the first `num_heads` heads: `[num_heads, num_rows, vocab_size]`."""
        ...


class MedusaProposer:
    """Keeps the last step, which computed every sequence that is decoding, until drafts are asked for."""

    wants_hidden = True

    def __init__(self, heads: Heads) -> None:
        """Draft by `heads`."""
        self._heads = heads
        self._downloads = Downloads(heads.device)
        self._last: Iterable[ComputedTokens] = ()

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return the likeliest combinations of the heads' candidates."""
        drafts = [NO_DRAFT] * len(requests)
        found = {item.sequence: item for item in self._last}
        latest = [found.get(request.sequence) for request in requests]
        known = [
            (index, computed.hidden)
            for index, computed in enumerate(latest)
            if computed is not None and _reaches_end(computed, requests[index].sequence)
        ]
        if not known:
            return drafts
        most = max(requests[index].num_tokens for index, _ in known)
        rows = known[0][1][-1:] if len(known) == 1 else torch.stack([hidden[-1] for _, hidden in known])
        logits = self._heads.logits(rows, min(most, self._heads.num_heads))
        scores, token_ids = logits.topk(min(most, MAX_CANDIDATES, logits.shape[-1]))
        scores -= logits.logsumexp(dim=-1, keepdim=True)
        token_ids, scores = self._downloads.start([token_ids, scores]).wait()
        by_row = zip(token_ids.transpose(0, 1).tolist(), scores.transpose(0, 1).tolist(), strict=True)
        for (index, _), (candidates, log_probabilities) in zip(known, by_row, strict=True):
            drafts[index] = likeliest_tree(candidates, log_probabilities, requests[index].num_tokens)
        return drafts

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Keep the step; nothing is computed, nor looked at."""
        self._last = computed

    def forget(self, sequence: Sequence) -> None:
        """Drop what the step knows of a sequence."""
        self._last = [item for item in self._last if item.sequence is not sequence]


def _reaches_end(computed: ComputedTokens, sequence: Sequence) -> bool:
    """Say whether the sequence's last token is the one that follows what was computed."""
    return len(computed.hidden) > 0 and computed.start + len(computed.token_ids) == len(sequence.token_ids)
