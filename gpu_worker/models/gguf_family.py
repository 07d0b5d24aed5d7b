"""What the architecture of a GGUF file alone says about its model: the format has no field for it.

Weights of Gemma's normalisations are not less one here, and rotations pair what llama.cpp's do: its converters add the
one, and put the rows of some families in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gpu_worker.layers.attention import HeadNorm
from gpu_worker.layers.block_traits import NormKind, TensorNames
from kernels.activation import Activation


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """A family's options; the absent ones are Llama's.

    Attributes:
        names: Of tensors, as `tensor_names` translates them, and which normalisations there are.
        norm: Kind of all normalisations.
        activation: Of the feed-forward block.
        is_gated: It has a gate.
        is_parallel: Both blocks of a layer read the stream before it; None is where the file has no normalisation
            before the feed-forward block, or says so.
        head_norm: How queries and keys are normalised, where the file has weights of a head's size for it.
        interleaved: Dimensions turn with their neighbours.
        turns_in_part: The file may name fewer dimensions that turn than a head has.
        scales_embeddings: Embeddings are multiplied by the root of their size.
        divides_logits: Logits are divided by the factor that the file names, not multiplied.
        window_period: Where the file names a window: of so many layers the last one has none. 1 is a window in all
            layers. None refuses windows.
        only_windows_turn: Where layers have windows, the others do not rotate.
        has_plain_windows: Layers with a window rotate without the scaling of the others.
        window_theta: Base of their rotation where the file names none; None is that of the others.
        still_period: Every so many layers one does not rotate.
        derived_scale_layers: With so many layers, scores are scaled by the width of the stream divided by the heads.
    """

    names: TensorNames = field(default_factory=TensorNames)
    norm: NormKind = field(default_factory=NormKind)
    activation: Activation = Activation.SILU
    is_gated: bool = True
    is_parallel: bool | None = False
    head_norm: HeadNorm = HeadNorm.HEADS
    interleaved: bool = False
    turns_in_part: bool = False
    scales_embeddings: bool = False
    divides_logits: bool = False
    window_period: int | None = None
    only_windows_turn: bool = False
    has_plain_windows: bool = False
    window_theta: float | None = None
    still_period: int | None = None
    derived_scale_layers: int | None = None


_AROUND = TensorNames(
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
_AFTER = TensorNames(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
_WITH_BIAS = NormKind(is_centered=True, has_bias=True)
_PLAIN = GGUFFamily()
_FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "llama": GGUFFamily(window_period=1),
        "gpt-oss": GGUFFamily(window_period=2),
        "gemma": GGUFFamily(activation=Activation.GELU_TANH, scales_embeddings=True),
        "gemma2": GGUFFamily(
            names=_AROUND,
            activation=Activation.GELU_TANH,
            scales_embeddings=True,
            window_period=2,
            derived_scale_layers=46,
        ),
        "gemma3": GGUFFamily(
            names=_AROUND,
            activation=Activation.GELU_TANH,
            scales_embeddings=True,
            window_period=6,
            has_plain_windows=True,
            window_theta=10_000.0,
            derived_scale_layers=62,
        ),
        "phi3": GGUFFamily(
            names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)), turns_in_part=True, window_period=1
        ),
        "glm4": GGUFFamily(
            names=TensorNames(
                after_mixer="post_self_attn_layernorm",
                after_feed_forward="post_mlp_layernorm",
                gate_up=("gate_up_proj",),
            ),
            interleaved=True,
            turns_in_part=True,
        ),
        "glm4moe": GGUFFamily(turns_in_part=True),
        "olmo2": GGUFFamily(names=_AFTER, window_period=4, has_plain_windows=True),
        "exaone4": GGUFFamily(names=_AFTER, window_period=4, only_windows_turn=True),
        "cohere2": GGUFFamily(
            names=TensorNames(before_feed_forward=None),
            norm=NormKind(is_centered=True),
            is_parallel=True,
            interleaved=True,
            window_period=4,
            only_windows_turn=True,
        ),
        "granite": GGUFFamily(divides_logits=True),
        "granitemoe": GGUFFamily(divides_logits=True),
        "command-r": GGUFFamily(
            names=TensorNames(before_feed_forward=None),
            norm=NormKind(is_centered=True),
            is_parallel=True,
            interleaved=True,
        ),
        "chatglm": GGUFFamily(names=TensorNames(gate_up=("gate_up_proj",)), interleaved=True, turns_in_part=True),
        "exaone-moe": GGUFFamily(window_period=4, only_windows_turn=True),
        "minimax-m2": GGUFFamily(turns_in_part=True),
        "mellum": GGUFFamily(window_period=4, has_plain_windows=True),
        "ernie4_5": GGUFFamily(interleaved=True),
        "ernie4_5-moe": GGUFFamily(interleaved=True),
        "hunyuan-dense": GGUFFamily(head_norm=HeadNorm.ROTATED),
        "hunyuan-moe": GGUFFamily(head_norm=HeadNorm.ROTATED),
        "arcee": GGUFFamily(activation=Activation.RELU_SQUARED, is_gated=False),
        "jais2": GGUFFamily(norm=_WITH_BIAS, activation=Activation.RELU_SQUARED, is_gated=False),
        "nemotron": GGUFFamily(norm=_WITH_BIAS, activation=Activation.RELU_SQUARED, is_gated=False, turns_in_part=True),
        "phi2": GGUFFamily(
            names=TensorNames(before_feed_forward=None),
            norm=_WITH_BIAS,
            activation=Activation.GELU_TANH,
            is_gated=False,
            is_parallel=True,
            turns_in_part=True,
        ),
        "phimoe": GGUFFamily(norm=_WITH_BIAS, window_period=1),
        "gptneox": GGUFFamily(
            norm=_WITH_BIAS, activation=Activation.GELU, is_gated=False, is_parallel=None, turns_in_part=True
        ),
        "stablelm": GGUFFamily(norm=_WITH_BIAS, is_parallel=None, turns_in_part=True),
        "smollm3": GGUFFamily(still_period=4),
        "starcoder2": GGUFFamily(
            names=TensorNames(up="c_fc", down="c_proj"),
            norm=_WITH_BIAS,
            activation=Activation.GELU_TANH,
            is_gated=False,
        ),
    }
)
WINDOWED = ", ".join(name for name, family in _FAMILIES.items() if family.window_period is not None)
"""The architectures whose files may name a window."""


def gguf_family(architecture: str) -> GGUFFamily:
    """Return the options of an architecture that can be served, as GGUF calls it."""
    return _FAMILIES.get(architecture, _PLAIN)
