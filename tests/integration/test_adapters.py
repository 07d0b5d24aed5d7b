"""Adapters behind the whole system: their names as models, answers of merged weights, swaps, caches, refusals."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch

from ops.stack.config import DEMO_MODEL
from tests.gpu_worker.adapters.peft_files import linear_sizes, merge, write_adapter
from tests.integration.system import System, running_system
from tests.shared.objects.small_s3 import small_s3

pytestmark = pytest.mark.slow

PROMPT = [11, 305, 42, 7, 900, 1200, 33, 58, 60, 1001, 17, 18, 500, 501, 502, 77, 78, 3000, 12]


def _answer(system: System, model: str) -> tuple[list[int], str]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = system.post("/v1/completions", body | {"model": model})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told["choices"][0]["token_ids"], told["model"]


def _expected(adapter: Path | None) -> list[int]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    if adapter is not None:
        merge(model, adapter)
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def adapters(directory: Path, count: int) -> list[Path]:
    import transformers

    sizes = linear_sizes(transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL), r".*_proj")
    return [write_adapter(directory / f"adapter-{seed}", sizes, rank=4, seed=seed) for seed in range(count)]


def test_names_of_adapters_answer_as_merged_models(tmp_path: Path) -> None:
    one, other = adapters(tmp_path, 2)
    modules = f"pirate={one},clerk={other}"
    with running_system(tmp_path, "--model", str(DEMO_MODEL), "--lora-modules", modules) as system:
        base = system.model
        models = {entry.id: entry.model_extra for entry in system.client().models.list()}
        # Twice: computed, and from what is cached of it. None gets what belongs to another.
        for _ in range(2):
            for name, adapter in ((base, None), ("pirate", one), ("clerk", other)):
                assert _answer(system, name) == (_expected(adapter), name)
        chat = system.client().chat.completions.create(
            model="clerk", messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        tokens = system.post("/tokenize", {"model": "clerk", "prompt": "hello"})
        unknown = system.post("/v1/completions", {"model": "cook", "prompt": "hello"})
    assert [models[name]["parent"] for name in (base, "pirate", "clerk")] == [None, base, base]
    assert chat.model == "clerk"
    assert tokens.json()["count"] > 0
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_adapters_are_loaded_swapped_and_unloaded_while_requests_run(tmp_path: Path) -> None:
    one, other = adapters(tmp_path, 2)
    expected = {one: _expected(one), other: _expected(other)}
    with running_system(tmp_path, "--model", str(DEMO_MODEL), "--max-loras", "3") as system:

        def order(verb: str, **body: str) -> httpx2.Response:
            return system.operator(f"/v1/{verb}_lora_adapter", body)

        def names() -> set[str]:
            return {entry.id for entry in system.client().models.list()}

        for number in range(6):
            content = (one, other)[number % 2]
            loaded = order("load", lora_name="pirate", lora_path=str(content))
            assert (loaded.status_code, "added successfully" in loaded.text) == (200, True), loaded.text
            assert "pirate" in names()
            assert [_answer(system, "pirate")[0] for _ in range(3)] == [expected[content]] * 3
        broken = order("load", lora_name="pirate", lora_path=str(tmp_path))
        unnamed = order("load", lora_path=str(one))
        assert order("unload", lora_name="pirate").status_code == 200
        assert order("unload", lora_name="pirate").status_code == 404
        assert "pirate" not in names()
        port = system.info["metrics_url"].removesuffix("/metrics")
        keyless = httpx2.post(f"{port}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "adapter_refused")
    assert "adapter_config.json" in broken.json()["error"]["message"]
    assert (unnamed.status_code, keyless.status_code) == (400, 401)


@pytest.mark.timeout(900)
def test_a_thousand_swaps_under_load_give_no_stale_answer(tmp_path: Path) -> None:
    """Answers of requests that begin after a swap has returned are of its content, at whichever gateway they arrive."""
    contents = adapters(tmp_path, 4)
    expected = [_expected(content) for content in contents]
    # Fewer places than contents: some swaps load what was taken out, in a slot of another.
    with running_system(tmp_path, "--model", str(DEMO_MODEL), "--max-loras", "3", "--gateways", "2") as system:
        info, ended = system.info, threading.Event()
        operator, url = info["metrics_url"].removesuffix("/metrics"), f"{system.url}/v1/completions"
        # Each request has a connection of its own, which either gateway may accept.
        headers = {**system.headers(), "Connection": "close"}
        client = system.opened.enter_context(httpx2.Client(timeout=60))
        swaps: list[tuple[float, float]] = []
        answers: list[tuple[float, float, list[int]]] = []

        def swap(number: int) -> None:
            began = time.monotonic()
            body = {"lora_name": "pirate", "lora_path": str(contents[number % len(contents)])}
            key = {"Authorization": f"Bearer {info['operator_key']}"}
            answer = client.post(f"{operator}/v1/load_lora_adapter", headers=key, json=body)
            assert answer.status_code == 200, answer.text
            swaps.append((began, time.monotonic()))

        def ask() -> None:
            body = {"model": "pirate", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            while not ended.is_set():
                began = time.monotonic()
                answer = client.post(url, headers=headers, json=body | {"return_token_ids": True})
                assert answer.status_code == 200, answer.text
                answers.append((began, time.monotonic(), answer.json()["choices"][0]["token_ids"]))

        swap(0)
        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask) for _ in range(4)]
            try:
                for number in range(1, 1000):
                    swap(number)
            finally:
                ended.set()
            for each in asking:
                each.result()
    assert len({tuple(tokens) for tokens in expected}) == len(contents)
    assert len(answers) > 200
    for began, done, tokens in answers:
        last = max(number for number, (_, returned) in enumerate(swaps) if returned <= began)
        while_it_ran = [number for number, (start, returned) in enumerate(swaps) if returned > began and start <= done]
        meanings = [expected[number % len(contents)] for number in (last, *while_it_ran)]
        assert tokens in meanings


def test_worker_that_is_killed_while_it_reads_an_adapter_loses_no_request(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    one, other = adapters(tmp_path, 2)
    ports: queue.Queue[int] = queue.Queue()
    may_read = threading.Event()
    may_read.set()

    def before_read(key: str, port: int) -> None:
        if key.endswith(".safetensors") and not may_read.is_set():
            ports.put(port)
            may_read.wait(120)

    with small_s3(before_read) as endpoint:
        bucket = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "r"}
        environ = {f"AWS_{name}": value for name, value in bucket.items()} | {"HEADRACE_ADAPTERS": "s3://bucket/some"}
        arguments = ("--model", str(DEMO_MODEL), "--workers", "2", "--max-loras", "1")
        with running_system(tmp_path, *arguments, environ=environ) as system, ThreadPoolExecutor(1) as clients:
            # The worker that checks them has room for the second one alone.
            for name, path in (("pirate", one), ("clerk", other)):
                body = {"lora_name": name, "lora_path": str(path)}
                loaded = system.operator("/v1/load_lora_adapter", body)
                assert loaded.status_code == 200, loaded.text
            may_read.clear()
            answer = clients.submit(_answer, system, "pirate")
            os.kill(_process_at(ports.get(timeout=60), system.info["pids"]["worker"]), signal.SIGKILL)
            ports.get(timeout=60)  # another one reads it
            may_read.set()
            assert answer.result(60) == (_expected(one), "pirate")


def test_streams_with_adapters_go_on_at_another_worker(tmp_path: Path) -> None:
    """Greedy, drawn and bound by a grammar, with drafts, side by side: each text is that of an undisturbed run."""
    one, other = adapters(tmp_path, 2)
    options = ("--lora-modules", f"pirate={one},clerk={other}", "--workers", "2", "--speculative", "ngram")
    prompt = "def list_files(path):\n    return os.listdir(path)\n\n\n" * 4
    bodies: list[dict[str, Any]] = [
        {"model": "pirate", "temperature": 0},
        {"model": "clerk", "temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"model": "clerk", "seed": 6, "extra_body": {"guided_regex": "([a-z]{1,8} ){60}"}},
        {"temperature": 0},
    ]
    with running_system(tmp_path, "--model", str(DEMO_MODEL), *options) as system:
        client = system.client(default_headers={"Cache-Control": "no-cache"})
        began = threading.Barrier(len(bodies) + 1)

        def stream(body: dict[str, Any], *, waits: bool = False) -> str:
            asked = {"model": system.model, "prompt": prompt, "max_tokens": 160, **body}
            text = ""
            for number, chunk in enumerate(client.completions.create(stream=True, **asked)):
                text += chunk.choices[0].text
                if waits and number == 3:
                    began.wait(60)
            return text

        expected = [stream(body) for body in bodies]
        before = system.gauge("headrace_redispatches_total")
        with ThreadPoolExecutor(len(bodies)) as pool:
            streams = [pool.submit(stream, body, waits=True) for body in bodies]
            began.wait(60)
            for pid in system.info["pids"]["worker"]:
                os.kill(pid, signal.SIGKILL)
            assert [each.result() for each in streams] == expected
        assert system.gauge("headrace_redispatches_total") > before
    assert len(set(expected)) == len(expected)


def _process_at(port: int, pids: list[int]) -> int:
    return next(pid for pid in pids if any(port == each.laddr.port for each in psutil.Process(pid).net_connections()))
