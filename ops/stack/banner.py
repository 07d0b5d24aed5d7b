"""What `headrace up` prints when it is ready: everything needed for a first request, ready to be pasted."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys

from ops.stack.plan import Plan

_BANNER = """
  URL      {url}/v1
  API key  {key}{key_note}

  Operator      {operator_url}/metrics
  Operator key  {operator_key}

curl -N {url}/v1/completions -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' -d {body}

{python} - <<'END'
{snippet}
END

"""
_SDK_SNIPPET = """\
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{key}")
for chunk in client.completions.create(**{arguments}, stream=True):
    print(chunk.choices[0].text, end="", flush=True)"""
# What every Python can run; `pip install openai` makes the other one work.
_PLAIN_SNIPPET = """\
import json, urllib.request
headers = {{"Authorization": "Bearer {key}", "Content-Type": "application/json"}}
body = json.dumps({arguments}).encode()
answer = json.load(urllib.request.urlopen(urllib.request.Request("{url}/v1/completions", body, headers)))
print(answer["choices"][0]["text"])"""
# The demo model is small and trails off soon: what it says here is whole within these tokens.
_DEMO_PROMPT, _DEMO_TOKENS = "def __eq__(self, other):\n    if", 12
_PROMPT, _TOKENS = "The three primary colours are", 64


def banner(plan: Plan, model: str, *, is_demo: bool) -> str:
    """Return URLs and keys, a curl line and a few lines of Python; the same answer comes from each, every time."""
    arguments = first_request(model, is_demo=is_demo)
    return _BANNER.format(
        url=plan.url,
        key=plan.api_key,
        key_note="" if plan.asks_for_key else " (--no-auth: only web pages need it)",
        operator_url=plan.operator_url,
        operator_key=plan.operator_key or "none is asked for",
        body=shlex.quote(json.dumps({**arguments, "stream": True})),
        python=shlex.quote(sys.executable),
        snippet=snippet(plan.url, plan.api_key, arguments, has_sdk=importlib.util.find_spec("openai") is not None),
    )


def first_request(model: str, *, is_demo: bool) -> dict[str, str | int]:
    """Return the parameters of a first request whose answer is the most likely one."""
    prompt, max_tokens = (_DEMO_PROMPT, _DEMO_TOKENS) if is_demo else (_PROMPT, _TOKENS)
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def snippet(url: str, key: str, arguments: dict[str, str | int], *, has_sdk: bool) -> str:
    """Return lines of Python that make a first request, with OpenAI's SDK where the environment has it."""
    template = _SDK_SNIPPET if has_sdk else _PLAIN_SNIPPET
    return template.format(url=url, key=key, arguments=arguments)
