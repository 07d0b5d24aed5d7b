"""The text part of models that also see or hear: its configuration, and the names of its tensors.

Such a checkpoint is served as the decoder of text that it holds. The weights of its towers are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.json_file import JsonFile
from gpu_worker.models.text_kinds import TEXT_KINDS, TextKind
from gpu_worker.models.wrappers import Wrapper

# Of the layouts of transformers 5, of 4.52 and later, of those before, and of models that were published with code.
_RENAMED = (
    (r"^thinker\.", ""),
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?text_model\.", "model."),
)
# What sees, hears, speaks or draws, and what joins it to the text part.
_TOWERS = (
    r"(model\.)?(high_res_)?(vision|visual|image|video|audio|speech|multi_modal|mm_|embed_vision|embed_audio)\w*(\..*)?",
    r"(model\.)?(aligner|connector|encoder|merger|mlp1|patch_merger|\w*projectors?|qformer|resampler)(\..*)?",
    r"(model\.)?(generation_\w+|vqmodel)\..*",
    r"(talker|token2wav|code2wav)\..*",
)
_ROPES = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_TIED = "tie_word_embeddings"
_SHARED = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", _TIED)


def text_part(file: JsonFile, wrapper: Wrapper) -> tuple[JsonFile, TextKind]:
    """Return the configuration of the text part, and its kind; the whole where nothing is nested in it.

    What concerns the checkpoint as a whole stands outside of the text part in some, and inside in others. The head is
    the whole model's: whether it is tied is said outside, if anywhere.

    Raises:
        CheckpointError: The text part is of a kind that is not served.
    """
    text, outer = file, dict[str, Any]()
    for field in wrapper.place:
        outer |= {name: text.fields[name] for name in _SHARED if text.fields.get(name) is not None}
        nested = text.nested(field)
        if nested is None:
            return file, TEXT_KINDS[wrapper.kind]
        text = nested
    name = wrapper.kind if wrapper.is_fixed else text.text("model_type", wrapper.kind)
    if name not in TEXT_KINDS:
        raise text.error("model_type", f"is {name[:80]!r}; supported: {', '.join(map(repr, TEXT_KINDS))}")
    kind = TEXT_KINDS[name]
    inner = {name: value for name, value in text.fields.items() if value is not None or name not in _SHARED}
    tied = {name: value for name, value in outer.items() if name == _TIED}
    defaults = dict(kind.defaults)
    if text.names() & _ROPES:
        # What a checkpoint says of its rotation is said whole.
        defaults.pop("rope_parameters", None)
    fields = {**defaults, **outer, **inner, **tied, "model_type": name}
    if kind.splits_hidden and fields.get("head_dim") is None:
        whole = JsonFile(file.path, fields, _prefix(wrapper))
        fields["head_dim"] = whole.integer("hidden_size") // whole.integer("num_attention_heads")
    return JsonFile(file.path, fields, _prefix(wrapper)), kind


def _prefix(wrapper: Wrapper) -> str:
    return "".join(f"{name}." for name in wrapper.place)


def with_text_names(config: ModelConfig) -> ModelConfig:
    """Return a decoder whose tensors may have the names of a text part too, with towers unused.

    That is for checkpoints of text alone as well: tools save text parts under the names that they had.
    """
    if config.is_bidirectional:
        return config
    names = config.block.names
    names = replace(names, renamed=_RENAMED + names.renamed, unused=_TOWERS + names.unused)
    return replace(config, block=replace(config.block, names=names))
