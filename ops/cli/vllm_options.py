"""What stands for an option of `vllm serve` that is called otherwise here, or that there is not: who types it is told.

`ops/docs/coming-from.md` says the same at more length.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ops.cli.sglang_options import SGLANG_OPTIONS

_ONE_DEVICE = "one model runs on one device here; a quantized copy may fit (`headrace quantize`)"
_ALWAYS = "this is always on: leave it out"
_CHOSEN = "this is chosen by itself: leave it out"
_FILES = "the model's files say it themselves: leave it out"
_CONFIG = "change config.json in a copy of the model's folder"
_ADAPTERS = "adapters are not served: merge it into the model's weights"
_MARKUP = "the chat template says how the model writes this: leave it out, or see --chat-format"

VLLM_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--host": "`headrace up` serves this machine alone; `headrace gateway` has --host: see ops/docs/two-hosts.md",
        "--tensor-parallel-size": _ONE_DEVICE,
        "--pipeline-parallel-size": _ONE_DEVICE,
        "--data-parallel-size": "start more workers: --workers of `headrace up`, or more of `headrace worker`",
        "--cpu-offload-gb": _ONE_DEVICE,
        "-tp": _ONE_DEVICE,
        "-pp": _ONE_DEVICE,
        "-dp": "start more workers: --workers of `headrace up`, or more of `headrace worker`",
        "-q": _FILES,
        "--enable-expert-parallel": _ONE_DEVICE,
        "--distributed-executor-backend": _ONE_DEVICE,
        "--quantization": _FILES,
        "--load-format": _FILES,
        "--runner": _FILES,
        "--convert": _FILES,
        "--task": _FILES,
        "--tokenizer-mode": _FILES,
        "--limit-mm-per-prompt": "text alone is served: leave it out",
        "--hf-overrides": _CONFIG,
        "--rope-scaling": _CONFIG,
        "--hf-token": "set HF_TOKEN",
        "--tokenizer": "the tokenizer is the one of the model's folder or file: leave it out",
        "--trust-remote-code": "code of a checkpoint is never run: leave it out",
        "--revision": "write it behind the id: --model ID@REVISION",
        "--download-dir": "set HF_HOME",
        "--chat-template": "put it into the model's folder as chat_template.jinja",
        "--enable-auto-tool-choice": _ALWAYS,
        "--enable-chunked-prefill": _ALWAYS,
        "--async-scheduling": _ALWAYS,
        "--enable-prompt-tokens-details": _ALWAYS,
        "--scheduling-policy": "requests are always served by their `priority`: leave it out",
        "--attention-backend": _CHOSEN,
        "--structured-outputs-config": _CHOSEN,
        "--max-seq-len-to-capture": _CHOSEN,
        "--swap-space": "nothing is swapped: leave it out",
        "--seed": "a request brings its own `seed`: leave it out",
        "--tool-call-parser": _MARKUP,
        "--reasoning-parser": _MARKUP,
        "--enforce-eager": "--cuda-graphs off",
        "--compilation-config": "--cuda-graphs off, decode or all",
        "--num-gpu-blocks-override": "--num-blocks",
        "--kv-cache-memory-bytes": "--kv-cache-bytes",
        "--generation-config": "--sampling-defaults model, or none for vLLM's `vllm`",
        "--speculative-config": "--speculative, --draft-model and --num-speculative-tokens",
        "--override-generation-config": "change generation_config.json in a copy of the model's folder",
        "--enable-lora": _ADAPTERS,
        "--lora-modules": _ADAPTERS,
        "--allowed-origins": "--cors-origins",
        "--otlp-traces-endpoint": "--otlp-endpoint",
        "--disable-log-requests": "--request-log-per-s 0",
        "--disable-log-stats": "--request-log-per-s 0",
        "--enable-log-requests": "--request-log-per-s, which is on; --log-prompts for prompts too",
        "--uvicorn-log-level": "--log-level, of the worker",
        "--config": "write the settings into a file of variables, HEADRACE_PORT=8000 for --port 8000",
        "--ssl-certfile": "--tls-cert-file of `headrace gateway`",
        "--ssl-keyfile": "--tls-key-file of `headrace gateway`",
    }
)


def advice(option: str) -> str | None:
    """Return whose an option is that we lack, vLLM's or SGLang's, and what to do instead; None for any other."""
    option = option.replace("_", "-")
    for owner, options in (("vLLM", VLLM_OPTIONS), ("SGLang", SGLANG_OPTIONS)):
        if told := options.get(option) or options.get(option.replace("--no-", "--", 1)):
            return f"Of {owner}'s: {told}"
    return None
