"""gpt-oss as it is published, its experts in MXFP4, against `transformers` on the numbers that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.models.loader import load_model, weights_bytes
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.variants import oracle_logits

CASE = Case(
    "GptOss",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 8,
    },
)
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS = "mlp.experts"


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round matrices `[..., columns]`: bytes of 16 to a group of 32, stored exponents, and what these stand for."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 2
    codes = ((groups / torch.exp2(exponents))[..., None] - VALUES).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents[..., 0] + 127).to(torch.uint8), (VALUES[codes] * torch.exp2(exponents)).flatten(-2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("gpt-oss")
    return directory, save_packed(directory)


def save_packed(directory: Path, case: Case = CASE) -> Any:
    """Save a random model with packed experts, and return the oracle."""
    oracle = save_case(case, directory)
    tensors = load_file(directory / "model.safetensors")
    for name, module in oracle.named_modules():
        if not name.endswith(EXPERTS):
            continue
        for part in ("gate_up_proj", "down_proj"):
            blocks, exponents, dense = pack(tensors.pop(f"{name}.{part}").mT)
            tensors |= {f"{name}.{part}_blocks": blocks, f"{name}.{part}_scales": exponents}
            getattr(module, part).data.copy_(dense.mT)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    (directory / "config.json").write_text(json.dumps(config))
    return oracle


def test_logits_equal_transformers(made: tuple[Path, Any]) -> None:
    directory, oracle = made
    tokens = torch.tensor(random_prompt(50, seed=1))
    expected = oracle_logits(oracle, tokens)
    step = PagedRun(load_model(directory, torch.float32, CPU), [tokens])
    actual = torch.cat([step.step({0: count})[0] for count in (21, 1, 27, 1)])
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_greedy_answers_of_the_engine_equal_transformers(made: tuple[Path, Any]) -> None:
    directory, oracle = made
    prompts = [random_prompt(length, seed=length) for length in (5, 23, 40)]
    sampling = Sampling(temperature=0.0, max_tokens=12)
    runner = make_runner(directory, max_model_len=80)
    outcome = run(runner, [make_sequence(str(i), p, sampling) for i, p in enumerate(prompts)], token_budget=16)
    for i, prompt in enumerate(prompts):
        tokens = torch.tensor([*prompt, *outcome.tokens[str(i)]])
        assert outcome.tokens[str(i)] == oracle_logits(oracle, tokens)[len(prompt) - 1 : -1].argmax(1).tolist()


def test_experts_take_the_memory_that_the_files_have(made: tuple[Path, Any]) -> None:
    directory, _ = made
    tensors = load_file(directory / "model.safetensors")
    packed = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(("_blocks", "_scales")))
    plain = sum(tensor.nbytes for tensor in tensors.values()) - packed
    assert weights_bytes(directory, torch.float32, CPU, is_tied=False) == packed + plain
