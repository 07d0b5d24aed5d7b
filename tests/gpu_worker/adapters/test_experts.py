"""Adapters beside the experts of mixtures: logits are those of merged weights, and rows without one do not change."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.adapters.config import AdapterError
from gpu_worker.adapters.reader import read_adapter
from gpu_worker.layers.fused_decoder import FusedDecoder
from gpu_worker.models.loader import load_model
from kernels.cpu_library import cpu_library
from tests.gpu_worker.adapters.peft_files import write_adapter
from tests.gpu_worker.adapters.test_merged import computed, place, plain_rows
from tests.gpu_worker.models.families.mixture_cases import CASES
from tests.gpu_worker.models.families.random_models import save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.models.variants import oracle_logits, random_tokens
from tests.gpu_worker.quantization.checkpoints import Pack, make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.test_compressed_tensors import config, group
from tests.gpu_worker.quantization.test_mixtures import IGNORED, METHODS, SIZES, score_left_alone
from tests.gpu_worker.quantization.test_mxfp4 import save_packed

# What checkpoints call the matrices of an expert, and the module of all.
MIXTURES = {
    # In one call, by kernels of a CPU.
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    # Layer by layer: a shared expert beside them.
    "qwen2-moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "glm4-moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


def _experts(oracle: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in oracle.named_modules() if name.endswith(".experts")}


def _sizes(oracle: torch.nn.Module, name: str) -> dict[str, tuple[int, int]]:
    """Return the sizes of routers and most experts' matrices; some have an adapter beside one matrix, or none."""
    module, (gate, up, down) = MIXTURES[name]
    sizes = {}
    for path, experts in _experts(oracle).items():
        layer = path.removesuffix(".mlp.experts")
        count, inner, hidden = experts.down_proj.shape[0], experts.down_proj.shape[2], experts.down_proj.shape[1]
        # As `transformers` calls it, whatever its name in the checkpoint is.
        sizes[f"{layer}.mlp.gate"] = (count, hidden)
        for expert in range(1, count):
            of = f"{layer}.{module}.{expert}"
            sizes |= {f"{of}.{gate}": (inner, hidden), f"{of}.{down}": (hidden, inner)}
            if expert % 3:
                sizes[f"{of}.{up}"] = (inner, hidden)
    return sizes


@torch.no_grad()
def _merge(oracle: torch.nn.Module, directory: Path, name: str) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    module, matrices = MIXTURES[name]
    for path, experts in _experts(oracle).items():
        layer = path.removesuffix(".mlp.experts")
        inner, router = experts.down_proj.shape[2], f"{layer}.mlp.gate"
        products = [tensors[f"base_model.model.{router}.lora_{side}.weight"] for side in "BA"]
        oracle.get_submodule(router).weight += 2 * products[0] @ products[1]
        for expert in range(len(experts.down_proj)):
            parts = (
                experts.gate_up_proj[expert, :inner],
                experts.gate_up_proj[expert, inner:],
                experts.down_proj[expert],
            )
            for matrix, weight in zip(matrices, parts, strict=True):
                of = f"base_model.model.{layer}.{module}.{expert}.{matrix}"
                if f"{of}.lora_A.weight" in tensors:
                    # `write_adapter` says an alpha of twice the rank.
                    weight += 2 * tensors[f"{of}.lora_B.weight"] @ tensors[f"{of}.lora_A.weight"]


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_equal_merged_experts_and_base_rows_do_not_change(name: str, tmp_path: Path) -> None:
    oracle = save_case(CASES[name], tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", _sizes(oracle, name), rank=3, seed=4)
    model = load_model(tmp_path / "model", torch.float32, torch.device("cpu"), num_adapters=2)
    if cpu_library() is not None:
        assert isinstance(model._decoder, FusedDecoder) == (name in ("mixtral", "qwen3-moe"))
    place(model, 1, adapter)
    rows = computed(model, {0: 1, 2: 1})
    merged = copy.deepcopy(oracle)
    _merge(merged, adapter, name)
    expected = oracle_logits(merged, random_tokens(18))
    assert (expected - oracle_logits(oracle, random_tokens(18))).abs().max() > 0.1
    for row in (0, 2):
        torch.testing.assert_close(rows[row], expected, atol=1e-3, rtol=0)
    assert torch.equal(rows[1], plain_rows(load_model(tmp_path / "model", torch.float32, torch.device("cpu"))))


def _write_stacks(
    directory: Path,
    oracle: torch.nn.Module,
    *,
    is_turned: bool,
    rank: int = 3,
    alphas: Mapping[str, float] = {},
    stacks: Sequence[str] = ("gate_up_proj", "down_proj"),
) -> Path:
    """Write an adapter of one or both stacks of each layer, as PEFT does for `target_parameters`; add it to the oracle.

    `alphas` are by the stack's parameter, in others twice the rank.

    PEFT takes the first dimension of a parameter's matrices for the inputs, or the second if `is_turned`.
    """
    generator, tensors = torch.Generator().manual_seed(1), {}
    for path, experts in _experts(oracle).items():
        for depth, own in enumerate(reversed(stacks)):
            parameter = getattr(experts, own)
            count, *sizes = parameter.shape
            inputs, outputs = sizes[::-1] if is_turned else sizes
            down = torch.randn(count * rank, inputs, generator=generator) * inputs**-0.5
            up = torch.randn(outputs, rank * count, generator=generator) * 0.3
            of = f"base_model.model.{path}{depth * '.base_layer'}"
            tensors |= {f"{of}.lora_A.weight": down, f"{of}.lora_B.weight": up}
            each = down.reshape(count, rank, inputs), up.reshape(outputs, rank, count)
            delta = alphas.get(own, 2 * rank) / rank * torch.einsum("o r e, e r i -> e i o", each[1], each[0])
            parameter.data += delta.transpose(1, 2) if is_turned else delta
    parameters = [f"experts.{own}" for own in stacks]
    # PEFT matches no parameter with the name of its module.
    patterns = {"experts": 50, **{rf".*\.{own}": alpha for own, alpha in alphas.items()}}
    write_adapter(directory, {}, rank=rank, target_parameters=parameters, alpha_pattern=patterns)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


# Without a gate, the sizes of the two matrices are each other's, turned.
_UNGATED = ("up_proj",), ("down_proj",), ("up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "stacks", "is_turned"),
    [
        ("qwen3-moe", ("gate_up_proj", "down_proj"), True),
        ("qwen3-moe", ("gate_up_proj", "down_proj"), False),
        ("gpt-oss", ("gate_up_proj", "down_proj"), False),
        *(("nemotron_h-experts", stacks, turned) for stacks in _UNGATED for turned in (True, False)),
    ],
)
def test_logits_equal_merged_stacks_of_experts(
    name: str, stacks: tuple[str, ...], is_turned: bool, tmp_path: Path
) -> None:
    is_gated = name in CASES
    oracle = save_case(CASES[name], tmp_path / "model") if is_gated else save_recurrent(name, tmp_path / "model")
    alphas = {"down_proj": 11} if is_gated else {}
    token_ids = random_tokens(18) % oracle.config.vocab_size
    before = oracle_logits(oracle, token_ids)
    adapter = _write_stacks(tmp_path / "adapter", oracle, is_turned=is_turned, alphas=alphas, stacks=stacks)
    model = load_model(tmp_path / "model", torch.float32, torch.device("cpu"), num_adapters=2)
    place(model, 1, adapter)
    expected = oracle_logits(oracle, token_ids)
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(computed(model, {0: 1})[0], expected, atol=1e-3, rtol=0)


def test_stack_of_experts_without_a_gate_has_to_be_named(tmp_path: Path) -> None:
    oracle = save_recurrent("nemotron_h-experts", tmp_path / "model")
    adapter = _write_stacks(tmp_path / "adapter", oracle, is_turned=False, stacks=("down_proj",))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_parameters": None}))
    targets = load_model(tmp_path / "model", torch.float32, torch.device("cpu"), num_adapters=1).adapters
    assert targets is not None
    with pytest.raises(AdapterError, match=r"target_parameters of adapter_config\.json has to name the one"):
        read_adapter(adapter, targets)


@pytest.mark.parametrize("name", ["mxfp4", "gpt-oss.gguf", "qwen3-moe.gguf"])
def test_logits_equal_merged_stacks_of_packed_experts(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    oracle = write_model(path, path.stem) if path.suffix == ".gguf" else save_packed(path)
    before = oracle_logits(oracle, random_tokens(18))
    adapter = _write_stacks(tmp_path / "adapter", oracle, is_turned=path.stem == "qwen3-moe")
    model = load_model(path, torch.float32, torch.device("cpu"), num_adapters=2)
    place(model, 1, adapter)
    rows, expected = computed(model, {0: 1}), oracle_logits(oracle, random_tokens(18))
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(rows[0], expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(rows[1], before, atol=1e-3, rtol=0)


_LEFT_ALONE = [*IGNORED["ignore"], r"re:.*experts\.2\..*"]


def _without_one_expert(pack: Pack) -> Pack:
    return lambda name, weight: None if ".experts.2." in name else pack(name, weight)


FORMS = {
    **METHODS,
    # One expert is plain: no kernel takes all of them.
    "compressed-tensors, one plain": (
        config("int-quantized", group({"num_bits": 8, "strategy": "channel"}), ignore=_LEFT_ALONE),
        _without_one_expert(METHODS["compressed-tensors, int8"][1]),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_logits_equal_merged_experts_of_each_form_of_weights(name: str, tmp_path: Path) -> None:
    fields, pack = FORMS[name]
    made = make_checkpoint(tmp_path / "model", fields, score_left_alone(pack), "Qwen2Moe", **SIZES)
    adapter = write_adapter(tmp_path / "adapter", _sizes(made.oracle, "qwen2-moe"), rank=3, seed=4)
    tokens = random_tokens(18) % made.oracle.config.vocab_size
    before = oracle_logits(made.oracle, tokens)
    model = load_model(tmp_path / "model", torch.float32, torch.device("cpu"), num_adapters=2)
    place(model, 1, adapter)
    rows = computed(model, {0: 1})
    _merge(made.oracle, adapter, "qwen2-moe")
    expected = oracle_logits(made.oracle, tokens)
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(rows[0], expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(rows[1], before, atol=1e-3, rtol=0)


def test_experts_that_cannot_have_an_adapter_say_why(tmp_path: Path) -> None:
    oracle = save_case(CASES["qwen3-moe"], tmp_path / "model")
    targets = load_model(tmp_path / "model", torch.float32, torch.device("cpu"), num_adapters=1).adapters
    assert targets is not None
    adapter = _write_stacks(tmp_path / "adapter", oracle, is_turned=True)
    tensors = load_file(adapter / "adapter_model.safetensors")
    up = next(name for name in tensors if name.endswith("experts.lora_B.weight"))
    save_file(tensors | {up: tensors[up][:-1].clone()}, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"those of this model's experts are \[\d+, \d+\] and \[\d+, \d+\]"):
        read_adapter(adapter, targets)
    # As on a GPU.
    targets.experts = dict.fromkeys(targets.experts)
    with pytest.raises(AdapterError, match="cannot have adapters on a GPU"):
        read_adapter(adapter, targets)
