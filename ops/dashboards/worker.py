"""One worker, or several beside each other: steps, batch, KV cache, drafts, process, GPU."""

from __future__ import annotations

from ops.dashboards.panel import Dashboard, Panel, Query, Variable, graph, quantiles, ratio

_VLLM = 'model_name=~"$model", engine=~"$worker"'
_OWN = 'model=~"$model", worker=~"$worker"'
_RATE = "[$__rate_interval]"


def _gpu(title: str, metric: str, unit: str, text: str, limit: float | None = None) -> Panel:
    return graph(title, text, Query(f"{metric}{{{_OWN}}}", "{{worker}} {{gpu}}"), unit=unit, width=8, limit=limit)


WORKER = Dashboard(
    "worker",
    "Headrace / Workers",
    "Steps, batch, KV cache, drafts, process and GPU of each worker.",
    (
        Variable("model", "label_values(headrace_worker_steps_total, model)"),
        Variable("worker", 'label_values(headrace_worker_steps_total{model=~"$model"}, worker)'),
    ),
    (
        graph(
            "Running and waiting",
            "Sequences in the worker.",
            Query(f"vllm:num_requests_running{{{_VLLM}}}", "{{engine}} running"),
            Query(f"vllm:num_requests_waiting{{{_VLLM}}}", "{{engine}} waiting"),
            Query(f"headrace_worker_running_batch{{{_OWN}}}", "{{worker}} of these running: batch lane"),
        ),
        graph(
            "Fill of the batch",
            "Running sequences over `--max-num-seqs`.",
            Query(f"headrace_worker_batch_fill{{{_OWN}}}", "{{worker}}"),
            unit="percentunit",
        ),
        graph(
            "KV cache in use",
            "Of all blocks, and by kind of memory. Near 1, sequences wait or are preempted.",
            Query(f"vllm:kv_cache_usage_perc{{{_VLLM}}}", "{{engine}}"),
            Query(
                f"headrace_worker_kv_used_blocks{{{_OWN}}} / headrace_worker_kv_blocks{{{_OWN}}}",
                "{{worker}} {{group}}",
            ),
            unit="percentunit",
            limit=0.95,
        ),
        graph(
            "Prefix tokens found, by tier",
            "Prompt tokens in the prefix cache: all of them, and where they were: on the device or in a tier below.",
            Query(f"rate(vllm:prefix_cache_hits_total{{{_VLLM}}}{_RATE})", "{{engine}} all"),
            Query(f"rate(headrace_worker_kv_tier_hit_tokens_total{{{_OWN}}}{_RATE})", "{{worker}} {{tier}}"),
        ),
        graph(
            "Preemptions",
            "Running sequences that gave up their blocks and will be computed again.",
            Query(f"rate(vllm:num_preemptions_total{{{_VLLM}}}{_RATE})", "{{engine}}"),
        ),
        Panel(
            "Time of a step",
            "A step gives each running sequence a token.",
            quantiles("headrace_worker_step_seconds", "worker", _OWN, (0.5, 0.99)),
            unit="s",
        ),
        ratio(
            "Tokens of a step",
            "Mean; chunks of prompts make steps large.",
            f"sum by (engine) (rate(vllm:iteration_tokens_total_sum{{{_VLLM}}}{_RATE}))",
            f"sum by (engine) (rate(vllm:iteration_tokens_total_count{{{_VLLM}}}{_RATE}))",
            "{{engine}}",
            "short",
        ),
        graph(
            "Tokens per second",
            "Prompt tokens computed, and tokens generated.",
            Query(f"rate(headrace_worker_prefill_tokens_total{{{_OWN}}}{_RATE})", "{{worker}} prompt"),
            Query(f"rate(vllm:generation_tokens_total{{{_VLLM}}}{_RATE})", "{{engine}} generated"),
        ),
        ratio(
            "Prefix cache",
            "Share of prompt tokens that needed no computation.",
            f"rate(vllm:prefix_cache_hits_total{{{_VLLM}}}{_RATE})",
            f"rate(vllm:prefix_cache_queries_total{{{_VLLM}}}{_RATE})",
            "{{engine}}",
        ),
        ratio(
            "Acceptance of drafts",
            "Share of draft tokens that were right; with speculative decoding.",
            f"rate(vllm:spec_decode_num_accepted_tokens_total{{{_VLLM}}}{_RATE})",
            f"rate(vllm:spec_decode_num_draft_tokens_total{{{_VLLM}}}{_RATE})",
            "{{engine}}",
        ),
        graph(
            "Redeliveries, failed steps, dead letters",
            "Messages that NATS delivered again, steps that could not be computed, jobs put into quarantine.",
            Query(f"rate(headrace_worker_redeliveries_total{{{_OWN}}}{_RATE})", "{{worker}} again: {{lane}}"),
            Query(f"rate(headrace_worker_failed_steps_total{{{_OWN}}}{_RATE})", "{{worker}} failed steps"),
            Query(f"rate(headrace_worker_dead_letters_total{{{_OWN}}}{_RATE})", "{{worker}} dead letters"),
        ),
        graph(
            "Processor time",
            "One core is 1.",
            Query(f"rate(headrace_worker_process_cpu_seconds_total{{{_OWN}}}{_RATE})", "{{worker}}"),
        ),
        graph(
            "Memory of the process",
            "Resident.",
            Query(f"headrace_worker_process_resident_memory_bytes{{{_OWN}}}", "{{worker}}"),
            unit="bytes",
        ),
        graph(
            "Deviation of golden probes",
            "Of log probabilities from the baseline, over the limit: two probes in a row above 1 withdraw a worker.",
            Query(
                f"headrace_worker_golden_deviation{{{_OWN}}} / (headrace_worker_golden_limit{{{_OWN}}} > 0)",
                "{{worker}}",
            ),
            limit=1,
        ),
        _gpu("GPU utilization", "headrace_gpu_utilization_ratio", "percentunit", "Time in which a kernel ran."),
        _gpu("GPU memory", "headrace_gpu_memory_used_bytes", "bytes", "In use."),
        _gpu("GPU temperature", "headrace_gpu_temperature_celsius", "celsius", "Most GPUs slow down at 85 to 90.", 85),
        _gpu("GPU power", "headrace_gpu_power_watts", "watt", "Drawn now."),
        graph(
            "Energy per generated token",
            "Of the GPU, prompts included.",
            Query(
                f"sum by (worker) (rate(headrace_gpu_energy_joules_total{{{_OWN}}}{_RATE})) / on (worker) "
                f'label_replace(sum by (engine) (rate(vllm:generation_tokens_total{{{_VLLM}}}{_RATE})), "worker", '
                '"$1", "engine", "(.*)")',
                "{{worker}}",
            ),
            unit="joule",
            width=8,
        ),
    ),
)
