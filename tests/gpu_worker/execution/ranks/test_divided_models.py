"""Models that are divided among ranks score tokens as the whole model does, over mixers, heads and forms of weights.

Ranks are threads here: what they send one another is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.layers.fused_decoder import FusedDecoder
from gpu_worker.layers.ranks.division import Division, IndivisibleError, divided_layer
from gpu_worker.layers.ranks.rank import ALONE, Ranks
from gpu_worker.models.decoder import CausalLM, is_fused
from gpu_worker.models.loader import load_model
from gpu_worker.models.registry import read_model_config
from tests.gpu_worker.execution.ranks.thread_ranks import on_ranks, sharing_memory
from tests.gpu_worker.models.families import composed_cases, dense_cases, latent_cases, mixture_cases
from tests.gpu_worker.models.families.random_models import Case, case, save_case
from tests.gpu_worker.models.paged_run import PagedRun
from tests.gpu_worker.models.recurrent_models import CASES as RECURRENT
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.models.variants import VARIANTS, oracle_logits, random_tokens, save_variant
from tests.gpu_worker.quantization.checkpoints import Pack, but_head, make_checkpoint
from tests.gpu_worker.quantization.gguf.gguf_models import VARIANTS as GGUF
from tests.gpu_worker.quantization.gguf.gguf_models import write_model
from tests.gpu_worker.quantization.packers import awq, fp8, fp8_blocks, gptq, in_order, int8, shuffled

CPU = torch.device("cpu")
TOKENS = random_tokens(30).clamp(max=90)
FAMILIES: Mapping[str, Case] = {
    **dense_cases.CASES,
    **latent_cases.CASES,
    **mixture_cases.CASES,
    **composed_cases.CASES,
}
LATENT = f"family-{next(iter(latent_cases.CASES))}"
_NEMOTRON = {"mamba_num_heads": 4, "n_groups": 4}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_n_groups": 4}
_FALCON = {**_MAMBA2, "mamba_d_ssm": 48}
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
CHANGED: Mapping[str, Mapping[str, int]] = {
    "family-phi": {"num_attention_heads": 4, "num_key_value_heads": 4},
    **{f"recurrent-nemotron_h{options}": _NEMOTRON for options in ("", "-biases", "-experts")},
    **{f"recurrent-falcon_h1{options}": _FALCON for options in ("", "-options")},
    "recurrent-granite_moe_hybrid": {**_MAMBA2, "num_local_experts": 6},
    "recurrent-granite_moe_hybrid-dense": _MAMBA2,
    "recurrent-mamba2": {"n_groups": 4},
    **{f"recurrent-{name}": _DELTA for name in ("qwen3_next", "qwen3_5_moe", "qwen3_5", "qwen3_5-options")},
    "gguf-mixtral": {"num_local_experts": 4},
}
"""Sizes that four ranks divide, in place of those of the cases, which they do not."""


def _save_family(name: str, directory: Path) -> None:
    own = FAMILIES[name]
    experts = {key: own.options[key] // 2 * 2 for key in ("num_local_experts", "num_experts") if key in own.options}
    save_case(replace(own, options={**own.options, **experts, **CHANGED.get(f"family-{name}", {})}), directory)


def _save_recurrent(name: str, directory: Path) -> None:
    save_recurrent(name, directory, **CHANGED.get(f"recurrent-{name}", {}))


def _write_gguf(name: str, directory: Path) -> None:
    write_model(directory / "model.gguf", name, **CHANGED.get(f"gguf-{name}", {}))


MODELS: dict[str, Callable[[Path], object]] = {
    **{f"variant-{name}": lambda path, name=name: save_variant(name, path) for name in VARIANTS},
    **{f"family-{name}": lambda path, name=name: _save_family(name, path) for name in FAMILIES},
    **{f"recurrent-{name}": lambda path, name=name: _save_recurrent(name, path) for name in RECURRENT},
    **{f"gguf-{name}": lambda path, name=name: _write_gguf(name, path) for name in GGUF},
}
"""Models that two and four ranks divide, all of them, and whose experts two do."""


def load(directory: Path, ranks: Ranks, **settings: Any) -> CausalLM:
    """Load a rank's part of a model, whose configuration is that of the part."""
    model = load_model(directory, torch.float32, CPU, make=partial(CausalLM, ranks=ranks), **settings)
    if ranks.size > 1:
        layers = tuple(divided_layer(layer, Division.of(ranks)) for layer in model.config.layers)
        model.config = replace(model.config, layers=layers)
    return model


def logits(directory: Path, ranks: Ranks = ALONE, form: type = object) -> torch.Tensor:
    """Score a prompt in chunks and then token by token, with layers of this form."""
    model = load(directory, ranks)
    assert isinstance(model._decoder, form)
    run = PagedRun(model, [TOKENS], kept=ranks.tokens)
    return torch.cat([run.step({0: count})[0] for count in (13, 14, 1, 1, 1)])


def assert_divisible(directory: Path, size: int, *, in_one_call: bool = False, **division: Any) -> None:
    share = sharing_memory(size) if in_one_call else None

    def scores(ranks: Any) -> torch.Tensor:
        if share is None or ranks is ALONE:
            return logits(directory, ranks)
        return logits(directory, share(ranks), FusedDecoder)

    whole, side_by_side = both(scores, size, **division)
    assert whole.std() > 0.05
    assert_near(side_by_side, whole)


def both(scores: Callable[[Ranks], torch.Tensor], size: int, **division: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the whole model scores, and what ranks that have some of its tokens each do, side by side."""
    whole = scores(ALONE)
    return whole, torch.cat(on_ranks(size, scores, **division), dim=1)[:, : whole.shape[1]]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def check(name: str, size: int, directory: Path, **division: Any) -> None:
    MODELS[name](directory)
    assert_divisible(directory, size, **division)


DEFAULT = (
    *("variant-llama", "variant-llama-mqa-biases"),
    *("recurrent-qwen3_5_moe", "recurrent-lfm2", "recurrent-nemotron_h"),
)


@pytest.mark.parametrize("name", DEFAULT)
def test_two_ranks_score_as_one(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*itertools.product(MODELS, (2, 4))])
def test_every_family_scores_as_one(name: str, size: int, tmp_path: Path) -> None:
    check(name, size, tmp_path)


SHARING = ("variant-llama", "variant-mistral-window", "family-gpt-oss", LATENT, "recurrent-qwen3_5_moe")


@pytest.mark.parametrize("name", SHARING)
def test_ranks_that_share_the_tokens_of_sequences_score_as_one(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path, context_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*itertools.product(MODELS, ((2, 2), (4, 2), (4, 4)))])
def test_every_family_whose_ranks_share_tokens_scores_as_one(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    check(name, size[0], tmp_path, context_size=size[1])


def test_prompt_of_ranks_that_share_tokens_may_be_cut_anywhere(tmp_path: Path) -> None:
    MODELS["variant-mistral-window"](tmp_path)

    def scores(ranks: Ranks) -> torch.Tensor:
        model, found = load(tmp_path, ranks), []
        for cut in range(1, 14):
            run = PagedRun(model, [TOKENS[:14], TOKENS[10:20]], kept=ranks.tokens)
            first = run.step({0: cut})[0]
            # Beside the beginning of another prompt, whose tokens come one by one then.
            second = run.step({0: 14 - cut, 1: cut % 9 + 1})
            last = run.step({1: 1})
            found.append(torch.cat((first, second[0], second[1], last[1])))
        return torch.cat(found)

    whole, side_by_side = both(scores, 2, context_size=2)
    assert_near(side_by_side, whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if "mo" in name or "mix" in name or "deepseek" in name])
def test_mixtures_whose_ranks_have_some_experts_score_as_one(name: str, tmp_path: Path) -> None:
    check(name, 2, tmp_path, has_whole_experts=True)


def test_ranks_have_some_experts_of_stacks_under_other_names(tmp_path: Path) -> None:
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
    save_case(case("GraniteMoeShared", shape), tmp_path)
    assert_divisible(tmp_path, 2, has_whole_experts=True)


def test_counts_of_experts_are_those_of_all_ranks(tmp_path: Path) -> None:
    MODELS["recurrent-qwen3_5_moe"](tmp_path)

    def counts(ranks: Ranks) -> list[list[int]]:
        model = load(tmp_path, ranks)
        PagedRun(model, [TOKENS]).step({0: len(TOKENS)})
        loads = model.expert_loads()
        assert loads is not None
        return [layer.tolist() for layer in loads.by_layer()]

    found = [on_ranks(2, counts, has_whole_experts=is_whole) for is_whole in (True, False)]
    assert found[0][0] == found[0][1] == found[1][0]
    assert sum(map(sum, found[0][0])) > 0


FUSED = ("variant-llama", "variant-mistral-window", "gguf-llama-mixed", "gguf-qwen3-moe")
FUSED_FAMILIES = (
    *("phi3", "phi3-long", "seed-oss", "glm", "ministral", "mixtral", "qwen3-moe", "ernie", "ernie-biases", "cwm"),
    *("internlm3", "internlm3-biases", "iquestcoder", "helium", "helium-bf16", "mellum"),
)
LAYERED_GGUF = {"qwen2-moe", "olmoe-F16", "gpt-oss"}
ALL_FUSED = (
    *(f"variant-{name}" for name in VARIANTS),
    *(f"family-{name}" for name in FUSED_FAMILIES),
    *(f"gguf-{name}" for name in GGUF if name not in LAYERED_GGUF),
)
"""Models whose layers the kernels of a CPU compute in one call."""


@pytest.mark.parametrize("name", FUSED)
def test_ranks_that_compute_all_layers_in_one_call_score_as_one(name: str, tmp_path: Path) -> None:
    check_fused(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*itertools.product(ALL_FUSED, (2, 4))])
def test_every_family_in_one_call_scores_as_one(name: str, size: int, tmp_path: Path) -> None:
    check_fused(name, size, tmp_path)


def check_fused(name: str, size: int, directory: Path) -> None:
    MODELS[name](directory)
    assert is_fused(read_model_config(directory), torch.float32, CPU, size)
    assert_divisible(directory, size, in_one_call=True)


REFUSED: dict[str, tuple[Callable[[Path], object], Division, str]] = {
    "heads": (lambda path: save_case(FAMILIES["phi"], path), Division(0, 2), "3 query heads"),
    "normed-groups": (
        lambda path: save_recurrent("nemotron_h", path),
        Division(0, 2),
        "3 groups of Mamba-2 heads, each normalised as one vector,",
    ),
    "groups": (lambda path: save_recurrent("falcon_h1-options", path), Division(0, 2), "3 groups of Mamba-2 heads"),
    "mamba2-heads": (lambda path: save_recurrent("falcon_h1-options", path), Division(0, 4), "6 heads of Mamba-2"),
    "delta-heads": (lambda path: save_recurrent("qwen3_5", path), Division(0, 4), "2 key heads of linear attention"),
    "experts": (lambda path: save_case(FAMILIES["mixtral"], path), Division(0, 2, True), "5 experts"),
    "expert-features": (lambda path: save_case(FAMILIES["mixtral"], path), Division(0, 3), "40 features of an expert"),
    "shared-expert": (
        lambda path: save_recurrent("qwen3_5_moe", path),
        Division(0, 3),
        "40 features of the shared expert",
    ),
    "features": (lambda path: save_variant("llama", path), Division(0, 3), "112 features of a feed-forward block"),
    "channels": (lambda path: save_recurrent("lfm2", path), Division(0, 5), "64 channels of a convolution"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_ranks_do_not_divide_are_refused(name: str, tmp_path: Path) -> None:
    save, division, what = REFUSED[name]
    save(tmp_path)
    layers = read_model_config(tmp_path).layers
    with pytest.raises(IndivisibleError, match=f"^{what} cannot be divided"):
        _ = [divided_layer(layer, division) for layer in layers]


def test_single_group_of_heads_is_on_every_rank(tmp_path: Path) -> None:
    save_recurrent("mamba2", tmp_path, n_groups=1)
    mixers: list[Any] = [divided_layer(layer, Division(1, 2)).mixer for layer in read_model_config(tmp_path).layers]
    assert {mixer.sizes.num_groups for mixer in mixers} == {1}


def _gptq(bits: int, group_size: int, **options: bool) -> Pack:
    return but_head(lambda weight: gptq(weight, bits, in_order(weight.shape[1], group_size), **options))


def _act_order(name: str, weight: torch.Tensor) -> object:
    columns = weight.shape[1]
    return None if name == "lm_head" else gptq(weight, 4, shuffled(columns, 32, columns), symmetric=False)


INT8: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
}
FORMS: dict[str, tuple[dict[str, object], Pack, dict[str, object]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, _gptq(4, 32), {}),
    "gptq-one-group": ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, _gptq(8, -1), {}),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        _act_order,  # type: ignore[dict-item]
        {},
    ),
    "gptq-head": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "lm_head": True},
        lambda _, weight: gptq(weight, 4, in_order(weight.shape[1], 32)),
        {},
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        but_head(lambda weight: awq(weight, 16)),
        {},
    ),
    "int8": (INT8, but_head(int8), {}),
    "fp8-rows": (
        {"quant_method": "fp8"},
        but_head(lambda weight: fp8(weight, weight.abs().amax(1, keepdim=True) / 448)),
        {},
    ),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        but_head(fp8_blocks),
        {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512},
    ),
    "fp8-blocks-apart": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        but_head(fp8_blocks),
        {},
    ),
}


EXACT_FORMS = [name for name in FORMS if not name.startswith("fp8")]
"""Of float8 each rank rounds its own inputs."""


@pytest.mark.parametrize("name", ["gptq-act-order", "awq"])
def test_quantized_weights_of_two_ranks_score_as_one(name: str, tmp_path: Path) -> None:
    settings, pack, options = FORMS[name]
    make_checkpoint(tmp_path, settings, pack, **options)
    assert_divisible(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*itertools.product(EXACT_FORMS, (2, 4))])
def test_every_form_in_one_call_scores_as_one(name: str, size: int, tmp_path: Path) -> None:
    settings, pack, options = FORMS[name]
    make_checkpoint(tmp_path, settings, pack, **options)
    assert_divisible(tmp_path, size, in_one_call=True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*itertools.product(FORMS, (2, 4))])
def test_every_form_of_weights_scores_as_one(name: str, size: int, tmp_path: Path) -> None:
    settings, pack, options = FORMS[name]
    made = make_checkpoint(tmp_path, settings, pack, **options)
    if name in EXACT_FORMS:
        assert_divisible(tmp_path, size)
        return
    # Inputs are rounded, each rank's by themselves: as near to what they stand for as those of the whole are.
    whole, side_by_side = both(lambda ranks: logits(tmp_path, ranks), size)
    plain = oracle_logits(made.oracle, TOKENS)
    assert (side_by_side - plain).std() < 1.1 * (whole - plain).std() < 0.2 * plain.std()
