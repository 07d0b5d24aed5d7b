"""Small random models that see, and what `transformers` computes of prompts with images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, IMAGE = 97, 90
SPECIAL = {"[IMG_BREAK]": 93, "[IMG_END]": 94, "<img>": 95, "</img>": 96}
Pixels = npt.NDArray[np.uint8]
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 4096, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An image as a request refers to it."""

    digest: bytes
    width: int
    height: int
    detail: Any = "auto"


@dataclass(frozen=True)
class SeeingCase:
    """A family.

    Attributes:
        family: Beginning of the name of its class.
        text: Of the text part, beside `TEXT`.
        vision: Of the tower.
        whole: Of the rest of its configuration.
        processor: Of its image processor, beside the defaults of the class in `transformers`.
        inputs: What the class of `transformers` takes, of prompts and the pixels that its tower reads.
        placeholder: What a chat template writes for an image.
        tokens: Further tokens of its tokenizer.
    """

    family: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    inputs: Callable[[list[int], list[Pixels]], dict[str, torch.Tensor]]
    whole: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    placeholder: tuple[int, ...] = (IMAGE,)
    tokens: Mapping[str, int] = field(default_factory=dict)


def random_image(height: int, width: int, seed: int) -> tuple[Ref, Pixels]:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Ref(sha256(pixels.tobytes()).digest(), width, height), pixels


def save_seeing(case: SeeingCase, directory: Path, seed: int = 3) -> Any:
    """Save a random model, and return it."""
    import transformers

    whole = {"image_token_id": IMAGE, "text_config": {**TEXT, **case.text}, "vision_config": dict(case.vision)}
    whole = {name: value for name, value in {**whole, **case.whole}.items() if value is not None}
    config = getattr(transformers, f"{case.family}Config")(**whole)
    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{case.family}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
        for name, buffer in model.named_buffers():
            if name.endswith(("input_min", "input_max", "output_min", "output_max")):
                buffer.fill_(-1.5 if name.endswith("min") else 1.5)
            elif name.rpartition(".")[2] in ("std_bias", "std_scale"):
                buffer.copy_(torch.randn_like(buffer) * 0.2 + name.endswith("scale"))
        # Never the likeliest: an image's token in an answer would be an image to the oracle.
        model.get_output_embeddings().weight[IMAGE] = 0
    model.save_pretrained(directory)
    path = directory / "preprocessor_config.json"
    image_processor_class(config.model_type)().save_pretrained(directory)
    # The constructor of Gemma 4's takes no number of tokens as small as a test's.
    path.write_text(json.dumps({**json.loads(path.read_text()), **case.processor}))
    added = [{"id": token_id, "content": text} for text, token_id in {**SPECIAL, **case.tokens}.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"\n": 88}}}))
    return model.double()


def image_processor_class(model_type: str) -> Any:
    """Return the class of `transformers` that prepares images for a family, without torchvision."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    return getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[model_type]["pil"])


def oracle_logits(case: SeeingCase, model: Any, token_ids: list[int], images: list[Pixels]) -> torch.Tensor:
    """Return the logits of all tokens, `[num_tokens, vocab_size]`, computed in float64."""
    inputs = case.inputs(token_ids, images)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits


def _qwen_inputs(patch: int, mean: float, deviation: float) -> Callable[..., dict[str, torch.Tensor]]:
    def inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([token_ids])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
        if not images:
            return given
        patches, grids = [], []
        for pixels in images:
            x = (torch.from_numpy(pixels).double() / 255 - mean) / deviation
            rows, columns = x.shape[0] // patch, x.shape[1] // patch
            for row in range(0, rows, 2):
                for column in range(0, columns, 2):
                    for r, c in ((row, column), (row, column + 1), (row + 1, column), (row + 1, column + 1)):
                        part = x[r * patch : (r + 1) * patch, c * patch : (c + 1) * patch].permute(2, 0, 1)
                        patches.append(part[:, None].expand(-1, 2, -1, -1).flatten())
            grids.append([1, rows, columns])
        return {**given, "pixel_values": torch.stack(patches).float(), "image_grid_thw": torch.tensor(grids)}

    return inputs


_QWEN_PROCESSOR = {
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64}, "patch_size": 4,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 48, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 2, 2]}

_PLAIN_TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip


def _given(token_ids: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _normal(pixels: Pixels) -> torch.Tensor:
    return ((torch.from_numpy(pixels).double() / 255 - 0.5) / 0.25).float().permute(2, 0, 1)


def _mistral_inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
    if not images:
        return _given(token_ids)
    height, width = (max(pixels.shape[side] for pixels in images) for side in (0, 1))
    sizes = torch.tensor([pixels.shape[:2] for pixels in images])
    padded = [
        torch.nn.functional.pad(_normal(pixels), (0, width - pixels.shape[1], 0, height - pixels.shape[0]))
        for pixels in images
    ]
    return {**_given(token_ids), "pixel_values": torch.stack(padded), "image_sizes": sizes}


def _tiles_inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
    if not images:
        return _given(token_ids)
    return {**_given(token_ids), "pixel_values": torch.stack([_normal(pixels) for pixels in images])}


def _gemma_inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
    return {**_tiles_inputs(token_ids, images), "token_type_ids": (torch.tensor([token_ids]) == IMAGE).int()}


_COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
_GEMMA4_TEXT = {
    "model_type": "gemma4_text", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16, "vocab_size_per_layer_input": VOCAB, "pad_token_id": 7,
}  # fmt: skip
_GEMMA4_TOWER = {
    "model_type": "gemma4_vision", **_PLAIN_TOWER, "image_size": None, "num_key_value_heads": 2, "head_dim": 12,
    "pooling_kernel_size": 2, "position_embedding_size": 60,
}  # fmt: skip
_GEMMA4_PROCESSOR = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 12}
_GEMMA4 = {"boi_token_id": 91, "eoi_token_id": 92, "audio_config": None}


def _gemma4_inputs(token_ids: list[int], images: list[Pixels]) -> dict[str, torch.Tensor]:
    given = {**_given(token_ids), "mm_token_type_ids": (torch.tensor([token_ids]) == IMAGE).int()}
    if not images:
        return given
    most, patches, places = _GEMMA4_PROCESSOR["max_soft_tokens"] * 4, [], []
    for pixels in images:
        rows, columns = pixels.shape[0] // 4, pixels.shape[1] // 4
        each = torch.from_numpy(pixels).double().view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(-1, 48) / 255
        at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        patches.append(torch.nn.functional.pad(each, (0, 0, 0, most - len(each))).float())
        places.append(torch.nn.functional.pad(at, (0, 0, 0, most - len(at)), value=-1))
    return {**given, "pixel_values": torch.stack(patches), "image_position_ids": torch.stack(places)}


SEEING_CASES: Mapping[str, SeeingCase] = {
    "qwen2.5-vl": SeeingCase(
        "Qwen2_5_VL", {"rope_parameters": _MROPE},
        {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1, 3], "hidden_act": "silu"},
        _qwen_inputs(4, 0.5, 0.25), processor=_QWEN_PROCESSOR,
    ),
    "qwen3-vl": SeeingCase(
        "Qwen3VL", {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        {**_QWEN_TOWER, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}, _qwen_inputs(4, 0.5, 0.25),
        processor=_QWEN_PROCESSOR,
    ),
    "qwen3.5": SeeingCase(
        "Qwen3_5",
        {
            "num_hidden_layers": 4, "head_dim": 24, "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_interleaved": True},
        },
        {**_QWEN_TOWER, "num_position_embeddings": 36}, _qwen_inputs(4, 0.5, 0.25), processor=_QWEN_PROCESSOR,
    ),
    "mistral3": SeeingCase(
        "Mistral3", {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral", **_PLAIN_TOWER, "image_size": 64, "hidden_act": "silu"}, _mistral_inputs,
        {"image_token_id": None, "image_token_index": IMAGE, "spatial_merge_size": 2},
        {**_COLOURS, "size": {"longest_edge": 48}},
    ),
    "internvl": SeeingCase(
        "InternVL", {"model_type": "qwen2", "use_sliding_window": False},
        {"model_type": "internvl_vision", **_PLAIN_TOWER, "use_qk_norm": True, "attention_bias": True}, _tiles_inputs,
        {"image_seq_length": 4, "downsample_ratio": 0.5},
        {**_COLOURS, "size": {"height": 16, "width": 16}, "max_patches": 4},
    ),
    "smolvlm": SeeingCase(
        "SmolVLM", {"model_type": "llama"}, {"model_type": "smolvlm_vision", **_PLAIN_TOWER},
        lambda token_ids, images: {
            name: value[None] if name == "pixel_values" else value
            for name, value in _tiles_inputs(token_ids, images).items()
        },
        {"scale_factor": 2}, {**_COLOURS, "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        tokens={
            "<fake_token_around_image>": 80, "<global-img>": 81,
            **{f"<row_{row}_col_{column}>": 80 + 2 * row + column - 1 for row in (1, 2) for column in (1, 2)},
        },
    ),
    "gemma3": SeeingCase(
        "Gemma3",
        {"model_type": "gemma3_text", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"model_type": "siglip_vision_model", **_PLAIN_TOWER, "vision_use_head": False}, _gemma_inputs,
        {
            "image_token_id": None, "image_token_index": IMAGE, "boi_token_index": 91, "eoi_token_index": 92,
            "mm_tokens_per_image": 16,
        },
        _COLOURS, (91,),
    ),
    # Small ones have inputs of layers, and layers that share keys; larger ones join an image's tokens.
    "gemma4-e": SeeingCase(
        "Gemma4", {**_GEMMA4_TEXT, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        {**_GEMMA4_TOWER, "use_clipped_linears": True}, _gemma4_inputs, _GEMMA4, _GEMMA4_PROCESSOR,
    ),
    "gemma4": SeeingCase(
        "Gemma4",
        {
            **_GEMMA4_TEXT, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        },
        {**_GEMMA4_TOWER, "standardize": True}, _gemma4_inputs, _GEMMA4, _GEMMA4_PROCESSOR,
    ),
}  # fmt: skip


LETTERS = [chr(0x21 + number) for number in range(VOCAB - 2)]
"""The texts of a seeing model's tokens, but for the image's and the unknown one."""
_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}."
)


def save_letters(directory: Path) -> None:
    """Write a tokenizer of single characters beside a model, with a chat template of nothing but the contents."""
    names = [*LETTERS[:IMAGE], "<|image_pad|>", *LETTERS[IMAGE:], "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|image_pad|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
