"""Makes the constraints of requests whose output has to look like something, away from the event loop.

A request goes to the engine only when its grammar is compiled. Grammars are compiled one at a time; tenants take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.structured_output.compiled_grammar import compile_grammar
from gpu_worker.structured_output.grammar_cache import GrammarCache
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, UnsupportedTokenizerError
from gpu_worker.text.fair_lane import FairLane
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError, HeadraceError
from shared.messages import Request
from shared.sampling import Grammar
from shared.structured_output import GRAMMAR_PARAM, GrammarError, LlguidanceMissingError

MAX_COMPILE_S = 10.0
"""Seconds that a grammar may be compiled, without the time that it waits for others."""

MAX_WAIT_S = 10.0
"""Seconds that a grammar may wait for others, before another worker is to have it."""


class CompilerBusyError(HeadraceError):
    """Other grammars are compiled for too long: the request is to be given back."""

    def __init__(self) -> None:
        """Build the message."""
        super().__init__(f"The grammar has waited for others for {MAX_WAIT_S:.0f} s.")


class ConstraintSource:
    """Owns the thread that compiles, and what it has compiled. Used from the event loop only."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        """Make constraints of this tokenizer's tokens."""
        self._tokenizer = tokenizer
        self._lane = FairLane("grammars", 1)
        self._cache = GrammarCache()

    async def constraint(
        self, request: Request, is_wanted: Callable[[], bool], *, in_reasoning: bool = False
    ) -> OutputConstraint | None:
        """Return what a request's output has to look like, which follows what it has emitted; None for anything.

        Args:
            request: Whose output it is.
            is_wanted: Asked before the grammar is compiled.
            in_reasoning: The prompt has opened the model's reasoning.

        Raises:
            BadRequestError: The grammar cannot be followed here.
            CompilerBusyError: It has waited too long for others.
            asyncio.CancelledError: It was not wanted any more.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if in_reasoning:
            grammar = grammar.begun_in_reasoning()
        tokenizer = self._grammar_tokenizer()
        has_begun = False

        def begins() -> bool:
            nonlocal has_begun
            has_begun = is_wanted()
            if has_begun:
                limit.reschedule(asyncio.get_running_loop().time() + MAX_COMPILE_S)
            return has_begun

        try:
            async with asyncio.timeout(MAX_WAIT_S) as limit:
                return await self._lane.run(
                    request.tenant, len(grammar.source), lambda: self._make(request, grammar, tokenizer), begins
                )
        except TimeoutError:
            if not has_begun:
                raise CompilerBusyError from None
            message = f"It could not be compiled within {MAX_COMPILE_S:.0f} s."
            raise GrammarError(message, param=GRAMMAR_PARAM) from None

    def close(self) -> None:
        """End the thread; what has not begun is dropped."""
        self._lane.close()

    def _grammar_tokenizer(self) -> GrammarTokenizer:
        try:
            return self._tokenizer.grammar_tokenizer
        except (LlguidanceMissingError, UnsupportedTokenizerError) as error:
            raise BadRequestError(str(error), GRAMMAR_PARAM, "unsupported_value") from None

    def _make(self, request: Request, grammar: Grammar, tokenizer: GrammarTokenizer) -> OutputConstraint:
        """Do it in the thread."""
        compiled = self._cache.get(request.tenant, grammar)
        if compiled is None:
            compiled = compile_grammar(grammar, tokenizer)
            self._cache.add(request.tenant, grammar, compiled)
        return compiled.constraint(request.sampling, request.emitted)
