"""Log probabilities from the engine, which knows ids, to the wire, which shows text."""

from __future__ import annotations

from gpu_worker.core.step import LogprobEntry
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.messages import TokenLogprob


def to_token_logprob(tokenizer: ModelTokenizer, entry: LogprobEntry) -> TokenLogprob:
    """Return the wire form of one token's log probability, with its alternatives."""
    shown = tokenizer.shown_token
    top = tuple([TokenLogprob(token_id, *shown(token_id), logprob) for token_id, logprob in entry.top])
    return TokenLogprob(entry.token_id, *shown(entry.token_id), entry.logprob, top)
