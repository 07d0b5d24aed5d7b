"""The worker's settings. Resolved once at start by `shared.config.resolve`, never changed afterwards.

Names are those that users of vLLM know, where the setting exists there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_worker.layers.ranks.settings import RankSettings
from gpu_worker.speculative.registry import RECIPES, describe_proposers, describe_weights
from shared.audit import AUDIT_HELP
from shared.config import setting
from shared.disaggregation import ROLES
from shared.formats import format_names
from shared.nats_files import NatsFiles
from shared.prefixes import MAX_WAIT_S
from shared.request_log import DEFAULT_PER_S, LOG_FORMAT_HELP, REQUEST_LOG_HELP
from shared.telemetry import FORMATS, LEVELS
from shared.tracing import ENDPOINT_HELP


@dataclass(frozen=True, slots=True)
class WorkerConfig(RankSettings, NatsFiles):
    """Everything an operator can choose about a worker. Sizes are bytes, times seconds."""

    model: Path | None = setting(
        None, "Directory of the model, in Hugging Face's format, its id at the hub, or a GGUF file. Required."
    )
    served_model_name: str | None = setting(None, "Name that clients ask for; the directory's or file's if not given.")
    allow_revision_change: bool = setting(
        False, "Join workers that serve another revision of the model under its name, to roll out a new one."
    )
    chat_format: str = setting(
        "auto",
        "How the model writes reasoning and calls of tools; auto is what its chat template says.",
        choices=("auto", *format_names()),
    )
    sampling_defaults: str = setting(
        "model",
        "What requests get that name no temperature, top_p, top_k, min_p or repetition_penalty: what the model's "
        "generation_config.json advises, or none of it: temperature 1 and every token.",
        choices=("model", "none"),
    )
    watermark_tenants: str = setting(
        "",
        "Tenants, separated by commas, whose requests are refused without the key of a watermark: for those who also "
        "publish jobs themselves, past the gateways that add it.",
    )
    allow_chat_template: bool = setting(
        False, "Let requests bring their own chat template; only for clients that you trust with the worker's memory."
    )
    device: str = setting("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "Number format of weights, activations and KV cache; auto is the checkpoint's own where the device is fast "
        "in it.",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"half": "float16", "float": "float32"},
    )
    num_threads: int | None = setting(None, "Threads of CPU operations; all cores but one if not given.", minimum=1)
    node_rank: int = setting(
        0, "Number of this host. Host 0 is the worker, the others start ranks for it and need no NATS.", minimum=0
    )
    master_addr: str | None = setting(
        None,
        "IPv4 address of host 0 on which it listens for the others, and by which they find it. Required with --nnodes.",
    )
    master_port: int = setting(29_500, "Port of host 0 for the others.", minimum=1, maximum=65535)
    group_token: str | None = setting(
        None,
        "Secret of at least 16 characters by which the hosts of one worker know one another. Required with --nnodes.",
        secret=True,
    )

    kv_cache_dtype: str = setting(
        "auto",
        "Number format of the KV cache: fp8 and int8 hold about twice the tokens, each with scales of its own; auto is "
        "the model's.",
        choices=("auto", "fp8", "int8"),
        synonyms={"fp8_e4m3": "fp8"},
    )
    block_size: int = setting(16, "Tokens per KV block.", minimum=1, maximum=1024)
    num_blocks: int | None = setting(
        None, "KV blocks; if not given, as many as fit a GPU, or a quarter of a CPU's free memory.", minimum=1
    )
    kv_cache_bytes: int | None = setting(
        None,
        "Size of the KV cache in bytes, if --num-blocks is not given; --gpu-memory-utilization does not bound it.",
        minimum=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of the GPU's whole memory that this process may use in all; what weights, activations and graphs leave "
        "of it is the KV cache.",
        minimum=0.05,
        maximum=1.0,
    )
    enable_prefix_caching: bool = setting(True, "Keep blocks findable so that equal prompt beginnings share them.")
    kv_host_bytes: int | None = setting(
        None,
        "Bytes of host memory that extend the prefix cache: blocks evicted from the device's memory are loaded from "
        "there where that is faster than computing them again. Pinned with a GPU. If not given, 256 MB "
        "with --kv-disk-path or --role, else off.",
        minimum=1,
    )
    kv_disk_path: str | None = setting(
        None,
        "Directory, or bucket (s3://BUCKET/PREFIX), that keeps the prefix cache too: a worker that starts again, and "
        "workers of the same model that share it, reuse the blocks there. Off if not given.",
    )
    kv_disk_bytes: int = setting(
        16_000_000_000,
        "Bytes that --kv-disk-path may hold in all, of all workers; blocks that are cheapest to recompute are deleted.",
        minimum=1 << 20,
    )
    kv_retained_share: float = setting(
        0.5,
        "Share of the KV cache, and of each tier below it, that requests may have evicted last for a time "
        "(`prompt_cache_retention`, `cache_control`); tenants divide it by their weights. 0: none.",
        minimum=0.0,
        maximum=0.9,
    )
    role: str | None = setting(
        None,
        "Part of this worker in computing prompts and answers on different workers: `prefill` hands requests over with "
        "their first token, `decode` goes on with them, `both` does either. Without another worker that does the rest "
        "each does all. Like --kv-host-bytes, needs memory of the host. Off if not given.",
        choices=ROLES,
    )
    kv_address: str = setting(
        "127.0.0.1", "HOST or HOST:PORT at which other workers fetch KV from this one, if it has a role."
    )
    kv_lease_s: float = setting(
        60.0,
        "Time for which the KV of a request that was handed over is kept for the worker that goes on with it.",
        minimum=1,
        maximum=3600,
    )
    prefix_wait_s: float = setting(
        MAX_WAIT_S,
        "Longest time that a request waits for the worker whose cache holds the beginning of its prompt, if computing "
        "that anew would take as long. 0: none waits here, and this worker asks for none of others.",
        minimum=0,
        maximum=MAX_WAIT_S,
    )
    state_checkpoint_ratio: float = setting(
        0.9,
        "Of models with recurrent layers: memory for checkpoints of states, from which equal prompt beginnings go on, "
        "in bytes for each byte of keys and values. Like SGLang's mamba_full_memory_ratio, but the states of running "
        "sequences are not in it.",
        minimum=0,
        maximum=100,
    )
    max_model_len: int | None = setting(
        None, "Tokens of a sequence, prompt and output; the model's own limit if not given.", minimum=2
    )
    image_memory_bytes: int = setting(
        1 << 30, "Memory of the host for the pixels of images; requests beyond it wait.", minimum=1 << 20
    )
    max_num_seqs: int = setting(256, "Sequences that may run at once.", minimum=1, maximum=8192)
    max_num_batched_tokens: int | None = setting(
        None, "Tokens of a step, no fewer than --max-num-seqs; 512 on a CPU, 8192 on a GPU if not given.", minimum=1
    )
    cuda_graphs: str = setting(
        "all",
        "Steps that a GPU replays from graphs, captured at the start: decodes alone, or also steps of up to 512 tokens "
        "with parts of prompts (2,048 of models with experts, latent attention or recurrent layers).",
        choices=("off", "decode", "all"),
    )
    batch_slowdown: float = setting(
        0.05,
        "How much longer batch work may make steps that serve people, as a share of them on average; one of them by "
        "twice that. Besides, one step in 1000 is longer (in 250 where others have no room for any, in 150 beside one "
        "person alone), and some of the first are, to learn what batch work takes. 0 leaves only these; from 1 on "
        "batch work is not held back at all.",
        minimum=0,
        maximum=1000,
    )
    speculative: str = setting(
        "off",
        "Draft tokens ahead and verify several in one step; answers stay the same. Who makes the drafts: "
        f"{describe_proposers()}. Not run on a GPU yet.",
        choices=("off", *(recipe.name for recipe in RECIPES)),
    )
    lora_modules: str | None = setting(
        None,
        "Adapters (LoRA) that the worker adds at its start under names of their own: name=directory, several separated "
        "by commas or spaces. Directories are as PEFT saves them.",
    )
    max_loras: int = setting(
        0,
        "Adapters in memory at once; requests for others load them, in place of those that were not used for longest. "
        "At least as many as --lora-modules names.",
        minimum=0,
        maximum=256,
    )
    max_lora_bytes: int = setting(
        4 << 30, "Bytes of adapters in memory at once, each in pages of 2 MiB.", minimum=2 << 20
    )
    adapters: str | None = setting(
        None,
        "Store of adapters: a directory that all workers and gateways share, or s3://BUCKET/PREFIX (needs "
        "headrace[s3]); a directory of this worker's own if not given, which has those of its --lora-modules alone.",
    )
    draft_model: Path | None = setting(
        None, f"Directory of what makes drafts, for the proposers that have weights. {describe_weights()}."
    )
    num_speculative_tokens: int = setting(
        5,
        "Draft tokens that a sequence verifies in a step at most; fewer while too few are accepted.",
        minimum=1,
        maximum=63,
    )
    simulate: float | None = setting(
        None,
        "Simulate the engine: one token per sequence and step of this many milliseconds, no model.",
        minimum=0,
        maximum=60_000,
    )
    simulate_growth: float = setting(
        0.005,
        "What every further token of a simulated step, of another sequence or of a prompt, adds to it, as a share of "
        "its time with one.",
        minimum=0,
        maximum=100,
    )

    nats_url: str = setting("nats://127.0.0.1:4222", "NATS servers, separated by commas.")
    nats_user: str | None = setting(None, "NATS user of the worker role.")
    nats_password: str | None = setting(None, "Password of the NATS user.", secret=True)

    worker_id: str | None = setting(None, "Name of this worker, unique among all; made up if not given.")
    health_host: str = setting("127.0.0.1", "Address of the health port.")
    health_port: int | None = setting(
        None,
        "Port of /health/live (steps end) and /health/ready (takes requests), for probes; none if not given.",
        minimum=0,
        maximum=65535,
    )
    golden: Path | None = setting(
        None,
        "Baseline of golden prompts, as `headrace golden record` makes it: the worker replays them when it has nothing "
        "better to do, and finds out if its answers are no longer the model's. Off if not given.",
    )
    golden_key_file: Path | None = setting(
        None, "File with the key that the baseline was signed with. Required with --golden."
    )
    golden_share: float = setting(
        0.001, "Share of the device's time that golden prompts may take.", minimum=0.00001, maximum=1
    )
    golden_withdraw: str = setting(
        "unless-last",
        "Whether a worker that fails two golden probes in a row takes no more requests: unless no other sound worker "
        "of the model is there, always, or never: then it only says so.",
        choices=("unless-last", "always", "never"),
    )
    drain_timeout_s: float = setting(30.0, "Time running requests get to finish at shutdown.", minimum=0)
    audit_file: Path | None = setting(None, AUDIT_HELP)
    log_format: str = setting("text", LOG_FORMAT_HELP, choices=FORMATS)
    request_log_per_s: float = setting(DEFAULT_PER_S, REQUEST_LOG_HELP, minimum=0)
    otlp_endpoint: str | None = setting(None, ENDPOINT_HELP)
    log_level: str = setting("info", "Lowest severity that is logged.", choices=LEVELS)
