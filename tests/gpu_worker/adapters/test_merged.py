"""Logits with an adapter are those of a model that it was merged into; those of rows without are as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from gpu_worker.adapters.reader import _part, read_adapter
from gpu_worker.layers.adapters import AdaptedMatrix, AdapterTargets
from gpu_worker.layers.attention_context import AttentionContext
from gpu_worker.models.decoder import CausalLM
from gpu_worker.models.loader import load_model
from tests.gpu_worker.adapters.peft_files import linear_sizes, merge, write_adapter
from tests.gpu_worker.models.families.composed_cases import CASES as COMPOSED
from tests.gpu_worker.models.families.dense_cases import CASES as DENSE
from tests.gpu_worker.models.families.random_models import case, save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.variants import oracle_logits, random_tokens
from tests.gpu_worker.quantization.checkpoints import Pack, but_head, make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.packers import gptq, in_order, int8, int8_inputs
from tests.gpu_worker.quantization.test_compressed_tensors import TOKEN_INT8, config, group
from tests.gpu_worker.quantization.test_fp8 import FIELDS as MODELOPT
from tests.gpu_worker.quantization.test_fp8 import config as fp8_config
from tests.gpu_worker.quantization.test_fp8 import per_tensor as per_tensor_and_inputs
from tests.gpu_worker.quantization.test_fp8 import static
from tests.gpu_worker.quantization.test_mixtures import CHECKPOINTS, FP8_TENSOR, per_tensor

_LAYERS = (
    r".*\.(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|qkv_proj|gate_up_proj|c_attn|c_proj|c_fc|in_proj"
    r"|per_layer_model_projection|per_layer_input_gate|per_layer_projection)"
)
CASES = {
    # Fused kernels: heads in another order, an embedding and a head of its own.
    "llama": case("Llama", num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2-biases": case("Qwen2", tie_word_embeddings=True),
    # One matrix for queries, keys and values, and one for gates and up projections.
    "phi3": case("Phi3"),
    # Layer by layer: norms behind blocks, a soft cap, embeddings that are scaled.
    "gemma2": case("Gemma2", head_dim=12, sliding_window=9, query_pre_attn_scalar=12),
    # Vectors of each token for each layer, and layers that have no keys of their own.
    "gemma4-e": DENSE["gemma4-e"],
    # Transposed matrices and learned positions.
    "gpt2": COMPOSED["gpt2"],
    "granite": case("Granite", attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.8),
}


class AdaptedRun(PagedRun):
    """Sequences of which some have an adapter, by their number."""

    slots: dict[int, int]

    def context(self, positions: dict[int, torch.Tensor]) -> AttentionContext:
        slots = [self.slots.get(s, -1) for s, where in positions.items() for _ in where]
        assert self.model.adapters is not None
        self.rows = self.model.adapters.rows(np.array(slots, dtype=np.int32))
        return replace(super().context(positions), adapters=self.rows if max(slots) >= 0 else None)

    def step(self, num_tokens: dict[int, int]) -> dict[int, torch.Tensor]:
        positions = {s: torch.arange(self.computed[s], self.computed[s] + count) for s, count in num_tokens.items()}
        for s, count in num_tokens.items():
            self.computed[s] += count
        tokens = torch.cat([self.sequences[s][positions[s]] for s in num_tokens])
        with torch.inference_mode():
            hidden = self.model.forward(tokens, torch.cat(list(positions.values())), self.context(positions))
            logits = self.model.logits(hidden, self.rows)
        return dict(zip(num_tokens, logits.split(list(num_tokens.values())), strict=True))


def computed(model: CausalLM, slots: dict[int, int]) -> list[torch.Tensor]:
    run = AdaptedRun(model, [random_tokens(18) % model.config.vocab_size for _ in range(3)])
    run.slots = slots
    rows: list[list[torch.Tensor]] = [[], [], []]
    for step in ({0: 9, 1: 14}, {1: 1, 2: 17}, {0: 8, 1: 2}, {0: 1, 1: 1, 2: 1}):
        for s, logits in run.step(step).items():
            rows[s].append(logits)
    return [torch.cat(row) for row in rows]


def place(model: CausalLM, slot: int, directory: Path) -> None:
    assert model.adapters is not None
    adapter = read_adapter(directory, model.adapters, model.config.block.names.renamed)
    model.adapters.place(slot, model.adapters.pack(adapter.low_ranks), adapter.max_rank)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_merged_weights_and_base_rows_do_not_change(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    oracle = save_case(CASES[name], directory)
    sizes = linear_sizes(oracle, _LAYERS)
    assert sizes
    last = list(sizes)[-1]
    embedding = next(name for name, module in oracle.named_modules() if isinstance(module, torch.nn.Embedding))
    is_tied = oracle.config.tie_word_embeddings
    words = {} if is_tied or name != "llama" else {"model.embed_tokens": (48, 97), "lm_head": (97, 48)}
    first = write_adapter(
        tmp_path / "first", {**sizes, **words}, rank=3, seed=1, embedding=embedding, rank_pattern={last: 17}
    )
    path = first / "adapter_model.safetensors"
    # PEFT saves copies of these beside their adapters.
    copies = {f"base_model.model.{word}.base_layer.weight": torch.zeros(97, 48) for word in words}
    save_file({**load_file(path), **copies}, path)
    # Only some modules, and another scale.
    few = dict(list(sizes.items())[::2])
    second = write_adapter(
        tmp_path / "second", few, rank=8, seed=2, use_rslora=True, alpha_pattern={next(iter(few)): 5}
    )
    model = load_model(directory, torch.float32, torch.device("cpu"), num_adapters=3)
    plain = load_model(directory, torch.float32, torch.device("cpu"))
    place(model, 2, first)
    place(model, 0, second)
    rows = computed(model, {0: 2, 2: 0})
    for s, adapter in ((0, first), (2, second)):
        merged = copy.deepcopy(oracle)
        merge(merged, adapter)
        expected = oracle_logits(merged, random_tokens(18))
        assert (expected - oracle_logits(oracle, random_tokens(18))).abs().max() > 0.1
        torch.testing.assert_close(rows[s], expected, atol=1e-3, rtol=0)
    assert torch.equal(rows[1], plain_rows(plain))


def plain_rows(model: Any) -> torch.Tensor:
    run = PagedRun(model, [random_tokens(18) for _ in range(3)])
    rows = [run.step(step)[1] for step in ({0: 9, 1: 14}, {1: 1, 2: 17}, {0: 8, 1: 2}, {0: 1, 1: 1, 2: 1})]
    return torch.cat(rows)


FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    **CHECKPOINTS,
    "int8": (config("int-quantized", group({"num_bits": 8, "strategy": "channel"})), but_head(int8)),
    "int8 and rounded inputs": (
        config("int-quantized", group({"num_bits": 8, "strategy": "channel"}, TOKEN_INT8)),
        but_head(lambda weight: int8(weight, inputs=int8_inputs)),
    ),
    "gptq with one group": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True},
        but_head(lambda weight: gptq(weight, 8, in_order(weight.shape[1], -1))),
    ),
    "fp8 of a tensor": (config("float-quantized", FP8_TENSOR), but_head(per_tensor)),
    "fp8 of a tensor and rounded inputs": (fp8_config(), but_head(per_tensor_and_inputs)),
    "modelopt and rounded inputs": (MODELOPT, but_head(static(0.02))),
}


def _add_beside(oracle: Any, directory: Path) -> None:
    """Add an adapter's products to those of an oracle's layers: of inputs that are not rounded."""
    tensors, modules = load_file(directory / "adapter_model.safetensors"), dict(oracle.named_modules())
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module = modules[name.removeprefix("base_model.model.").partition(".lora_")[0]]
        up = tensors[name.replace("lora_A", "lora_B")]
        kept: list[torch.Tensor] = []
        module.register_forward_pre_hook(lambda _, x, kept=kept: kept.append(x[0]), prepend=True)
        # `write_adapter` says an alpha of twice the rank.
        module.register_forward_hook(
            lambda _, x, result, kept=kept, down=down, up=up: result + 2 * kept.pop() @ down.T @ up.T
        )


@pytest.mark.parametrize("name", FORMS)
def test_adapters_are_beside_weights_of_each_form(name: str, tmp_path: Path) -> None:
    fields, pack = FORMS[name]
    made = make_checkpoint(tmp_path / "model", fields, pack, eos_token_id=None)
    adapter = write_adapter(tmp_path / "adapter", linear_sizes(made.oracle, _LAYERS), rank=6, seed=3)
    model = load_model(made.directory, torch.float32, torch.device("cpu"), num_adapters=1)
    place(model, 0, adapter)
    rows = computed(model, {0: 0})
    base = oracle_logits(made.oracle, random_tokens(18) % 96)
    _add_beside(made.oracle, adapter)
    expected = oracle_logits(made.oracle, random_tokens(18) % 96)
    assert (expected - base).abs().max() > 0.1
    if "rounded" not in name:
        torch.testing.assert_close(rows[1], base, atol=1e-3, rtol=0)
        return torch.testing.assert_close(rows[0], expected, atol=1e-3, rtol=0)
    # A last bit can move an input by a whole step, which changes less than no rounding would.
    for module in made.oracle.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if "kept" not in hook.__code__.co_varnames]:
            del hooks[key]
    unrounded = oracle_logits(made.oracle, random_tokens(18) % 96)
    assert (rows[0] - expected).abs().mean() < (unrounded - expected).abs().mean() / 5


@pytest.mark.parametrize("name", ["llama-F16", "llama-Q4_0", "llama-mixed", "llama-small", "qwen3"])
def test_logits_equal_weights_of_a_gguf_file_with_the_adapter_merged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    oracle = write_model(path, name)
    adapter = write_adapter(tmp_path / "adapter", linear_sizes(oracle, _LAYERS), rank=6, seed=3)
    model = load_model(path, torch.float32, torch.device("cpu"), num_adapters=1)
    place(model, 0, adapter)
    rows = computed(model, {0: 0})
    base = oracle_logits(oracle, random_tokens(18))
    merge(oracle, adapter)
    expected = oracle_logits(oracle, random_tokens(18))
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(rows[0], expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(rows[1], base, atol=1e-3, rtol=0)


def test_part_of_a_matrix_in_another_order_has_its_features_where_they_are() -> None:
    down, up = torch.randn(4, 12), torch.randn(6, 4)
    # Features of the first module lie at 1, 2 and 8, those of the second at the other places.
    order = torch.tensor([3, 2, 0, 4, 5, 6, 7, 8, 1])
    scales = torch.arange(1.0, 10.0)
    matrix = AdaptedMatrix(("a", "b"), (3, 6), 12, order, scales, ())
    part = _part(matrix, 1, down, up, 0.5)
    assert part.features.tolist() == [0, 3, 4, 5, 6, 7]
    assert torch.equal(part.down, down)
    assert torch.equal(part.up, up * scales[3:, None])
    assert _part(matrix, 0, down, up[:3], 0.5).features.tolist() == [1, 2, 8]
    # Rows follow the order: 2 before 0 before 1.
    assert torch.equal(_part(matrix, 0, down, up[:3], 0.5).up, (up[:3] * scales[:3, None])[[2, 0, 1]])


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_matrix_of_float32_beside_one_of_bfloat16_is_not_rounded(side: str, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.down_proj"
    adapter = write_adapter(tmp_path, {module: (40, 24)}, rank=4)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {name: tensor.bfloat16() if side in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    targets = AdapterTargets(1, torch.device("cpu"), torch.float32)
    (table,) = targets.add((module,), (40,), 24)
    targets.place(0, targets.pack(read_adapter(adapter, targets).low_ranks), 4)
    x, result = torch.randn(3, 24), torch.zeros(3, 40)
    table.add(x, result, targets.rows(np.zeros(3, dtype=np.int32)))
    down, up = (tensors[f"base_model.model.{module}.lora_{name}.weight"].float() for name in "AB")
    torch.testing.assert_close(result, 2 * x @ down.T @ up.T, atol=1e-5, rtol=1e-5)
