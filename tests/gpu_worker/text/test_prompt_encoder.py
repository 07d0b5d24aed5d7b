from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from gpu_worker.model_directory import ModelDirectory
from gpu_worker.text.prompt_encoder import PromptEncoder
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError


@pytest.fixture
def encoder(demo_directory: ModelDirectory) -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(ModelTokenizer(demo_directory))
    yield encoder
    encoder.close()


async def test_100k_token_prompt_does_not_stall_the_loop(encoder: PromptEncoder) -> None:
    lags: list[float] = []

    async def measure() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - before)

    task = asyncio.create_task(measure())
    started = time.perf_counter()
    token_ids = await encoder.encode("def f(x): return x + 1\n" * 13_000)
    duration_s = time.perf_counter() - started
    task.cancel()
    assert len(token_ids) > 100_000
    assert max(lags) < max(0.05, duration_s / 2)
    assert len(lags) > duration_s / 0.05


async def test_long_prompt_equals_the_same_prompt_encoded_at_once(encoder: PromptEncoder) -> None:
    text = "naïve 日本語 text\n" * 500
    assert not encoder.is_short(text)
    assert await encoder.encode(text) == encoder.encode_now(text)


async def test_bad_prompt_raises_from_the_pool_too(encoder: PromptEncoder) -> None:
    with pytest.raises(BadRequestError):
        await encoder.encode(())


async def test_long_decoding_equals_the_same_in_parts(encoder: PromptEncoder) -> None:
    token_ids = tuple(encoder.encode_now("x = 1\n" * 5_000))
    assert await encoder.decode(token_ids) == "x = 1\n" * 5_000
