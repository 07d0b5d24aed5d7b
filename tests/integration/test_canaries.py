"""Aliases and canaries in the whole system under load: nothing is lost, and a bad canary is rolled back by itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from ops.stack.config import DEMO_MODEL
from tests.integration.hosted import load_on, order, wait_for_state
from tests.integration.system import System, running_system
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Of each model: its files, and settings of its worker.
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "good": ("good", {}),
    "same": ("good", {}),
    "slow": ("good", {"simulate": "200"}),
    "short": ("good", {"max_model_len": "16"}),
    "wrong": ("wrong", {}),
}
# Long enough for all tests, quick to be judged.
RULES = ("--min-requests", "40", "--logprob-share", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, and a copy whose weights have noise of the size of half of them."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("good", "wrong"):
        shutil.copytree(DEMO_MODEL, directory / name)
    file, generator = directory / "wrong" / "model.safetensors", torch.Generator().manual_seed(1)
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.7
            weights[name] = weight + noise.to(weight.dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("canaries"), "--models-dir", str(models)) as running:
        for name, (path, options) in MODELS.items():
            order(running, "load", name, path=path, options=options, memory_bytes=300_000_000)
        for name in MODELS:
            wait_for_state(running, name, "awake", 240)
        yield running


@pytest.fixture(autouse=True)
def alias(system: System) -> Iterator[None]:
    """An alias `chat` of `good`."""
    headrace(system, "alias", "set", "chat", "good")
    yield
    headrace(system, "alias", "rm", "chat")


def headrace(system: System, group: str, *arguments: str) -> str:
    """Run a command of the operator, and return what it prints."""
    command = [sys.executable, "-m", "ops.cli", group, "--state-dir", str(system.ready_file.parent / "state")]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def canary(system: System) -> dict[str, Any]:
    (found,) = system.operator("/v1/canaries").json()["canaries"]
    return dict(found)


def ask(system: System, name: str, prompt: str, **fields: Any) -> httpx2.Response:
    body = {"model": name, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **fields}
    return system.post("/v1/completions", body)


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def rolled_back_under_load(system: System, name: str, *options: str, prompt: str = "Word {}") -> Counter[int]:
    """Start a canary under load, wait until it is rolled back and for some requests more; return all statuses."""
    statuses: list[int] = []
    ended: list[str] = []

    def ask_one(number: int) -> None:
        answer = ask(system, "chat", prompt.format(number), seed=number)
        statuses.append(answer.status_code)
        body = answer.json()
        if answer.status_code == 200:
            assert (body["model"], body["usage"]["completion_tokens"]) == ("chat", 6)
            assert body["choices"][0]["logprobs"] is None
        else:
            ended.append(body["error"]["code"])

    with load_on(ask_one) as answered:
        headrace(system, "canary", "start", "chat", "--to", name, "--percent", "50", *RULES, *options)
        wait_for(lambda: canary(system)["state"] == "rolled_back", 240, lambda: canary(system))
        count, failed = len(answered), len(ended)
        wait_for(lambda: len(answered) > count + 30, 120)
    # Those that ran when it was rolled back, one a client, may yet have failed.
    assert len(ended) <= failed + 6
    assert len(statuses) == len(answered)
    lines = map(json.loads, (system.ready_file.parent / "state" / "audit.jsonl").read_text().splitlines())
    (line,) = [each for each in lines if each["action"] == "canary.rollback" and each["what"]["canary"] == name]
    assert (line["outcome"], line["what"]["by"]) == ("done", "comparison")
    assert line["what"]["reason"] == canary(system)["verdict"]
    return Counter(statuses)


def rollbacks(system: System, reason: str) -> float:
    return system.gauge(f'headrace_canary_rollbacks_total{{process="0",reason="{reason}"}}')


def test_alias_is_swapped_under_load_and_every_answer_is_of_one_model(system: System) -> None:
    texts = {text_of(ask(system, name, "The river", temperature=0)): name for name in ("good", "slow")}
    assert len(texts) == 2
    seen: list[str] = []  # Its append is atomic, other than adding to a count.

    def ask_one(number: int) -> None:
        # None is answered from the cache.
        seen.append(texts[text_of(ask(system, "chat", "The river", temperature=0, cache_salt=str(number)))])

    with load_on(ask_one) as answered:
        for name in ("slow", "good", "slow"):
            count = len(answered)
            wait_for(lambda count=count: len(answered) > count + 12, 120)
            headrace(system, "alias", "set", "chat", name)
        before = seen.count("slow")
        wait_for(lambda: seen.count("slow") > before + 12, 120)
    assert len(seen) == len(answered)
    assert min(Counter(seen).values()) > 12


def test_slow_canary_is_rolled_back_and_nothing_is_lost(system: System) -> None:
    before = rollbacks(system, "ttft") + rollbacks(system, "itl")
    assert set(rolled_back_under_load(system, "slow")) == {200}
    assert rollbacks(system, "ttft") + rollbacks(system, "itl") == before + 1
    assert "Mann-Whitney" in headrace(system, "canary", "show", "chat")


def test_canary_with_wrong_weights_is_rolled_back_and_nothing_is_lost(system: System) -> None:
    before = rollbacks(system, "logprob")
    # A machine that does much else may make any of two alike look slow for a while.
    lenient = ("--max-ttft-ratio", "100", "--max-itl-ratio", "100")
    assert set(rolled_back_under_load(system, "wrong", *lenient)) == {200}
    assert rollbacks(system, "logprob") == before + 1
    assert "perplexity of its own answers" in canary(system)["verdict"]


def test_canary_that_cannot_hold_the_prompts_is_rolled_back_for_its_errors(system: System) -> None:
    before = rollbacks(system, "errors")
    prompt = (
        "{} a prompt of more tokens than the sixteen that this one canary has, and that others have no trouble with"
    )
    statuses = rolled_back_under_load(system, "short", prompt=prompt)
    assert set(statuses) == {200, 400}
    assert rollbacks(system, "errors") == before + 1


def test_canary_that_is_the_same_stays_and_is_promoted(system: System) -> None:
    with load_on(lambda number: ask(system, "chat", f"Same {number}", seed=number).raise_for_status()):
        headrace(system, "canary", "start", "chat", "--to", "same", "--percent", "50", *RULES)
        wait_for(lambda: canary(system)["arms"][1]["requests"] > 150, 240, lambda: canary(system))
    shown = canary(system)
    assert (shown["state"], shown["verdict"]) == ("running", "not worse so far")
    assert {arm["errors"] for arm in shown["arms"]} == {0}
    assert [arm["requests"] for arm in shown["arms"]] == [arm["logprobs"] for arm in shown["arms"]]
    assert "same" in headrace(system, "canary", "ls")
    headrace(system, "canary", "promote", "chat")
    assert headrace(system, "alias", "ls").splitlines()[1].split() == ["chat", "all", "same"]
