"""Encodes the prompts of requests without stalling the event loop.

Short prompts are encoded at once. Long ones go to a small pool of threads, where the tokenizer works without the
interpreter lock; the pool's size bounds how much of the machine that may take.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError
from shared.messages import ChatMessage

# About 0.7 ms of encoding, several times the price of a trip through the pool.
INLINE_CHARACTERS = 2048
INLINE_MESSAGES = 64
NUM_THREADS = 2


class PromptEncoder:
    """Owns the threads. Used from the event loop only."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        """Encode with this tokenizer."""
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    def is_short(self, prompt: str | tuple[ChatMessage, ...]) -> bool:
        """Say whether `encode_now` will not stall the loop."""
        if isinstance(prompt, str):
            return len(prompt) <= INLINE_CHARACTERS
        return len(prompt) <= INLINE_MESSAGES and sum(map(_size, prompt)) <= INLINE_CHARACTERS

    def encode_now(
        self,
        prompt: str | tuple[ChatMessage, ...],
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a text or a conversation.

        Raises:
            BadRequestError: The prompt cannot be encoded.
        """
        if isinstance(prompt, str):
            return self._tokenizer.encode_text(prompt, add_special_tokens=add_special_tokens)
        if not prompt:
            raise BadRequestError("messages must not be empty.", "messages")
        return self._tokenizer.encode_chat(prompt, add_generation_prompt=add_generation_prompt)

    async def encode(
        self,
        prompt: str | tuple[ChatMessage, ...],
        *,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a text or a conversation of any length.

        Raises:
            BadRequestError: The prompt cannot be encoded.
        """
        options = {"add_special_tokens": add_special_tokens, "add_generation_prompt": add_generation_prompt}
        if self.is_short(prompt):
            return self.encode_now(prompt, **options)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: self.encode_now(prompt, **options))

    async def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of token ids, special tokens left out."""
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._tokenizer.decode, token_ids)

    def close(self) -> None:
        """End the threads; encodings that have not started are dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _size(message: ChatMessage) -> int:
    return len(message.role) + len(message.content) + len(message.name or "")
