"""Makes the constraints of requests whose output has to look like something, away from the event loop.

A request goes to the engine only when its grammar is compiled. A limited process compiles it first: what ends that
process, or takes too long there, never reaches this one. Grammars are compiled one at a time; tenants take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from gpu_worker.core.constraint import OutputConstraint
from gpu_worker.structured_output.compiled_grammar import CompiledGrammar, GrammarCache, compile_grammar
from gpu_worker.structured_output.grammar_budget import TOTAL_SHARE, GrammarBudget
from gpu_worker.structured_output.grammar_tokenizer import GrammarTokenizer, UnsupportedTokenizerError
from gpu_worker.text.fair_lane import FairLane
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.errors import BadRequestError, HeadraceError
from shared.grammar import GRAMMAR_PARAM, Grammar, GrammarError, LlguidanceMissingError
from shared.grammar.checker import PROCESS, CheckerBusyError, GrammarChecker
from shared.grammar.checker_process import COMPILE_STACK_BYTES, TIME_LIMIT_S
from shared.limited_link import LimitedLink, LimitedProcessError
from shared.messages import Request

MAX_COMPILE_S = 10.0
"""Seconds that a grammar may be compiled here, once the limited process has compiled it."""

MAX_WAIT_S = 10.0
"""Seconds that a grammar may wait for others, before another worker is to have it."""

MAX_GIVEN_BACK = 3
"""A request whose grammar has waited in vain so often ends with an error."""

RESTART_S = 1.0
"""Seconds before a checker that does not work is started again."""

MAX_RESTARTS = 5
"""After this many starts in vain, requests are taken all the same: where no worker can check them, they have to end."""

_MAX_REMEMBERED = 4096
_CHECKER = "gpu_worker.structured_output.compile_check"


class CompilerBusyError(HeadraceError):
    """Other grammars are compiled for too long: the request is to be given back."""

    def __init__(self) -> None:
        super().__init__(f"The grammar has waited for others for {MAX_WAIT_S:.0f} s.")


class ConstraintSource:
    """Owns the checker process, the compiler thread and the compiled grammars. Used from the event loop only."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._checker = GrammarChecker(
            LimitedLink(_CHECKER, TIME_LIMIT_S, PROCESS, lambda: msgspec.msgpack.encode(tokenizer.grammar_source()))
        )
        self._lane = FairLane("grammars", 1, stack_bytes=COMPILE_STACK_BYTES)
        self._cache = GrammarCache()
        self._all_budgets = GrammarBudget(share=TOTAL_SHARE)
        # By tenant, the latest last.
        self._budgets: OrderedDict[str, GrammarBudget] = OrderedDict()
        self._is_closed = False
        self._restarting: asyncio.Task[None] | None = None
        # By tenant and id, how often a request was given back, the latest last.
        self._given_back: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def constraint(
        self, request: Request, is_wanted: Callable[[], bool], *, in_reasoning: bool = False
    ) -> OutputConstraint | None:
        """Return what a request's output has to look like, which follows what it has emitted; None for anything.

        Args:
            request: Whose output it is.
            is_wanted: Asked before the grammar is compiled.
            in_reasoning: The prompt has opened the model's reasoning.

        Raises:
            BadRequestError: The grammar cannot be followed here, or has waited for others too often.
            CompilerBusyError: It has waited too long for others.
            LimitedProcessError: It cannot be checked.
            asyncio.CancelledError: It was not wanted any more.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if in_reasoning:
            grammar = grammar.begun_in_reasoning()
        tokenizer = self._grammar_tokenizer()
        try:
            compiled = self._cache.get(request.tenant, grammar)
            if compiled is None:
                await self._check(request.tenant, grammar)
            return await self._compiled(request, grammar, compiled, tokenizer, is_wanted)
        except CompilerBusyError:
            self._count_given_back(request)
            raise
        except LimitedProcessError:
            if self._restarting is None and not self._is_closed:
                self._restarting = asyncio.create_task(self._restart())
            raise

    def is_away(self, request: Request) -> bool:
        """Whether a request needs the checker, which does not work at the moment."""
        grammar = request.sampling.grammar
        if self._restarting is None or grammar is None:
            return False
        return self._cache.get(request.tenant, grammar) is None

    async def _restart(self) -> None:
        try:
            for _ in range(MAX_RESTARTS):
                await asyncio.sleep(RESTART_S)
                with contextlib.suppress(LimitedProcessError):
                    await self._checker.start()
                    return
        finally:
            self._restarting = None

    async def close(self) -> None:
        """End the process and the thread; what has not begun is dropped."""
        self._is_closed = True
        self._lane.close()
        if (restarting := self._restarting) is not None:
            restarting.cancel()
            await asyncio.wait([restarting])
        await self._checker.close()

    async def _check(self, tenant: str, grammar: Grammar) -> None:
        try:
            await self._checker.check(tenant, grammar, MAX_WAIT_S)
        except GrammarError as error:
            raise GrammarError(error.reason, error.path, GRAMMAR_PARAM) from None
        except CheckerBusyError:
            raise CompilerBusyError from None

    async def _compiled(
        self,
        request: Request,
        grammar: Grammar,
        compiled: CompiledGrammar | None,
        tokenizer: GrammarTokenizer,
        is_wanted: Callable[[], bool],
    ) -> OutputConstraint:
        has_begun, budget = False, self._budget(request.tenant)

        def begins() -> bool:
            nonlocal has_begun
            has_begun = is_wanted()
            if has_begun:
                limit.reschedule(asyncio.get_running_loop().time() + MAX_COMPILE_S)
            return has_begun

        def make() -> OutputConstraint:
            ready = compiled or self._cache.get(request.tenant, grammar)
            if ready is None:
                ready = compile_grammar(grammar, tokenizer)
                self._cache.add(request.tenant, grammar, ready)
            return ready.constraint(request.sampling, request.emitted, budget)

        try:
            async with asyncio.timeout(MAX_WAIT_S) as limit:
                return await self._lane.run(request.tenant, len(grammar.source), make, begins)
        except TimeoutError:
            if not has_begun:
                raise CompilerBusyError from None
            message = f"It could not be compiled within {MAX_COMPILE_S:.0f} s."
            raise GrammarError(message, param=GRAMMAR_PARAM) from None

    def _budget(self, tenant: str) -> GrammarBudget:
        budget = self._budgets.setdefault(tenant, GrammarBudget(self._all_budgets))
        self._budgets.move_to_end(tenant)
        if len(self._budgets) > _MAX_REMEMBERED:
            self._budgets.popitem(last=False)
        return budget

    def _count_given_back(self, request: Request) -> None:
        key = (request.tenant, request.id)
        count = self._given_back.pop(key, 0) + 1
        if count >= MAX_GIVEN_BACK:
            waited = f"{count} times for {MAX_WAIT_S:.0f} s"
            message = f"The grammar has waited {waited} for other grammars of this tenant. Send fewer at once."
            raise BadRequestError(message, GRAMMAR_PARAM, "too_many_grammars")
        self._given_back[key] = count
        if len(self._given_back) > _MAX_REMEMBERED:
            self._given_back.popitem(last=False)

    def _grammar_tokenizer(self) -> GrammarTokenizer:
        try:
            return self._tokenizer.grammar_tokenizer
        except (LlguidanceMissingError, UnsupportedTokenizerError) as error:
            raise BadRequestError(str(error), GRAMMAR_PARAM, "unsupported_value") from None
