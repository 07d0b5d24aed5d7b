"""What the head of a checkpoint drafts while the engine runs, against a dense computation of the whole sequence.

Small random models with the heads that their publishers ship beside them, and what such a head computes.

`transformers` leaves heads out. So a model with one layer more is made; the last layer becomes that of the head, under
the names that publishers have for it, and a plain computation puts it behind what joins the vectors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_worker.core.sequence import Sequence
from gpu_worker.execution.memory.kv_cache import allocate_kv_cache
from gpu_worker.execution.runner_config import RunnerConfig
from gpu_worker.models.loader import load_model
from gpu_worker.speculative.hidden_vectors.layer import EntryStep
from gpu_worker.speculative.hidden_vectors.proposer import HiddenVectorProposer
from gpu_worker.speculative.mtp.head import load_head
from gpu_worker.start.config import WorkerConfig
from gpu_worker.start.proposer_setup import with_room_for_proposer
from ops.bench.spec.fixed_depth import FixedDepth
from shared.errors import ConfigError
from shared.sampling import Sampling
from tests.gpu_worker.execution.engine_run import make_runner, make_sequence, random_prompt, run
from tests.gpu_worker.layers.contexts import context_of_one
from tests.gpu_worker.models.families.composed_cases import CASES as COMPOSED
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.mixture_cases import CASES as MIXTURES
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.pairs import CPU
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent
from tests.gpu_worker.quantization.packers import fp8_blocks
from tests.gpu_worker.speculative.recorder import DraftOracle, exact_drafts, recorded_runner
from tests.kernels.poisoned_memory import poisoned_memory

SHARP = 10


@dataclass(frozen=True)
class Family:
    """How a family's checkpoints have the head.

    Attributes:
        save: Saves a model with one layer more than `num_layers`, and returns it.
        num_layers: Of the model that is served.
        names: The two normalisations, token and hidden vector, the projection, and the last normalisation.
        field: What counts heads, if anything.
        prefix: What its tensors' names begin with.
        layer: Likewise those of its layer, where that is another.
        renamed: Names within the layer that are others there.
        kind: Of the layer, in families that have several.
    """

    save: Callable[[Path], Any]
    num_layers: int
    names: tuple[str, str, str, str]
    field: str | None
    prefix: str
    layer: str | None = None
    renamed: tuple[str, str] = ("", "")
    kind: str | None = None

    @property
    def is_qwen(self) -> bool:
        return self.names[2] == "fc"

    @property
    def hands_on_normed(self) -> bool:
        return self.names[3] in ("norm", "final_layernorm")


_NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_FINAL = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_MTP = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def _nextn(case: Case, names: tuple[str, str, str, str] = _NEXTN) -> Family:
    larger = Case(case.family, {**case.options, "num_hidden_layers": 3})
    return Family(partial(save_case, larger), 2, names, "num_nextn_predict_layers", "model.layers.2")


def _mimo() -> Family:
    """The layer of the head has a window and sinks, as no other in it has, and no experts."""
    options = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    }
    case = COMPOSED["mimo-v2"]
    return Family(
        partial(save_case, Case(case.family, {**case.options, **options})),
        2,
        _FINAL,
        "num_nextn_predict_layers",
        "model.mtp.layers.0",
        renamed=("post_attention_layernorm", "pre_mlp_layernorm"),
        kind="sliding_attention",
    )


def _mtp(name: str, field: str | None) -> Family:
    types = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]

    def save(directory: Path) -> Any:
        return save_recurrent(name, directory, num_hidden_layers=5, layer_types=types, eos_token_id=None)

    return Family(save, 4, _MTP, field, "mtp", "mtp.layers.0", kind="full_attention")


FAMILIES: Mapping[str, Family] = {
    "deepseek-v3": _nextn(LATENT["deepseek-v3"]),
    "glm4-moe": _nextn(MIXTURES["glm4-moe"]),
    "hy-v3": _nextn(COMPOSED["hy-v3"], _FINAL),
    "mimo-v2": _mimo(),
    "qwen3_5": _mtp("qwen3_5", "mtp_num_hidden_layers"),
    "qwen3_5_moe": _mtp("qwen3_5_moe", "mtp_num_hidden_layers"),
    "qwen3_next": _mtp("qwen3_next", None),
}


class HeadedModel:
    """A model, and its head as a dense computation over a whole sequence."""

    def __init__(self, family: Family, whole: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the first layers of `whole` as the model, and its last as that of the head, whose rest is `tensors`."""
        self.model, layer = copy.deepcopy(whole), copy.deepcopy(whole.model)
        self.model.model.layers = self.model.model.layers[: family.num_layers]
        self.model.config.num_hidden_layers = family.num_layers
        layer.layers, layer.norm = layer.layers[-1:], torch.nn.Identity()
        layer.config.num_hidden_layers = 1
        if family.kind is not None:
            layer.config.layer_types = [family.kind]
        self._layer, self._family, self._tensors = layer, family, tensors

    @torch.no_grad()
    def hidden(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what the model's vocabulary head reads: `[num_tokens, hidden_size]`."""
        result: torch.Tensor = self.model.model(token_ids[None], use_cache=False).last_hidden_state[0]
        return result

    @torch.no_grad()
    def head(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the head hands on, `[hidden_size]`, and its log probabilities, behind all these tokens.

        Shapes:
            token_ids: `[num_entries]`, the token behind each hidden vector
            hidden: `[num_entries, hidden_size]`
        """
        token_norm, hidden_norm, projection, final_norm = self._family.names
        embedded = self._normed(token_norm, self.model.model.embed_tokens(token_ids))
        joined = torch.cat((embedded, self._normed(hidden_norm, hidden)), 1) @ self._tensors[projection].T
        stream = self._layer(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0, -1]
        normed = self._normed(final_norm, stream)
        return (normed if self._family.hands_on_normed else stream), self.model.lm_head(normed).log_softmax(-1)

    def _normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[name] + (1 if self._family.is_qwen else 0)
        return x * (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight


def save_headed(name: str, directory: Path, *, has_copies: bool = False, **fields: Any) -> HeadedModel:
    """Save a random model with its head, whose tokens are few, so that drafts are right now and then.

    Args:
        name: Of `FAMILIES`.
        directory: Where to.
        has_copies: The head comes with copies of embedding and vocabulary head that must not be read.
        fields: Of the configuration, in place of others.
    """
    family = FAMILIES[name]
    whole = family.save(directory)
    with torch.no_grad():
        whole.lm_head.weight[:SHARP].normal_(0, 0.45)
        whole.lm_head.weight[SHARP:].normal_(0, 0.06)
    whole.save_pretrained(directory)
    tensors = {_renamed(family, key): tensor for key, tensor in load_file(directory / "model.safetensors").items()}
    own = _random_head(family, int(whole.config.hidden_size))
    tensors |= {f"{family.prefix}.{key}.weight": tensor for key, tensor in own.items()}
    if has_copies:
        for copied in ("embed_tokens", "shared_head.head"):
            tensors[f"{family.prefix}.{copied}.weight"] = torch.full_like(whole.lm_head.weight, torch.nan)
    save_file(tensors, directory / "model.safetensors")
    _change_config(family, directory / "config.json", fields)
    return HeadedModel(family, whole, own)


def _renamed(family: Family, name: str) -> str:
    root = f"model.layers.{family.num_layers}."
    if not name.startswith(root):
        return name
    return f"{family.layer or family.prefix}.{name.removeprefix(root)}".replace(*family.renamed)


def _random_head(family: Family, size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(size)
    token_norm, hidden_norm, projection, final_norm = family.names
    norms = {
        name: torch.rand(size) + (-0.5 if family.is_qwen else 0.5) for name in (token_norm, hidden_norm, final_norm)
    }
    return {**norms, projection: torch.randn(size, 2 * size) / size**0.5}


def _change_config(family: Family, path: Path, fields: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": family.num_layers}
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][: family.num_layers]
    if family.field:
        config[family.field] = 1
    path.write_text(json.dumps({**config, **fields}))


__all__ = ["exact_drafts"]

LEAST_CHANCE = 0.005
GREEDY = Sampling(max_tokens=8, temperature=0.0)
WAYS: dict[str, dict[str, Any]] = {
    "together": {"token_budget": 200},
    "prompts in chunks": {"token_budget": 21, "arrivals_per_step": 1},
    "preempted": {"num_blocks": 11, "headroom_tokens": 0},
}


class Oracle(DraftOracle):
    """Compares drafts with what the head drafts by a dense computation, applied to its own vectors at each depth."""

    def __init__(self, headed: HeadedModel) -> None:
        super().__init__(LEAST_CHANCE)
        self.read, self.following = headed.hidden, headed.head


def sequences() -> list[Sequence]:
    return [make_sequence(str(index), random_prompt(2 + 7 * index, seed=index), GREEDY) for index in range(3)]


def check_drafts(name: str, directory: Path, ways: list[str]) -> None:
    oracle = Oracle(save_headed(name, directory, has_copies=True))
    plain = run(make_runner(directory), sequences(), enable_prefix_caching=False).tokens
    for way in ways:
        runner, recorder = recorded_runner(directory, oracle.check, speculative="mtp", num_speculative_tokens=5)
        assert isinstance(recorder.proposer, HiddenVectorProposer)
        recorder.proposer._least_chance = LEAST_CHANCE
        is_caching = not runner.model.config.has_states
        outcome = run(runner, sequences(), policy=FixedDepth(5), enable_prefix_caching=is_caching, **WAYS[way])
        assert not recorder.failures
        assert outcome.tokens == plain
        assert (outcome.num_preemptions > 0) == (way == "preempted")
    assert oracle.num_deep > 2 * len(ways)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3_5"])
def test_drafts_of_each_depth_are_those_of_the_dense_head(tmp_path: Path, name: str) -> None:
    check_drafts(name, tmp_path, ["prompts in chunks"])


def test_rotations_are_computed_when_drafts_come_near_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.layers.rotations.CHUNK", 2)
    with poisoned_memory():
        check_drafts("glm4-moe", tmp_path, ["prompts in chunks"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_the_dense_head_however_steps_are_cut(tmp_path: Path, name: str) -> None:
    check_drafts(name, tmp_path, list(WAYS))


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as error:
        with_room_for_proposer(WorkerConfig(speculative="mtp"), RunnerConfig(directory))
    return str(error.value)


def test_room_is_for_the_head_without_its_copies(tmp_path: Path) -> None:
    save_headed("deepseek-v3", tmp_path, has_copies=True)
    config = with_room_for_proposer(
        WorkerConfig(speculative="mtp"), RunnerConfig(tmp_path, dtype="float32", device="cuda")
    )
    tensors = load_file(tmp_path / "model.safetensors")
    own = [name for name in tensors if name.startswith("model.layers.2.") and not tensors[name].isnan().any()]
    assert config.proposer_bytes == sum(tensors[name].numel() * 4 for name in own)
    # A row of 24 latent numbers, and 8 that turn.
    assert config.proposer_block_bytes == 16 * (24 + 8) * 4


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3_5"])
def test_checkpoint_that_counts_no_head_is_refused_by_the_field(tmp_path: Path, name: str) -> None:
    field = FAMILIES[name].field
    assert field is not None
    save_headed(name, tmp_path, **{field: 0})
    assert f"HEADRACE_SPECULATIVE: is mtp, but {field} in config.json counts no such head; set it to ngram" in refusal(
        tmp_path
    )


def test_checkpoint_that_lost_its_head_is_refused_by_the_tensor(tmp_path: Path) -> None:
    save_headed("qwen3_next", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith("mtp.")}, tmp_path / "model.safetensors")
    assert "has no tensor 'mtp.pre_fc_norm_hidden.weight'; tools that save a model" in refusal(tmp_path)


def test_family_without_heads_is_refused() -> None:
    problem = "not read from this checkpoint (LlamaForCausalLM): neither num_nextn_predict_layers nor mtp_num_hidden"
    assert problem in refusal(Path("ops/demo_model/model"))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3_5"])
def test_further_heads_are_left_alone(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    assert family.field is not None
    save_headed(name, tmp_path, **{family.field: 2})
    tensors = load_file(tmp_path / "model.safetensors")
    first, second = ("mtp.layers.0.", "mtp.layers.1.") if family.is_qwen else ("model.layers.2.", "model.layers.3.")
    more = {key.replace(first, second): tensor.clone() for key, tensor in tensors.items() if key.startswith(first)}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    _, recorder = recorded_runner(tmp_path, lambda *_: None, speculative="mtp")
    assert isinstance(recorder.proposer, HiddenVectorProposer)


def test_head_with_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    save_headed("glm4-moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(48, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    assert config["num_nextn_predict_layers"] == 1
    with pytest.raises(
        ConfigError, match=r"HEADRACE_MODEL: .*eh_proj\.weight' has shape \[48, 48\]; config\.json calls for \[48, 96\]"
    ):
        recorded_runner(tmp_path, lambda *_: None, speculative="mtp")


LENGTH, BLOCK = 12, 4


def quantize(directory: Path) -> int:
    """Store matrices in FP8 with scales by block, as DeepSeek does, but for the projection of both vectors."""
    tensors = load_file(directory / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight") and not name.endswith("eh_proj.weight")]
    for name in names:
        layer = fp8_blocks(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in layer.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))
    return sum(name.startswith("model.layers.2.") for name in names)


def yielded(directory: Path, hidden: torch.Tensor) -> torch.Tensor:
    """Return what the head makes of a sequence."""
    head = load_head(directory, load_model(directory, torch.float32, CPU))
    cache = allocate_kv_cache(LENGTH // BLOCK, BLOCK, head.config, head.dtype, CPU)
    positions = torch.arange(LENGTH)
    context = context_of_one(cache.layers, LENGTH, num_blocks=LENGTH // BLOCK)
    with torch.inference_mode():
        return head.forward(EntryStep(positions + 7, hidden, positions, context))


def test_head_with_scales_by_block_is_near_the_plain_one(tmp_path: Path) -> None:
    save_headed("deepseek-v3", tmp_path)
    hidden = torch.randn(LENGTH, 48, generator=torch.Generator().manual_seed(1))
    plain = yielded(tmp_path, hidden)
    assert quantize(tmp_path) > 20
    error = (yielded(tmp_path, hidden) - plain).norm() / plain.norm()
    assert 0.001 < error < 0.1
