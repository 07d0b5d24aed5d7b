"""Proposers as a worker builds them, and what they propose while the engine runs on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.draft import NO_DRAFT, Draft
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution import runner_config
from gpu_worker.execution.drafts.proposer import ComputedTokens, DraftRequest, Proposer
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import build_proposer, with_room_for_proposer
from tests.gpu_worker.execution.engine_run import BLOCK, make_runner

Listener = Callable[[DraftRequest, Draft], Draft | None]
"""Sees a draft, and may return another in its place."""


class Recorder:
    """Passes everything on, lets no failure pass, and shows each draft to a listener."""

    def __init__(self, proposer: Proposer, listener: Listener) -> None:
        self.proposer = proposer
        self.listener = listener
        self.wants_hidden = proposer.wants_hidden
        self.failures: list[Exception] = []

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        try:
            drafts = self.proposer.propose(requests)
            shown = [self.listener(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        except (Exception, AssertionError) as error:
            self.failures.append(error)
            raise
        return [draft if other is None else other for draft, other in zip(drafts, shown, strict=True)]

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        try:
            self.proposer.observe(computed)
        except Exception as error:
            self.failures.append(error)
            raise

    def forget(self, sequence: Sequence) -> None:
        self.proposer.forget(sequence)


@pytest.fixture(autouse=True)
def exact_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft in float32, where a CPU would draft in bfloat16."""
    monkeypatch.setattr(runner_config, "choose_draft_dtype", lambda model, device: model)


class DraftOracle:
    """Compares drafts with the likeliest ones of a dense computation, over the whole sequence at each depth.

    Subclasses have `read`, from tokens to the vectors that a layer reads of the model, and `following`, from tokens and
    the vectors before them to the next vector and the log probabilities behind it.
    """

    read: Callable[[torch.Tensor], torch.Tensor]
    following: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, least_chance: float) -> None:
        self._least = math.log(least_chance)
        self.num_checked = self.num_deep = 0

    @torch.no_grad()
    def check(self, request: DraftRequest, draft: Draft) -> None:
        """Assert that a draft is the likeliest, and ends where it is no longer likely enough.

        Of a prompt that was found in the cache but for its last token, no hidden vector was ever seen.
        """
        if request.sequence.num_output_tokens == 0:
            assert draft == NO_DRAFT
            return
        token_ids = torch.tensor(request.sequence.token_ids)
        hidden, total = self.read(token_ids)[:-1], 0.0
        for token_id in draft.token_ids:
            assert total >= self._least
            handed_on, log_probabilities = self.following(token_ids[1:], hidden)
            score, likeliest = log_probabilities.max(-1)
            assert likeliest == token_id
            total += float(score)
            hidden, token_ids = torch.cat((hidden, handed_on[None])), torch.cat((token_ids, likeliest[None]))
        assert len(draft) == request.num_tokens or total < self._least
        self.num_deep += len(draft) > 2
        self.num_checked += 1


def recorded_runner(
    directory: Path, listener: Listener, *, token_budget: int = 64, kv_cache_dtype: str = "auto", **settings: Any
) -> tuple[TorchModelRunner, Recorder]:
    """Build a runner with the proposer that the worker's settings ask for."""
    worker_config = WorkerConfig(**settings)
    config = RunnerConfig(directory, block_size=BLOCK, max_num_seqs=40, max_num_batched_tokens=token_budget)
    config = with_room_for_proposer(worker_config, config)
    runner = make_runner(
        directory,
        tapped_layers=config.tapped_layers,
        max_draft_tokens=config.max_draft_tokens,
        kv_cache_dtype=kv_cache_dtype,
    )
    recorder = Recorder(build_proposer(worker_config, config, runner), listener)
    runner.verify_drafts_of(recorder)
    return runner, recorder
