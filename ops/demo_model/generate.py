"""Greedy completion without a cache: slow and obvious, for the model card's samples and as an oracle in tests."""

import torch
from tokenizers import Tokenizer

from ops.demo_model.architecture import Llama
from ops.demo_model.tokenizer import END_OF_TEXT_ID


@torch.inference_mode()
def greedy_tokens(model: Llama, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """Return the most likely continuation, token by token, ending early at the end-of-text token."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        logits = model(torch.tensor([ids]))
        token = int(logits[0, -1].argmax())
        ids.append(token)
        if token == END_OF_TEXT_ID:
            break
    return ids[len(prompt_ids) :]


def complete(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """Return the greedy completion of a prompt as text, without its end-of-text token."""
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    text: str = tokenizer.decode(greedy_tokens(model, prompt_ids, max_tokens), skip_special_tokens=True)
    return text
