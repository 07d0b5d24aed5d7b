"""A model's configuration, from its directory or GGUF file, by the family that the checkpoint names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from gpu_worker.layers.block_traits import TensorNames
from gpu_worker.models.checkpoint import Checkpoint
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families import find_families
from gpu_worker.models.gguf_config import read_gguf_config
from gpu_worker.models.json_file import CheckpointError, JsonFile
from gpu_worker.models.tensor_file import INDEX_FILE, SINGLE_FILE, TensorFile
from gpu_worker.models.text_part import TEXT_KINDS, WRAPPERS, Wrapper, text_part, with_text_names
from gpu_worker.quantization.gguf.model_file import find_gguf

FAMILIES = find_families()

# Attention of these reads the tokens that a second network, the indexer, has chosen.
_INDEXED = frozenset({"DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "GlmMoeDsaForCausalLM"})

# What can be served in place of models that many ask for.
_INSTEAD: Mapping[str, str] = {
    "ChatGLMModel": "the same GLM-4 is published as GlmForCausalLM (names that end in -hf), which is",
    "DeciLMForCausalLM": "Llama 3.3, of which it was made, is",
    "ExaoneForCausalLM": "EXAONE 4 is",
    "Gemma3nForConditionalGeneration": "Gemma 4 E2B and E4B, which followed it, are",
    "InternLM2ForCausalLM": "InternLM 3 is",
    "MllamaForConditionalGeneration": "Llama 3.1, whose layers for text it has, is",
    "PaliGemmaForConditionalGeneration": "its prompts attend in both directions; Gemma 3 is",
    "Phi3VForCausalLM": "Phi-3.5-mini, its part for text, is",
    "Phi4MMForCausalLM": "Phi-4-mini, its part for text, is",
    "QWenLMHeadModel": "Qwen 2 and later are",
}

# What else a family's checkpoints are saved as: layers alone, or with a head that scores classes.
_LAYERS, _CLASSES, _GENERATES, _WITH_HEAD = "Model", "ForSequenceClassification", "ForCausalLM", "LMHeadModel"
_SEES = "ForConditionalGeneration"


def read_model_config(directory: Path) -> ModelConfig:
    """Read a model's configuration, without its weights, from its directory or GGUF file; raises `HeadraceError`."""
    if (gguf := find_gguf(directory)) is not None:
        return read_gguf_config(gguf)
    file = JsonFile.read(directory / "config.json")
    for name in file.texts("architectures"):
        if name in _INDEXED:
            raise file.error("architectures", f"is {name!r}, whose sparse indexer is not supported; DeepSeek V3 is")
        if name in WRAPPERS:
            return _wrapped(file, WRAPPERS[name])
        if name in FAMILIES:
            inside = _wrapper_of(name, file)
            return _whole(file, name) if inside is None else _wrapped(file, inside)
        for suffix in (_LAYERS, _CLASSES):
            # Layers of text parts are called so too: `Gemma3TextModel`.
            stem = name.removesuffix(suffix).removesuffix("Text")
            if name.endswith(suffix) and (wrapper := WRAPPERS.get(stem + _SEES)) is not None:
                return _without_head(_wrapped(file, wrapper), num_classes(file) if suffix == _CLASSES else 0)
            ends = (_GENERATES, _WITH_HEAD, _LAYERS)
            family = next((FAMILIES[stem + end] for end in ends if stem + end in FAMILIES), None)
            if name.endswith(suffix) and family is not None:
                return _without_head(with_text_names(family(file)), num_classes(file) if suffix == _CLASSES else 0)
        if name in _INSTEAD:
            raise file.error("architectures", f"is {name!r}, which is not supported; {_INSTEAD[name]}")
    _refuse_around_text(file)
    given = ", ".join(repr(name[:80]) for name in file.texts("architectures")[:4]) or "missing: is it a model's config?"
    raise CheckpointError(
        file.path, f"unsupported architecture ({given}); ops/docs/models.md lists the served ones{_nearest(file)}"
    )


def _refuse_around_text(file: JsonFile) -> None:
    """Refuse a model that also sees or hears and is not known, with a hint if its text part would be served."""
    text = file.nested("text_config") or file.nested("llm_config") or file.nested("language_config")
    if text is None or not file.texts("architectures"):
        return
    name, kind = file.texts("architectures")[0], text.text("model_type", "")
    served = f"{kind!r}, which is served: take the checkpoint of text that it was made of"
    other = f"{kind[:80]!r}, which is not served" if kind else "not named"
    problem = f"is {name[:80]!r}, a model around a text part that is {served if kind in TEXT_KINDS else other}"
    raise file.error("architectures", f"{problem}; ops/docs/models.md lists the served ones")


def _wrapper_of(family: str, file: JsonFile) -> Wrapper | None:
    """Return where a text model has its configuration that was saved with the whole's; None where it has its own."""
    text = file.nested("text_config")
    kinds = [name for name, kind in TEXT_KINDS.items() if kind.architecture == family]
    if text is None or not kinds:
        return None
    name = text.text("model_type", kinds[0])
    return Wrapper(name if name in kinds else kinds[0], is_fixed=True)


def _whole(file: JsonFile, family: str) -> ModelConfig:
    return with_stored_head(with_text_names(FAMILIES[family](file)), file.path.parent)


def _wrapped(file: JsonFile, wrapper: Wrapper) -> ModelConfig:
    part, kind = text_part(file, wrapper)
    config = with_text_names(FAMILIES[kind.architecture](part))
    return with_stored_head(config, file.path.parent, has_flag=False)


def _nearest(file: JsonFile) -> str:
    stems = {name.removesuffix(_GENERATES): name for name in FAMILIES}
    asked = (file.texts("architectures") or ("",))[0]
    # The family whose whole name this may be, misspelt; then those whose names without the common end are like it.
    misspelt = difflib.get_close_matches(asked, FAMILIES, 1, cutoff=0.9)
    likely = [stems[stem] for stem in difflib.get_close_matches(asked.removesuffix(_GENERATES), stems, 3)]
    names = list(dict.fromkeys([*misspelt, *likely]))
    return f"; nearest by name: {', '.join(names)}" if names else ""


def num_classes(file: JsonFile) -> int:
    """Read how many classes a model scores; two where nothing is said, as in `transformers`."""
    labels = file.nested("id2label")
    return file.integer("num_labels", 2, maximum=1 << 16) if labels is None else max(1, len(labels.names()))


def _without_head(config: ModelConfig, num_classes: int) -> ModelConfig:
    """Let the embedding stand for the head that the checkpoint lacks: steps are the same for all, no one reads it."""
    return dataclasses.replace(config, tie_word_embeddings=True, num_classes=num_classes)


_HEAD, _EMBEDDING = "lm_head.", "model.embed_tokens.weight"


def with_stored_head(config: ModelConfig, directory: Path, *, has_flag: bool = True) -> ModelConfig:
    """Return the configuration with `tie_word_embeddings` as the files have it.

    Models that also see or hear have the flag in several places, or nowhere. As in `transformers`, a stored head that
    differs from the embedding is the head. With `has_flag`, a model whose flag is not true must have a head.
    """
    if has_flag and not config.tie_word_embeddings:
        return config
    head = has_head(directory, config.block.names)
    if head is None:
        return config
    return dataclasses.replace(config, tie_word_embeddings=not (head and _differs(directory, config.block.names)))


def _differs(directory: Path, names: TensorNames) -> bool:
    try:
        with Checkpoint(
            directory, torch.float32, torch.device("cpu"), adds_root=True, renamed=names.renamed, unused=names.unused
        ) as checkpoint:
            return not checkpoint.are_same(f"{_HEAD}weight", _EMBEDDING)
    except (CheckpointError, OSError):
        return True


def has_head(directory: Path, names: TensorNames) -> bool | None:
    """Return whether there is a tensor of the head; None where no file can be read, or none holds weights."""
    stored = [names.own_name(name) for name in _stored_names(directory)]
    return any(name.startswith(_HEAD) for name in stored) if stored else None


def _stored_names(directory: Path) -> Iterable[str]:
    try:
        if (directory / SINGLE_FILE).exists():
            file = TensorFile(directory / SINGLE_FILE)
            file.close()
            return file.tensors
        if (directory / INDEX_FILE).exists():
            weight_map = JsonFile.read(directory / INDEX_FILE).nested("weight_map")
            return () if weight_map is None else weight_map.names()
    except CheckpointError:
        pass
    return ()
