"""Measures `transformers` or vLLM under the loads of `engine_compare`. Prints one JSON line a batch size.

Arguments: `transformers` or `vllm`, model directory, batch sizes separated by commas, prompt tokens, new tokens,
threads. It runs in the peer's own environment and needs nothing of ours. Threads of vLLM are bound by
VLLM_CPU_OMP_THREADS_BIND.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], object]
"""Generates a number of tokens after each prompt."""


def transformers_generate(model_dir: str, num_threads: int) -> Generate:
    """Load the model with `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)

    def generate(prompts: list[list[int]], count: int) -> object:
        token_ids = torch.tensor(prompts)
        limits = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **limits)

    return generate


def vllm_generate(model_dir: str, max_len: int, max_batch: int, prompt: int) -> Generate:
    """Load the model with vLLM's CPU build."""
    import vllm

    llm: Any = vllm.LLM(
        model_dir,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max_len,
        max_num_seqs=max_batch,
        max_num_batched_tokens=max(prompt, 512),
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], count: int) -> object:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)

    return generate


def main(peer: str, model_dir: str, batches: str, prompt: int, new: int, num_threads: int) -> None:
    """Time the generation of one token, which is the prefill, and of `new` more; prompts differ each time."""
    sizes = [int(batch) for batch in batches.split(",")]
    if peer == "vllm":
        generate = vllm_generate(model_dir, prompt + new + 8, max(sizes), prompt)
    else:
        generate = transformers_generate(model_dir, num_threads)
    generator = random.Random(0)

    def seconds(batch: int, count: int, length: int = prompt) -> float:
        prompts = [generator.choices(range(3, 4096), k=length) for _ in range(batch)]
        started = time.perf_counter()
        generate(prompts, count)
        return time.perf_counter() - started

    seconds(max(sizes), 4)
    for batch in sizes:
        seconds(batch, 2, min(prompt, 8))
        prefill_s = seconds(batch, 1)
        decode_s = seconds(batch, new + 1) - prefill_s
        row = {"batch": batch, "prefill": batch * prompt / prefill_s, "decode": batch * new / decode_s}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
