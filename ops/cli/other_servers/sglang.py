"""Options of SGLang's server; what vLLM calls alike is in `vllm`."""

from __future__ import annotations

from ops.cli.other_servers import reasons

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
    ("--model", "--model-path"),
    (reasons.TOKENIZER, "--tokenizer-path --tokenizer-worker-num --enable-tokenizer-batch-encode"),
    ("--max-model-len", "--context-length"),
    ("--gpu-memory-utilization, which is of all that the process uses", "--mem-fraction-static"),
    ("--max-num-seqs", "--max-running-requests --prefill-max-requests --pp-max-micro-batch-size"),
    ("--kv-cache-bytes, or --num-blocks", "--max-total-tokens"),
    ("--max-num-batched-tokens, which is of all tokens of a step", "--chunked-prefill-size --max-prefill-tokens"),
    ("--block-size", "--page-size"),
    (
        reasons.ONE_DEVICE,
        "--tp --tp-size --pp --pp-size --ep --ep-size --expert-parallel-size --enable-dp-attention "
        "--enable-dp-lm-head --attention-context-parallel-size --attn-cp-size --moe-dp-size --moe-data-parallel-size "
        "--dist-init-addr --nccl-init-addr --nccl-port --dist-timeout --base-gpu-id --gpu-id-step --moe-a2a-backend "
        "--moe-dense-tp-size --ep-num-redundant-experts --ep-dispatch-algorithm --deepep-mode --init-expert-location "
        "--enable-two-batch-overlap --enable-single-batch-overlap --enable-p2p-check --enable-mscclpp "
        "--enable-nccl-nvls --enable-symm-mem --pp-async-batch-depth --enable-dynamic-chunking",
    ),
    (reasons.WORKERS, "--dp --dp-size --load-balance-method"),
    ("--no-enable-prefix-caching", "--disable-radix-cache"),
    ("--cuda-graphs off", "--disable-cuda-graph"),
    (reasons.GRAPHS, "--cuda-graph-max-bs --cuda-graph-bs --disable-cuda-graph-padding --disable-piecewise-cuda-graph"),
    ("--speculative", "--speculative-algorithm --speculative-algo"),
    ("--draft-model", "--speculative-draft-model-path --speculative-draft-model"),
    ("write it behind the id: --draft-model ID@REVISION", "--speculative-draft-model-revision"),
    ("--num-speculative-tokens; the depth adapts by itself", "--speculative-num-draft-tokens --speculative-num-steps"),
    (
        reasons.CHOSEN,
        "--speculative-eagle-topk --speculative-token-map --speculative-accept-threshold-single "
        "--speculative-accept-threshold-acc --speculative-attention-mode --speculative-ngram-min-match-window-size "
        "--speculative-ngram-max-match-window-size --grammar-backend --sampling-backend --prefill-attention-backend "
        "--decode-attention-backend --mm-attention-backend --fp8-gemm-backend --fp4-gemm-backend --moe-runner-backend "
        "--dsa-prefill-backend --dsa-decode-backend --disable-flashinfer-autotune --enable-torch-compile "
        "--torch-compile-max-bs --disable-overlap-schedule --enable-mixed-chunk --num-continuous-decode-steps "
        "--triton-attention-reduce-in-fp32 --triton-attention-num-kv-splits --disable-shared-experts-fusion "
        "--flashinfer-mla-disable-ragged --schedule-conservativeness --radix-eviction-policy --swa-full-tokens-ratio "
        "--disable-hybrid-swa-memory --enable-prefill-delayer --incremental-streaming-output --stream-output "
        "--sleep-on-idle --skip-server-warmup --warmups --delete-ckpt-after-loading --enable-memory-saver "
        "--enable-deterministic-inference --enable-fp32-lm-head --constrained-json-whitespace-pattern "
        "--constrained-json-disable-any-whitespace --disable-outlines-disk-cache",
    ),
    ("--state-checkpoint-ratio", "--max-mamba-cache-size --mamba-full-memory-ratio"),
    (
        "requests are always served by their `priority`: leave it out",
        "--schedule-policy --enable-priority-scheduling --schedule-low-priority-values-first "
        "--priority-scheduling-preemption-threshold --abort-on-priority-when-disabled",
    ),
    ("a request brings its own `seed`: leave it out", "--random-seed"),
    ("a request asks for it: `truncate_prompt_tokens`", "--allow-auto-truncate"),
    ("change generation_config.json in a copy of the model's folder", "--preferred-sampling-params"),
    (reasons.CONFIG, "--json-model-override-args"),
    (
        "`headrace quantize` makes a checkpoint, which is then served",
        "--modelopt-quant --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path --modelopt-export-path "
        "--quantize-and-serve --torchao-config",
    ),
    (
        reasons.METRICS,
        "--enable-metrics --enable-metrics-for-all-schedulers --enable-mfu-metrics --collect-tokens-histogram",
    ),
    (
        "the buckets of histograms are the same everywhere: leave it out",
        "--bucket-time-to-first-token --bucket-inter-token-latency --bucket-e2e-request-latency "
        "--prompt-tokens-buckets --generation-tokens-buckets",
    ),
    (
        "usage always has `prompt_tokens_details`: leave it out",
        "--enable-cache-report",
    ),
    (
        reasons.REQUEST_LOG,
        "--log-requests --log-requests-level --log-requests-target --decode-log-interval "
        "--enable-request-time-stats-logging --export-metrics-to-file --uvicorn-access-log-exclude-prefixes",
    ),
    ("--log-format", "--log-requests-format"),
    ("--log-level, of the worker", "--log-level-http"),
    ("--otlp-endpoint", "--enable-trace"),
    ("--operator-key, of the operator's port", "--admin-api-key"),
    ("/v1/embeddings is always served: leave it out", "--is-embedding"),
    (reasons.TEXT, "--enable-multimodal --keep-mm-feature-on-device --mm-max-concurrent-calls"),
    (
        "put it into the model's folder as chat_template.jinja",
        "--hf-chat-template-name --completion-template",
    ),
    (
        "--hang-timeout-s of `headrace up`; --health-port of `headrace worker`",
        "--watchdog-timeout --soft-watchdog-timeout",
    ),
    (reasons.ADAPTERS, "--lora-paths --max-loras-per-batch --max-loaded-loras --lora-backend --lora-eviction-policy"),
    (
        reasons.KV_STAYS,
        "--disaggregation-mode --disaggregation-transfer-backend --disaggregation-bootstrap-port "
        "--disaggregation-ib-device --enable-hierarchical-cache --hicache-ratio --hicache-size --hicache-write-policy "
        "--hicache-io-backend --hicache-mem-layout --hicache-storage-backend --enable-lmcache --kv-canary",
    ),
    (reasons.NO_CODE, "--enable-custom-logit-processor --custom-sigquit-handler --forward-hooks"),
    (reasons.PROXY, "--fastapi-root-path --grpc-mode"),
    ("background responses are kept by NATS: leave it out", "--file-storage-path"),
    (
        "a worker tells its revision by itself; --allow-revision-change for a new one",
        "--weight-version --model-checksum",
    ),
    (
        "prompts are not kept for later; --log-prompts adds them to the log",
        "--crash-dump-folder --debug-tensor-dump-output-folder",
    ),
)
