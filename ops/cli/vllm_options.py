"""What stands for an option of `vllm serve` that is called otherwise here, or that there is not: who types it is told.

`ops/docs/coming-from.md` says the same at more length.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ONE_DEVICE = "one model runs on one device here; a quantized copy may fit (`headrace quantize`)"
_ALWAYS = "this is always on: leave it out"
_MARKUP = "the chat template says how the model writes this: leave it out, or see --chat-format"

VLLM_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--host": "`headrace up` serves this machine alone; `headrace gateway` has --host: see ops/docs/two-hosts.md",
        "--tensor-parallel-size": _ONE_DEVICE,
        "--pipeline-parallel-size": _ONE_DEVICE,
        "--data-parallel-size": "start more workers: --workers of `headrace up`, or more of `headrace worker`",
        "--cpu-offload-gb": _ONE_DEVICE,
        "--quantization": "the checkpoint says it itself: leave it out",
        "--load-format": "the files say it themselves: leave it out",
        "--tokenizer": "the tokenizer is the one of the model's folder or file: leave it out",
        "--trust-remote-code": "code of a checkpoint is never run: leave it out",
        "--revision": "write it behind the id: --model ID@REVISION",
        "--download-dir": "set HF_HOME",
        "--chat-template": "put it into the model's folder as chat_template.jinja",
        "--enable-auto-tool-choice": _ALWAYS,
        "--enable-chunked-prefill": _ALWAYS,
        "--tool-call-parser": _MARKUP,
        "--reasoning-parser": _MARKUP,
        "--enforce-eager": "--cuda-graphs off",
        "--num-gpu-blocks-override": "--num-blocks",
        "--kv-cache-memory-bytes": "--kv-cache-bytes",
        "--generation-config": "--sampling-defaults model, or none for vLLM's `vllm`",
        "--speculative-config": "--speculative, --draft-model and --num-speculative-tokens",
        "--enable-lora": "adapters are not served: merge it into the model's weights",
        "--ssl-certfile": "--tls-cert-file of `headrace gateway`",
        "--ssl-keyfile": "--tls-key-file of `headrace gateway`",
    }
)


def advice(option: str) -> str | None:
    """Return what to do instead of an option of vLLM's that we lack; None for any other."""
    return VLLM_OPTIONS.get(option.replace("_", "-"))
