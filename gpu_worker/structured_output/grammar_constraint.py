"""What one sequence may say next, by the grammar that its output follows.

A token that ends the answer is allowed where the grammar accepts the output so far; one that the grammar itself takes
is allowed where it accepts the output with it. A matcher that fails has no mask any more: its sequence ends, alone.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpu_worker.structured_output.grammar_budget import GrammarBudget
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, forced_tokens, respelled_token

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ALL_TOKENS = 0xFF
# How llguidance says that a grammar has reached one of its limits; its stop reason is the same for all errors.
_LIMIT = re.compile("too many|too large|too complex|fuel")
_LONG_S = 0.002
_TOO_SLOW = "the grammar takes too long to follow; make it simpler, and its constants shorter"
_OVERDRAWN = "the grammars of your requests have taken too long to follow; send simpler ones, and fewer at once"


class GrammarConstraint:
    """The `OutputConstraint` of a sequence whose output follows a grammar. Owns its matcher.

    The matcher is ahead of the output by the drafts that a mask was last filled behind.
    """

    __slots__ = (
        "_budget",
        "_drafts",
        "_end_ids",
        "_forced",
        "_ignores_eos",
        "_is_at_fault",
        "_is_direct",
        "_matcher",
        "_num_bytes",
        "_stop_ids",
        "_tokenizer",
        "error",
    )

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: GrammarTokenizer,
        stop_token_ids: Set[int],
        budget: GrammarBudget,
        *,
        ignores_eos: bool,
    ) -> None:
        """Follow the grammar of a fresh `matcher`; with `ignores_eos`, only `stop_token_ids` end the answer."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._stop_ids = stop_token_ids - tokenizer.eos_token_ids
        self._end_ids = self._stop_ids if ignores_eos else self._stop_ids | tokenizer.eos_token_ids
        self._ignores_eos = ignores_eos
        self._num_bytes = 4 * -(-tokenizer.vocab_size // 32)
        has_same_size = tokenizer.tokenizer.vocab_size == tokenizer.vocab_size
        self._is_direct = has_same_size and not ignores_eos and not self._stop_ids
        self._drafts: tuple[int, ...] = ()
        self._forced: list[int] | None = None
        self.error: str | None = None
        self._is_at_fault = True
        self._budget = budget

    @property
    def is_at_fault(self) -> bool:
        """See `OutputConstraint`."""
        return self.error is not None and self._is_at_fault

    @property
    def is_complete(self) -> bool:
        """See `OutputConstraint`."""
        # A matcher that has taken tokens behind the output could not have stopped there.
        return self.error is None and not self._drafts and self._matcher.is_stopped()

    def advance(self, token_id: int) -> bool:
        """See `OutputConstraint`. What ends the answer is not the grammar's business."""
        if self.error is not None:
            return False
        if token_id in self._end_ids:
            return True
        self._forced = None
        if self._drafts:
            if self._drafts[0] == token_id:
                self._drafts = self._drafts[1:]
                return True
            self._move_behind(())
        since = self._budget.now()
        is_taken = self._matcher.consume_token(token_id)
        self._charge(since)
        if is_taken:
            return self.error is None
        # Otherwise a mask should have kept the token away, which is not a fault of the grammar.
        reason = _reason(self._matcher)
        self._is_at_fault = _LIMIT.search(reason) is not None
        problem = "the grammar cannot be followed" if self._is_at_fault else "the output does not follow the grammar"
        self.error = f"{problem}: {reason}"
        return False

    def advance_inside(self, token_id: int) -> bool:
        """See `OutputConstraint`."""
        if token_id in self._end_ids or not self.advance(token_id):
            return False
        if self._drafts or not self._matcher.is_stopped():
            return True
        # The matcher has stopped behind the token, which now counts as a draft: `advance` will take it in.
        self._drafts = (token_id,)
        return False

    def fill_mask(self, drafts: tuple[int, ...], address: int) -> None:
        """See `OutputConstraint`."""
        if self.error is None and self._budget.is_overdrawn:
            self.error = _OVERDRAWN
        since = self._budget.now()
        if self.error is None and (drafts == self._drafts or self._move_behind(drafts)):
            if self._is_direct:
                self._matcher.unsafe_compute_mask_ptr(address, self._num_bytes)
            else:
                words = self._adjusted_mask()
                ctypes.memmove(address, words.ctypes.data, self._num_bytes)
            if self._matcher.is_error():
                self.error = f"the grammar cannot be followed: {_reason(self._matcher)}"
            elif (token_id := respelled_token(self._matcher, self._tokenizer)) is not None:
                ctypes.memset(address, 0, self._num_bytes)
                ctypes.memset(address + token_id // 8, 1 << token_id % 8, 1)
            self._charge(since)
            if self.error is None:
                return
        ctypes.memset(address, _ALL_TOKENS, self._num_bytes)

    def allows(self, drafts: tuple[int, ...]) -> bool:
        """See `OutputConstraint`."""
        if self.error is not None:
            return False
        since = self._budget.now()
        is_allowed = self._move_behind(drafts)
        self._charge(since)
        return is_allowed and self.error is None

    def forced_tokens(self) -> list[int]:
        """See `OutputConstraint`."""
        if self.error is not None:
            return []
        if self._forced is None:
            since = self._budget.now()
            if self._drafts:
                self._move_behind(())
            self._forced = forced_tokens(self._matcher, self._tokenizer)
            self._charge(since)
        return self._forced

    def some_allowed(self, number: int) -> int:
        """See `OutputConstraint`."""
        mask = np.zeros(self._num_bytes // 4, dtype=np.int32)
        self.fill_mask((), mask.ctypes.data)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._tokenizer.vocab_size]
        allowed = np.flatnonzero(bits)
        return int(allowed[number % len(allowed)])

    def _charge(self, since: float) -> None:
        """Charge the time since then to the tenant; a sequence that makes all others wait for too long ends."""
        if not self._budget.spend(since) and self.error is None:
            # Perhaps it is others of its tenant that have spent the most.
            self.error = _TOO_SLOW if self._budget.now() - since > _LONG_S else _OVERDRAWN

    def _move_behind(self, drafts: tuple[int, ...]) -> bool:
        """Bring the matcher behind the output and these drafts; False when the grammar does not allow them."""
        taken = self._drafts
        if taken == drafts:
            return True
        same = 0
        while same < min(len(taken), len(drafts)) and taken[same] == drafts[same]:
            same += 1
        if same < len(taken):
            self._matcher.rollback(len(taken) - same)
        count = self._matcher.try_consume_tokens(list(drafts[same:])) if same < len(drafts) else 0
        self._drafts = drafts[: same + count]
        return self._drafts == drafts

    def _adjusted_mask(self) -> npt.NDArray[np.uint32]:
        """Return the mask of the model's vocabulary, with the stop tokens of this request."""
        size, vocab_size = self._tokenizer.tokenizer.vocab_size, self._tokenizer.vocab_size
        whole = np.zeros(-(-size // 32), dtype=np.uint32)
        self._matcher.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
        grammar_mask = whole[: self._num_bytes // 4]
        if vocab_size % 32:
            grammar_mask[-1] &= (1 << vocab_size % 32) - 1
        mask = grammar_mask.copy()
        if self._ignores_eos:
            for token_id in self._tokenizer.eos_token_ids:
                _set(mask, token_id, False)
        is_accepting = self._matcher.is_accepting()
        for token_id in self._stop_ids:
            if is_accepting or _has(mask, token_id):
                _set(mask, token_id, is_accepting or self._ends_with(token_id))
        if mask.any():
            return mask
        if not grammar_mask.any():
            self.error = "the grammar allows no token that the model has"
        return grammar_mask

    def _ends_with(self, token_id: int) -> bool:
        self._matcher.try_consume_tokens([token_id])
        is_accepting: bool = self._matcher.is_accepting()
        self._matcher.rollback(1)
        return is_accepting


def _reason(matcher: LLMatcher) -> str:
    lines = matcher.get_error().strip().splitlines()
    return lines[0][:200] if lines else "no reason is known"


def _has(mask: npt.NDArray[np.uint32], token_id: int) -> bool:
    return bool(mask[token_id // 32] >> token_id % 32 & 1)


def _set(mask: npt.NDArray[np.uint32], token_id: int, is_allowed: bool) -> None:
    if is_allowed:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    else:
        mask[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
