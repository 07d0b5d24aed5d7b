"""Applies what a landed step computed to its sequences: new tokens, published blocks, and where they end.

Counters advance when a step is planned. Whatever depends on the sampled token waits until the step lands: whether the
sequence ends, and which blocks others may find. So a sequence can end while a later step computes for it; the tokens of
that step are dropped.
"""

from __future__ import annotations

from gpu_worker.core.live_sequences import LiveSequences
from gpu_worker.core.sequence import Sequence, SequenceStatus
from gpu_worker.core.sequence_blocks import SequenceBlocks
from gpu_worker.core.speculation import Speculation
from gpu_worker.core.step import SampledTokens, ScheduledSequence, ScheduledStep, SequenceEvent, StepResult
from shared.kv_budget import MAX_BUDGETED_TOKENS
from shared.messages import FinishReason


class Landing:
    """Writes the tokens of sequences, and makes their events."""

    def __init__(self, blocks: SequenceBlocks, live: LiveSequences, speculation: Speculation | None) -> None:
        self._blocks = blocks
        self._live = live
        self._speculation = speculation

    def apply(self, step: ScheduledStep, result: StepResult, events: list[SequenceEvent]) -> None:
        """Apply a step, and append what it did to each sequence to `events`."""
        if self._blocks.states is not None:
            self._blocks.land_states(step, result)
        for place, attention in result.attention:
            scores = step.scheduled[place].sequence.scores
            assert scores is not None, "attention was reported for a sequence without scores"
            scores.add(attention)
        written: list[tuple[Sequence, int]] = []
        for item, sampled in zip(step.scheduled, result.sampled, strict=True):
            sequence, new = item.sequence, sampled.token_ids
            token_ids = sequence.token_ids
            num_before = len(token_ids)
            # The hot path, once per running sequence and step: a decode that goes on.
            if (
                len(new) == 1
                and new[0] not in sequence.stop_ids
                and (num_before < sequence.next_publish or self._try_continue(item, num_before, new[0], written))
            ):
                token_ids.append(new[0])
                num_output = num_before - sequence.num_prompt_tokens
                events.append(SequenceEvent(sequence, new, num_output, None, sampled.logprobs))
            elif sequence.status is not SequenceStatus.FINISHED:
                event = self._apply(item, sampled)
                if event is not None:
                    events.append(event)
        if written:
            self._blocks.publish(written)

    def _try_continue(
        self, item: ScheduledSequence, num_known: int, token_id: int, written: list[tuple[Sequence, int]]
    ) -> bool:
        """Continue a decode whose next token ends nothing, and add its count of known tokens to `written`.

        False, with nothing done, if appending the token is not enough.
        """
        sequence, constraint = item.sequence, item.sequence.constraint
        if (
            item.num_tokens > 1
            or item.num_draft_tokens
            or num_known + 1 >= sequence.max_num_tokens
            or sequence.status is SequenceStatus.FINISHED
            or (constraint is not None and not constraint.advance_inside(token_id))
        ):
            return False
        written.append((sequence, num_known))
        if constraint is None:
            # With a constraint each token is looked at.
            sequence.next_publish = min(self._blocks.next_publish(num_known), sequence.max_num_tokens - 1)
        return True

    def _apply(self, item: ScheduledSequence, sampled: SampledTokens) -> SequenceEvent | None:
        sequence = item.sequence
        if sampled.error is not None:
            return self._apply_error(item, sampled, sampled.error)
        new = sampled.token_ids if item.samples else ()
        assert bool(new) == item.samples, "the runner sampled no token for a sequence that wants one"
        assert sampled.num_accepted <= min(item.num_draft_tokens, max(0, len(new) - 1)), "more accepted than sampled"
        num_before = sequence.num_output_tokens
        num_computed = item.start + item.num_tokens
        assert len(new) <= 1 or num_computed == sequence.num_computed_tokens, "a step in flight took one for certain"
        count, finish = extend(sequence, new)
        if item.num_draft_tokens:
            num_accepted = min(sampled.num_accepted, count)
            num_computed += min(num_accepted, max(0, count - 1))
            sequence.num_computed_tokens = num_computed
            self._record_drafts(item, sampled, num_accepted)
        if not item.samples and num_computed == len(sequence.token_ids):
            finish = finish_reason(sequence)
        self._blocks.publish([(sequence, num_computed)])
        of_prompt = sampled.prompt_logprobs[max(0, sequence.num_prompt_logprobs - item.start) :]
        sequence.num_prompt_logprobs += len(of_prompt)
        if sampled.pooled is not None:
            sequence.pooled.append(sampled.pooled)
        if finish is not None:
            self._live.finish(sequence)
        elif count > 1:
            self._live.running.reclassify(sequence)
        if not count and finish is None and not of_prompt:
            return None
        logprobs = sampled.logprobs[:count]
        return SequenceEvent(sequence, new[:count], num_before, finish, logprobs, of_prompt, refusal(sequence))

    def _apply_error(self, item: ScheduledSequence, sampled: SampledTokens, error: str) -> SequenceEvent:
        """End a sequence behind the tokens that it got before the error, unless these end it already.

        Its blocks leave the prefix cache, because the cause of the error may be in there.
        """
        sequence, num_before = item.sequence, item.sequence.num_output_tokens
        count, finish = extend(sequence, sampled.token_ids)
        self._record_drafts(item, sampled, min(sampled.num_accepted, count))
        if finish is None:
            self._blocks.hide(sequence)
        self._live.finish(sequence)
        new, logprobs = sampled.token_ids[:count], sampled.logprobs[:count]
        reason = error if finish is None else refusal(sequence)
        return SequenceEvent(sequence, new, num_before, finish or "failed", logprobs, error=reason)

    def _record_drafts(self, item: ScheduledSequence, sampled: SampledTokens, num_accepted: int) -> None:
        if self._speculation is not None and not item.forced:
            self._speculation.record(item.sequence, sampled.num_drafted, num_accepted)
        self._blocks.trim(item.sequence)


def set_limits(sequence: Sequence, max_num_tokens: int) -> None:
    """Work out what ends a new sequence, and whether what may follow its last token depends on it.

    `max_num_tokens` is the length of a sequence that keeps all of its tokens.
    """
    sampling = sequence.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    sequence.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | sequence.eos_token_ids
    longest = max_num_tokens if sequence.budget is None else MAX_BUDGETED_TOKENS
    sequence.max_num_tokens = min(sequence.num_prompt_tokens + sequence.max_tokens, longest)
    has_bad_runs = any(len(word) > 1 for word in sequence.bad_words)
    sequence.needs_last_token = has_bad_runs or sequence.constraint is not None or sampling.watermark is not None


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

    Return how many tokens were appended, and why the sequence ended, if it did.
    """
    constraint = sequence.constraint
    for count, token_id in enumerate(token_ids, 1):
        if constraint is not None and not constraint.advance(token_id):
            return count - 1, "failed"
        sequence.token_ids.append(token_id)
        if reason := finish_reason(sequence):
            return count, reason
    return len(token_ids), None
