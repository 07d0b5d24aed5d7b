"""What proposers are shown of steps is what the model made of each sequence's tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Values
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest
from ops.bench.spec.fixed_depth import FixedDepth
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import VOCAB, make_runner, make_sequence, random_prompt, run


class WatchingProposer:
    """Proposes right and wrong guesses; keeps the hidden vector and the follower of every position."""

    wants_hidden = True

    def __init__(self, right: dict[str, list[int]] | None = None) -> None:
        self.right = right or {}
        self.random = random.Random(2)
        self.hidden: dict[str, dict[int, torch.Tensor]] = {}
        self.tokens: dict[str, dict[int, int]] = {}
        self.num_missing = 0

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        for request in requests:
            seen = self.tokens[request.sequence.id]
            known = request.sequence.token_ids
            # What a prefix hit spared was shown when another sequence computed it; the last token was never computed.
            self.num_missing += len(set(range(16, len(known) - 1)) - set(self.hidden[request.sequence.id]))
            assert [seen.get(position, token_id) for position, token_id in enumerate(known)] == known
        return [self._draft(request.sequence, request.num_tokens) for request in requests]

    def _draft(self, sequence: Sequence, count: int) -> Draft:
        right = self.right[sequence.id][sequence.num_output_tokens :][:count]
        return Draft(tuple(t if self.random.random() < 0.7 else (t + 1) % VOCAB for t in right))

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        for item in computed:
            hidden = self.hidden.setdefault(item.sequence.id, {})
            tokens = self.tokens.setdefault(item.sequence.id, {})
            assert len(item.hidden) == len(item.token_ids) - 1
            for offset, token_id in enumerate(item.token_ids):
                tokens[item.start + offset] = token_id
            for offset, row in enumerate(item.hidden):
                hidden[item.start + offset] = row

    def forget(self, sequence: Sequence) -> None:
        pass


def sequences() -> list[Sequence]:
    shared = random_prompt(16, seed=99)
    return [
        make_sequence(
            str(index),
            [*shared[: index % 3 * 8], *random_prompt(2 + index, seed=index)],
            Sampling(max_tokens=20, seed=index, temperature=index % 2 * 0.9),
        )
        for index in range(12)
    ]


@pytest.mark.parametrize(
    "load",
    [
        {"token_budget": 300},
        {"token_budget": 21, "max_num_seqs": 9, "arrivals_per_step": 1},
        {"token_budget": 200, "num_blocks": 50, "headroom_tokens": 0},
    ],
    ids=["together", "chunks", "preempted"],
)
def test_hidden_vectors_are_those_of_the_whole_text(tiny: tuple[Path, Any], load: dict[str, int]) -> None:
    directory, model = tiny
    plain = run(make_runner(directory), sequences()).tokens
    proposer = WatchingProposer(plain)
    outcome = run(make_runner(directory, proposer=proposer), sequences(), policy=FixedDepth(3), **load)
    assert outcome.tokens == plain
    assert proposer.num_missing == 0
    assert outcome.speculation is not None
    assert outcome.speculation.num_accepted_tokens > 50
    if "num_blocks" in load:
        assert outcome.num_preemptions > 0
    for sequence in sequences():
        token_ids = [*sequence.token_ids, *plain[sequence.id]]
        with torch.no_grad():
            expected = model.model(torch.tensor([token_ids])).last_hidden_state[0]
        seen = proposer.hidden[sequence.id]
        # Steps behind the last that was asked for drafts are never shown.
        assert len(seen) > 10
        assert set(seen) <= set(range(len(token_ids) - 1))
        for position, row in seen.items():
            torch.testing.assert_close(row, expected[position], atol=2e-4, rtol=2e-4)
            assert proposer.tokens[sequence.id][position + 1] == token_ids[position + 1]
