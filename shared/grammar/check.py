"""Whether llguidance can compile a grammar: one function for the gateway that admits and the worker that compiles.

llguidance also compiles schemas of which every document is endless: an object that must hold an object of its own kind,
and so on. Their output would begin and never end, and a chain of references that leads back to itself matches nothing.
Such schemas are refused here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from shared.grammar.grammar import Grammar, GrammarError, LlguidanceMissingError
from shared.grammar.grammar_text import decode_schema, grammar_text
from shared.grammar.multiples import embedded_schemas
from shared.grammar.problems import named_problem, refuse_old_keywords
from shared.grammar.schema_walk import resolve, schemas_within

if TYPE_CHECKING:
    from llguidance import LLParserLimits

INITIAL_LEXER_FUEL = 500_000
MAX_GRAMMAR_SIZE = 200_000
MAX_LEXER_STATES = 100_000
"""About 50 MB. A string of bounded length takes some five for each of its characters; others a few hundred in all."""
MAX_ITEMS_A_STEP = 10_000

_ONE_OF_AS_ANY_OF = "oneOf not fully supported"


def parser_limits() -> LLParserLimits:
    """Return how much work a grammar may cause, for every matcher; `LlguidanceMissingError` without the package."""
    try:
        from llguidance import LLParserLimits
    except ImportError:
        raise LlguidanceMissingError from None
    return LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=MAX_ITEMS_A_STEP,
        verbose_errors=False,
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


def refuse_endless(schema: Any) -> None:
    """Refuse a schema without a document of finite length.

    Only what always holds is concluded: a schema passes where its keywords may allow a document.
    """
    if not isinstance(schema, dict):
        return
    needs = {id(each): _needs(each, schema) for each, _ in schemas_within(schema)}
    users: defaultdict[int, set[int]] = defaultdict(set)
    for identity, ways in needs.items():
        for used in (used for options in ways for used in options):
            users[used].add(identity)
    finite = set[int]()
    waiting = list(needs)
    while waiting:
        identity = waiting.pop()
        ways = needs.get(identity, [])
        # Each need is met by any one of its options. Unknown schemas count as finite.
        if identity not in finite and all(any(o in finite or o not in needs for o in options) for options in ways):
            finite.add(identity)
            waiting += users[identity]
    if id(schema) not in finite:
        raise GrammarError("No document of finite length matches: it refers to itself on every way. Make it optional.")


def _needs(schema: dict[str, Any], root: dict[str, Any]) -> list[list[int]]:
    """Return what must be finite for a schema to be: all of the lists, and of each list one."""
    needs: list[list[int]] = []
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = resolve(root, reference)
        if isinstance(target, dict):
            needs.append([id(target)])
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and all(isinstance(each, dict) for each in alternatives):
            needs.append([id(each) for each in alternatives])
    needs += [[id(each)] for each in _listed(schema.get("allOf")) if isinstance(each, dict)]
    if schema.get("type") == "object":
        properties = schema.get("properties")
        required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        if isinstance(properties, dict):
            needs += [[id(properties[name])] for name in required if isinstance(properties.get(name), dict)]
    items = schema.get("items")
    has_items = _is_positive(schema.get("minItems")) and not schema.get("prefixItems")
    if schema.get("type") == "array" and isinstance(items, dict) and has_items:
        needs.append([id(items)])
    return needs


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
