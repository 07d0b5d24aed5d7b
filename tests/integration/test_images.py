"""Images through the whole system: three APIs, counts, batches, a worker that dies; `transformers` is the oracle."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import nats
import pytest
import torch
from PIL import Image

from gpu_worker.media import prepared_images
from gpu_worker.media.prepared_images import QUICK_CPU_S
from tests.gpu_worker.models.vision.seeing_models import (
    IMAGE,
    LETTERS,
    SEEING_CASES,
    Pixels,
    oracle_logits,
    random_image,
    save_letters,
    save_seeing,
)
from tests.images import encoded, reference, scans_added
from tests.integration.system import System, running_system
from tests.ops.cli.command import headrace
from tests.waiting import until, wait_for

pytestmark = pytest.mark.slow

CASE = SEEING_CASES["qwen2.5-vl"]
TOKENS_BY_WIDTH = {32: 12, 48: 24}
"""An image of 24 or 32 lines, in squares of 8 pixels."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model that sees, with a tokenizer of characters."""
    directory = tmp_path_factory.mktemp("seeing")
    model = save_seeing(CASE, directory)
    save_letters(directory)
    return directory, model


@pytest.fixture(scope="module")
def system(seeing: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    with running_system(directory, "--model", str(seeing[0]), "--num-blocks", "512") as system:
        yield system


def png(pixels: Pixels) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def url(pixels: Pixels) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}"


def shown(pixels: Pixels, text: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url(pixels)}}, {"type": "text", "text": text}]


def post(system: System, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = system.post(path, body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def greedy(model: Any, prompt: list[int], images: list[Pixels], count: int) -> str:
    """Return the text that `transformers` continues a prompt with."""
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            token_ids.append(int(oracle_logits(CASE, model, token_ids, images)[-1].argmax()))
    names = [*LETTERS[:IMAGE], "", *LETTERS[IMAGE:], "<unk>"]
    return "".join(names[token_id] for token_id in token_ids[len(prompt) :])


def prompt_of(text: str, num_image_tokens: int) -> list[int]:
    return [*([IMAGE] * num_image_tokens), *(ord(letter) - 0x21 for letter in f"{text}.")]


def test_answers_are_those_of_transformers_and_counts_agree(system: System, seeing: tuple[Path, Any]) -> None:
    _, model = seeing
    texts = set()
    for seed, (width, count) in enumerate(TOKENS_BY_WIDTH.items()):
        _, pixels = random_image(24 if width == 32 else 32, width, seed)
        prompt = prompt_of("Look", count)
        expected = greedy(model, prompt, [pixels], 6)
        texts.add(expected)
        common = {"model": system.model, "temperature": 0}
        content = shown(pixels, "Look")
        asked_in_chat = {"model": system.model, "messages": [{"role": "user", "content": content}]}
        chat = post(system, "/v1/chat/completions", {**asked_in_chat, "temperature": 0, "max_tokens": 6})
        assert chat["choices"][0]["message"]["content"] == expected
        assert chat["usage"]["prompt_tokens"] == len(prompt)
        item = [{"type": "input_image", "image_url": url(pixels)}, {"type": "input_text", "text": "Look"}]
        asked = {"model": system.model, "input": [{"role": "user", "content": item}]}
        response = post(system, "/v1/responses", {**asked, "temperature": 0, "max_output_tokens": 6})
        assert response["output"][-1]["content"][0]["text"] == expected
        assert response["usage"]["input_tokens"] == len(prompt)
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(pixels)).decode()}
        turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Look"}]}
        message = post(system, "/v1/messages", {**common, "messages": [turn], "max_tokens": 6})
        assert message["content"][0]["text"] == expected
        assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len(prompt)
        counted = post(system, "/v1/messages/count_tokens", {"model": system.model, "messages": [turn]})
        assert counted["input_tokens"] == len(prompt)
        assert post(system, "/tokenize", asked_in_chat)["tokens"] == prompt
        assert post(system, "/v1/responses/input_tokens", asked)["input_tokens"] == len(prompt)
    assert len(texts) == 2


def test_stored_response_goes_on_about_its_image(system: System, seeing: tuple[Path, Any]) -> None:
    _, pixels = random_image(24, 32, 5)
    item = [{"type": "input_image", "image_url": url(pixels)}, {"type": "input_text", "text": "Look"}]
    common = {"model": system.model, "temperature": 0, "max_output_tokens": 4}
    first = post(system, "/v1/responses", {**common, "input": [{"role": "user", "content": item}]})
    second = post(system, "/v1/responses", {**common, "input": "And", "previous_response_id": first["id"]})
    answer = first["output"][-1]["content"][0]["text"]
    prompt = [*prompt_of("Look", 12)[:-1], *(ord(letter) - 0x21 for letter in f"{answer}And.")]
    assert second["usage"]["input_tokens"] == len(prompt)
    assert second["output"][-1]["content"][0]["text"] == greedy(seeing[1], prompt, [pixels], 4)


def test_batches_and_files_show_images(system: System, seeing: tuple[Path, Any]) -> None:
    _, pixels = random_image(24, 32, 6)
    client = system.client()
    uploaded = client.files.create(file=("a.png", png(pixels)), purpose="vision")
    item = [{"type": "input_image", "file_id": uploaded.id, "detail": "auto"}, {"type": "input_text", "text": "Look"}]
    common = {"model": system.model, "temperature": 0, "max_output_tokens": 4}
    expected = greedy(seeing[1], prompt_of("Look", 12), [pixels], 4)
    asked = {**common, "input": [{"role": "user", "content": item}]}
    assert post(system, "/v1/responses", asked)["output"][-1]["content"][0]["text"] == expected
    background = post(system, "/v1/responses", {**asked, "background": True})
    chat = {"model": system.model, "temperature": 0, "max_tokens": 4}
    broken = {"type": "image_url", "image_url": "data:image/png;base64,AA=="}
    bodies = [{**chat, "messages": [{"role": "user", "content": each}]} for each in (shown(pixels, "Look"), [broken])]
    lines = [
        json.dumps({"custom_id": str(place), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for place, body in enumerate(bodies)
    ]
    for number, line in enumerate(lines):
        file = client.files.create(file=("lines.jsonl", f"{line}\n".encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        wait_for(lambda id_=batch.id: client.batches.retrieve(id_).status in ("completed", "failed"), 60)
        batch = client.batches.retrieve(batch.id)
        if number == 0:
            assert batch.output_file_id is not None
            (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
            assert answer["response"]["body"]["choices"][0]["message"]["content"] == expected
            assert answer["response"]["body"]["usage"]["prompt_tokens"] == 17
        else:
            assert batch.errors is not None
            assert "is not a PNG, JPEG, WebP or GIF" in (batch.errors.data or [])[0].message  # type: ignore[operator]
    wait_for(lambda: client.responses.retrieve(background["id"]).status not in ("queued", "in_progress"), 60)
    assert client.responses.retrieve(background["id"]).output_text == expected


def test_answer_about_an_image_goes_on_when_its_worker_dies(system: System, seeing: tuple[Path, Any]) -> None:
    _, pixels = random_image(24, 32, 7)
    body = {
        "model": system.model,
        "messages": [{"role": "user", "content": shown(pixels, "Look")}],
        "max_tokens": 600,
        "temperature": 0,
        "stream": True,
    }
    (worker,) = system.info["pids"]["worker"]
    texts: list[str] = []
    with httpx2.stream(
        "POST", f"{system.url}/v1/chat/completions", headers=system.headers(), json=body, timeout=90
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                texts.append(event["choices"][0]["delta"].get("content") or "")
                if len(texts) == 5:
                    threading.Thread(target=os.kill, args=(worker, signal.SIGKILL)).start()
    whole = "".join(texts)
    assert len(whole) == 600
    assert whole.startswith(greedy(seeing[1], prompt_of("Look", 12), [pixels], 12))
    again = post(system, "/v1/chat/completions", {**body, "stream": False})
    assert again["choices"][0]["message"]["content"] == whole


def hostile_parts() -> Iterator[dict[str, Any]]:
    """Yield distinct images that take long, or are broken: JPEGs whose last scan comes again and again, half a PNG."""
    large, small = (encoded(Image.new("RGB", (side, side), "red"), "JPEG", progressive=True) for side in (7000, 2500))
    half = encoded(Image.new("RGB", (2500, 2500), "red"))[:-200]
    for number in itertools.count(1):
        for kind, data in (
            ("jpeg", scans_added(large, 52)),
            ("jpeg", scans_added(small, 400)),
            ("jpeg", scans_added(small, 52)),
            ("png", half),
        ):
            # Behind the end of a JPEG, or in the data of a PNG.
            distinct = base64.b64encode(data + number.to_bytes(4, "big")).decode()
            yield {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{distinct}"}}


def decoding_cpu_s(worker: int) -> float:
    """Return the processor time that decoded images have taken so far."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = path.read_text().rpartition(") ")
            is_own = int(fields.split()[1]) == worker and b"decode_process" in (path.parent / "cmdline").read_bytes()
            if is_own and name:
                return sum(map(int, fields.split()[13:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@pytest.mark.timeout(400)
async def test_tenants_whose_images_take_long_hold_up_nobody_else(system: System, seeing: tuple[Path, Any]) -> None:
    """Six tenants, two requests each at once, as long as another tenant asks about its image, and for text."""
    parts, model, state = hostile_parts(), system.model, system.ready_file.parent / "state"
    (worker,) = system.info["pids"]["worker"]
    keys = [headrace("keys", "--state-dir", str(state), "create", "--tenant", f"mallory{n}").stdout for n in range(6)]
    attackers = [{"Authorization": "Bearer " + re.findall(r"hr-\S+", key)[0]} for key in keys]
    pictures = [random_image(24, 32, seed)[1] for seed in range(20, 24)]
    expected = [greedy(seeing[1], prompt_of("Look", 12), [pixels], 4) for pixels in pictures]
    async with httpx2.AsyncClient(base_url=system.url, timeout=300) as client:

        async def ask(headers: dict[str, str], content: Any, max_tokens: int = 4) -> httpx2.Response:
            body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
            return await client.post("/v1/chat/completions", headers=headers, json={**body, "max_tokens": max_tokens})

        async def attack(headers: dict[str, str]) -> None:
            while True:
                reply = await ask(headers, [next(parts), next(parts), {"type": "text", "text": "?"}])
                ends[reply.status_code] += 1

        async with asyncio.timeout(60):
            while 401 in [(await ask(headers, "Look")).status_code for headers in attackers]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # gateways read the file of keys every second
        alone = (await ask(system.headers(), "Look", 400)).json()["choices"][0]["message"]["content"]
        ends = Counter[int]()
        attacking = [asyncio.create_task(attack(headers)) for headers in attackers for _ in range(2)]
        try:
            await until(lambda: decoding_cpu_s(worker) >= 2, 120)
            for pixels, text in zip(pictures, expected, strict=True):
                before = decoding_cpu_s(worker)
                seen, read = await asyncio.gather(
                    ask(system.headers(), shown(pixels, "Look")), ask(system.headers(), "Look", 400)
                )
                assert seen.json()["choices"][0]["message"]["content"] == text
                assert read.json()["choices"][0]["message"]["content"] == alone
                # After a second each place to decode goes to another image.
                assert decoding_cpu_s(worker) - before < 4 * QUICK_CPU_S * (prepared_images.MAX_AT_ONCE + 2)
        finally:
            for task in attacking:
                task.cancel()
        await asyncio.gather(*attacking, return_exceptions=True)
        assert set(ends) <= {200, 400, 429, 503}
        assert (await ask(attackers[0], shown(pictures[0], "Look"))).status_code == 200


async def test_batch_work_about_an_image_goes_on_when_its_worker_dies(system: System) -> None:
    """A line of a batch and a job that was published without the gateway; a third job names an image of no one."""
    _, pixels = random_image(24, 32, 30)
    data, model, client = png(pixels), system.model, system.client()
    sampling = {"max_tokens": 1500, "temperature": 0}
    body = {"model": model, "messages": [{"role": "user", "content": shown(pixels, "Look")}], **sampling}
    # Also stores the image for its tenant.
    expected = post(system, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    queue = await nats.connect(system.info["nats_url"])
    try:
        results = await queue.subscribe("hr.result.default.*")
        ref = msgspec.to_builtins(reference(data))
        place = {"num_parts_before": 0, "index": 0}
        message = {"role": "user", "content": "Look", "part_lengths": [4], "images": [place]}
        job = {"model": model, "lane": "batch", "messages": [message], "sampling": sampling}
        lost = {**ref, "digest": base64.b64encode(bytes(32)).decode()}
        for name, media in (("seen", ref), ("lost", lost)):
            asked = {**job, "id": name, "media": [media]}
            await queue.jetstream().publish(f"hr.req.{model}.batch.default", json.dumps(asked).encode())
        line = json.dumps({"custom_id": "0", "method": "POST", "url": "/v1/chat/completions", "body": body})
        file = client.files.create(file=("lines.jsonl", f"{line}\n".encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        await until(lambda: system.gauge("headrace_fleet_running") >= 1)
        os.kill(system.info["pids"]["worker"][0], signal.SIGKILL)
        answers = {}
        while answers.keys() != {"seen", "lost"}:
            answer = json.loads((await results.next_msg(timeout=60)).data)
            assert answer["id"] not in answers
            answers |= {answer["id"]: answer} if answer["id"] in ("seen", "lost") else {}
    finally:
        await queue.close()
    assert answers["seen"]["text"] == expected
    assert (answers["lost"]["finish"], answers["lost"]["error_code"]) == ("failed", "image_not_found")
    await until(lambda: client.batches.retrieve(batch.id).status == "completed", 60)
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id or "").text
    assert json.loads(output)["response"]["body"]["choices"][0]["message"]["content"] == expected


def test_chat_command_shows_a_file(system: System, seeing: tuple[Path, Any], tmp_path: Path) -> None:
    _, pixels = random_image(24, 32, 8)
    (tmp_path / "a.png").write_bytes(png(pixels))
    (tmp_path / "b.png").write_text("no image")
    command = [sys.executable, "-m", "ops.cli", "chat", "Look", "--temperature", "0", "--max-tokens", "6"]
    access = ["--url", system.url, "--api-key", system.info["api_key"]]
    done = subprocess.run([*command, *access, "--image", str(tmp_path / "a.png")], capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == greedy(seeing[1], prompt_of("Look", 12), [pixels], 6), done.stderr
    wrong = subprocess.run([*command, *access, "--image", str(tmp_path / "b.png")], capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "is not a PNG, JPEG, WebP or GIF" in wrong.stderr
