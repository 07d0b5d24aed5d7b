"""The files of the model folder: writing them so that a reader never sees half of one, and reading the weights back."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from ops.demo_model.architecture import Llama, LlamaShape
from ops.demo_model.chat import CHAT_TEMPLATE
from ops.demo_model.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, SPECIAL_TOKENS

MODEL_FOLDER = Path(__file__).parent / "model"
PREFIX = "model."


def export_model(model: Llama, tokenizer: Tokenizer, training: dict[str, Any], folder: Path = MODEL_FOLDER) -> None:
    """Write everything that a server needs, each file in one atomic replacement, the weights in float16.

    Args:
        model: the network.
        tokenizer: the tokenizer it was trained with.
        training: what `training.json` records of how the weights came about.
        folder: where to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {PREFIX + name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    partial.write_bytes(save(weights, metadata={"format": "pt"}))
    os.replace(partial, folder / "model.safetensors")
    texts = {
        "config.json": _to_json(model.shape.to_config()),
        "generation_config.json": _to_json(_generation_config()),
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _to_json(_tokenizer_config(model.shape)),
        "training.json": _to_json(training),
    }
    for name, text in texts.items():
        write_text(folder / name, text)


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def load_model(folder: Path = MODEL_FOLDER) -> tuple[Llama, Tokenizer]:
    """Return the exported network, in float32, and its tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(LlamaShape.from_config(config))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix(PREFIX): tensor.to(torch.float32) for name, tensor in weights.items()})
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _tokenizer_config(shape: LlamaShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
