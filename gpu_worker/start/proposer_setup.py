"""Builds the proposer of drafts that the settings ask for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_worker.execution.drafts.proposer import Proposer
from gpu_worker.speculative.ngram.proposer import NgramProposer
from gpu_worker.start.config import WorkerConfig
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from gpu_worker.execution.build import BuiltRunner
    from gpu_worker.execution.runner_config import RunnerConfig

_DRAFT_MODEL = "HEADRACE_DRAFT_MODEL"
_LAYERS = "HEADRACE_SELF_SPECULATION_LAYERS"
_NEEDS = {
    "draft": "a smaller model",
    "medusa": "Medusa heads, which were trained for the model",
    "eagle": "an EAGLE layer, which was trained for the model",
}
"""What `draft_model` holds, by the proposers that need it."""


def check_speculation(config: WorkerConfig, tokenizer: ModelTokenizer) -> None:
    """Refuse settings of speculation that do not go together, before anything is loaded.

    Raises:
        ConfigError: A draft model is missing, not wanted, not usable, of another kind, or has another vocabulary.
    """
    kind = config.speculative
    if config.simulate is not None and kind != "off":
        raise ConfigError("HEADRACE_SPECULATIVE", f"is {kind}, but a simulated engine has no model")
    if config.self_speculation_layers is not None and kind != "self":
        raise ConfigError(_LAYERS, f"is set, but HEADRACE_SPECULATIVE is {kind}; set it to self")
    if kind not in _NEEDS:
        if config.draft_model is not None:
            problem = f"is set, but HEADRACE_SPECULATIVE is {kind}; set it to {_either(list(_NEEDS))}"
            raise ConfigError(_DRAFT_MODEL, problem)
        return
    if config.draft_model is None:
        raise ConfigError(_DRAFT_MODEL, f"is needed with HEADRACE_SPECULATIVE={kind}: the directory of {_NEEDS[kind]}")
    _check_kind(kind, config.draft_model)
    if kind == "draft":
        _check_vocabulary(config.draft_model, tokenizer)


def build_proposer(config: WorkerConfig, runner_config: RunnerConfig, runner: BuiltRunner) -> Proposer:
    """Build the proposer; what it guesses by is loaded for this.

    Args:
        config: The settings, which `check_speculation` has let pass.
        runner_config: Of the model that verifies; a draft model runs alike, on a GPU with a cache of as many blocks.
        runner: Runs the model that verifies.

    Raises:
        HeadraceError: What `draft_model` holds cannot be loaded, or does not belong to the model.
    """
    if config.speculative == "ngram":
        return NgramProposer()
    if config.speculative == "self":
        return _self_speculation(config.self_speculation_layers, runner_config, runner)
    assert config.draft_model is not None
    if config.speculative == "draft":
        return _draft_model(config.draft_model, runner_config, runner)
    try:
        if config.speculative == "medusa":
            return _medusa(config.draft_model, runner)
        return _eagle(config.draft_model, runner_config, runner)
    except HeadraceError as error:
        raise ConfigError(_DRAFT_MODEL, str(error)) from error


def _check_kind(kind: str, directory: Path) -> None:
    from gpu_worker.speculative.draft_kind import read_draft_kind

    if not directory.exists():
        raise ConfigError(_DRAFT_MODEL, f"{directory} is no directory of a model; give that of {_NEEDS[kind]}")
    try:
        found = read_draft_kind(directory).value
    except HeadraceError as error:
        raise ConfigError(_DRAFT_MODEL, str(error)) from error
    if found != kind:
        problem = f"{directory} holds {_NEEDS[found]}, but HEADRACE_SPECULATIVE is {kind}; set that to {found}"
        raise ConfigError(_DRAFT_MODEL, f"{problem}, or give the directory of {_NEEDS[kind]}")


def _check_vocabulary(directory: Path, tokenizer: ModelTokenizer) -> None:
    try:
        draft = ModelTokenizer(read_model_directory(directory))
    except ConfigError as error:
        raise ConfigError(_DRAFT_MODEL, error.problem) from error
    if not tokenizer.has_vocabulary_of(draft):
        raise ConfigError(
            _DRAFT_MODEL,
            f"{directory} has another vocabulary than the model; both must turn text into the same token ids. "
            "Take a smaller model of the same family",
        )


def _draft_model(directory: Path, runner_config: RunnerConfig, runner: BuiltRunner) -> Proposer:
    from gpu_worker.execution.build import build_runner
    from gpu_worker.execution.runner_config import choose_draft_dtype
    from gpu_worker.models.registry import read_model_config
    from gpu_worker.speculative.draft_model.proposer import DraftModelProposer

    model = read_model_config(directory)
    max_model_len = min(model.max_model_len, runner_config.max_model_len or model.max_model_len)
    draft_config = dataclasses.replace(runner_config, model=directory, max_model_len=max_model_len)
    if runner_config.device == "cpu":
        dtype = choose_draft_dtype(runner.dtype, runner.model.device)
        draft_config = dataclasses.replace(draft_config, dtype=str(dtype).removeprefix("torch."))
    else:
        # The model's cache has left room for as many blocks of the draft model's.
        draft_config = dataclasses.replace(draft_config, num_blocks=runner.num_blocks)
    try:
        draft_runner = build_runner(draft_config)
    except ConfigError as error:
        raise ConfigError(_DRAFT_MODEL, f"{directory} cannot run beside the model: {error}") from error
    return DraftModelProposer(
        draft_runner,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=runner_config.max_num_batched_tokens,
    )


def _self_speculation(num_layers: int | None, runner_config: RunnerConfig, runner: BuiltRunner) -> Proposer:
    from gpu_worker.execution.model_runner import TorchModelRunner
    from gpu_worker.execution.runner import DeviceModelRunner
    from gpu_worker.speculative.self_speculation.proposer import SelfSpeculationProposer

    most = runner.model_config.num_layers
    if num_layers is None:
        num_layers = max(1, round(most / 4))
    if num_layers > most:
        raise ConfigError(
            _LAYERS, f"is {num_layers}, but the model has {most} layers; about a quarter of them is usual"
        )
    cache = dataclasses.replace(runner.cache, layers=runner.cache.layers[:num_layers])
    short, max_num_seqs = runner.model.early_exit(num_layers), runner_config.max_num_seqs
    if not isinstance(runner, DeviceModelRunner):
        return SelfSpeculationProposer(TorchModelRunner(short, cache, max_num_seqs, runner.max_model_len))
    guesser = DeviceModelRunner(short, cache, max_num_seqs, runner.max_model_len, max_num_seqs)
    guesser.capture_graphs()
    return SelfSpeculationProposer(guesser)


def _medusa(directory: Path, runner: BuiltRunner) -> Proposer:
    from gpu_worker.execution.runner_config import choose_draft_dtype
    from gpu_worker.speculative.medusa.heads import load_medusa_heads
    from gpu_worker.speculative.medusa.proposer import MedusaProposer

    model = runner.model
    return MedusaProposer(load_medusa_heads(directory, model, choose_draft_dtype(model.dtype, model.device)))


def _eagle(directory: Path, runner_config: RunnerConfig, runner: BuiltRunner) -> Proposer:
    from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
    from gpu_worker.execution.runner_config import choose_draft_dtype
    from gpu_worker.execution.step_inputs import StepAssembler
    from gpu_worker.speculative.eagle.layer import load_eagle_layer
    from gpu_worker.speculative.eagle.proposer import EagleProposer

    model = runner.model
    layer = load_eagle_layer(directory, model, choose_draft_dtype(model.dtype, model.device))
    cache = allocate_kv_cache(runner.num_blocks, runner.block_size, layer.config, layer.dtype, layer.device)
    for tensor in cache.layers[0].tensors:
        tensor.zero_()
    return EagleProposer(
        layer,
        StepAssembler(cache, runner_config.max_num_seqs, runner.max_model_len, layer.device),
        max_num_batched_tokens=runner_config.max_num_batched_tokens,
    )


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
