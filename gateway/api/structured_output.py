"""Checks before admission that a request's grammar compiles: one that no worker could obey is a 400 that says why."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from gateway.api.output_reading import refused_grammar, refused_schema, schema_grammar
from gateway.errors import ApiError
from gateway.generation import Generation, ToolUse
from shared.formats import Tool
from shared.grammar import Grammar, GrammarError, LlguidanceMissingError
from shared.grammar.checker import TIMEOUT_S, CheckerBusyError, GrammarChecker
from shared.limited_link import LimitedProcessError

_TOOLS = "tools"
# Wait for verdicts that only make an answer better: which tool is at fault, or which tools' schemas can be kept.
_SHORT_TIMEOUT_S = 0.2


class StructuredOutputAdmission:
    """Asks the checker about the grammars of generations."""

    def __init__(self, checker: GrammarChecker) -> None:
        self._checker = checker

    async def checked(self, generation: Generation, tenant: str) -> Generation:
        """Return a generation whose grammar can be compiled.

        Where its own cannot, a grammar with the schemas of those tools takes its place that can be compiled, or the
        looser one, which promises no less to the client.

        Raises:
            ApiError: 400, the grammar is refused; 429, other grammars of the tenant are checked before; 503, it cannot
                be checked in time; 501, this gateway cannot check any.
        """
        grammar = generation.sampling.grammar
        if grammar is None:
            return generation
        within_s = TIMEOUT_S if generation.timeout_s is None else min(TIMEOUT_S, generation.timeout_s)
        asked = generation.structured_output
        if asked is not None:
            await self._check(asked.grammar, tenant, asked.field, within_s)
            if asked.grammar == grammar:
                return generation
        # The grammar holds the schemas of the tools too.
        looser = generation.looser_grammar
        if looser is None:
            await self._check_calls(grammar, generation.tools, tenant, within_s)
            return generation
        try:
            await self._check(grammar, tenant, _TOOLS, within_s)
        except ApiError as error:
            if error.status != 400:
                raise
            compilable = await self._compilable_grammar(generation, tenant)
            if compilable is None:
                await self._check_calls(looser, generation.tools, tenant, within_s)
            sampling = msgspec.structs.replace(generation.sampling, grammar=compilable or looser)
            return msgspec.structs.replace(generation, sampling=sampling)
        return generation

    async def _compilable_grammar(self, generation: Generation, tenant: str) -> Grammar | None:
        """Return a grammar that holds calls to the schemas of all tools but those that cannot be compiled.

        None where there is no such grammar, or the checks take too long: the next request finds their verdicts.
        """
        use = generation.tools
        # `_check_calls` refuses a strict tool that cannot be compiled, by its name.
        no_grammar = (ApiError, GrammarError, TimeoutError, CheckerBusyError, LimitedProcessError)
        with contextlib.suppress(*no_grammar):
            async with asyncio.timeout(_SHORT_TIMEOUT_S):
                names = [tool.name for tool in (() if use is None else use.tools) if await self._compiles(tool, tenant)]
                grammar = await asyncio.to_thread(schema_grammar, generation, frozenset(names)) if names else None
                if grammar is not None:
                    await self._checker.check(tenant, grammar)
                return grammar
        return None

    async def _compiles(self, tool: Tool, tenant: str) -> bool:
        if tool.parameters is None:
            return False
        try:
            await self._checker.check(tenant, Grammar(kind="json_schema", source=tool.parameters, strict=True))
        except GrammarError:
            return False
        return True

    async def _check_calls(self, grammar: Grammar, use: ToolUse | None, tenant: str, within_s: float) -> None:
        try:
            await self._check(grammar, tenant, _TOOLS, within_s)
        except ApiError as error:
            if error.status == 400 and use is not None:
                # Without a verdict in time the error names no tool.
                with contextlib.suppress(TimeoutError, CheckerBusyError, LimitedProcessError):
                    async with asyncio.timeout(_SHORT_TIMEOUT_S):
                        await self._check_each(use, tenant)
            raise

    async def _check_each(self, use: ToolUse, tenant: str) -> None:
        for tool in use.tools:
            if tool.strict and tool.parameters is not None:
                try:
                    await self._checker.check(tenant, Grammar(kind="json_schema", source=tool.parameters))
                except GrammarError as error:
                    raise refused_schema(use, tool.name, error.reason, error.path) from None

    async def _check(self, grammar: Grammar, tenant: str, field: str, within_s: float) -> None:
        try:
            await self._checker.check(tenant, grammar, within_s)
        except GrammarError as error:
            raise refused_grammar(field, error) from None
        except LlguidanceMissingError as error:
            raise ApiError(501, str(error), param=field, code="structured_output_unavailable") from None
        except CheckerBusyError as error:
            raise _busy(error, field) from None
        except LimitedProcessError:
            message = "The grammar could not be checked. Try again shortly."
            raise ApiError(503, message, param=field, code="grammar_not_checked", retry_after_s=1.0) from None


def _busy(error: CheckerBusyError, field: str) -> ApiError:
    """Return the error while there is no verdict. The check goes on, so that there is one when the client returns."""
    status, code = (429, "too_many_grammars") if error.is_own else (503, "grammar_not_checked")
    cause = "Other grammars of this tenant are checked before this one" if error.is_own else "The grammar is checked"
    message = f"{cause}, and the check goes on. Send the same request again after the time that Retry-After says."
    return ApiError(status, message, param=field, code=code, retry_after_s=error.retry_after_s)
