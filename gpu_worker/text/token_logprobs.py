"""Log probabilities from the engine, which knows ids, to the wire, which shows text."""

from __future__ import annotations

from gpu_worker.core.step import LogprobEntry
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.messages import TokenLogprob


def to_token_logprob(tokenizer: ModelTokenizer, entry: LogprobEntry) -> TokenLogprob:
    """Return the wire form of one token's log probability, with its alternatives."""
    top = tuple(_plain(tokenizer, token_id, logprob) for token_id, logprob in entry.top)
    chosen = _plain(tokenizer, entry.token_id, entry.logprob)
    return TokenLogprob(chosen.token_id, chosen.token, chosen.bytes, chosen.logprob, top)


def _plain(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob)
