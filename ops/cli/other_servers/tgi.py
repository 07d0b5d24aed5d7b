"""Options of text-generation-inference."""

from __future__ import annotations

from ops.cli.other_servers import reasons

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
    ("--model", "--model-id"),
    (reasons.ONE_DEVICE, "--num-shard --sharded --shard-uds-path"),
    ("`headrace quantize` makes a checkpoint, which is then served", "--quantize"),
    ("--speculative ngram, and --num-speculative-tokens", "--speculate"),
    ("--max-queued-requests and --max-streams of the gateway", "--max-concurrent-requests"),
    ("--max-model-len, which is of prompt and output", "--max-input-tokens --max-input-length"),
    ("--max-num-batched-tokens", "--max-batch-prefill-tokens"),
    ("--kv-cache-bytes, or --num-blocks", "--max-batch-total-tokens"),
    ("--max-num-seqs", "--max-batch-size"),
    (reasons.CHOSEN, "--waiting-served-ratio --max-waiting-tokens --disable-custom-kernels --enable-prefill-logprobs"),
    ("a request may ask for 20 at most: leave it out", "--max-top-n-tokens"),
    (
        "every request is bounded alike: see ops/docs/parameters.md",
        "--max-best-of --max-stop-sequences --max-client-batch-size",
    ),
    ("--gpu-memory-utilization", "--cuda-memory-fraction"),
    ("--host of `headrace gateway`: see ops/docs/two-hosts.md", "--hostname"),
    ("--operator-port", "--prometheus-port"),
    ("--max-body-bytes", "--payload-limit"),
    ("--cors-origins", "--cors-allow-origin"),
    ("--log-format json", "--json-output"),
    ("services are called headrace-gateway and headrace-worker: leave it out", "--otlp-service-name"),
    ("--drain-timeout-s", "--graceful-termination-timeout"),
    ("put it into the model's folder", "--tokenizer-config-path"),
    (reasons.HUB, "--huggingface-hub-cache --weights-cache-override"),
    (reasons.CONFIG, "--rope-factor"),
    (reasons.ADAPTERS, "--lora-adapters"),
    ("prompts are checked by the gateway and read by workers: leave it out", "--validation-workers"),
    ("guided answers cost nothing where nobody asks for them: leave it out", "--disable-grammar-support"),
    ("answers are not watermarked", "--watermark-gamma --watermark-delta"),
    (reasons.PROXY, "--ngrok --ngrok-authtoken --ngrok-edge"),
    ("nothing is sent to anybody: leave it out", "--usage-stats"),
    ("`headrace doctor` prints it", "--env"),
)
