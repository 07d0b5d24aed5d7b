"""Measures vLLM's CPU build under the loads of `engine_compare`. Runs in vLLM's environment; needs nothing of ours.

Prints one JSON line a batch size. Arguments: model directory, batch sizes separated by commas, prompt tokens, new
tokens. Threads are bound by VLLM_CPU_OMP_THREADS_BIND.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any


def main(model_dir: str, batches: str, prompt: int, new: int) -> None:
    """Time `generate` for one token, which is the prefill, and for `new` more; prompts differ each time."""
    import vllm

    sizes = [int(batch) for batch in batches.split(",")]
    llm: Any = vllm.LLM(
        model_dir,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=prompt + new + 8,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=max(prompt, 512),
        disable_log_stats=True,
    )
    generator = random.Random(0)

    def seconds(batch: int, count: int) -> float:
        prompts = [{"prompt_token_ids": generator.choices(range(3, 4096), k=prompt)} for _ in range(batch)]
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    seconds(max(sizes), 4)
    for batch in sizes:
        prefill_s = seconds(batch, 1)
        decode_s = seconds(batch, new + 1) - prefill_s
        row = {"batch": batch, "prefill": batch * prompt / prefill_s, "decode": batch * new / decode_s}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]))
