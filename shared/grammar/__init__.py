"""Grammars of the output as llguidance reads them, the same for the gateway that admits and the worker that obeys.

llguidance is imported where it is used, so that a process without it can import this package.
"""

from shared.grammar.check import check_grammar, parser_limits
from shared.grammar.grammar import GRAMMAR_PARAM, Grammar, GrammarError, LlguidanceMissingError
from shared.grammar.grammar_text import decode_schema, grammar_text, llguidance_schema

__all__ = [
    "GRAMMAR_PARAM",
    "Grammar",
    "GrammarError",
    "LlguidanceMissingError",
    "check_grammar",
    "decode_schema",
    "grammar_text",
    "llguidance_schema",
    "parser_limits",
]
