"""A grammar made ready for one model's tokens, from which each sequence gets a constraint of its own.

Its first masks are computed before a request waits for them. The first mask of a state of the grammar takes up to
hundreds of times as long as the next, because llguidance finds the states of its lexer as it meets them. All copies of
a matcher share the lexer states found. Walks through the grammar find most of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpu_worker.structured_output.grammar_budget import GrammarBudget
from gpu_worker.structured_output.grammar_constraint import GrammarConstraint
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer
from shared.errors import BadRequestError
from shared.formats import with_marker_tokens
from shared.grammar import GRAMMAR_PARAM, Grammar, GrammarError, check_grammar, grammar_text, parser_limits
from shared.grammar.multiples import grammar_states
from shared.grammar.problems import named_problem
from shared.process_usage import resident_bytes
from shared.sampling import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_WALKS = 3
_MAX_WALK_TOKENS = 64
MAX_CACHE_BYTES = 256 << 20
MAX_GROWTH_BYTES = 512 << 20
"""The process may grow by so much while grammars are kept: their matchers find more states as sequences follow them,
and do not tell how many."""

MAX_TENANT_GRAMMARS = 128
_MAX_WARM_UP_S = 0.02
_CLOSING = '"}],'
"""What ends a part of a JSON document. Without a preference for it a walk would stay in the first string."""

MAX_WARM_UP_S = 0.2
"""Seconds of computing that the first masks of a grammar may take together; a tenth of that is usual."""

_BASE_BYTES = 300_000
"""What any compiled grammar takes after its warm-up, measured with 128,000 tokens."""

_BYTES_A_STATE = 1_000
"""What it takes besides for each state of a `multipleOf`. Measured: up to 650 with a vocabulary of single bytes."""

_BYTES_A_CHARACTER = 16
"""What it takes besides for each character of its source, about."""


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A matcher of about `num_bytes` that takes no token itself; several threads may make constraints of it."""

    _matcher: LLMatcher
    _tokenizer: GrammarTokenizer
    num_bytes: int

    def constraint(
        self, sampling: Sampling, emitted: Values[int], budget: GrammarBudget | None = None
    ) -> GrammarConstraint:
        """Return the constraint of a sequence that has emitted some tokens; `BadRequestError` if they do not follow.

        Without a tenant's `budget` it has one of its own.
        """
        matcher, stop_ids = self._matcher.deep_copy(), frozenset(sampling.stop_token_ids)
        budget = budget or GrammarBudget()
        constraint = GrammarConstraint(matcher, self._tokenizer, stop_ids, budget, ignores_eos=sampling.ignore_eos)
        for token_id in emitted:
            if not constraint.advance(token_id):
                raise BadRequestError(f"The tokens emitted so far do not fit: {constraint.error}.", "emitted")
        return constraint


def compile_grammar(grammar: Grammar, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """Compile a grammar, and work out masks that many sequences will ask for. It cannot be interrupted.

    Raises:
        GrammarError: It is wrong, too large or not supported.
        LlguidanceMissingError: The package is not installed.
    """
    try:
        # The gateway has checked it, but any client of NATS may publish a request.
        check_grammar(grammar)
        text = grammar_text(with_marker_tokens(grammar, tokenizer.special_tokens))
        matcher = _ready_matcher(text, tokenizer)
    except GrammarError as error:
        raise GrammarError(error.reason, error.path, GRAMMAR_PARAM) from None
    num_bytes = _BASE_BYTES + _BYTES_A_CHARACTER * len(text) + _BYTES_A_STATE * grammar_states(text)
    return CompiledGrammar(matcher, tokenizer, num_bytes)


def _ready_matcher(text: str, tokenizer: GrammarTokenizer) -> LLMatcher:
    limits = parser_limits()
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer.tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        started = time.thread_time()
        walker = warm_up(matcher, tokenizer.tokenizer)
        if time.thread_time() - started > MAX_WARM_UP_S:
            raise GrammarError("it takes too long to follow. Make it simpler, and its constants shorter.")
        if not walker.is_error():
            return matcher
        matcher = walker
    raise named_problem(matcher.get_error())


def warm_up(matcher: LLMatcher, tokenizer: LLTokenizer) -> LLMatcher:
    """Walk through a matcher's grammar for some milliseconds; return the walker, or the first that had an error.

    The walks are always the same, so that what one worker can follow, all can; the matcher itself takes no token.
    """
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.uint32)
    closing = {tokens[0] for character in _CLOSING if len(tokens := tokenizer.tokenize_str(character)) == 1}
    deadline = time.monotonic() + _MAX_WARM_UP_S
    for number in range(_NUM_WALKS):
        walker = matcher.deep_copy()
        _walk(walker, mask, closing, random.Random(number), deadline)
        if walker.is_error():
            break
    return walker


def _walk(
    walker: LLMatcher, mask: npt.NDArray[np.uint32], closing: set[int], generator: random.Random, deadline: float
) -> None:
    for count in range(_MAX_WALK_TOKENS):
        if walker.is_stopped() or (count and time.monotonic() > deadline):
            return
        walker.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if walker.is_error():
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ends = [token_id for token_id in sorted(closing) if mask[token_id // 32] >> token_id % 32 & 1]
        if not len(allowed):
            return
        takes_end = ends and generator.random() < 0.5
        token_id = generator.choice(ends) if takes_end else int(allowed[generator.randrange(len(allowed))])
        walker.try_consume_tokens([token_id])


class GrammarCache:
    """Keeps the latest grammars, within a number of bytes for all and a number of grammars for each tenant.

    A tenant finds its own grammars alone: it can neither learn from the time of an answer what others ask for, nor
    drive out theirs as long as it takes more room than they do.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES, max_tenant_grammars: int = MAX_TENANT_GRAMMARS) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_grammars = max_tenant_grammars
        self._lock = threading.Lock()
        self._grown_from = resident_bytes()
        self._grammars: dict[str, OrderedDict[Grammar, CompiledGrammar]] = {}
        self._num_bytes: dict[str, int] = {}

    def get(self, tenant: str, grammar: Grammar) -> CompiledGrammar | None:
        """Return a tenant's compiled grammar, if it is still kept."""
        with self._lock:
            own = self._grammars.get(tenant)
            compiled = None if own is None else own.get(grammar)
            if own is not None and compiled is not None:
                own.move_to_end(grammar)
            return compiled

    def add(self, tenant: str, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Keep a tenant's compiled grammar, and drop others where there is too much."""
        with self._lock:
            own = self._grammars.setdefault(tenant, OrderedDict())
            if grammar in own:
                return
            own[grammar] = compiled
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + compiled.num_bytes
            if len(own) > self._max_tenant_grammars:
                self._drop_oldest(tenant)
            while sum(self._num_bytes.values()) > self._max_bytes:
                self._drop_oldest(max(self._num_bytes, key=self._num_bytes.__getitem__))
            if resident_bytes() - self._grown_from > MAX_GROWTH_BYTES:
                self._grammars.clear()
                self._num_bytes.clear()
                self._grown_from = resident_bytes()

    def _drop_oldest(self, tenant: str) -> None:
        _, dropped = self._grammars[tenant].popitem(last=False)
        self._num_bytes[tenant] -= dropped.num_bytes
        if not self._grammars[tenant]:
            del self._grammars[tenant], self._num_bytes[tenant]
