"""A model of random weights whose context holds the prompts of coding agents: some ten thousand tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clients.environment import ROOT

_DEMO_MODEL = ROOT / "ops/demo_model/model"
_CONTEXT_LENGTH = 1 << 18


def save_long_model(directory: Path) -> None:
    """Write the model, with the demo model's tokenizer and chat template."""
    # Here, because every run of tests imports this module, and hardly any this.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=_CONTEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(_DEMO_MODEL / name, directory / name)
