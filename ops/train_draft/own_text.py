"""Text that the target writes itself: what its users will see of it, and so what a draft has to predict.

Each row begins with a piece of the given text and goes on with what the target says, past the ends of documents too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from gpu_worker.core.scheduler import Scheduler
from gpu_worker.core.scheduler_config import SchedulerConfig
from gpu_worker.core.sequence import Sequence
from gpu_worker.core.speculation import Speculation
from gpu_worker.engine.engine import Engine
from gpu_worker.execution.runner import TorchModelRunner
from shared.errors import ConfigError, HeadraceError
from shared.sampling import Sampling

GREEDY_SHARE = 0.6
TEMPERATURE = 0.7
BATCHED_TOKENS = 1024
_MIN_PROMPT = 8
_PROMPT_SHARE = 0.75


def prompts(token_ids: torch.Tensor, length: int, seed: int) -> Iterator[list[int]]:
    """Draw pieces of a text without end, each shorter than three quarters of a row.

    Shapes:
        token_ids: `[num_tokens]`, at least `length` of them
    """
    rng = random.Random(seed)
    while True:
        size = rng.randint(min(_MIN_PROMPT, length // 2), max(1, int(length * _PROMPT_SHARE)))
        start = rng.randint(0, len(token_ids) - size)
        yield token_ids[start : start + size].tolist()


def write_rows(
    runner: TorchModelRunner,
    beginnings: list[list[int]],
    length: int,
    *,
    greedy_share: float,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> torch.Tensor:
    """Have the target go on from each beginning to the end of its row.

    Args:
        runner: Runs the target, with room for `length + 1` tokens a sequence and `BATCHED_TOKENS` a step.
        beginnings: Shorter than `length`.
        length: Tokens of a row.
        greedy_share: Share of the rows that take the likeliest token; the others sample.
        seed: Of the samples.
        progress: Called with the tokens that were written since.

    Shapes:
        result: `[len(beginnings), length]` int64

    Raises:
        ConfigError: The target cannot be computed.
        RuntimeError: The engine failed for another reason; the cause says why.
    """
    engine = make_engine(runner, len(beginnings))
    rng = random.Random(seed)
    sequences = []
    for number, beginning in enumerate(beginnings):
        temperature = 0.0 if rng.random() < greedy_share else TEMPERATURE
        sampling = Sampling(temperature=temperature, seed=rng.randrange(1 << 30), ignore_eos=True)
        missing = length - len(beginning)
        sequences.append(Sequence(str(number), list(beginning), len(beginning), sampling, max_tokens=missing))
        engine.add(sequences[-1])
    while engine.has_work():
        events = engine.step()
        if engine.last_error is not None:
            raise _failure(engine.last_error) from engine.last_error
        if (error := next((event.error for event in events if event.error), None)) is not None:
            raise ConfigError("HEADRACE_TARGET", f"the target cannot write text: {error}")
        progress(sum(len(event.token_ids) for event in events))
    runner.clear()
    return torch.tensor([sequence.token_ids for sequence in sequences])


def _failure(error: Exception) -> Exception:
    """Return the user's message: an error that was raised on purpose is about the target."""
    if isinstance(error, HeadraceError):
        return ConfigError("HEADRACE_TARGET", f"the target cannot write text: {error}")
    return RuntimeError("the engine failed")


def make_engine(runner: TorchModelRunner, num_rows: int, speculation: Speculation | None = None) -> Engine:
    """Return an engine whose sequences share nothing: the runner's cache serves one engine after another.

    The runner takes `BATCHED_TOKENS` a step.
    """
    config = SchedulerConfig(
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        windows=runner.windows,
        max_num_seqs=min(num_rows, 128),
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=runner.max_model_len,
        enable_prefix_caching=False,
    )
    return Engine(Scheduler(config, speculation), runner)
