"""Builds the proposer of drafts that the settings ask for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gpu_worker.config import WorkerConfig
from gpu_worker.model_directory import read_model_directory
from gpu_worker.speculative.draft_model import DraftModelProposer
from gpu_worker.speculative.ngram import NgramProposer
from gpu_worker.speculative.proposer import Proposer
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError

if TYPE_CHECKING:
    from gpu_worker.execution.runner_config import RunnerConfig

_VARIABLE = "HEADRACE_DRAFT_MODEL"


def check_speculation(config: WorkerConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse settings of speculation that do not go together, before anything is loaded.

    Raises:
        ConfigError: A draft model is missing, not wanted, not usable, or has another vocabulary.
    """
    if config.simulate is not None and config.speculative != "off":
        raise ConfigError("HEADRACE_SPECULATIVE", f"is {config.speculative}, but a simulated engine has no model")
    if config.speculative != "draft":
        if config.draft_model is not None:
            raise ConfigError(_VARIABLE, f"is set, but HEADRACE_SPECULATIVE is {config.speculative}; set it to draft")
        return
    if config.draft_model is None:
        raise ConfigError(_VARIABLE, "is needed with HEADRACE_SPECULATIVE=draft: the directory of a smaller model")
    try:
        draft = ModelTokenizer(read_model_directory(config.draft_model))
    except ConfigError as error:
        raise ConfigError(_VARIABLE, error.problem) from error
    if not tokenizer.has_vocabulary_of(draft):
        raise ConfigError(
            _VARIABLE,
            f"{config.draft_model} has another vocabulary than the model; both must turn text into the same token ids. "
            "Take a smaller model of the same family",
        )


def build_proposer(config: WorkerConfig, runner_config: RunnerConfig) -> Proposer:
    """Build the proposer; a draft model is loaded for this.

    Args:
        config: The settings, which `check_speculation` has let pass.
        runner_config: Of the model that verifies; the draft model runs alike, with as much memory again.

    Raises:
        HeadraceError: The draft model cannot be loaded.
    """
    if config.speculative == "ngram":
        return NgramProposer()
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.model_runner import TorchModelRunner
    from gpu_worker.models.registry import read_model_config

    assert config.draft_model is not None
    model = read_model_config(config.draft_model)
    max_model_len = min(model.max_model_len, runner_config.max_model_len or model.max_model_len)
    runner = build_runner(dataclasses.replace(runner_config, model=config.draft_model, max_model_len=max_model_len))
    assert isinstance(runner, TorchModelRunner)
    return DraftModelProposer(
        runner,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=runner_config.max_num_batched_tokens,
    )
