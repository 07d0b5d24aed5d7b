"""Proposers as a worker builds them, and what they propose while the engine runs on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Values
from pathlib import Path
from typing import Any

from gpu_worker.core.draft import Draft
from gpu_worker.core.sequence import Sequence
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
