"""Cuts texts that are embedded or scored as sentence-transformers does: at the end, before what the tokenizer adds."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer


class TextCutter:
    """Cuts token ids of texts that one tokenizer has made. The caller turns the library's errors into its own."""

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str, bool], list[int]]) -> None:
        """Cut for this tokenizer; `encode` takes a text, and whether the tokenizer adds its own tokens."""
        self._tokenizer = tokenizer
        whole, bare = encode("a", True), encode("a", False)
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        start = next(starts, 0) if bare else 0
        # What the tokenizer puts before a text, and behind it.
        self._begin, self._end = whole[:start], whole[start + len(bare) :]

    def shortened(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return the first tokens of a text, between those that the tokenizer adds to every text."""
        begin, end = self._begin, self._end
        if len(token_ids) <= max_tokens:
            return token_ids
        if token_ids[: len(begin)] != begin or (end and token_ids[-len(end) :] != end):
            return token_ids[:max_tokens]
        room = max(1, max_tokens - len(begin) - len(end))
        return [*token_ids[: len(begin) + room], *end]

    def joined(self, first: str, second: str, max_tokens: int) -> list[int]:
        """Return a pair of texts as one prompt; the longer text is cut, or both where both are long."""
        one, other = self._tokenizer.encode_batch_fast([first, second], add_special_tokens=False)
        room = max(2, max_tokens - self._tokenizer.num_special_tokens_to_add(True))
        num_first, num_second = _longest_first(len(one), len(other), room)
        one.truncate(num_first)
        other.truncate(num_second)
        ids: list[int] = self._tokenizer.post_process(one, other).ids
        return ids

    def without_last_tokens(self, text: str, num_tokens: int) -> str:
        """Return a text without its last `num_tokens` tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[-num_tokens][0]] if num_tokens < len(offsets) else ""


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, as the tokenizers' strategy of this name has it."""
    shorter, longer = min(first, second), max(first, second)
    if shorter + longer > room:
        if shorter < room - shorter:
            longer = room - shorter
        else:
            shorter, longer = room // 2, room // 2 + room % 2
    return (shorter, longer) if first <= second else (longer, shorter)
