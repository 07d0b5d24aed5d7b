"""Options of `vllm serve`."""

from __future__ import annotations

from ops.cli.other_servers import reasons

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
    ("`headrace up` serves this machine alone; `headrace gateway` has --host: see ops/docs/two-hosts.md", "--host"),
    (
        reasons.ONE_DEVICE,
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp --enable-expert-parallel -ep --cpu-offload-gb "
        "--cpu-offload-params --distributed-executor-backend --decode-context-parallel-size -dcp "
        "--prefill-context-parallel-size -pcp --disable-custom-all-reduce --enable-dbo --enable-eplb --eplb-config "
        "--all2all-backend --max-parallel-loading-workers --ray-workers-use-nsight --nnodes --node-rank --master-addr "
        "--master-port --num-redundant-experts --expert-placement-strategy --offload-backend",
    ),
    (
        reasons.WORKERS,
        "--data-parallel-size -dp --data-parallel-size-local -dpl --data-parallel-rank -dpn --data-parallel-start-rank "
        "-dpr --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb "
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe",
    ),
    ("--gateways of `headrace up`, --processes of `headrace gateway`", "--api-server-count -asc"),
    ("`headrace worker` is a worker without HTTP", "--headless"),
    (
        reasons.FILES,
        "-q --quantization --load-format --runner --convert --task --model-impl --config-format --hf-config-path "
        "--ignore-patterns --model-loader-extra-config --safetensors-load-strategy --quantization-param-path",
    ),
    (reasons.TOKENIZER, "--tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init"),
    ("code of a checkpoint is never run: leave it out", "--trust-remote-code --code-revision"),
    (
        reasons.TEXT,
        "--limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type "
        "--mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-only --mm-shm-cache-max-object-size-mb "
        "--disable-mm-preprocessor-cache --disable-chunked-mm-input --media-io-kwargs --allowed-local-media-path "
        "--allowed-media-domains --interleave-mm-strings --skip-mm-profiling --video-pruning-rate "
        "--enable-mm-embeds --language-model-only",
    ),
    (reasons.CONFIG, "--hf-overrides --rope-scaling --rope-theta --disable-sliding-window"),
    ("change generation_config.json in a copy of the model's folder", "--override-generation-config"),
    ("set HF_TOKEN", "--hf-token"),
    ("write it behind the id: --model ID@REVISION", "--revision"),
    (reasons.HUB, "--download-dir"),
    ("put it into the model's folder as chat_template.jinja", "--chat-template"),
    ("--allow-chat-template", "--trust-request-chat-template"),
    ("a request brings its own `chat_template_kwargs`", "--default-chat-template-kwargs"),
    ("a request brings its own `seed`: leave it out", "--seed"),
    ("a request asks for it: `return_tokens_as_token_ids`", "--return-tokens-as-token-ids"),
    ("a request asks for it in its `stream_options`", "--enable-force-include-usage"),
    ("a request may ask for 20 at most: leave it out", "--max-logprobs"),
    ("a prompt is a text or token ids: leave it out", "--enable-prompt-embeds"),
    (
        reasons.ALWAYS,
        "--enable-auto-tool-choice --enable-chunked-prefill --async-scheduling --enable-prompt-tokens-details "
        "--enable-request-id-headers",
    ),
    ("requests are always served by their `priority`: leave it out", "--scheduling-policy"),
    (
        reasons.CHOSEN,
        "--attention-backend --attention-config --structured-outputs-config --guided-decoding-backend --kernel-config "
        "--max-seq-len-to-capture --cudagraph-capture-sizes --max-cudagraph-capture-size --cuda-graph-sizes "
        "--moe-backend --prefix-caching-hash-algo --disable-cascade-attn --mamba-cache-dtype --mamba-ssm-cache-dtype "
        "--mamba-block-size --mamba-cache-mode --calculate-kv-scales --kv-sharing-fast-prefill --stream-interval "
        "--logprobs-mode --disable-hybrid-kv-cache-manager "
        "--optimization-level --performance-mode --additional-config --use-v2-block-manager --num-scheduler-steps "
        "--multi-step-stream-outputs --scheduler-delay-factor --num-lookahead-slots --preemption-mode "
        "--disable-async-output-proc --use-tqdm-on-load --scheduler-reserve-full-isl --chat-template-content-format "
        "--exclude-tools-when-tool-choice-none --response-role --renderer-num-workers --tokenizer-pool-size "
        "--enable-server-load-tracking --enable-tokenizer-info-endpoint --disable-frontend-multiprocessing",
    ),
    (
        "--max-num-batched-tokens: long prompts are read in parts of what it leaves",
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold",
    ),
    ("nothing is swapped: leave it out", "--swap-space"),
    (
        reasons.KV_STAYS,
        "--kv-transfer-config --kv-events-config --kv-offloading-size --kv-offloading-backend --ec-transfer-config",
    ),
    ("stop the worker instead: the queue keeps what waits until one starts again", "--enable-sleep-mode"),
    (
        reasons.NO_CODE,
        "--worker-cls --worker-extension-cls --scheduler-cls --logits-processors --logits-processor-pattern "
        "--io-processor-plugin --tool-parser-plugin --reasoning-parser-plugin --middleware --weight-transfer-config",
    ),
    (reasons.MARKUP, "--tool-call-parser --reasoning-parser --enable-reasoning"),
    (reasons.TOOLS, "--tool-server"),
    ("--cuda-graphs off", "--enforce-eager"),
    (reasons.GRAPHS, "--compilation-config -cc -O"),
    ("--num-blocks", "--num-gpu-blocks-override"),
    ("--kv-cache-bytes", "--kv-cache-memory-bytes --kv-cache-memory"),
    ("--sampling-defaults model, or none for vLLM's `vllm`", "--generation-config"),
    (
        "--speculative, --draft-model and --num-speculative-tokens",
        "--speculative-config -sc --speculative-model --ngram-prompt-lookup-max --ngram-prompt-lookup-min "
        "--speculative-model-quantization --speculative-draft-tensor-parallel-size --speculative-max-model-len "
        "--speculative-disable-by-batch-size --spec-decoding-acceptance-method",
    ),
    (
        reasons.ADAPTERS,
        "--enable-lora --lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype --fully-sharded-loras "
        "--lora-extra-vocab-size --lora-target-modules --default-mm-loras --enable-tower-connector-lora "
        "--enable-lora-bias --long-lora-scaling-factors --enable-prompt-adapter --max-prompt-adapters "
        "--max-prompt-adapter-token --qlora-adapter-name-or-path",
    ),
    (reasons.POOLING, "--pooler-config --override-pooler-config"),
    ("--cors-origins", "--allowed-origins"),
    (
        "--cors-origins is all that one chooses of this: leave it out",
        "--allow-credentials --allowed-methods --allowed-headers",
    ),
    ("--otlp-endpoint", "--otlp-traces-endpoint --collect-detailed-traces"),
    ("--request-log-per-s 0", "--disable-log-requests --disable-log-stats --disable-uvicorn-access-log"),
    ("--request-log-per-s, which is on; --log-prompts for prompts too", "--enable-log-requests --max-log-len"),
    ("answers are never logged: leave it out", "--enable-log-outputs --enable-log-deltas"),
    ("of a request that ends there is one line; --request-log-per-s", "--disable-access-log-for-endpoints"),
    ("--log-level, of the worker", "--uvicorn-log-level"),
    ("--log-format", "--log-config-file"),
    (
        reasons.METRICS,
        "--show-hidden-metrics-for-version --kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics "
        "--enable-layerwise-nvtx-tracing --enable-logging-iteration-details --aggregate-engine-logging",
    ),
    ("write the settings into a file of variables, HEADRACE_PORT=8000 for --port 8000", "--config"),
    ("--tls-cert-file of `headrace gateway`", "--ssl-certfile"),
    ("--tls-key-file of `headrace gateway`", "--ssl-keyfile"),
    ("--tls-client-ca-file of `headrace gateway`", "--ssl-ca-certs --ssl-cert-reqs"),
    ("TLS 1.2 and 1.3 with Python's ciphers: leave it out, or end TLS in a proxy", "--ssl-ciphers"),
    (reasons.PROXY, "--root-path --uds"),
    ("SIGUSR1 replaces the processes of `headrace gateway`, which read a new certificate", "--enable-ssl-refresh"),
    ("/openapi.json describes the API and is always served: leave it out", "--disable-fastapi-docs"),
    (
        "--max-body-bytes bounds a request of `headrace gateway`",
        "--h11-max-incomplete-event-size --h11-max-header-count",
    ),
    ("--drain-timeout-s", "--shutdown-timeout"),
)
