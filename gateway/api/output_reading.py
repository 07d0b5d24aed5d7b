"""How an answer is constrained and read, by the chat format of its model, and errors about its grammar.

Workers' heartbeats name the format of a model. A request with a template of its own has the format of that template.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence, Set

import msgspec

from gateway.errors import ApiError
from gateway.generation import Generation, OutputReading, ToolUse
from shared.bounds import MAX_GRAMMAR_CHARACTERS
from shared.formats import ChatFormat, OutputReader, Tool, ToolChoice, ToolSchemaError, detect_format, format_named
from shared.grammar import GRAMMAR_PARAM, Grammar, GrammarError, LlguidanceMissingError
from shared.grammar.bounds import MAX_CHARACTERS
from shared.grammar.checker import TIMEOUT_S, CheckerBusyError, GrammarChecker
from shared.limited_link import LimitedProcessError
from shared.media import IMAGE_PARAM
from shared.sampling import Sampling

MAX_SCHEMA_CHARACTERS = 128 << 10
# A grammar of more is made in a thread, so that the streams of others do not wait for it.
_MAX_INLINE_CHARACTERS = 16 << 10
_MAX_INLINE_TOOLS = 16
# Tools whose schemas may be given up, one after the other: each costs another attempt at the grammar.
_MAX_GIVEN_UP = 4

NO_TOOLS = ToolUse((), ToolChoice("none"))


def with_reading(generation: Generation, chat_format: str) -> Generation:
    """Return a generation with its reading and its grammar, by the name of the format of its model's template.

    An answer of a model without reasoning, to a conversation without tools, is left as it is: all its text is content.
    """
    prompt = generation.prompts[0] if generation.prompts else None
    if prompt is None or prompt.messages is None:
        return generation
    template = None if prompt.chat is None else prompt.chat.template
    name = chat_format if template is None else detect_format(template)
    chosen = format_named(name)
    use = generation.tools or NO_TOOLS
    if not (use.tools or chosen.has_reasoning):
        return generation
    declared = _with_grammar(generation, chosen, use)
    if declared.grammar is not None and generation.tools is not None:
        use = dataclasses.replace(use, is_exclusive=True)
        generation = msgspec.structs.replace(generation, tools=use)
    reading = reading_of(name, use, generation.includes_reasoning)
    if declared.grammar is None or not use.tools:
        return msgspec.structs.replace(generation, sampling=declared, reading=reading)
    sampling = _with_most_schemas(generation, chosen, use) or declared
    looser = None if sampling.grammar == declared.grammar else declared.grammar
    return msgspec.structs.replace(generation, sampling=sampling, looser_grammar=looser, reading=reading)


def _with_most_schemas(generation: Generation, chosen: ChatFormat, use: ToolUse) -> Sampling | None:
    """Return the sampling whose grammar holds calls to the schemas of all tools, but for some it cannot express.

    None where there is no such grammar, or the format cannot express too many of the schemas.
    """
    names = {tool.name for tool in use.tools}
    for _ in range(1 + _MAX_GIVEN_UP):
        try:
            return _with_grammar(generation, chosen, _with_strict(use, names))
        except RefusedSchemaError as error:
            names.discard(error.tool_name)
        except ApiError:
            break
    return None


def _with_strict(use: ToolUse, names: Set[str]) -> ToolUse:
    tools = tuple(dataclasses.replace(tool, strict=tool.strict or tool.name in names) for tool in use.tools)
    return dataclasses.replace(use, tools=tools)


def schema_grammar(generation: Generation, names: Set[str]) -> Grammar | None:
    """Return the grammar that holds calls to the schemas of the tools of these names, and of the strict ones."""
    use, reading, asked = generation.tools, generation.reading, generation.structured_output
    if use is None or reading is None or reading.format_name is None:
        return None
    content = msgspec.structs.replace(generation.sampling, grammar=None if asked is None else asked.grammar)
    alone = msgspec.structs.replace(generation, sampling=content)
    return _with_grammar(alone, format_named(reading.format_name), _with_strict(use, names)).grammar


def is_costly(generation: Generation) -> bool:
    """Whether `with_reading` may take more than some milliseconds."""
    tools = generation.tools.tools if generation.tools is not None else ()
    size = sum(len(tool.parameters or "") for tool in tools)
    content = generation.sampling.grammar
    size += 0 if content is None else len(content.source)
    return len(tools) > _MAX_INLINE_TOOLS or size > _MAX_INLINE_CHARACTERS


def reading_of(format_name: str, use: ToolUse, includes_reasoning: bool) -> OutputReading:
    """Return how a text in a format is read, by values that can be kept with the text."""
    chosen = format_named(format_name)

    def new_reader(starts_in_reasoning: bool) -> OutputReader:
        return chosen.reader(use.tools, starts_in_reasoning=starts_in_reasoning, is_exclusive=use.is_exclusive)

    return OutputReading(
        new_reader,
        format_name,
        max_calls=None if use.is_parallel else 1,
        includes_reasoning=includes_reasoning,
        is_function_call=use.is_function_call,
    )


def _check_size(use: ToolUse) -> None:
    for tool in use.tools:
        if tool.parameters is not None and len(tool.parameters) > MAX_SCHEMA_CHARACTERS:
            reason = f"it has more than {MAX_SCHEMA_CHARACTERS} characters. Make it smaller."
            raise refused_schema(use, tool.name, reason)
    num_characters = sum(len(tool.parameters or "") for tool in use.tools if tool.strict)
    if num_characters > MAX_CHARACTERS:
        message = f"The strict tools have {num_characters} characters of schemas; at most {MAX_CHARACTERS} are allowed."
        raise ApiError(400, message, param="tools", code="invalid_value")


def _with_grammar(generation: Generation, chosen: ChatFormat, use: ToolUse) -> Sampling:
    """Return the sampling with a grammar for the whole answer; it holds calls of strict tools to their schemas."""
    sampling = generation.sampling
    _check_size(use)
    try:
        grammar = chosen.grammar(
            use.tools,
            use.choice,
            parallel=use.is_parallel,
            content=sampling.grammar,
            reasoning=chosen.has_reasoning and generation.may_reason,
        )
    except ToolSchemaError as error:
        raise refused_schema(use, error.tool_name, error.reason, error.path) from None
    except GrammarError as error:
        field = "tools" if generation.structured_output is None else generation.structured_output.field
        raise refused_grammar(field, error) from None
    except RecursionError:
        raise ApiError(400, "A schema is nested too deeply.", param="tools", code="invalid_value") from None
    if grammar is None and use.choice.mode in ("required", "named"):
        message = "This model's chat template knows no calls of tools, so that none can be required of it."
        raise ApiError(400, message, param="tool_choice", code="unsupported_parameter")
    if grammar is not None and len(grammar.source) > MAX_GRAMMAR_CHARACTERS:
        message = f"The tools make a grammar of more than {MAX_GRAMMAR_CHARACTERS} characters; offer fewer at once."
        raise ApiError(400, message, param="tools", code="invalid_value")
    skips = sampling.skip_special_tokens and not chosen.keeps_special_tokens
    return msgspec.structs.replace(sampling, grammar=grammar, skip_special_tokens=skips)


def refused_grammar(field: str, error: GrammarError) -> ApiError:
    """Return the 400 of a grammar that a field asks for, with the place within it."""
    where = f"{field}{error.path}"
    return ApiError(400, f"{where}: {error.reason}", param=where, code="invalid_value")


def naming_field(error: ApiError, field: str) -> ApiError:
    """Return an error about the grammar as one about `field`; any other error as it is."""
    if error.param != GRAMMAR_PARAM:
        return error
    message = error.message
    if message.startswith(GRAMMAR_PARAM):
        message = f"{field}{message.removeprefix(GRAMMAR_PARAM)}"
    return about(error, field, message)


def about(error: ApiError, param: str, message: str | None = None) -> ApiError:
    """Return an error as one about another field."""
    more = {"code": error.code, "type": error.type, "retry_after_s": error.retry_after_s, "headers": error.headers}
    return ApiError(error.status, message or error.message, param=param, **more)  # type: ignore[arg-type]


def naming_conversation(error: ApiError, field: str) -> ApiError:
    """Return an error about the messages as one about `field`, as which the client sends them; any other as it is."""
    return about(error, field) if error.param == "messages" else error


def image_places(generation: Generation) -> tuple[str, ...]:
    """Return where in the body its images stand."""
    return tuple(place for prompt in generation.prompts for place in prompt.image_places)


def naming_image(error: ApiError, places: Sequence[str]) -> ApiError:
    """Return an error about an image as one about its place in the body; any other error as it is."""
    if not places or error.param is None:
        return error
    named = {f"{IMAGE_PARAM}.[{index}]": place for index, place in enumerate(places)}
    if len(places) == 1:
        # Workers of earlier versions do not say which one.
        named[IMAGE_PARAM] = places[0]
    return about(error, named.get(error.param, error.param))


class RefusedSchemaError(ApiError):
    """A 400 about the schema of one tool."""

    def __init__(self, message: str, param: str, tool_name: str) -> None:
        super().__init__(400, message, param=param, code="invalid_value")
        self.tool_name = tool_name


def refused_schema(use: ToolUse, tool_name: str, reason: str, path: str = "") -> RefusedSchemaError:
    """Return the refusal of a tool's schema, which names the tool and where in the body its schema stands.

    `path` is the place within the schema, as `.properties.name`.
    """
    names = [tool.name for tool in use.tools]
    is_placed = len(names) == len(use.schema_places) and tool_name in names
    where = f"{use.schema_places[names.index(tool_name)]}{path}" if is_placed else "tools"
    return RefusedSchemaError(f"{where}: the schema of '{tool_name}': {reason}", where, tool_name)


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
