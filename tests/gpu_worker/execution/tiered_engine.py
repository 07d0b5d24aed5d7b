"""An engine whose prefix cache has few blocks, and tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.step import LogprobEntry
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.memory.state_sizes import state_config
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.tiers.block_files import BlockFiles
from gpu_worker.execution.tiers.block_tiers import BlockTiers
from gpu_worker.execution.tiers.file_format import Maker
from gpu_worker.execution.tiers.host_tier import HostTier
from gpu_worker.execution.tiers.nixl_transport import NixlAgent
from gpu_worker.execution.tiers.transfer import Transfer
from shared.cache_hints import CacheHints
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import (
    make_runner,
    make_sequence,
    random_prompt,
    save_tiny_model,
    scheduler_config,
)
from tests.gpu_worker.models.families.dense_cases import CASES as DENSE
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent_case

GREEDY = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
NUM_BLOCKS = 24
CASES = {**DENSE, **LATENT}
BLOCK = 4
OPENED = ExitStack()
"""Closed after each test: tiers have threads."""
MakeFiles = Callable[[HostTier], BlockFiles]
Answer = tuple[list[int], list[LogprobEntry]]


OF_ALL_KINDS = pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("llama", {}, id="full"),
        pytest.param("llama", {"kv_cache_dtype": "int8"}, id="eight-bits"),
        pytest.param("gemma3", {"dtype": "float32"}, id="windows"),
        pytest.param("deepseek-v3", {}, id="latent"),
        pytest.param("qwen3_5", {}, id="recurrent"),
    ],
)


class PatientTiers(BlockTiers):
    """Tiers that load whatever they have, however long it takes: what a test finds does not hang on the machine."""

    @property
    def prefill_rate(self) -> float:  # type: ignore[override]
        return 0.0

    @prefill_rate.setter
    def prefill_rate(self, value: float) -> None:
        pass


class Served:
    """An engine with few blocks, whose tiers keep many."""

    def __init__(
        self,
        runner: TorchModelRunner,
        host_bytes: int | None = 1 << 22,
        make_files: MakeFiles | None = None,
        retained_share: float = 0.0,
        weights: bytes | None = None,
        *,
        has_nixl: bool = False,
    ) -> None:
        """Keep KV in the host's memory; with a digest of `weights` it is given to others, and fetched from them."""
        self.runner = runner
        groups = runner.block_contents
        self.tiers: BlockTiers | None = None
        if host_bytes is not None:
            host = HostTier(groups, host_bytes, retained_share, is_shared=weights is not None)
            files = None if make_files is None else make_files(host)
            self.transfer = None
            if weights is not None:
                maker = Maker(weights, tuple(bytes([number]) * 32 for number, _ in enumerate(groups)))
                nixl = NixlAgent(host.regions, max(group.row_bytes for group in groups)) if has_nixl else None
                self.transfer = Transfer(groups, BLOCK, host, "127.0.0.1", 30.0, lambda: maker, nixl)
            self.tiers = PatientTiers(groups, BLOCK, host, files, self.transfer)
            OPENED.callback(self.tiers.close)
        has_states = runner._states is not None
        state = state_config(runner.num_state_slots, BLOCK) if has_states else None
        config = scheduler_config(runner, 4, 32, headroom_tokens=4, retained_share=retained_share, state=state)
        self.scheduler = Scheduler(config, tiers=self.tiers)
        self.engine = Engine(self.scheduler, runner)

    def serve(self, *sequences: Sequence) -> list[Answer]:
        answers: dict[str, Answer] = {sequence.id: ([], []) for sequence in sequences}
        for sequence in sequences:
            self.engine.add(sequence)
        deadline = time.monotonic() + 60
        while self.engine.has_work():
            assert time.monotonic() < deadline, "the engine makes no progress"
            for event in self.engine.step():
                answers[event.sequence.id][0].extend(event.token_ids)
                answers[event.sequence.id][1].extend(event.logprobs)
            assert self.engine.last_error is None
        self.scheduler.check_integrity()
        return list(answers.values())

    def fill(self) -> None:
        """Serve other texts until nothing of earlier ones is left on the device."""
        self.serve(*(sequence(f"filler-{number}", random_prompt(60, 1000 + number)) for number in range(4)))

    def hit_tokens(self, tier: str = "host") -> int:
        assert self.tiers is not None
        return next(reading.hit_tokens for reading in self.tiers.readings() if reading.name == tier)


def sequence(
    name: str, prompt: list[int], salt: bytes = b"", sampling: Sampling = GREEDY, hints: CacheHints | None = None
) -> Sequence:
    made = make_sequence(name, prompt, sampling)
    made.salt, made.hints = salt, hints
    return made


def save_model(name: str, directory: Path) -> None:
    if name == "llama":
        save_tiny_model(directory)
    elif name in CASES:
        save_case(CASES[name], directory)
    else:
        save_recurrent_case(name, directory, eos_token_id=None)


class Models:
    """Small models, each of which is saved once."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._factory = tmp_path_factory
        self._directories: dict[str, Path] = {}

    def open(self, name: str, **settings: object) -> TorchModelRunner:
        if name not in self._directories:
            self._directories[name] = self._factory.mktemp(name)
            save_model(name, self._directories[name])
        return make_runner(self._directories[name], num_blocks=NUM_BLOCKS, max_num_seqs=4, max_model_len=80, **settings)


def greedy(count: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
