"""Sinks that stand before a choice's own, for details beside the text and for the choice among answers.

Only answers whose clients asked for token ids, the prompt's log probabilities or the usage so far have a
`DetailedSink`, which notes them in the choice's `ChoiceDetails`. If more answers are generated than were asked for
(`best_of`), a `RankedSink` adds up log probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.api.chat_answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    PromptLogprobs,
    UsageAnswer,
    prompt_logprobs,
    token_id_name,
)
from gateway.dispatch.sinks import Sink
from gateway.errors import ApiError
from gateway.generation import Details, Kind
from shared.messages import Delta, TokenLogprob


class ChoiceDetails:
    """The details that one choice reports. Token ids are those since they were last reported."""

    def __init__(self, wanted: Details, kind: Kind) -> None:
        self.wanted = wanted
        self._kind = kind
        self._token_ids: list[int] = []
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def note(self, delta: Delta) -> None:
        """Take in a delta."""
        self._num_tokens += len(delta.token_ids)
        if delta.prompt_tokens is not None:
            self._num_prompt_tokens = delta.prompt_tokens
        if self.wanted.token_ids:
            self._token_ids += delta.token_ids
            if delta.prompt_token_ids is not None:
                self._prompt_token_ids = list(delta.prompt_token_ids)
        if self.wanted.prompt_logprobs and delta.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(delta.prompt_logprobs)

    def report(
        self,
        answer: ChatCompletion | ChatCompletionChunk | Completion,
        choice: ChatChoice | ChatChunkChoice | CompletionChoice,
    ) -> None:
        """Write new details into an answer and its choice; chat reports prompt details beside the choices."""
        if self.wanted.token_ids:
            choice.token_ids, self._token_ids = self._token_ids, []
        holder: Any = answer if self._kind == "chat" else choice
        if self._prompt_token_ids is not UNSET:
            holder.prompt_token_ids, self._prompt_token_ids = self._prompt_token_ids, UNSET
        if self._prompt_logprobs is not UNSET:
            holder.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, UNSET

    def usage_so_far(self) -> UsageAnswer | None:
        """Return the usage of this choice so far, if every chunk is to have it."""
        if not self.wanted.usage_so_far:
            return None
        return UsageAnswer(self._num_prompt_tokens, self._num_tokens, self._num_prompt_tokens + self._num_tokens)


class DetailedSink:
    """Notes a choice's details, and passes deltas on in the form that the choice shows."""

    __slots__ = ("_details", "_opening", "_sink")

    def __init__(self, sink: Sink, details: ChoiceDetails) -> None:
        self._sink = sink
        self._details = details
        self._opening = details.wanted.opening

    def deliver(self, delta: Delta) -> None:
        """Note a delta and pass it on."""
        self._details.note(delta)
        wanted, changes = self._details.wanted, dict[str, Any]()
        if wanted.prompt_logprobs and not wanted.echoes_logprobs:
            changes["prompt_logprobs"] = None
        if wanted.tokens_as_ids:
            changes["logprobs"] = _named_by_ids(delta.logprobs)
            if "prompt_logprobs" not in changes:
                changes["prompt_logprobs"] = _named_by_ids(delta.prompt_logprobs)
        elif delta.prompt_token_ids is not None:
            # Those behind take them to mean that tokens are called so.
            changes["prompt_token_ids"] = None
        if self._opening and (delta.token_ids or delta.finish is not None):
            changes["text"] = self._opening + delta.text
            self._opening = ""
        self._sink.deliver(msgspec.structs.replace(delta, **changes) if changes else delta)

    def fail(self, error: ApiError) -> None:
        """Pass it on."""
        self._sink.fail(error)


def _named_by_ids(entries: Sequence[TokenLogprob | None] | None) -> tuple[Any, ...] | None:
    """Return entries whose tokens are called by their ids: two tokens may look the same."""
    return None if entries is None else tuple(None if entry is None else _named_by_id(entry) for entry in entries)


def _named_by_id(entry: TokenLogprob) -> TokenLogprob:
    top = tuple(map(_named_by_id, entry.top))
    return msgspec.structs.replace(entry, token=token_id_name(entry.token_id), top=top)


class RankedSink:
    """Adds up the log probabilities of a choice's tokens on their way to the choice's own sink."""

    __slots__ = ("_num_tokens", "_shows_logprobs", "_sink", "_total")

    def __init__(self, sink: Sink, *, shows_logprobs: bool) -> None:
        self._sink = sink
        self._shows_logprobs = shows_logprobs
        self._total = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """Mean of the tokens' natural logs; 0 without tokens."""
        return self._total / self._num_tokens if self._num_tokens else 0.0

    def deliver(self, delta: Delta) -> None:
        """Count a delta, and pass it on."""
        if delta.logprobs is not None:
            self._total += sum(entry.logprob for entry in delta.logprobs)
            self._num_tokens += len(delta.logprobs)
            if not self._shows_logprobs:
                delta = msgspec.structs.replace(delta, logprobs=None)
        self._sink.deliver(delta)

    def fail(self, error: ApiError) -> None:
        """Pass it on."""
        self._sink.fail(error)


def likeliest(mean_logprobs: Sequence[float], n: int, num_returned: int) -> list[int]:
    """Return which choices to return, prompt by prompt, the likeliest first; of equal ones the first.

    Each prompt has `n` of the `mean_logprobs`.
    """
    chosen: list[int] = []
    for first in range(0, len(mean_logprobs), n):
        places = sorted(range(first, first + n), key=lambda place: -mean_logprobs[place])
        chosen += places[:num_returned]
    return chosen
