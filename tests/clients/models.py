"""Models for clients: one with a long context, one that always thinks, and one that calls a tool it was not offered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.clients.environment import ROOT

_DEMO_MODEL = ROOT / "ops/demo_model/model"
_CONTEXT_LENGTH = 1 << 18
_ANSWER, _THOUGHT = "{{ '<|assistant|>' }}", "{{ '<|assistant|><think>\n' }}"
_CALL = '<tool_call>\n{"name": "nobody", "arguments": {"who": "me"}}\n</tool_call>'
_END, _CALL_ID = 0, 4096
_SIZE = 32


def save_long_model(directory: Path) -> None:
    """Write a random model whose context holds the prompts of coding agents: some ten thousand tokens."""
    import torch

    torch.manual_seed(0)
    model = _one_layer(vocab_size=4096, max_position_embeddings=_CONTEXT_LENGTH, tie_word_embeddings=True)
    model.save_pretrained(directory)
    _copy(directory, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def save_thinking_model(directory: Path) -> None:
    """Write the demo model with a chat template that opens the reasoning, so all that it writes is a thought."""
    shutil.copytree(_DEMO_MODEL, directory)
    template = _read(directory / "tokenizer_config.json")["chat_template"]
    assert _ANSWER in template
    _change(directory / "tokenizer_config.json", chat_template=template.replace(_ANSWER, _THOUGHT))
    # Drawn by chance, a thought may end before it begins.
    _change(directory / "generation_config.json", temperature=0.0)


def save_calling_model(directory: Path) -> None:
    """Write a model that answers every prompt with the same call: one token, and then the end."""
    import torch

    model = _one_layer(vocab_size=_CALL_ID + 1, max_position_embeddings=1 << 13, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.embed_tokens.weight[_CALL_ID] = torch.eye(_SIZE)[1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[_CALL_ID, 0] = model.lm_head.weight[_END, 1] = 10
    model.save_pretrained(directory)
    _copy(directory, "tokenizer_config.json", "generation_config.json")
    tokens = _read(_DEMO_MODEL / "tokenizer.json")
    tokens["added_tokens"].append({**tokens["added_tokens"][-1], "id": _CALL_ID, "content": _CALL, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokens))


def _one_layer(**options: Any) -> Any:
    # Here, because every run of tests imports this module, and hardly any this.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=_SIZE,
        intermediate_size=2 * _SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        **options,
    )
    return LlamaForCausalLM(config)


def _copy(directory: Path, *names: str) -> None:
    for name in names:
        shutil.copy(_DEMO_MODEL / name, directory / name)


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(_read(path) | fields))
