"""Adapters beside layers that are divided among stages: every stage knows all matrices, and tokens are those of one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.reader import read_packed
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.build_plan import make_plan
from gpu_worker.execution.ranks.beside import encoded_pieces
from gpu_worker.execution.ranks.meeting import ProcessGroupRanks
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.layers.adapters import EMBEDDING, HEAD, AdaptedMatrix, AdapterTargets
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.adapters.peft_files import linear_sizes, write_adapter
from tests.gpu_worker.execution.engine_run import random_prompt
from tests.gpu_worker.execution.ranks.group_run import Run, started
from tests.gpu_worker.execution.ranks.test_adapters import place_adapters
from tests.gpu_worker.execution.ranks.test_divided_models import FORMS, LATENT, MODELS, load
from tests.gpu_worker.execution.ranks.test_group import assert_same, replace_rank
from tests.gpu_worker.execution.ranks.test_same_tokens import SIZES
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.quantization.checkpoints import make_checkpoint
from tests.gpu_worker.quantization.test_mxfp4 import CASE as GPT_OSS
from tests.gpu_worker.quantization.test_mxfp4 import save_packed


def _refusal(directory: Path) -> str | None:
    """Return why a model cannot be divided among two stages; None if it can."""
    try:
        make_plan(RunnerConfig(directory, dtype="float32", pipeline_parallel_size=2))
    except ConfigError as error:
        return str(error)
    return None


def _targets(directory: Path, ranks: Ranks) -> AdapterTargets:
    targets = load(directory, ranks, num_adapters=2).adapters
    assert targets is not None
    return targets


def _described(matrix: AdaptedMatrix) -> list[object]:
    """Return what the reader of adapters needs of a matrix."""
    tensors = [None if tensor is None else tensor.tolist() for tensor in (matrix.order, matrix.scales)]
    return [matrix.modules, matrix.rows, matrix.columns, *tensors]


Sizes = dict[str, tuple[int, int]]


def _check_described(directory: Path) -> None:
    alone = _targets(directory, ALONE)
    config = RunnerConfig(Path(), pipeline_parallel_size=2)
    stages = [_targets(directory, ProcessGroupRanks(stage, config)) for stage in range(2)]
    for stage in stages:
        assert stage.matrices.keys() == alone.matrices.keys()
        for name, matrix in alone.matrices.items():
            assert _described(stage.matrices[name]) == _described(matrix)
        assert {name: replace(found, share=None) for name, found in stage.experts.items() if found} == alone.experts
    for name in alone.matrices:
        assert [bool(stage.matrices[name].tables) for stage in stages].count(True) == 1
    assert stages[0].matrices[EMBEDDING].tables
    assert stages[1].matrices[HEAD].tables


FEW = ("variant-llama", "gguf-llama-mixed", "family-mixtral", "family-phi3", LATENT)


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(MODELS.keys() - set(FEW)))]
)
def test_each_stage_describes_all_matrices_as_one_process_does(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    refusal = _refusal(tmp_path)
    if refusal is None:
        _check_described(tmp_path)
    else:
        assert name not in FEW
        assert "stage" in refusal


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "int8"])
def test_each_stage_describes_the_matrices_of_quantized_layers(name: str, tmp_path: Path) -> None:
    settings, pack, options = FORMS[name]
    make_checkpoint(tmp_path, settings, pack, **options)
    _check_described(tmp_path)


def test_each_stage_describes_packed_experts(tmp_path: Path) -> None:
    save_packed(tmp_path, Case("GptOss", {**GPT_OSS.options, "num_local_experts": 4}))
    _check_described(tmp_path)


def _sequences() -> list[Sequence]:
    """Return sequences of one batch: without an adapter, and with each of three."""
    sampling, shared = Sampling(temperature=0.0, max_tokens=10, logprobs=2), random_prompt(20, seed=1)
    found = []
    for number in range(8):
        slot = number % 4 - 1
        prompt = [*shared, *random_prompt(number // 4, seed=number // 4)]
        own = (None, b"") if slot < 0 else (slot, bytes([slot + 1]))
        found.append(Sequence(str(number), prompt, len(prompt), sampling, max_tokens=10, adapter=own[0], salt=own[1]))
    return found


def _write_adapters(directory: Path, sizes: Sizes, words: Sizes) -> list[Path]:
    """Write adapters of three ranks: of all layers; of all, embedding and head; and of the last layer alone."""
    last = max(int(name.split(".")[2]) for name in sizes if ".layers." in name)
    kinds = (sizes, {**sizes, **words}, {name: own for name, own in sizes.items() if f".layers.{last}." in name})
    return [
        write_adapter(directory / str(rank), kind, rank=rank, seed=rank, embedding="model.embed_tokens", strength=2.0)
        for rank, kind in zip((3, 17, 8), kinds, strict=True)
    ]


def _check_tokens(
    directory: Path, adapters: list[Path], size: int, then: Callable[[Run], object] = lambda _: None
) -> None:
    settings = {"dtype": "float32", "max_loras": 3, "max_model_len": 256, "max_draft_tokens": 0, "max_num_seqs": 8}
    ways: list[dict[str, int]] = [{}, {"num_blocks": 32}]
    with started(directory, 1, None, **settings) as (alone, _):
        place_adapters(alone, adapters)
        expected = [alone.answer(_sequences(), **way) for way in ways]
    assert len({tuple(expected[0].tokens[str(number)]) for number in range(4)}) == 4
    with started(directory, size, None, pipeline_parallel_size=2, **settings) as (run, group):
        assert group is not None
        place_adapters(run, adapters)
        for way, outcome in zip(ways, expected, strict=True):
            assert_same(run.answer(_sequences(), **way), outcome)
        replace_rank(run, group, 2 * size - 1, signal.SIGKILL)
        # The process that takes its place gets the adapters that are in memory.
        assert_same(run.answer(_sequences()), expected[0])
        then(run)


def _save_llama(directory: Path) -> tuple[Sizes, Sizes]:
    oracle = save_case(Case("Llama", {**SIZES, "num_hidden_layers": 3, "tie_word_embeddings": False}), directory)
    vocab, size = oracle.config.vocab_size, oracle.config.hidden_size
    words = {"model.embed_tokens": (size, vocab), "lm_head": (vocab, size)}
    return linear_sizes(oracle, r".*_proj"), words


def test_two_stages_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    sizes, words = _save_llama(tmp_path / "model")
    adapters = _write_adapters(tmp_path, sizes, words)
    foreign = write_adapter(tmp_path / "foreign", {"model.layers.3.mlp.up_proj": (96, 48)}, rank=3)
    wrong = write_adapter(tmp_path / "wrong", {"model.layers.2.mlp.up_proj": (13, 48)}, rank=3)

    def refuse_others(run: Run) -> None:
        # The sizes of both stages are known to the first one, which reads adapters.
        targets = run.own.model.adapters
        assert targets is not None
        for adapter, problem in ((foreign, "has no such linear layer"), (wrong, "for this model it has to be")):
            with pytest.raises(AdapterError, match=problem):
                read_packed(adapter, targets, encode=encoded_pieces)
        whole = [read_packed(adapter, targets, encode=encoded_pieces) for adapter in adapters]
        assert [each.max_rank for each in whole] == [9, 51, 24]

    _check_tokens(tmp_path / "model", adapters, 1, refuse_others)


@pytest.mark.slow
def test_two_stages_of_two_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    sizes, words = _save_llama(tmp_path / "model")
    _check_tokens(tmp_path / "model", _write_adapters(tmp_path, sizes, words), 2)


@pytest.mark.slow
def test_two_stages_of_experts_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    options = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "tie_word_embeddings": True}
    oracle = save_case(Case("Mixtral", options), tmp_path / "model")
    assert torch.is_tensor(oracle.lm_head.weight)
    inner, size = oracle.config.intermediate_size, oracle.config.hidden_size
    experts = {
        f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}": shape
        for layer in range(2)
        for expert in range(4)
        for name, shape in (("w1", (inner, size)), ("w2", (size, inner)), ("w3", (inner, size)))
    }
    sizes = {**linear_sizes(oracle, r".*self_attn.*_proj"), **experts}
    _check_tokens(tmp_path / "model", _write_adapters(tmp_path, sizes, {}), 1)
