"""Measures `transformers` under the loads of `engine_compare`. Prints one JSON line a batch size.

Arguments: model directory, batch sizes separated by commas, prompt tokens, new tokens, threads.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch


def main(model_dir: str, batches: str, prompt: int, new: int, num_threads: int) -> None:
    """Time `generate` for one token, which is the prefill, and for `new` more."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)

    def seconds(token_ids: torch.Tensor, count: int) -> float:
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        started = time.perf_counter()
        model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **limits)
        return time.perf_counter() - started

    for batch in map(int, batches.split(",")):
        token_ids = torch.randint(3, model.config.vocab_size, (batch, prompt))
        seconds(token_ids[:, :8], 2)
        prefill_s = seconds(token_ids, 1)
        decode_s = seconds(token_ids, new + 1) - prefill_s
        row = {"batch": batch, "prefill": batch * prompt / prefill_s, "decode": batch * new / decode_s}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
