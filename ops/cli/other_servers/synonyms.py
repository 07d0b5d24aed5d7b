"""Names that no server has, and that may be typed for options of ours."""

from __future__ import annotations

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
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
