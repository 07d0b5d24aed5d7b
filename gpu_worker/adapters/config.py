"""What `adapter_config.json` says of an adapter, as PEFT writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpu_worker.models.json_file import JsonFile
from shared.adapter_store import CONFIG_NAME
from shared.errors import HeadraceError

Value = TypeVar("Value", int, float)

MAX_RANK = 256
_MAX_PATTERNS = 10_000
# Of a name, with its dots escaped or not.
_NAME = re.compile(r"\^?[\w.\\]{1,256}\$?")
# Fields that, unless they have one of these values, change what an adapter computes in ways that are not served.
_PLAIN = {
    "use_dora": (False, "DoRA, whose magnitudes need the norms of the model's own weights"),
    "use_qalora": (False, "QALoRA, which pools inputs"),
    "lora_bias": (False, "biases of the adapter's own matrices"),
    "bias": ("none", "biases that were trained with it"),
    "layer_replication": (None, "layers that are there several times"),
    "alora_invocation_tokens": (None, "an adapter that begins at a token"),
    "arrow_config": (None, "a mixture of adapters"),
    "modules_to_save": (None, "whole modules that replace the model's"),
    "trainable_token_indices": (None, "tokens that were trained whole"),
    "megatron_config": (None, "layers of Megatron"),
}
# Such an adapter belongs to weights that were changed when it was made, unless it was converted when it was saved.
_CHANGED_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterError(HeadraceError):
    """An adapter cannot be served: it is broken, of a kind that is not served, or made for another model."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How the product of an adapter's matrices is scaled; rsLoRA divides by the root of the rank.

    `ranks` and `alphas` are by the end of a module's name, for others `rank` and `alpha`.

    Source: Kalajdzievski, rsLoRA, arXiv 2312.03732, section 3.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool

    def rank_of(self, module: str) -> int:
        """Return the rank that a module's matrices are to have."""
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what the product of a module's matrices is multiplied by."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _matching(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    if patterns:
        parts = module.split(".")
        ends = {".".join(parts[first:]) for first in range(len(parts))}
        return next((value for name, value in patterns.items() if name in ends), default)
    return default


def read_config(directory: Path) -> AdapterConfig:
    """Read the configuration in a directory; `AdapterError` or `CheckpointError` if it is not served or malformed."""
    file = JsonFile.read(directory / CONFIG_NAME)
    kind = file.text("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG_NAME} says peft_type {kind[:40]!r}; only LORA is served")
    for name, (plain, what) in _PLAIN.items():
        value = file.fields.get(name)
        if value not in (None, plain, [], {}):
            raise AdapterError(f"{CONFIG_NAME} has {name} {str(value)[:40]!r}: {what}; this is not served")
    initial = file.fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGED_WEIGHTS):
        problem = "it belongs to weights that were changed when it was made; save it converted, with"
        how = "path_initial_model_for_weight_conversion"
        raise AdapterError(f"{CONFIG_NAME} has init_lora_weights {initial[:40]!r}: {problem} {how}")
    rank = file.integer("r", maximum=MAX_RANK)
    ranks, alphas = (_patterns(file, name) for name in ("rank_pattern", "alpha_pattern"))
    for name, own in ranks.items():
        if not (isinstance(own, int) and 1 <= own <= MAX_RANK):
            raise file.error("rank_pattern", f"has {own} for {name!r}; a rank is a whole number from 1 to {MAX_RANK}")
    return AdapterConfig(
        rank,
        file.number("lora_alpha", 8.0),
        {name: int(own) for name, own in ranks.items()},
        alphas,
        file.boolean("use_rslora", False),
    )


def _patterns(file: JsonFile, name: str) -> dict[str, float]:
    """Read numbers by names of modules; PEFT's are regular expressions, of which only names are taken."""
    nested = file.nested(name)
    if nested is None:
        return {}
    if len(nested.fields) > _MAX_PATTERNS:
        raise file.error(name, f"has {len(nested.fields)} patterns; at most {_MAX_PATTERNS} are read")
    found = {}
    for pattern, value in nested.fields.items():
        if not _NAME.fullmatch(pattern):
            raise file.error(name, f"has the pattern {pattern[:60]!r}; only names of modules are read, or their ends")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise file.error(name, f"has {str(value)[:40]!r} for {pattern[:60]!r}; it must be a number above 0")
        found[pattern.strip("^$").replace("\\", "")] = value
    return found
