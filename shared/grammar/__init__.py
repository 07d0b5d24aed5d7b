"""Grammars of the output as llguidance reads them, the same for the gateway that admits and the worker that obeys.

llguidance is imported where it is used, so that a process without it can import this package.
"""

from shared.grammar.check import check_grammar as check_grammar
from shared.grammar.check import parser_limits as parser_limits
from shared.grammar.grammar import GRAMMAR_PARAM as GRAMMAR_PARAM
from shared.grammar.grammar import Grammar as Grammar
from shared.grammar.grammar import GrammarError as GrammarError
from shared.grammar.grammar import LlguidanceMissingError as LlguidanceMissingError
from shared.grammar.grammar_text import decode_schema as decode_schema
from shared.grammar.grammar_text import grammar_text as grammar_text
from shared.grammar.grammar_text import llguidance_schema as llguidance_schema
