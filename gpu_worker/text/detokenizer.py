"""Tokens to text, one token at a time: a fold whose text so far is certain, whatever tokens follow.

The pieces of a sequence add up to `tokenizer.decode(all ids)`, with special tokens or without, and each piece depends
on the tokens alone, never on how they were grouped. So a worker that resumes a sequence feeds the tokens emitted
elsewhere, ignores the pieces, and continues with exactly the text that is still missing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gpu_worker.text.library import library_errors
from gpu_worker.text.token_table import TokenTable

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The fold over one sequence's output tokens."""

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        ...

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance as `feed` does, without returning text."""
        ...

    def flush(self) -> str:
        """Return the text still held back; nothing follows."""
        ...


def _behind_text(texts: Sequence[str | None], token_ids: Sequence[int]) -> Sequence[int]:
    """Return the last token that has text of its own, and those behind it."""
    start = next((place for place in range(len(token_ids) - 1, 0, -1) if texts[token_ids[place]]), 0)
    return token_ids[start:]


class ByteLevelDetokenizer:
    """For byte-level tokenizers: holds back at most three bytes, an unfinished UTF-8 character."""

    def __init__(self, table: TokenTable) -> None:
        self._texts = table.texts
        self._raw = table.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        text = self._texts[token_id]
        if text is not None and not self._is_mid_character:
            return text
        text = self._decoder.decode(self._raw[token_id])
        self._is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance as `feed` does, in a moment: a token with text of its own ends whatever was held back."""
        for token_id in _behind_text(self._texts, token_ids):
            self.feed(token_id)

    def flush(self) -> str:
        """Return a replacement character for an unfinished character, if there is one."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """For sentencepiece-style tokenizers: holds back a run of byte tokens until it ends.

    The library reads a run as a whole: if it is valid UTF-8, as that text, else as one replacement character per byte.
    What a run means is therefore only certain at its end, which is the next ordinary token.
    """

    def __init__(self, table: TokenTable, *, is_start: bool) -> None:
        self._texts = table.texts
        self._raw = table.raw
        self._run = bytearray()
        self._strips_space = table.strips_space and is_start

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        text = self._texts[token_id]
        if text is None:
            self._run += self._raw[token_id]
            return ""
        if text and (self._run or self._strips_space):
            text = self._stripped(self._end_run() + text)
        return text

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance as `feed` does, in a moment: a token with text of its own ends whatever was held back."""
        for token_id in _behind_text(self._texts, token_ids):
            self.feed(token_id)

    def flush(self) -> str:
        """Return the text of the run that the output ends with."""
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if not self._strips_space:
            return text
        self._strips_space = False
        return text.removeprefix(" ")


class LibraryDetokenizer:
    """For any other tokenizer: the library's own stream, completed at the end by decoding everything once."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_characters = 0

    def feed(self, token_id: int) -> str:
        """Return the text that this token makes certain."""
        self._token_ids.append(token_id)
        with library_errors():
            text = self._stream.step(self._tokenizer, token_id) or ""
        self._num_characters += len(text)
        return text

    def skip(self, token_ids: Sequence[int]) -> None:
        """Advance as `feed` does, by all tokens."""
        for token_id in token_ids:
            self.feed(token_id)

    def flush(self) -> str:
        """Return the text of decoding everything beyond the pieces so far."""
        with library_errors():
            text: str = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        return text[self._num_characters :]


def make_detokenizer(
    tokenizer: Tokenizer, table: TokenTable | None, prompt_ids: Iterable[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """Return a fresh detokenizer for the output that follows `prompt_ids`, by the `table` or else the `tokenizer`."""
    if table is None:
        return LibraryDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    if table.style == "byte_level":
        return ByteLevelDetokenizer(table)
    has_text = table.strips_space and any(table.texts[token_id] != "" for token_id in prompt_ids)
    return ByteFallbackDetokenizer(table, is_start=not has_text)
