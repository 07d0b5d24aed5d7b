"""Prepares what a draft learns from and what it is measured on, from texts and what the target makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch

from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.execution.build import build_runner
from gpu_worker.execution.memory.budget import shown_bytes
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.runner_config import RunnerConfig, choose_dtype
from gpu_worker.layers.free_memory import free_host_bytes
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.registry import read_model_config
from gpu_worker.models.weights_size import weights_bytes
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.train_draft.own_text import BATCHED_TOKENS, GREEDY_SHARE, prompts, write_rows
from ops.train_draft.rows import HIDDEN_DTYPE, Rows, cut, encode_files
from ops.train_draft.target import HiddenVectors
from shared.errors import ConfigError

HELD_OUT_ROWS = 32
_HELD_OUT_SHARE = 0.1
_MAX_BATCH = 128


class Progress(Protocol):
    """Is told how far a stage of the job is."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Take in that `done` of `total` is done."""
        ...


@dataclass(frozen=True, slots=True)
class MaterialPlan:
    """What to prepare.

    Attributes:
        target: Directory of the target.
        text: UTF-8 files; their last tenth is kept for measuring, unless there is `held_out_text`.
        held_out_text: UTF-8 files to measure on.
        num_tokens: Tokens to learn from at most.
        own_share: Share of the rows that the target writes itself, on beginnings from the text.
        window: Tokens of a row.
        seed: Of beginnings, samples and the choice of rows.
    """

    target: Path
    text: tuple[Path, ...]
    held_out_text: tuple[Path, ...]
    num_tokens: int
    own_share: float
    window: int
    seed: int


@dataclass(frozen=True, slots=True)
class Material:
    """Rows with the target's hidden vectors.

    Attributes:
        training: To learn from.
        held_out: What the target wrote greedily on beginnings that nothing was trained on.
        own_from: `[rows of held_out]`, where that begins.
        num_own: Tokens of `training` that the target wrote.
    """

    training: Rows
    held_out: Rows
    own_from: torch.Tensor
    num_own: int


def prepare(plan: MaterialPlan, progress: Progress) -> Material:
    """Encode the texts, have the target write, and compute its hidden vectors.

    Raises:
        ConfigError: The texts or the window cannot be used, or what is made of them does not fit the memory.
        HeadraceError: The target cannot be loaded.
    """
    config = read_model_config(plan.target)
    if plan.window >= config.max_model_len:
        problem = f"is {plan.window}; this target takes less than {config.max_model_len} tokens"
        raise ConfigError("HEADRACE_WINDOW", problem)
    text, held_out = _texts(plan)
    if max(int(text.max()), int(held_out.max())) >= config.vocab_size:
        problem = f"{plan.target} has a tokenizer with more than the model's {config.vocab_size} tokens; take its own"
        raise ConfigError("HEADRACE_TARGET", problem)
    text_rows = cut(text, plan.window)
    num_rows = max(1, plan.num_tokens // plan.window)
    num_own = round(num_rows * plan.own_share)
    generator = torch.Generator().manual_seed(plan.seed)
    taken = torch.randperm(len(text_rows), generator=generator)[: num_rows - num_own]
    _check_memory(num_own + len(taken) + HELD_OUT_ROWS, plan, config, free_host_bytes())
    runner = _runner(plan)
    beginnings = list(islice(prompts(text, plan.window, plan.seed), num_own))
    own = _write(runner, plan, beginnings, GREEDY_SHARE, partial(progress, "the target writes"))
    tests = list(islice(prompts(held_out, plan.window, plan.seed + 1), HELD_OUT_ROWS))
    written = _write(runner, plan, tests, 1.0, partial(progress, "held-out answers"))
    del runner
    training = Rows(torch.cat((own, text_rows[taken])), config.hidden_size)
    held_out_rows = Rows(written, config.hidden_size)
    _compute(plan, config, (training, held_out_rows), progress)
    num_own_tokens = own.numel() - sum(map(len, beginnings))
    return Material(training, held_out_rows, torch.tensor([len(beginning) for beginning in tests]), num_own_tokens)


def _check_memory(num_rows: int, plan: MaterialPlan, config: ModelConfig, free_bytes: int) -> None:
    """Refuse rows whose hidden vectors do not fit beside the target, before it writes for hours."""
    taken = weights_bytes(
        plan.target, _dtype(config), torch.device("cpu"), is_tied=config.tie_word_embeddings, names=config.block.names
    )
    weights, free = shown_bytes(taken), shown_bytes(free_bytes)
    if taken > free_bytes:
        problem = f"the weights of {plan.target} need {weights}, but {free} of memory are free"
        raise ConfigError("HEADRACE_TARGET", f"{problem}; free some, or train for a smaller model")
    token_bytes, room = config.hidden_size * HIDDEN_DTYPE.itemsize, free_bytes - taken
    needed = num_rows * plan.window * token_bytes
    if needed > room:
        allowed = room // token_bytes - HELD_OUT_ROWS * plan.window
        is_enough = allowed >= plan.window
        remedy = f"set {allowed} at most" if is_enough else "set a smaller HEADRACE_WINDOW, or free some memory"
        problem = f"hidden vectors need {shown_bytes(needed)} beside the target's {weights}"
        raise ConfigError("HEADRACE_TOKENS", f"{problem}, but {free} of memory are free; {remedy}")


def _texts(plan: MaterialPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens to learn from and those to measure on."""
    tokenizer = ModelTokenizer(read_model_directory(plan.target))
    if plan.held_out_text:
        held_out = encode_files(tokenizer, plan.held_out_text, plan.window, "HEADRACE_HELD_OUT")
        return encode_files(tokenizer, plan.text, plan.window), held_out
    text = encode_files(tokenizer, plan.text, 2 * plan.window)
    split = len(text) - max(plan.window, int(len(text) * _HELD_OUT_SHARE))
    return text[:split], text[split:]


def _runner(plan: MaterialPlan) -> TorchModelRunner:
    config = RunnerConfig(
        plan.target,
        max_num_seqs=_MAX_BATCH,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=plan.window + 1,
        num_threads=torch.get_num_threads(),
    )
    try:
        return build_runner(config)
    except InvalidLogitsError as error:
        raise ConfigError("HEADRACE_TARGET", f"{plan.target} cannot write text: {error}") from error


def _write(
    runner: TorchModelRunner,
    plan: MaterialPlan,
    beginnings: list[list[int]],
    greedy_share: float,
    progress: Callable[[int, int], None],
) -> torch.Tensor:
    """Have the target complete the rows."""
    if not beginnings:
        return torch.empty(0, plan.window, dtype=torch.int64)
    total = plan.window * len(beginnings) - sum(map(len, beginnings))
    done = 0

    def count(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        progress(done, total)

    return write_rows(runner, beginnings, plan.window, greedy_share=greedy_share, seed=plan.seed, progress=count)


def _compute(plan: MaterialPlan, config: ModelConfig, sets: tuple[Rows, ...], progress: Progress) -> None:
    target = HiddenVectors(plan.target, _dtype(config), plan.window)
    total = sum(rows.token_ids.numel() for rows in sets)
    done = 0
    for num_tokens in _chained(target, sets):
        done += num_tokens
        progress("hidden vectors", done, total)


def _dtype(config: ModelConfig) -> torch.dtype:
    """Return the type that the target computes in."""
    return choose_dtype("auto", config.dtype, torch.device("cpu"))


def _chained(target: HiddenVectors, sets: tuple[Rows, ...]) -> Iterator[int]:
    for rows in sets:
        yield from rows.compute(target)
