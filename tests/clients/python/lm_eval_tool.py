"""EleutherAI's evaluation harness, by scores of given texts and by generation."""

from __future__ import annotations

from cells import MODEL, URL, run
from tool import TOKENIZER, run_tool

DATA = '{"q": "x = ", "a": "1"}\n{"q": "def f(", "a": "x"}\n'
TASK = """
task: {kind}
dataset_path: json
dataset_kwargs:
  data_files: data.jsonl
test_split: train
output_type: {kind}
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
{more}
"""
SCORED = "metric_list:\n  - metric: perplexity"
GENERATED = 'generation_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match'


def evaluate(kind: str, more: str, metric: str) -> None:
    settings = f"model={MODEL},base_url={URL}/v1/completions,tokenizer={TOKENIZER},num_concurrent=2"
    printed = run_tool(
        "lm_eval",
        "run",
        *("--model", "local-completions", "--model_args", settings, "--tasks", kind, "--include_path", "."),
        files={"data.jsonl": DATA, f"{kind}.yaml": TASK.format(kind=kind, more=more)},
    )
    assert f"|{metric}" in printed.replace(" ", ""), printed[-3000:]


run(
    {
        "runs unmodified": lambda: evaluate("generate_until", GENERATED, "exact_match"),
        "scores of texts": lambda: evaluate("loglikelihood", SCORED, "perplexity"),
    }
)
