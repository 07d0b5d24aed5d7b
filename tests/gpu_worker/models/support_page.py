"""Renews the tables of the page of supported models, `ops/docs/models.md`, from the families' own descriptions.

Each family reads a small configuration, and its row says how the resulting model is served.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import is_fusable
from gpu_worker.models.families import Family, families
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.text_part import TEXT_KINDS, WRAPPERS, with_text_names
from gpu_worker.models.vision.registry import FAMILIES as SEEING
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, SAME_FILES

SAMPLE: Mapping[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64,
}  # fmt: skip
"""A configuration with the fields that most families require."""


def support_page(page: str) -> str:
    """Return the page with the tables and lists as the families are now."""
    rows = "".join(f"{_row(family)}\n" for family in sorted(families(), key=lambda family: family.architecture.lower()))
    blocks = {
        "| Architectures | On CPUs | Weights | Drafts |\n|---|---|---|---|\n": rows,
        "The vision towers of these read images:\n\n": _listed(sorted(SEEING)),
        "Where the `model_type` of the text part decides, it is one of\n\n": _listed(TEXT_KINDS),
        "| Architectures | Text part |\n|---|---|\n": "".join(_wrapper_rows()),
    }
    for opening, block in blocks.items():
        before, _, after = page.partition(opening)
        page = before + opening + block + after[after.index("\n\n") + 1 :]
    return page


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 120) + "\n"


def _wrapper_rows() -> Iterator[str]:
    names: dict[tuple[str, bool], list[str]] = {}
    for name, wrapper in sorted(WRAPPERS.items(), key=lambda item: item[0].lower()):
        names.setdefault((TEXT_KINDS[wrapper.kind].architecture, wrapper.is_fixed), []).append(f"`{name}`")
    for family, is_fixed in sorted(names):
        other = "" if is_fixed else ", or what `model_type` says"
        yield f"| {', '.join(names[family, is_fixed])} | `{family}`{other} |\n"


def sample_config(architecture: str, **fields: Any) -> ModelConfig:
    """Read the small configuration, with other values of `fields`, as the family of this name does."""
    (family,) = (family for family in families() if family.architecture == architecture)
    sample = {**SAMPLE, **family.sample, "architectures": [architecture], **fields}
    return with_text_names(family.read_config(JsonFile(Path("config.json"), sample)))


def _row(family: Family) -> str:
    config = sample_config(family.architecture)
    names = ", ".join(f"`{name}`" for name in (family.architecture, *family.also))
    return f"| {names} | {_form(config)} | {_weights(config)} | {_drafts(config)} |"


def _form(config: ModelConfig) -> str:
    return "fused" if config.encoder is None and is_fusable(config) else "by operation"


def _weights(config: ModelConfig) -> str:
    files = [name for name, architecture in ARCHITECTURES.items() if architecture == config.architecture]
    files += SAME_FILES.get(config.architecture, ())
    kinds = "all" if config.encoder is None else "dense"
    return f"{kinds}, GGUF (`{'`, `'.join(files)}`)" if files else kinds


def _drafts(config: ModelConfig) -> str:
    if config.is_bidirectional:
        return "none"
    kinds = "chains" if config.has_states else "all"
    return kinds if config.draft_head is None else f"{kinds}; `mtp`"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(support_page(file.read_text(encoding="utf-8")), encoding="utf-8")
