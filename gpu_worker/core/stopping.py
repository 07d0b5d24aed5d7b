"""When a sequence ends, by its tokens alone. Stop strings are the business of the text side, above the engine."""

from __future__ import annotations

from gpu_worker.core.sequence import Sequence
from shared.messages import FinishReason


def set_limits(sequence: Sequence, max_num_tokens: int) -> None:
    """Work out what ends a new sequence, and whether what may follow its last token depends on it.

    Args:
        sequence: Its request is known, its counters are those of a new one.
        max_num_tokens: No sequence gets longer.
    """
    sampling = sequence.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    sequence.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | sequence.eos_token_ids
    sequence.max_num_tokens = min(sequence.num_prompt_tokens + sequence.max_tokens, max_num_tokens)
    has_bad_runs = any(len(word) > 1 for word in sequence.bad_words)
    sequence.needs_last_token = has_bad_runs or sequence.constraint is not None


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Return why the sequence ends with the tokens it has, or None when it goes on.

    A stop token counts only where it was generated, not as the end of the prompt. Tokens being sampled do not count.
    """
    if sequence.num_output_tokens > 0 and sequence.token_ids[-1] in sequence.stop_ids:
        return "stop"
    if sequence.constraint is not None and sequence.constraint.is_complete:
        return "stop"
    if len(sequence.token_ids) >= sequence.max_num_tokens:
        return "length"
    return None


def refusal(sequence: Sequence) -> str | None:
    """Return why the sequence's constraint cannot go on, or None."""
    return None if sequence.constraint is None else sequence.constraint.error


def extend(sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
    """Append new tokens up to the one that ends the sequence; one that its constraint refuses is left out.

    Returns:
        How many tokens were appended, and why the sequence ended, if it did.
    """
    constraint = sequence.constraint
    for count, token_id in enumerate(token_ids, 1):
        if constraint is not None and not constraint.advance(token_id):
            return count - 1, "failed"
        sequence.token_ids.append(token_id)
        if reason := finish_reason(sequence):
            return count, reason
    return len(token_ids), None
