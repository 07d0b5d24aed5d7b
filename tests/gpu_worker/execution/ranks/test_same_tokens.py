"""Ten thousand tokens of each topology are those of one process, over forms of weights, mixers and requests.

Each model answers greedy and drawn requests with log probabilities, grammars, penalties and truncation, in mixed
batches: with room, with preemptions, and with drafts. Answers that one process began go on at ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.ranks import group as group_module
from gpu_worker.speculative.ngram.proposer import NgramProposer
from gpu_worker.text.model_directory import read_model_directory
from gpu_worker.text.tokenizer import ModelTokenizer
from ops.demo_model.corpus import held_out_documents
from ops.stack.config import DEMO_MODEL
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import Outcome
from tests.gpu_worker.execution.ranks.group_run import started
from tests.gpu_worker.execution.ranks.test_divided_models import FORMS
from tests.gpu_worker.execution.ranks.test_group import assert_same, sequences
from tests.gpu_worker.models.families import latent_cases
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.quantization.checkpoints import make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.test_mxfp4 import CASE as GPT_OSS
from tests.gpu_worker.quantization.test_mxfp4 import save_packed

VOCAB = 100
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 256, "eos_token_id": None}


def _form(name: str) -> Callable[[Path], object]:
    settings, pack, options = FORMS[name]
    return lambda path: make_checkpoint(path, settings, pack, **{**SIZES, **options})


LATENT = next(iter(latent_cases.CASES.values()))
MODELS: dict[str, Callable[[Path], object]] = {
    "llama": lambda path: save_case(Case("Llama", SIZES), path),
    "one-kv-head": lambda path: save_case(Case("Llama", {**SIZES, "num_key_value_heads": 1}), path),
    "windows": lambda path: save_case(Case("Mistral", {**SIZES, "sliding_window": 10}), path),
    "latent": lambda path: save_case(Case(LATENT.family, {**LATENT.options, **SIZES}), path),
    "gpt-oss-mxfp4": lambda path: save_packed(
        path, Case("GptOss", {**GPT_OSS.options, **SIZES, "num_local_experts": 4})
    ),
    "gguf": lambda path: write_model(path / "model.gguf", "llama-mixed", **{**SIZES, "eos_token_id": 1}),
    **{name: _form(name) for name in ("gptq", "gptq-act-order", "awq", "int8")},
    **{
        name: lambda path, name=name: save_recurrent(name, path, eos_token_id=None)
        for name in ("qwen3_5_moe", "lfm2", "mamba2", "bamba")
    },
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_blocks": 32}, {"proposer": True})


def ways(*, has_drafts: bool = True) -> list[dict[str, Any]]:
    own = WAYS if has_drafts else WAYS[:2]
    return [{**way, "proposer": NgramProposer(100_000)} if "proposer" in way else way for way in own]


@pytest.mark.slow
@pytest.mark.parametrize("context_size", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_tokens_of_one(name: str, context_size: int, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    with started(tmp_path, 1, dtype="float32", max_model_len=256) as (alone, _):
        expected = [alone.answer(sequences(18), **way) for way in ways()]
    context = {"decode_context_parallel_size": context_size}
    with started(tmp_path, 2, dtype="float32", max_model_len=256, **context) as (run, _):
        for way, outcome in zip(ways(), expected, strict=True):
            assert_same(run.answer(sequences(18), **way), outcome)
    assert expected[1].num_preemptions > 0
    # Of all models together ten thousand.
    num_tokens = sum(len(tokens) for outcome in expected for tokens in outcome.tokens.values())
    assert num_tokens > 10_000 / len(MODELS)
    sys.stdout.write(f"{name}: {num_tokens} tokens are those of one process\n")


class Topology(NamedTuple):
    """How models are divided, and how many sequences make ten thousand tokens.

    With `by_torch` ranks sum by gloo, not through memory that they share.
    """

    size: int
    models: tuple[str, ...]
    num_sequences: int
    settings: Mapping[str, Any] = MappingProxyType({})
    by_torch: bool = False


STAGED = ("windows", "latent", "gguf", "gptq")
TOPOLOGIES: dict[str, Topology] = {
    "tp2-gloo": Topology(2, ("llama", "awq", "bamba"), 80, by_torch=True),
    "tp4": Topology(4, ("one-kv-head", "latent", "gptq"), 80),
    "pp2": Topology(1, STAGED, 92, {"pipeline_parallel_size": 2}),
    "tp2-pp2": Topology(2, STAGED, 92, {"pipeline_parallel_size": 2}),
    "ep2": Topology(2, ("gpt-oss-mxfp4", "qwen3_5_moe"), 116, {"enable_expert_parallel": True}),
    "ep2-moving": Topology(
        2,
        ("gpt-oss-mxfp4", "qwen3_5_moe"),
        116,
        {"enable_expert_parallel": True, "enable_eplb": True, "num_redundant_experts": 2, "eplb_step_interval": 50},
    ),
}


def moved(outcome: Outcome, num_sequences: int) -> list[Sequence]:
    """Return sequences whose first half was answered elsewhere: those that need nothing replayed."""
    found = []
    for sequence in sequences(num_sequences):
        tokens = outcome.tokens[sequence.id]
        sampling = sequence.sampling
        if sampling.grammar is None and sampling.prompt_logprobs is None:
            sequence.token_ids += tokens[: len(tokens) // 2]
            found.append(sequence)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_gives_the_tokens_of_one_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, num_tokens = TOPOLOGIES[name], 0
    count = topology.num_sequences
    if topology.by_torch:
        monkeypatch.setattr(group_module, "cpu_library", lambda: None)
    has_drafts = topology.settings.get("pipeline_parallel_size", 1) == 1
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_draft_tokens": 4 if has_drafts else 0}
    for model in topology.models:
        (tmp_path / model).mkdir()
        MODELS[model](tmp_path / model)
        with started(tmp_path / model, 1, **common) as (alone, _):
            expected = [alone.answer(sequences(count), **way) for way in ways(has_drafts=has_drafts)]
        with started(tmp_path / model, topology.size, **common, **topology.settings) as (run, _):
            for way, outcome in zip(ways(has_drafts=has_drafts), expected, strict=True):
                assert_same(run.answer(sequences(count), **way), outcome)
            rest = run.answer(moved(expected[0], count))
        for sequence, tokens in rest.tokens.items():
            whole = expected[0].tokens[sequence]
            assert tokens == whole[len(whole) // 2 :]
        assert len(rest.tokens) > count / 4
        assert expected[1].num_preemptions > 0
        num_tokens += sum(len(tokens) for outcome in expected for tokens in outcome.tokens.values())
    assert num_tokens >= 10_000
    sys.stdout.write(f"{name}: {num_tokens} tokens are those of one process\n")


SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 600,
    "block_size": 16,
    "num_blocks": 120,
    "max_draft_tokens": 0,
}


def prompts() -> list[list[int]]:
    tokenizer = ModelTokenizer(read_model_directory(DEMO_MODEL))
    token_ids = tokenizer.encode_text("".join(held_out_documents()))
    return [token_ids[first : first + 500] for first in range(0, 4000, 500)]


def perplexity(size: int, **settings: Any) -> float:
    logprobs: list[float] = []
    with started(DEMO_MODEL, size, **SETTINGS, **settings) as (run, _):
        sampling = Sampling(temperature=0.0, prompt_logprobs=0)
        sequences = [
            Sequence(str(number), prompt, len(prompt), sampling, max_tokens=1, arrival=number)
            for number, prompt in enumerate(prompts())
        ]
        for entries in run.answer(sequences).prompt_logprobs.values():
            logprobs += [entry.logprob for entry in entries]
    assert len(logprobs) > 3500
    return math.exp(-math.fsum(logprobs) / len(logprobs))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
def test_perplexity_is_that_of_one_process(size: int, num_stages: int) -> None:
    assert perplexity(size, pipeline_parallel_size=num_stages) == pytest.approx(perplexity(1), rel=1e-3)
