"""What the `config.json` of an EAGLE layer says, in one form for all versions and layouts.

EAGLE and EAGLE-2 have the fields of a Llama of one layer. EAGLE-3 adds those of its smaller vocabulary and of the
model's layers that it listens to; the `speculators` library nests the layer's own in `transformer_layer_config`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gpu_worker.models.config import ModelConfig
from gpu_worker.models.families.llama import read_llama
from gpu_worker.models.json_file import JsonFile

REMEDY = "take weights that were trained for this model"
_TAPPED = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
_NOT_SUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and options of a layer.

    Attributes:
        layer: Of the one layer, with the model's vocabulary and length.
        tapped_layers: Layers of the model whose inputs EAGLE-3 reads; empty reads the head's input.
        num_features: Tokens that it can draft.
        is_stream_normed: Its residual stream begins with the normalised vector, in EAGLE-3.
    """

    layer: ModelConfig
    tapped_layers: tuple[int, ...]
    num_features: int
    is_stream_normed: bool = False


def is_third(file: JsonFile) -> bool:
    """Return whether a configuration is that of an EAGLE-3 layer."""
    kinds = (*file.texts("architectures"), file.text("speculators_model_type", ""))
    return "draft_vocab_size" in file.names() or any("eagle3" in kind.lower() for kind in kinds)


def read_eagle_config(file: JsonFile, model: ModelConfig) -> EagleConfig:
    """Read a layer's configuration; `CheckpointError` if a field is missing, not supported, or of another model."""
    nested = file.nested(_NESTED)
    fields = file if nested is None else nested
    layer = read_llama(fields)
    for name, found, needed in (
        ("num_hidden_layers", layer.num_layers, 1),
        ("hidden_size", layer.hidden_size, model.hidden_size),
        ("vocab_size", layer.vocab_size, model.vocab_size),
    ):
        if found != needed:
            raise fields.error(name, f"is {found}, but must be {needed}; {REMEDY}")
    layer = dataclasses.replace(layer, max_model_len=model.max_model_len)
    if not is_third(file):
        return EagleConfig(layer, (), layer.vocab_size)
    for name in _NOT_SUPPORTED:
        if file.boolean(name, False):
            raise file.error(name, "is true, which is not supported")
    num_features = file.integer("draft_vocab_size", layer.vocab_size, maximum=layer.vocab_size)
    # As those who write either layout leave it out.
    is_stream_normed = file.boolean("norm_before_residual", nested is not None)
    return EagleConfig(layer, _tapped_layers(file, model.num_layers), num_features, is_stream_normed)


def _tapped_layers(file: JsonFile, num_layers: int) -> tuple[int, ...]:
    """Return those that the file names, or the three of the paper's authors: an early, the middle and a late one."""
    inner = file.nested("eagle_config")
    for fields in (file, inner):
        if fields is not None and _TAPPED in fields.names():
            layers = fields.token_ids(_TAPPED)
            if not layers or max(layers) >= num_layers or len(set(layers)) < len(layers):
                problem = f"is {list(layers)}; it must name different layers of the model, 0 to {num_layers - 1}"
                raise fields.error(_TAPPED, f"{problem}; {REMEDY}")
            return layers
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[2] > 0 or len(set(layers)) < 3:
        raise file.error(_TAPPED, f"is missing, and the usual layers do not exist in a model of {num_layers}")
    return layers
