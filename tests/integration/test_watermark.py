"""The watermark through the whole system: whoever has the key finds it in streams, moved streams and batches."""

from __future__ import annotations

import itertools
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.admission.api_keys import create_key
from ops.stack.config import DEMO_MODEL
from tests.integration.system import System, running_system
from tests.integration.test_adapters import adapters
from tests.integration.test_batches import batch_of
from tests.ops.cli.command import headrace_here
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

PROMPT = "import os\n\n\n" + "def list_files(path):\n    return os.listdir(path)\n\n\n" * 8
BODY = {"prompt": PROMPT, "max_tokens": 200, "temperature": 1.0, "seed": 5}


def _found(text: str, key_file: Path, directory: Path) -> tuple[float, str]:
    file = directory / "text"
    file.write_text(text)
    found = headrace_here("detect", str(file), "--model", str(DEMO_MODEL), "--key-file", str(key_file), "--json")
    told = json.loads(found.stdout)
    return told["log10_p"], told["key"]


def _stream(client: openai.OpenAI, system: System, *, kills: bool = False, **fields: Any) -> str:
    text = ""
    chunks = client.completions.create(
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"Cache-Control": "no-cache"},
        **{"model": system.model, **BODY, **fields},
    )
    for number, chunk in enumerate(chunks):
        text += chunk.choices[0].text
        if kills and number == 3:
            for pid in system.info["pids"]["worker"]:
                os.kill(pid, signal.SIGKILL)
    return text


def test_marked_texts_are_found_after_drafts_a_death_and_a_batch(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    _, marked = create_key(keys, tenant="default")
    _, unmarked = create_key(keys, tenant="other")
    record, phone = create_key(keys, tenant="default", name="phone")
    for owner in (("default",), ("--key", "phone")):
        assert headrace_here("keys", "--keys-file", str(keys), "watermark", *owner).returncode == 0
    (adapter,) = adapters(tmp_path, 1)
    options = ("--keys-file", str(keys), "--workers", "2", "--speculative", "ngram", "--lora-modules", f"own={adapter}")
    with running_system(tmp_path, "--model", str(DEMO_MODEL), *options) as system:
        client, other = system.client(api_key=marked), system.client(api_key=unmarked)
        whole, plain = _stream(client, system), _stream(other, system)
        adapted = _stream(client, system, model="own")
        # A key is random, and so is what a text repeats: drafts of one may be none.
        seeds = itertools.count()
        wait_for(
            lambda: (
                _stream(client, system, seed=next(seeds))
                and system.gauge("vllm:spec_decode_num_draft_tokens_total") > 0
            ),
            120,
        )
        with ThreadPoolExecutor(6) as pool:
            # In batches with others, of the same key and of another one, that come and go.
            beside = [
                pool.submit(_stream, who, system, max_tokens=50 + 30 * n, seed=n)
                for n, who in enumerate([client, other] * 3)
            ]
            crowded = _stream(client, system)
            for each in beside:
                each.result()
        moved = _stream(client, system, kills=True)
        wait_for(lambda: len(system.info["pids"]["worker"]) == 2, 60)
        moved_adapted = _stream(client, system, kills=True, model="own")
        assert system.gauge("headrace_redispatches_total") > 0
        of_phone = system.client(api_key=phone)
        asked = {"model": system.model, "ignore_eos": True, **BODY}
        [line] = [response["body"] for response in batch_of(of_phone, "/v1/completions", [asked])]
    assert moved == crowded == whole != plain
    assert moved_adapted == adapted != whole
    # Detection needs the earlier secrets as well.
    assert headrace_here("keys", "--keys-file", str(keys), "watermark", "default", "--rotate").returncode == 0
    of_model = headrace_here("keys", "--keys-file", str(keys), "watermark", "default", "--model", system.model)
    key_file = tmp_path / "default.key"
    key_file.write_text(of_model.stdout)
    found = [_found(text, key_file, tmp_path) for text in (whole, line["choices"][0]["text"], moved_adapted)]
    assert max(log10_p for log10_p, _ in found) < -6, found
    owners = [owner.partition(",")[0] for _, owner in found]
    assert owners == ["tenant default", f"key {record.id} of tenant default", "tenant default"]
    assert ", until 2" in found[0][1]
    assert _found(plain, key_file, tmp_path)[0] > -4
