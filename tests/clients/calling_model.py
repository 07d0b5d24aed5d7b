"""A model that answers every prompt with one and the same call, of a tool that nobody offered to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.clients.environment import ROOT

_DEMO_MODEL = ROOT / "ops/demo_model/model"
_CALL = '<tool_call>\n{"name": "nobody", "arguments": {"who": "me"}}\n</tool_call>'
_END, _CALL_ID = 0, 4096
_SIZE = 32


def save_calling_model(directory: Path) -> None:
    """Write the model: the call is one token, which follows whatever the prompt ends with; the end follows it."""
    # Here, because every run of tests imports this module, and hardly any this.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir()
    config = LlamaConfig(
        vocab_size=_CALL_ID + 1,
        hidden_size=_SIZE,
        intermediate_size=_SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=1 << 13,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
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
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(_DEMO_MODEL / name, directory / name)
    tokenizer = json.loads((_DEMO_MODEL / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][-1], "id": _CALL_ID, "content": _CALL, "special": False}
    )
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
