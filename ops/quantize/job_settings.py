"""What a job of quantizing is asked to do, and what is refused before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gpu_worker.layers.layer_packing import can_pack
from gpu_worker.layers.layer_traits import GatedShape, LayerTraits
from gpu_worker.layers.mixture_shape import MixtureShape
from gpu_worker.models.block_traits import BlockTraits
from gpu_worker.models.config import ModelConfig
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
    if not all(map(_is_known, config.layers)) or _in_own_names(config.block) != BlockTraits():
        problem = f"{job.model} has layers of its own kind ({config.architecture})"
        supported = "those of Llama, Qwen2, Qwen3 and their like, and experts of Mixtral, Qwen2-MoE and Qwen3-MoE"
        raise ConfigError("HEADRACE_MODEL", f"{problem}; supported: {supported}")
    if job.method == "awq" and any(isinstance(layer.feed_forward, MixtureShape) for layer in config.layers):
        problem = "awq scales inputs for one matrix, but all experts and the router share theirs; use gptq or rtn-int4"
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
    heads = config.num_heads * config.head_dim
    sizes = {"hidden_size": config.hidden_size, "heads": heads, **_inner_sizes(config)}
    allowed = [size for size in (32, 64, 128, 256) if all(count % size == 0 for count in sizes.values())]
    if method.group_size not in allowed:
        given = ", ".join(f"{name} {count}" for name, count in sizes.items())
        choices = ", ".join(map(str, allowed)) or "none: use int8 or fp8"
        problem = f"{method.group_size} does not divide the model's input sizes ({given}); possible: {choices}"
        raise ConfigError("HEADRACE_GROUP_SIZE", problem)


def _inner_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the features between the matrices of feed-forward blocks, by what they are called."""
    sizes: dict[str, int] = {}
    for layer in config.layers:
        block = layer.feed_forward
        if isinstance(block, MixtureShape):
            sizes |= {"experts": block.expert_size} | (
                {"shared expert": block.shared_size} if block.shared_size else {}
            )
        else:
            sizes["intermediate_size"] = config.intermediate_size
    return sizes


def _in_own_names(block: BlockTraits) -> BlockTraits:
    return replace(block, names=replace(block.names, renamed=(), unused=()))


def _is_known(layer: LayerTraits) -> bool:
    """Whether the matrices of a layer are those that the job rounds."""
    block = layer.feed_forward
    if not isinstance(block, MixtureShape):
        return can_pack(layer)
    is_plain = not (block.has_expert_biases or block.has_choice_bias or block.weighs_inputs)
    return is_plain and can_pack(replace(layer, feed_forward=GatedShape(block.expert_size)))
