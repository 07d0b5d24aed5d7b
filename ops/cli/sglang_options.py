"""What stands for an option of SGLang's server that is called otherwise here, or is missing: who types it is told.

`ops/docs/coming-from.md` says the same. What vLLM calls alike is in `vllm_options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ONE_DEVICE = "one model runs on one device here; a quantized copy may fit (`headrace quantize`)"
_WORKERS = "start more workers: --workers of `headrace up`, or more of `headrace worker`"

SGLANG_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "--model",
        "--tokenizer-path": "the tokenizer is the one of the model's folder or file: leave it out",
        "--context-length": "--max-model-len",
        "--mem-fraction-static": "--gpu-memory-utilization, which is of all that the process uses",
        "--max-running-requests": "--max-num-seqs",
        "--max-total-tokens": "--kv-cache-bytes, or --num-blocks",
        "--chunked-prefill-size": "--max-num-batched-tokens, which is of all tokens of a step",
        "--tp": _ONE_DEVICE,
        "--tp-size": _ONE_DEVICE,
        "--dp": _WORKERS,
        "--dp-size": _WORKERS,
        "--disable-radix-cache": "--no-enable-prefix-caching",
        "--disable-cuda-graph": "--cuda-graphs off",
        "--speculative-algorithm": "--speculative",
        "--speculative-draft-model-path": "--draft-model",
        "--speculative-num-draft-tokens": "--num-speculative-tokens",
        "--enable-metrics": "metrics are always on, at the operator's port: --operator-port",
        "--grammar-backend": "this is chosen by itself: leave it out",
        "--lora-paths": "adapters are not served: merge it into the model's weights",
    }
)
