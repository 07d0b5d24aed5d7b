"""Logits of every family on a device, eager and replayed, against transformers.

Blocks of 16 tokens, in which a CPU's keys lie transposed: the same tokens in any batch, resumed and with drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.core.plan import StepPlan
from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.runner import TorchModelRunner
from gpu_worker.execution.step import SubmittedStep
from shared.sampling import Sampling
from tests.gpu_worker.execution.device_runs import load, make_device_runner, transformers_logits
from tests.gpu_worker.execution.engine_run import MAX_LEN, VOCAB, make_runner, make_sequence, random_prompt, run

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 64},
    "Mistral": {"sliding_window": 12, "head_dim": 32},
}
GPU = pytest.mark.gpu
PLACES = [
    ("cpu", torch.float32),
    pytest.param("cuda", torch.float32, marks=GPU),
    pytest.param("cuda", torch.bfloat16, marks=GPU),
]
LEAST_COSINE = {torch.float32: 1 - 1e-5, torch.bfloat16: 0.999}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A random model of the family, and its directory."""
    import transformers

    family = request.param
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**(options | FAMILIES[family]))
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    directory = tmp_path_factory.mktemp(family)
    model.save_pretrained(directory)
    yield directory, model
    model.to("cpu", torch.float32)


class Recording:
    """A runner that keeps the logits of every sequence that samples."""

    def __init__(self, runner: TorchModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[str, list[torch.Tensor]] = {}
        self._runner = runner
        self._latest: list[torch.Tensor] = []
        sample = runner._sampler.sample

        def keep(logits: torch.Tensor, *rest: Any) -> Any:
            self._latest = list(logits.float().cpu())
            return sample(logits, *rest)

        monkeypatch.setattr(runner._sampler, "sample", keep)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> SubmittedStep:
        self._latest = []
        step = self._runner.submit(plan)
        shares = self._runner._sequences.shares(plan)
        names = [share.sequence.id for share in shares if share.samples]
        for name, row in zip(names, self._latest, strict=True):
            self.logits.setdefault(name, []).append(row)
        return step


@pytest.mark.parametrize("is_graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_logits_of_chunks_and_decodes_equal_transformers(
    saved: tuple[Path, Any], device: str, dtype: torch.dtype, is_graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, oracle = saved
    runner = make_device_runner(load(directory, device, dtype), is_graphed=is_graphed)
    recording = Recording(runner, monkeypatch)
    sampling = Sampling(temperature=0.8, max_tokens=20)
    sequences = [make_sequence(str(n), random_prompt(n, seed=n), sampling) for n in (1, 5, 16, 37, 70, 90)]
    run(recording, sequences, token_budget=40, arrivals_per_step=2)
    oracle.to(device, dtype)
    for sequence in sequences:
        expected = transformers_logits(oracle, sequence.token_ids)[sequence.num_prompt_tokens - 1 : -1]
        actual = torch.stack(recording.logits[sequence.id])[:20]
        cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=1)
        assert cosine.min() >= LEAST_COSINE[dtype]


BLOCK = 16
NUM_TOKENS = 24
TRAFFIC: dict[str, dict[str, int]] = {
    "one-by-one": {"max_num_seqs": 1},
    "chunks": {"token_budget": 7, "arrivals_per_step": 1},
    "preemptions": {"num_blocks": 14, "headroom_tokens": 0},
}
PROMPTS = [random_prompt(17, seed=99) * (index % 2) + random_prompt(3 + 7 * index, seed=index) for index in range(9)]


def sequences() -> list[Sequence]:
    return [
        make_sequence(
            str(index), prompt, Sampling(temperature=0.9 * (index % 2), seed=index, max_tokens=NUM_TOKENS, logprobs=1)
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module", params=["auto", "int8"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"block_size": BLOCK, "kv_cache_dtype": request.param}


@pytest.fixture(scope="module")
def runner(directory: Path, settings: dict[str, Any]) -> TorchModelRunner:
    runner = make_runner(directory, **settings)
    assert runner.cache.layers[0].keys.stride(1) == 1
    return runner


@pytest.fixture(scope="module")
def plain(runner: TorchModelRunner) -> Any:
    return run(runner, sequences())


def test_tokens_equal_those_of_blocks_of_four(directory: Path, settings: dict[str, Any], plain: Any) -> None:
    runner = make_runner(directory, kv_cache_dtype=settings["kv_cache_dtype"])
    assert runner.cache.layers[0].keys.is_contiguous()
    assert run(runner, sequences()).tokens == plain.tokens


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_tokens_and_their_bits_do_not_depend_on_the_traffic(runner: TorchModelRunner, plain: Any, traffic: str) -> None:
    outcome = run(runner, sequences(), **TRAFFIC[traffic])
    assert outcome.tokens == plain.tokens
    assert outcome.logprobs == plain.logprobs
    assert outcome.num_preemptions > 0 or traffic != "preemptions"


def test_resumed_sequences_continue_exactly(runner: TorchModelRunner, plain: Any) -> None:
    resumed = [
        make_sequence(sequence.id, sequence.token_ids, sequence.sampling, tuple(plain.tokens[sequence.id][: 5 + index]))
        for index, sequence in enumerate(sequences())
    ]
    outcome = run(runner, resumed)
    assert all(outcome.tokens[name] == tokens[5 + int(name) :] for name, tokens in plain.tokens.items())
