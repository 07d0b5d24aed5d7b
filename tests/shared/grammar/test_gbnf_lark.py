from __future__ import annotations

import pytest

from shared.grammar import Grammar, GrammarError, grammar_text
from shared.grammar.gbnf_lark import GbnfAsLark
from tests.shared.grammar.byte_matcher import accepts

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws (
    value ("," ws value)*   # a comment
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("gbnf", "accepted", "refused"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["yesno", ""]),
        ('root ::= a+ "b"\na ::= [a-z]', ["ab", "bb", "abab"], ["b", "a", "1b"]),
        ('root ::=\n  "a"\n  | "b" # second\n', ["a", "b"], ["ab"]),
        ('root ::= "a"? "b"{2} "c"{1,} "d"{0,1}', ["bbc", "abbccd"], ["bc", "abbdd"]),
        (r'root ::= "\x41é\U0001F600\n\"" [^\]\-^] [a\-z]', ['Aé😀\n"x-'], ['Aé😀\n"]-']),
        ("root ::= .{2}", ["é\n"], ["a", "abc"]),
        ('root ::= "(" root? ")" | my-rule\nmy-rule ::= "x" ""', ["()", "((x))", "x"], ["(()", "xx"]),
        (JSON, ['{"a": [1, -2.5e3, {"b": null}], "c":"\\u00e9"}', "{\n  }"], ['{"a"}', "[]", '{"a": 01}']),
    ],
)
def test_grammar_accepts_what_it_describes_and_nothing_else(gbnf: str, accepted: list[str], refused: list[str]) -> None:
    text = grammar_text(Grammar(kind="gbnf", source=gbnf))
    assert [each for each in accepted if not accepts(text, each)] == []
    assert [each for each in refused if accepts(text, each)] == []


@pytest.mark.parametrize(
    ("gbnf", "problem"),
    [
        ("", "no rule 'root'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root ::= missing", "Line 1, column 10 of the grammar: the rule 'missing' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "Line 2"),
        ('root "a"', "'::=' is expected"),
        ('root ::= "a', "a closing quote"),
        ("root ::= [a", "a closing quote or bracket"),
        ("root ::= []", "matches nothing"),
        ("root ::= [z-a]", "ends before it begins"),
        ('root ::= ("a"', "')' is expected"),
        ('root ::= "a")', "the end of a rule"),
        ("root ::= " + "(" * 100, "levels of parentheses"),
        ('root ::= "a"{2,1}', "below its minimum"),
        ('root ::= "a"{9999}', "at most 2000"),
        ('root ::= "a"{x}', "'{m}'"),
        (r'root ::= "\q"', "an escape"),
        (r'root ::= "\uD800"', "is not a character"),
        ("root ::= <think>", "tokens are not supported"),
    ],
)
def test_wrong_grammar_is_refused_with_the_place(gbnf: str, problem: str) -> None:
    with pytest.raises(GrammarError, match=None) as refused:
        GbnfAsLark(gbnf).text()
    assert problem in refused.value.reason
