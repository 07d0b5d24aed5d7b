"""Whether llguidance can compile a grammar: one function for the gateway that admits and the worker that compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.grammar.endless import refuse_endless
from shared.grammar.grammar import Grammar, LlguidanceMissingError
from shared.grammar.grammar_text import decode_schema, grammar_text
from shared.grammar.multiples import embedded_schemas
from shared.grammar.problems import named_problem, refuse_old_keywords

if TYPE_CHECKING:
    from llguidance import LLParserLimits

INITIAL_LEXER_FUEL = 500_000
MAX_GRAMMAR_SIZE = 200_000

_ONE_OF_AS_ANY_OF = "oneOf not fully supported"


def parser_limits() -> LLParserLimits:
    """Return how much work a grammar may cause, with which every matcher is to be made.

    Raises:
        LlguidanceMissingError: The package is not installed.
    """
    try:
        from llguidance import LLParserLimits
    except ImportError:
        raise LlguidanceMissingError from None
    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL, max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False
    )


def check_grammar(grammar: Grammar) -> None:
    """Refuse a grammar that cannot be compiled, of which a part would be ignored, or that no finite text matches.

    It takes milliseconds for a usual grammar. It cannot be interrupted: for untrusted input, run it in a process
    with a limit of time.

    Raises:
        GrammarError: It is refused.
        LlguidanceMissingError: The package is not installed.
    """
    limits = parser_limits()
    from llguidance import LLMatcher

    schema = decode_schema(grammar.source) if grammar.kind == "json_schema" else None
    schemas = [schema] if grammar.kind == "json_schema" else []
    if grammar.kind == "lark":
        schemas = list(embedded_schemas(grammar.source))
    for each in schemas:
        refuse_old_keywords(each)
    for form in {grammar, grammar.begun_in_reasoning()}:
        # A warning says that something was ignored: that is refused like an error.
        _, problems = LLMatcher.validate_grammar_with_warnings(grammar_text(form), limits=limits)
        for problem in problems:
            if grammar.strict or not problem.startswith(_ONE_OF_AS_ANY_OF):
                raise named_problem(problem, schema)
    for each in schemas:
        refuse_endless(each)


def try_compiling(grammar: Grammar) -> None:
    """Compile a grammar that passed the check as a worker does, for a tokenizer of single bytes.

    Some grammars are checked at once, and take long to be compiled, as numbers that many divisors must divide do.
    Nothing is learned but that it takes no longer than the process that does this may run.
    """
    limits = parser_limits()
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), grammar_text(grammar), log_level=0, limits=limits)
