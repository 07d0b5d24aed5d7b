"""Options of text-generation-inference and Ollama, and those that anybody may guess."""

from __future__ import annotations

from ops.cli.other_servers import reasons

# What is said, and the options of which it is said.
TGI: tuple[tuple[str, str], ...] = (
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
OLLAMA: tuple[tuple[str, str], ...] = (
    ("a worker keeps its model until it ends: leave it out", "--keepalive --keep-alive"),
    ("a request asks for it: `response_format`", "--format"),
    ("a request asks for it: `reasoning_effort`", "--think --hidethinking"),
    ("set HF_ENDPOINT for a mirror of the hub", "--insecure"),
    ("--max-model-len", "--num-ctx"),
    ("--device cpu or cuda; a model runs on one of them as a whole", "--num-gpu"),
    ("--num-threads", "--num-thread"),
    ("--max-num-seqs", "--num-parallel"),
)
GUESSED: tuple[tuple[str, str], ...] = (
    (
        "--device cuda; a GPU is used by itself, and CUDA_VISIBLE_DEVICES says which",
        "--gpu --gpus --cuda --use-gpu --gpu-id",
    ),
    ("run one worker for each GPU, with CUDA_VISIBLE_DEVICES", "--num-gpus --devices --gpu-ids"),
    ("--device cpu", "--cpu --cpu-only --no-gpu --use-cpu --no-cuda"),
    ("--num-threads", "--cores --cpus --num-cpus --nthreads"),
    (
        "--max-model-len",
        "--context --context-size --context-window --ctx --max-length --max-seq-len --max-context --max-len "
        "--n-ctx --seq-len",
    ),
    ("--max-num-seqs", "--concurrency --max-concurrency --max-batch --num-seqs"),
    (
        "--kv-cache-bytes on a CPU, --gpu-memory-utilization on a GPU",
        "--memory --mem --ram --vram --max-memory --gpu-memory --gpu-mem",
    ),
    ("--kv-cache-dtype", "--kv-dtype --kv-cache-type --kv-type --cache-dtype"),
    ("--dtype", "--precision --bf16 --fp16 --float16 --bfloat16 --half --torch-dtype"),
    (
        "`headrace quantize` makes a checkpoint, which is then served",
        "--int8 --int4 --fp8 --4bit --8bit --quant --load-in-4bit --load-in-8bit",
    ),
    ("a request says this itself (`max_tokens`): leave it out", "--max-tokens --max-new-tokens --max-output-tokens"),
    ("--served-model-name", "--name --model-alias --served-name"),
    (
        "--host of `headrace gateway`: see ops/docs/two-hosts.md",
        "--bind --address --listen --addr --ip --public --expose",
    ),
    ("--api-key, or keys of tenants with `headrace keys create`", "--key --token --auth-token --password --secret"),
    ("--no-auth, on loopback only", "--no-key --without-key --no-api-key --disable-auth --public-access"),
    ("--tls-cert-file and --tls-key-file of `headrace gateway`", "--tls --ssl --https --cert --certfile --keyfile"),
    ("--state-dir", "--data-dir --state --home --work-dir --directory --dir"),
    ("--log-level debug, of the worker; logs are in the state directory", "--debug --trace --log --logs"),
    ("--log-level error, of the worker", "--quiet --silent"),
    (
        "it stays in the foreground; let systemd or `nohup` keep it: see ops/docs/gpu-fleet.md",
        "-d --daemon --detach --background --daemonize",
    ),
    ("there is no reloading; start it again after a change", "--reload --watch --dev"),
    ("--speculative", "--speculation --spec --speculative-decoding --draft-tokens --mtp --eagle --medusa --ngram"),
    ("--nats-url", "--nats --queue --broker --nats-server"),
    ("--redis-url", "--redis --redis-server"),
    ("--nats-user and --nats-password", "--user --username"),
    (
        "--no-enable-prefix-caching; --cache-ttl-s 0 keeps no answers",
        "--no-cache --no-prefix-cache --no-prefix-caching --disable-cache --disable-prefix-caching",
    ),
    ("results are printed: send them into a file with `>`", "--output --output-file -o --outfile"),
    ("--file", "-i --input --input-file"),
    ("--port", "-p"),
    ("--enable-prefix-caching, which is on", "--prefix-cache --prefix-caching --cache"),
    ("--interactive-ttft-slo-s", "--slo --ttft --ttft-slo"),
    ("--operator-port", "--metrics-port --prometheus --admin-port"),
)
