"""`/infill` of a gateway process: a completion with a suffix, answered in llama.cpp's form."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from shared.messages import Finish, Usage
from tests.gateway.gateway_process import API_KEY, GatewayProcess
from tests.gateway.known_worker import known_worker

ASKED = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "a", "n_predict": 2, "cache_prompt": True}


async def test_text_between_prefix_and_suffix_is_asked_for_and_told(gateway: GatewayProcess, nats_url: str) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with known_worker(nats_url, gateway) as worker, httpx2.AsyncClient(headers=headers) as http:
        for stream in (False, True):
            body = ASKED | {"model": worker.model, "stream": stream}
            asking = asyncio.create_task(http.post(f"{gateway.url}/infill", json=body))
            request = await worker.begin(2)
            assert (request.text, request.suffix, request.sampling.max_tokens) == ("def f(a", "): pass", 2)
            await worker.end(request, 2, Finish("stop", Usage(3, 2, 1), stop="x"))
            answer = await asking
            lines = answer.text.split("\n\n")[:-1] if stream else [answer.text]
            pieces = [json.loads(line.removeprefix("data: ")) for line in lines]
            assert "".join(piece["content"] for piece in pieces) == "0 1 "
            assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            end = {"stop_type": "word", "stopping_word": "x", "tokens_predicted": 2, "tokens_evaluated": 3}
            assert pieces[-1].items() >= end.items()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_suffix": ""}, "input_suffix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a", "text": "b"}]}, "input_extra"),
        ({"temperature": 9}, "temperature"),
        ({"n": 2}, "n"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_wrong_body_is_a_400_that_names_the_field(
    gateway: GatewayProcess, fields: dict[str, object], param: str
) -> None:
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {API_KEY}"}) as http:
        answer = await http.post(f"{gateway.url}/infill", json=ASKED | {"model": "m"} | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
