"""Grammars of the output as llguidance reads them, the same for the gateway that admits and the worker that obeys.

llguidance is imported where it is used, so that a process without it can import this package.
"""

from shared.structured_output.check import check_grammar, parser_limits
from shared.structured_output.errors import GrammarError, LlguidanceMissingError
from shared.structured_output.grammar_text import grammar_text

__all__ = ["GrammarError", "LlguidanceMissingError", "check_grammar", "grammar_text", "parser_limits"]
