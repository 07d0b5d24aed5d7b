"""Options of llama.cpp's server; what vLLM or SGLang calls alike is in `vllm` and `sglang`."""

from __future__ import annotations

from ops.cli.other_servers import reasons

_DEVICE = "a model runs on one device as a whole; --device cpu or cuda"
_POSITIONS = "the model's files say how positions are rotated; change config.json in a copy of its folder"

# What is said, and the options of which it is said.
ROWS: tuple[tuple[str, str], ...] = (
    ("--model", "-m"),
    ("--model, with an id at Hugging Face's hub", "-hf -hfr --hf-repo"),
    (
        "--model takes a folder, a file, or an id at the hub; download it first",
        "-hff --hf-file -mu --model-url -dr --docker-repo",
    ),
    ("set HF_TOKEN", "-hft"),
    ("set HF_HUB_OFFLINE=1", "--offline"),
    ("--served-model-name", "-a --alias"),
    ("--max-model-len, which is of each sequence", "-c --ctx-size"),
    ("--max-num-batched-tokens", "-b --batch-size -ub --ubatch-size"),
    ("--max-num-seqs", "-np --parallel"),
    ("--num-threads", "-t --threads -tb --threads-batch"),
    ("--gateways of `headrace up`, --processes of `headrace gateway`", "--threads-http"),
    ("--device", "-dev"),
    (
        _DEVICE,
        "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -ot --override-tensor -cmoe --cpu-moe "
        "-ncmoe --n-cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --op-offload -fit --fit --fit-target -fitt "
        "--fit-ctx -fitc --rpc --moe-cache-mib --n-cpu-ffn -ncffn",
    ),
    ("set CUDA_VISIBLE_DEVICES, and start one worker for each GPU", "-mg --main-gpu"),
    ("`headrace doctor` lists them", "--list-devices"),
    ("--kv-cache-dtype, one for keys and values", "-ctk --cache-type-k -ctv --cache-type-v"),
    ("a draft model's cache has the format of the model's", "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft"),
    ("--draft-model, with --speculative draft", "-md --model-draft --spec-draft-model -hfd --hf-repo-draft"),
    ("--num-speculative-tokens", "--draft --draft-n --draft-max --spec-draft-n-max"),
    (
        "the depth of drafts adapts by itself: leave it out",
        "--draft-min --draft-n-min --draft-p-min --spec-draft-n-min",
    ),
    ("--speculative ngram", "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic"),
    (
        reasons.ALWAYS,
        "-fa --flash-attn -cb --cont-batching --jinja --metrics --props --slots --mmap --warmup --kv-unified -kvu "
        "--escape -e --repack --embedding --embeddings --rerank --reranking --swa-full",
    ),
    ("--enable-prefix-caching, which is on", "--cache-prompt --cache-reuse -cram --cache-ram --cache-idle-slots"),
    (
        "a sequence ends where its context does; nothing of a prompt is dropped",
        "--context-shift --keep",
    ),
    (
        reasons.CHOSEN,
        "--mlock --no-mmap --load-mode -lm --numa --prio --poll --cpu-mask -C --cpu-range -Cr --cpu-strict "
        "--defrag-thold -dt --ctx-checkpoints -ctxcp --swa-checkpoints --check-tensors --perf --spm-infill --special "
        "-sp --direct-io --lazy-mode --checkpoint-min-step --backend-sampling -bs",
    ),
    (
        _POSITIONS,
        "--rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor "
        "--yarn-beta-slow --yarn-beta-fast --override-kv",
    ),
    (
        reasons.REQUEST,
        "--temp --temperature --top-k --top-p --min-p -n --predict --n-predict --repeat-penalty --presence-penalty "
        "--frequency-penalty --ignore-eos -s --samplers --sampler-seq --mirostat --dry-multiplier --dry-base "
        "--xtc-probability --typical --typical-p --top-nsigma --dynatemp-range --repeat-last-n -l --logit-bias "
        "--grammar --grammar-file -j --json-schema -jf --json-schema-file --prompt -f --file -sys --system-prompt "
        "-r --reverse-prompt --reasoning-effort --chat-template-kwargs",
    ),
    ("put it into the model's folder as chat_template.jinja", "--chat-template-file --no-jinja --skip-chat-parsing"),
    (reasons.MARKUP, "--reasoning-format --reasoning -rea --reasoning-budget --prefill-assistant"),
    (reasons.POOLING, "--pooling --embd-normalize"),
    (reasons.ADAPTERS, "--lora --lora-scaled --lora-init-without-apply"),
    ("control vectors are not served", "--control-vector --control-vector-scaled --control-vector-layer-range"),
    (
        reasons.TEXT,
        "--mmproj -mm --mmproj-url -mmu --mmproj-auto --mmproj-offload --image-min-tokens --image-max-tokens "
        "--media-path -mv --model-vocoder --tts-use-guide-tokens",
    ),
    ("--keys-file, which `headrace keys create` writes", "--api-key-file"),
    ("--tls-key-file of `headrace gateway`", "--ssl-key-file"),
    ("--tls-cert-file of `headrace gateway`", "--ssl-cert-file"),
    ("--default-timeout-s", "-to --timeout"),
    ("there are no pages to look at, only the API: leave it out", "--ui --webui --ui-config --webui-config --path"),
    (reasons.PROXY, "--api-prefix --reuse-port"),
    (reasons.TOOLS, "--tools --tools-runtime --agent -ag --mcp-servers-config --ui-mcp-proxy --webui-mcp-proxy"),
    (
        "run a worker for each model: see ops/docs/your-own-model.md",
        "--models-dir --models-preset --models-max --models-autoload",
    ),
    ("a sequence's keys and values are not saved: leave it out", "--slot-save-path --slot-prompt-similarity -sps"),
    ("--log-level debug, of the worker", "-v --verbose --log-verbose -lv --verbosity --log-verbosity"),
    ("the log goes to standard error: send it where you want it", "--log-file"),
    ("--request-log-per-s 0", "--log-disable"),
    ("--log-format json", "--log-jsonl"),
    ("each line of the log has a time and a level: leave it out", "--log-colors --log-prefix --log-timestamps"),
)
