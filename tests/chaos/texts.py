"""Streams of a few texts at once, and of each when it has begun: what goes on while processes are killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import openai

FREE: Any = {"ignore_eos": True}


async def stream_texts(
    client: openai.AsyncOpenAI,
    count: int,
    begun: asyncio.Semaphore,
    *,
    num_at_once: int,
    body: Callable[[int], dict[str, Any]],
    silences: list[float] | None = None,
) -> list[str]:
    """Stream texts of seeds from 0 on; `body` gives what else is asked of each. Release `begun` at its first token.

    Seconds between the chunks of a text go to `silences`.
    """
    places = asyncio.Semaphore(num_at_once)

    async def text(index: int) -> str:
        async with places:
            chunks = await client.completions.create(
                prompt=f"def function_{index}(x):\n" + "    return x\n" * (index % 7),
                seed=index,
                stream=True,
                extra_headers={"Cache-Control": "no-cache"},
                **body(index),
            )
            received, heard = "", time.monotonic()
            async for chunk in chunks:
                if not received:
                    begun.release()
                elif silences is not None:
                    silences.append(time.monotonic() - heard)
                heard = time.monotonic()
                received += "".join(choice.text for choice in chunk.choices)
            return received

    return await asyncio.gather(*map(text, range(count)))
