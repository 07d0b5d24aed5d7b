"""What `headrace up` prints when it is ready: everything needed for a first request, ready to be pasted."""

from __future__ import annotations

import json

from ops.stack.plan import Plan

_BANNER = """
  URL      {url}/v1
  API key  {key}

  Operator      {operator_url}/metrics
  Operator key  {operator_key}

curl -N {url}/v1/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d '{body}'

from openai import OpenAI  # pip install openai
client = OpenAI(base_url="{url}/v1", api_key="{key}")
for chunk in client.completions.create(model={model}, prompt={prompt}, max_tokens=64, stream=True):
    print(chunk.choices[0].text, end="", flush=True)

"""
_PROMPT = "def read_lines(path):\n"


def banner(plan: Plan, model: str) -> str:
    """Return URLs and keys, a curl line and four lines for the OpenAI SDK."""
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 64, "stream": True}).replace("'", "'\\''")
    return _BANNER.format(
        url=plan.url,
        key=plan.api_key,
        operator_url=plan.operator_url,
        operator_key=plan.operator_key or "none is asked for",
        body=body,
        model=json.dumps(model),
        prompt=json.dumps(_PROMPT),
    )
