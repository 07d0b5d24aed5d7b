"""Small random models with the heads that their publishers ship beside them, and what such a head computes.

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

import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.models.families.composed_cases import CASES as COMPOSED
from tests.gpu_worker.models.families.latent_cases import CASES as LATENT
from tests.gpu_worker.models.families.mixture_cases import CASES as MIXTURES
from tests.gpu_worker.models.families.random_models import Case, save_case
from tests.gpu_worker.models.recurrent_models import save_case as save_recurrent

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
