"""`headrace up`: plan, start, say how to use it, ready to be pasted, wait, stop."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.stack.config import DEMO_MODEL, UpConfig
from ops.stack.console import Console
from ops.stack.hosting.host import Host, without_model
from ops.stack.plan import DEMO_MODEL_NAME, ModelChoice, Plan, make_plan, missing_role
from ops.stack.preconditions import check_parts
from ops.stack.state import StateDirectory
from ops.stack.supervisor import Supervisor
from shared.errors import ConfigError
from shared.model_hub import existing_model, hub_id, local_model
from shared.subjects import check_model_name, check_setting


def run(config: UpConfig, environ: Mapping[str, str], more_models: Sequence[Path] = ()) -> int:
    """Run the whole system until a signal stops it, and return the exit code."""
    models = [_found(model, environ) for model in (config.model, *more_models)]
    _check_names(models, environ)
    if config.ready_file is not None and not config.ready_file.absolute().parent.is_dir():
        raise ConfigError("HEADRACE_READY_FILE", f"{config.ready_file.absolute().parent} is not a directory")
    if config.ready_file is not None and config.ready_file.is_dir():
        raise ConfigError("HEADRACE_READY_FILE", f"{config.ready_file} is a directory; name a file")
    state = StateDirectory(config.state_dir)
    try:
        return asyncio.run(_run(config, models, state, environ, Console()))
    finally:
        state.close()


def _found(model: Path | None, environ: Mapping[str, str]) -> ModelChoice:
    """Return a model that is there: one that the hub has is downloaded once, for all its workers."""
    chosen = environ.get("HEADRACE_SERVED_MODEL_NAME") or None
    if model is None:
        return ModelChoice(existing_model(DEMO_MODEL, "HEADRACE_MODEL"), chosen or DEMO_MODEL_NAME)
    hub_name = hub_id(model)
    path = model if hub_name is None else local_model(model, "HEADRACE_MODEL")
    return ModelChoice(existing_model(path, "HEADRACE_MODEL"), chosen or hub_name)


def _check_names(models: Sequence[ModelChoice], environ: Mapping[str, str]) -> None:
    """Refuse several models of which clients could not say which they mean."""
    if len(models) > 1 and environ.get("HEADRACE_SERVED_MODEL_NAME"):
        problem = "is the name of one model; several are served under the names of their folders, or their ids"
        raise ConfigError("HEADRACE_SERVED_MODEL_NAME", problem)
    names = [model.served_name for model in models]
    for name in names:
        check_setting("HEADRACE_SERVED_MODEL_NAME", name, check_model_name)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError("HEADRACE_MODEL", f"two of the models would be served as {twice!r}; rename a folder")


def _tell_of_missing_keys(named: str | None, console: Console) -> None:
    """Say that the named key file is missing; this is no error, since a key made later works."""
    if named and not Path(named).exists():
        advice = f"until `headrace keys --keys-file {named} create` makes it, only the key of the state directory opens"
        console.say("headrace", f"{named} does not exist; {advice}")


async def _run(
    config: UpConfig, models: Sequence[ModelChoice], state: StateDirectory, environ: Mapping[str, str], console: Console
) -> int:
    began = time.monotonic()
    plan = make_plan(config, state, environ, models)
    check_parts(plan, console, is_demo=config.model is None)
    if (warning := missing_role(config)) is not None:
        console.say("headrace", warning)
    _tell_of_missing_keys(environ.get("HEADRACE_KEYS_FILE"), console)
    served = "the demo model" if config.model is None else ", ".join(str(model.path) for model in models)
    if config.simulate is not None:
        served = f"a simulated engine, {config.simulate:g} ms a step"
    console.say("headrace", f"starting with {served}; logs in {state.logs}")
    environ_of_workers = without_model(plan.workers[0].environ)
    audit_file = Path(environ_of_workers["HEADRACE_AUDIT_FILE"])
    host_parts = (config, plan.worker, environ_of_workers, state.path, console)
    host = Host(*host_parts, hang_timeout_s=config.hang_timeout_s, audit_file=audit_file)
    supervisor = Supervisor(plan, state, config.ready_file, console, config.hang_timeout_s, host)
    try:
        if await supervisor.start():
            assert supervisor.model is not None
            console.say("headrace", f"ready in {time.monotonic() - began:.1f} s; Ctrl-C stops it")
            sys.stdout.write(banner(plan, supervisor.model, is_demo=config.model is None))
            sys.stdout.flush()
            await supervisor.wait()
    finally:
        await supervisor.stop()
    console.say("headrace", "stopped")
    return 0


_BANNER = """
  URL      {url}/v1
  API key  {key}{key_note}

  Console       {operator_url}/console
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
# The demo model is small and trails off soon: this answer is complete within these tokens.
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
    """Return lines of Python that make a first request, with OpenAI's SDK if it is installed."""
    template = _SDK_SNIPPET if has_sdk else _PLAIN_SNIPPET
    return template.format(url=url, key=key, arguments=arguments)
