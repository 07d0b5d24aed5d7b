"""Grammars of the output as llguidance reads them, the same for the gateway that admits and the worker that obeys.

llguidance is imported where it is used, so that a process without it can import this package.
"""

from shared.structured_output.check import check_grammar, parser_limits
from shared.structured_output.errors import GRAMMAR_PARAM, GrammarError, LlguidanceMissingError
from shared.structured_output.grammar_text import decode_schema, grammar_text, llguidance_schema

__all__ = [
    "GRAMMAR_PARAM",
    "GrammarError",
    "LlguidanceMissingError",
    "check_grammar",
    "decode_schema",
    "grammar_text",
    "llguidance_schema",
    "parser_limits",
]
