"""What a job of quantizing is asked to do, and what is refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker.layers.layer_packing import can_pack
from gpu_worker.layers.layer_traits import AttentionShape, GatedShape, LatentShape, LayerTraits, PlainShape
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.block_traits import BlockTraits
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.layer_source import qkv_order
from ops.quantize.methods import Method
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What to do.

    Attributes:
        calibration: Text that the methods which look at inputs run through the model.
        samples: Windows of it.
        window: Tokens of a window.
        lm_head: The head is rounded too, to eight bits: of a tied vocabulary a copy, beside the embedding.
    """

    model: Path
    out: Path
    method: str
    group_size: int
    calibration: Path | None
    samples: int
    window: int
    device: str
    lm_head: bool = False


def check_job(config: ModelConfig, job: QuantizeJob, method: Method) -> None:
    """Refuse what cannot work before anything is written.

    Raises:
        ConfigError: Says which setting is wrong and what is allowed.
    """
    if config.quantization is not None:
        raise ConfigError("HEADRACE_MODEL", f"{job.model} is quantized already ({config.quantization.name})")
    if (problem := _unknown(config)) is not None:
        remedy = "serve it in its own numbers, or as a GGUF or float8 checkpoint that others have made of it"
        raise ConfigError("HEADRACE_MODEL", f"{job.model} ({config.architecture}) has {problem}; {remedy}")
    if method.scales_inputs and (reason := _unscalable(config)) is not None:
        problem = f"{job.method} scales inputs at the matrix before, which {reason}; use gptq or rtn-int4"
        raise ConfigError("HEADRACE_METHOD", problem)
    if method.needs_inputs and job.calibration is None:
        problem = f"is required by {job.method}: a text like those that the model will work on"
        raise ConfigError("HEADRACE_CALIBRATION", problem)
    if job.out.resolve() == job.model.resolve():
        raise ConfigError("HEADRACE_OUT", "is the model's own folder; name another one")
    if job.lm_head and not method.can_round_head:
        problem = (
            f"checkpoints of {job.method} have one precision, too low for a head; use rtn-int4 or gptq, or leave it out"
        )
        raise ConfigError("HEADRACE_LM_HEAD", problem)
    _check_group_size(config, method)


def _check_group_size(config: ModelConfig, method: Method) -> None:
    if method.group_size is None:
        return
    sizes = _input_sizes(config)
    allowed = [size for size in (32, 64, 128, 256) if all(count % size == 0 for _, count in sizes)]
    if method.group_size not in allowed:
        given = ", ".join(f"{name} {count}" for name, count in sizes)
        choices = ", ".join(map(str, allowed)) or "none: use int8 or fp8"
        problem = f"{method.group_size} does not divide the model's input sizes ({given}); possible: {choices}"
        raise ConfigError("HEADRACE_GROUP_SIZE", problem)


def _input_sizes(config: ModelConfig) -> list[tuple[str, int]]:
    """Return the features that matrices of layers are given, with what they are."""
    sizes: dict[tuple[str, int], None] = {("hidden_size", config.hidden_size): None}
    for layer in config.layers:
        mixer, block = layer.mixer, layer.feed_forward
        assert isinstance(mixer, AttentionShape)
        sizes["heads", mixer.num_heads * mixer.head_dim] = None
        if isinstance(block, MixtureShape):
            sizes["experts", block.expert_size] = None
            if block.shared_size:
                sizes["shared expert", block.shared_size] = None
        else:
            assert isinstance(block, GatedShape | PlainShape)
            sizes["intermediate_size", block.inner_size] = None
    return list(sizes)


def _unknown(config: ModelConfig) -> str | None:
    """Return what a model has whose matrices cannot be rounded; None where all can."""
    if config.encoder is not None:
        return "attention in both directions"
    if config.block.layer_inputs is not None:
        return "an input of each token for each layer"
    return next((problem for layer in config.layers if (problem := _unknown_part(layer)) is not None), None)


def _unknown_part(layer: LayerTraits) -> str | None:
    mixer, block = layer.mixer, layer.feed_forward
    if isinstance(mixer, LatentShape):
        return "attention by latent vectors"
    if not isinstance(mixer, AttentionShape):
        return "layers that are no attention"
    if mixer.reads_layer is not None:
        return "layers that read the keys of others"
    if isinstance(block, MixtureShape):
        return "experts with biases" if block.has_expert_biases else None
    return None if isinstance(block, GatedShape | PlainShape) else "a dense block beside experts"


def _unscalable(config: ModelConfig) -> str | None:
    """Return why the inputs of a layer's matrices cannot be scaled where they come from; None where they can."""
    if any(isinstance(layer.feed_forward, MixtureShape) for layer in config.layers):
        return "all experts and the router share"
    block = replace(config.block, names=replace(config.block.names, renamed=(), unused=()))
    if block != BlockTraits() or not all(map(can_pack, config.layers)):
        return "only layers like Llama's have"
    shapes = [layer.mixer for layer in config.layers]
    if any(isinstance(shape, AttentionShape) and qkv_order(shape) is not None for shape in shapes):
        return "only heads that turn whole, by halves, have"
    return None
