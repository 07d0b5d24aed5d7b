"""Writes the page of supported models, `ops/docs/models.md`, from the families' own descriptions.

Each family reads a small configuration, and its row says how the resulting model is served.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.decoder import is_fusable
from gpu_worker.models.families import Family, families
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.text_kinds import TEXT_KINDS
from gpu_worker.models.text_part import WRAPPERS, with_text_names
from gpu_worker.models.vision.registry import FAMILIES as SEEING
from gpu_worker.quantization.gguf.model_facts import ARCHITECTURES, SAME_FILES

_OPENING = """# Models

A checkpoint is supported if one of its `architectures` is in the first column of the second table. Variants of these
families without a head, or with a classification head, are supported under names that end in `Model` and
`ForSequenceClassification`. If a checkpoint needs more than its family's row offers, loading refuses it and names the
field and the supported values.

- **On CPUs**: *fused* layers are computed in one call a step by compiled kernels; the others one operation after
  another, by compiled kernels where there is one. On GPUs all are launched operation by operation, decodes as graphs.
- **Weights**: the forms of the first table.
- **Drafts**: *all* is n-grams, a draft model, EAGLE 1 to 3; `mtp` is the head
  that checkpoints of the family hold for this themselves (MTP, NextN), where tools have not left it out.
- Checkpoints that also see or hear are in the last table; they have what their text part's family has.

| Weights | form read |
|---|---|
| *all* | float32, float16, bfloat16, GPTQ, AWQ, AutoRound, compressed-tensors and FP8 (NVIDIA's too) |
| *GGUF* | besides, the family's files of llama.cpp, under these names, of all types from Q2_K and IQ2_XXS up |
| not read | IQ1 and TQ; bitsandbytes (names that end in `-bnb-4bit`), EXL2 and HQQ: see below |

Q4 types of GGUF, Q2_K, Q3_K and IQ3_S take 4 bits a weight in memory, besides scales; all its other types below 16 bits
take 8, IQ4, IQ3_XXS and IQ2 among them. Matrices of all these forms may stand beside one another. Of a form that is not
read, take the model in 16 bits, which `headrace quantize` makes as small, or in one that is.

| Architectures | On CPUs | Weights | Drafts |
|---|---|---|---|
"""

_ENDING = """
This page is made from the families' descriptions: `python -m gpu_worker.models.support_page > ops/docs/models.md`.
"""

_SEEING = (
    "The vision towers of these read images: {seeing}. They do so in one process, from safetensors files whose towers "
    "have 16 or 32 bits; those of quantized checkpoints do. Where several ranks divide the model, the files hold "
    "no tower, or the tower is quantized, the model is served for text, and the worker's log says so. How an image is "
    "read is what the model's own `processor_config.json` says, or the older `preprocessor_config.json`. With "
    "`detail: low` Qwen's models and Mistral 3 "
    "see some 512 pixels a side, InternVL and SmolVLM one tile, and Gemma 4 takes 70 tokens. Gemma 3 takes as many of "
    "every image; its pan and scan is not done."
)

_WRAPPERS = """

All others are served for text: their towers are not loaded, and a request with an image or sound is refused. They
answer as their text part alone does. Where the `model_type` of the text part decides, it is one of

{kinds}.

| Architectures | Text part |
|---|---|
"""

SAMPLE: Mapping[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "kv_lora_rank": 64,
}  # fmt: skip
"""A configuration with the fields that most families require."""


def support_page() -> str:
    """Return the page, in Markdown."""
    rows = (f"{_row(family)}\n" for family in sorted(families(), key=lambda family: family.architecture.lower()))
    return _OPENING + "".join(rows) + _wrappers_table() + _ENDING


def _wrappers_table() -> str:
    names: dict[tuple[str, bool], list[str]] = {}
    for name, wrapper in sorted(WRAPPERS.items(), key=lambda item: item[0].lower()):
        names.setdefault((TEXT_KINDS[wrapper.kind].architecture, wrapper.is_fixed), []).append(f"`{name}`")
    rows = [
        f"| {', '.join(names[family, is_fixed])} | `{family}`{'' if is_fixed else ', or what `model_type` says'} |\n"
        for family, is_fixed in sorted(names)
    ]
    kinds = textwrap.fill(", ".join(f"`{kind}`" for kind in TEXT_KINDS), 120)
    seeing = ", ".join(f"`{name}`" for name in sorted(SEEING))
    intro = textwrap.fill(_SEEING.format(seeing=seeing), 120)
    return "\n## Models that also see or hear\n\n" + intro + _WRAPPERS.format(kinds=kinds) + "".join(rows)


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
    sys.stdout.write(support_page())
