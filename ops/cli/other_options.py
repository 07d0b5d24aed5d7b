"""Explains options that a command does not have: what stands for them here.

Such an option is looked up in a table of what people type most who come from another server, then among the options of
our other commands.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection

import click

_RANKS = "a model is divided among ranks: --tensor-parallel-size"
_WORKERS = "start more workers: --workers of `headrace up`, or more of `headrace worker`"
_DATA_PARALLEL = f"{_WORKERS}; or --enable-dp-attention with --tensor-parallel-size, which shares experts"
_REQUEST = "a request says this itself: leave it out, and see ops/docs/parameters.md"
_MARKUP = "the chat template says how the model writes this: leave it out, or see --chat-format"
_FILES = "the model's files say it themselves: leave it out"
_ALWAYS = "this is always on: leave it out"
_CHOSEN = "this is chosen by itself: leave it out"
_HOST = "`headrace up` serves this machine alone; `headrace gateway` has --host: see ops/docs/two-hosts.md"
_ADAPTERS = "--lora-modules, with NAME=DIRECTORY"

# The server that has the options (None: none has, but users type them), the advice, and the options.
_ROWS: tuple[tuple[str | None, str, str], ...] = (
    ("vLLM", _HOST, "--host"),
    ("vLLM", "--tensor-parallel-size", "-tp"),
    ("vLLM", "--pipeline-parallel-size", "-pp"),
    ("vLLM", "--decode-context-parallel-size", "-dcp"),
    ("vLLM", _DATA_PARALLEL, "--data-parallel-size -dp"),
    ("vLLM", "--num-redundant-experts and --eplb-step-interval", "--eplb-config"),
    ("vLLM", "--gateways of `headrace up`, --processes of `headrace gateway`", "--api-server-count"),
    ("vLLM", _FILES, "-q --quantization --load-format --tokenizer"),
    ("vLLM", "code of a checkpoint is never run: leave it out", "--trust-remote-code"),
    ("vLLM", "set HF_TOKEN", "--hf-token"),
    ("vLLM", "put it into the model's folder as chat_template.jinja", "--chat-template"),
    ("vLLM", _ALWAYS, "--enable-auto-tool-choice --enable-chunked-prefill"),
    ("vLLM", _MARKUP, "--tool-call-parser --reasoning-parser"),
    ("vLLM", "nothing is swapped: leave it out", "--swap-space --cpu-offload-gb"),
    ("vLLM", "--cuda-graphs off", "--enforce-eager"),
    ("vLLM", "--speculative, --draft-model and --num-speculative-tokens", "--speculative-config"),
    ("vLLM", _ADAPTERS, "--enable-lora"),
    ("vLLM", "--max-lora-bytes, of all adapters in memory", "--max-lora-rank --max-cpu-loras"),
    ("vLLM", _CHOSEN, "--lora-dtype --fully-sharded-loras --mm-encoder-tp-mode"),
    ("vLLM", "--max-images, of images in a request", "--limit-mm-per-prompt"),
    ("vLLM", "--image-memory-bytes, of the worker", "--mm-processor-cache-gb"),
    ("vLLM", _FILES, "--mm-processor-kwargs"),
    (
        "vLLM",
        "files of the server are never read; clients send theirs: see ops/docs/images.md",
        "--allowed-local-media-path",
    ),
    (
        "vLLM",
        "--kv-host-bytes and --kv-disk-path",
        "--kv-transfer-config --kv-offloading-size --kv-offloading-backend",
    ),
    ("vLLM", "options are HEADRACE_ variables, too; there is no file of them", "--config"),
    ("SGLang", "--model", "--model-path"),
    ("SGLang", "--max-model-len", "--context-length"),
    ("SGLang", "--gpu-memory-utilization, which is of all that the process uses", "--mem-fraction-static"),
    ("SGLang", "--max-num-seqs", "--max-running-requests"),
    ("SGLang", _RANKS, "--tp --tp-size"),
    ("SGLang", "--decode-context-parallel-size", "--dcp --dcp-size"),
    ("SGLang", "--role, of each worker: see ops/docs/disaggregation.md", "--disaggregation-mode"),
    ("SGLang", "--max-num-batched-tokens", "--chunked-prefill-size"),
    ("SGLang", _DATA_PARALLEL, "--dp"),
    ("SGLang", "--num-redundant-experts", "--ep-num-redundant-experts"),
    ("SGLang", "--no-enable-prefix-caching", "--disable-radix-cache"),
    ("llama.cpp", "--model", "-m"),
    ("llama.cpp", "--model, with an id at Hugging Face's hub", "-hf"),
    ("llama.cpp", "--max-model-len, which is of each sequence", "-c --ctx-size"),
    ("llama.cpp", "--max-num-seqs", "-np --parallel"),
    ("llama.cpp", "--num-threads", "-t --threads"),
    ("llama.cpp", "a model runs on one device as a whole; --device cpu or cuda", "-ngl --n-gpu-layers"),
    ("llama.cpp", _ALWAYS, "-fa --jinja"),
    ("llama.cpp", _CHOSEN, "--mlock --no-mmap"),
    ("llama.cpp", _REQUEST, "--temp --max-tokens --n-predict"),
    ("llama.cpp", _ADAPTERS, "--lora"),
    ("llama.cpp", "the model's folder has its vision part: leave it out", "--mmproj"),
    ("TGI", "--model", "--model-id"),
    ("TGI", _RANKS, "--num-shard"),
    ("TGI", "`headrace quantize` makes a checkpoint, which is then served", "--quantize"),
    (None, "--device cuda; a GPU is used by itself, and CUDA_VISIBLE_DEVICES says which", "--gpu --gpus"),
    (None, "--device cpu", "--cpu"),
    (None, "it stays in the foreground; let systemd keep it: see ops/docs/gpu-fleet.md", "-d --daemon"),
    (None, "--log-level debug, of the worker; logs are in the state directory", "--debug -v --verbose"),
    (None, "--port", "-p"),
)

_SERVERS = ("up", "worker", "gateway")
_COMMANDS = (*_SERVERS, "chat")


OTHERS = {name: (owner, advice) for owner, advice, names in _ROWS for name in names.split()}
"""Whose an option is (None for a synonym), and what stands for it here, by its name."""


def explain(option: str, command: str, known: Collection[str]) -> str | None:
    """Return what to say of an option that a server's `command` lacks; None leaves it to click and its suggestions."""
    name = option.replace("_", "-") if option.startswith("--") else option
    if command not in _SERVERS or name in known:
        return None
    for found in (name, name.replace("--no-", "--", 1)):
        if found in OTHERS:
            owner, advice = OTHERS[found]
            whose = f" ({owner}'s)" if owner else ""
            return f"No such option '{option}'{whose}: {_instead(advice, known)}."
    others = [f"`headrace {other}`" for other in _COMMANDS if other != command and name in _options(other)][:2]
    has = "has" if len(others) == 1 else "have"
    return f"No such option '{option}' of `headrace {command}`; {' and '.join(others)} {has} it." if others else None


def _instead(advice: str, known: Collection[str]) -> str:
    """Return the advice; if it only names an option, add how to use it, or which command has it."""
    name = advice.split()[0].rstrip(",;:")
    if not name.startswith("--") or "of `headrace" in advice:
        return advice
    if name in known:
        return f"use {advice}"
    return f"`headrace {next(other for other in _COMMANDS if name in _options(other))}` has {advice}"


def _options(command: str) -> set[str]:
    found: click.Command = importlib.import_module(f"ops.cli.{command}").command
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
