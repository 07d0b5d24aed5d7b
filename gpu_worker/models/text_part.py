"""The text part of models that also see or hear: its configuration, and the names of its tensors.

Such a checkpoint is served as the decoder of text that it holds. The weights of its towers are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu_worker.models.block_traits import TensorNames
from gpu_worker.models.json_file import JsonFile

# Of the layouts of transformers 5, of 4.52 and later, and of those before.
_RENAMED = (
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^text_model\.", "model."),
)
_TOWERS = (
    r"(model\.)?(vision_tower|vision_model|vision_embed_tokens|visual|vision_encoder|vision_adapter|vision)\..*",
    r"(model\.)?(audio_tower|audio_model|audio_encoder|embed_audio|embed_vision)\..*",
    r"(model\.)?(multi_modal_projector|mm_projector|patch_merger|aligner|connector)\..*",
)
_TIED = "tie_word_embeddings"
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", _TIED)


def text_part(file: JsonFile, defaults: Mapping[str, Any]) -> JsonFile:
    """Return the configuration of the text part, or the whole where there is nothing else.

    What concerns the checkpoint as a whole stands outside of the text part in some, and inside in others. The head is
    the whole model's: whether it is tied is said outside, if anywhere.

    Args:
        file: The configuration.
        defaults: What fields mean that the text part leaves out: `transformers` writes only those that differ from the
            defaults of their class there, sizes included.
    """
    text = file.nested("text_config")
    if text is None:
        return file
    outer = {name: file.fields[name] for name in _SHARED if file.fields.get(name) is not None}
    inner = {name: value for name, value in text.fields.items() if value is not None or name not in _SHARED}
    tied = {name: value for name, value in outer.items() if name == _TIED}
    return JsonFile(file.path, {**defaults, **outer, **inner, **tied}, "text_config.")


def text_names(names: TensorNames) -> TensorNames:
    """Return a family's names, with those of the text part of a larger model as its own, and towers unused."""
    return replace(names, renamed=_RENAMED + names.renamed, unused=_TOWERS + names.unused)
