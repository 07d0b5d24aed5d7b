"""GBNF as it is read: what each notation means, and where a mistake stands."""

from __future__ import annotations

import pytest

from shared.grammar import Grammar, GrammarError, gbnf, grammar_text
from shared.grammar.gbnf import GbnfAsLark
from tests.shared.grammar.byte_matcher import accepts

A, B, C = gbnf.Text("a"), gbnf.Text("b"), gbnf.Text("c")


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ('"a"', A),
        ('"a" "b"', gbnf.Sequence([A, B])),
        ('"a" | "b" "c"', gbnf.Choice([A, gbnf.Sequence([B, C])])),
        ('"a" |', gbnf.Choice([A, gbnf.Sequence([])])),
        ('("a")', A),
        ('( "a"\n | "b" )\t"c"', gbnf.Sequence([gbnf.Choice([A, B]), C])),
        ('"a" # comment | "b"\n | "c"', gbnf.Choice([A, C])),
        ("root", gbnf.Reference("root")),
        (".", gbnf.ANY_CHARACTER),
        ("[a-cx]", gbnf.CharacterClass([(97, 99), (120, 120)])),
        ("[^a-a]", gbnf.CharacterClass([(97, 97)], negated=True)),
        ("[^]", gbnf.CharacterClass([], negated=True)),
        ("[a-]", gbnf.CharacterClass([(97, 97), (45, 45)])),
        (r"[\]\-\^]", gbnf.CharacterClass([(93, 93), (45, 45), (94, 94)])),
        (r'"\n\r\t\\\"\/\x41\u00e9\U0010FFFF"', gbnf.Text('\n\r\t\\"/A\xe9\U0010ffff')),
        (r'"\uD7FF\uE000"', gbnf.Text("\ud7ff\ue000")),
        ('"a"*', gbnf.Repetition(A, 0, None)),
        ('"a"+', gbnf.Repetition(A, 1, None)),
        ('"a"?', gbnf.Repetition(A, 0, 1)),
        ('"a"{2}', gbnf.Repetition(A, 2, 2)),
        ('"a"{0}', gbnf.Repetition(A, 0, 0)),
        ('"a"{2,}', gbnf.Repetition(A, 2, None)),
        ('"a"{ 2 , 3 }', gbnf.Repetition(A, 2, 3)),
        ('"a"{2,2}', gbnf.Repetition(A, 2, 2)),
        (f'"a"{{{gbnf.MAX_REPETITIONS}}}', gbnf.Repetition(A, gbnf.MAX_REPETITIONS, gbnf.MAX_REPETITIONS)),
        ('"a"+?', gbnf.Repetition(gbnf.Repetition(A, 1, None), 0, 1)),
        ('"a"* {2} "b"', gbnf.Sequence([gbnf.Repetition(gbnf.Repetition(A, 0, None), 2, 2), B])),
        ("(" * gbnf.MAX_NESTING + '"a"' + ")" * gbnf.MAX_NESTING, A),
    ],
)
def test_notation_is_read(body: str, expression: gbnf.Expression) -> None:
    assert gbnf.GbnfReader(f"root ::= {body}").rules() == {"root": expression}


def test_rules_keep_their_order_and_lines_may_be_anyhow() -> None:
    rules = gbnf.GbnfReader('\n# first\n b ::= "a"\r\nroot::=\n  b |\n "c"\n\n').rules()
    assert list(rules.items()) == [("b", A), ("root", gbnf.Choice([gbnf.Reference("b"), C]))]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('root ::= "a" }', "Line 1, column 14 of the grammar: the end of a rule is expected."),
        ('root "a"', "Line 1, column 6 of the grammar: '::=' is expected."),
        ('= "a"', "Line 1, column 1 of the grammar: the name of a rule is expected."),
        ('root ::= "a"\n  "b" ::= "c"', "Line 2, column 3 of the grammar: the name of a rule is expected."),
        ('root ::= "a"\n\nroot ::= "b"', "Line 3, column 10 of the grammar: the rule 'root' has been defined before."),
        ('root ::= x\n | y x\ny ::= "a"', "Line 1, column 10 of the grammar: the rule 'x' is not defined."),
        ('root ::= "a" ("b"', "Line 1, column 18 of the grammar: ')' is expected."),
        ('root ::= "a\n"', "Line 1, column 12 of the grammar: a closing quote or bracket is expected."),
        ("root ::= [a", "Line 1, column 12 of the grammar: a closing quote or bracket is expected."),
        ("root ::= []", "Line 1, column 12 of the grammar: a class of no characters matches nothing."),
        ("root ::= [b-a]", "Line 1, column 14 of the grammar: a range of characters ends before it begins."),
        (r'root ::= "\q"', "Line 1, column 12 of the grammar: an escape (n, r, t, x00, u0000, U00000000) is expected."),
        (r'root ::= "\uD800"', "Line 1, column 17 of the grammar: U+D800 is not a character."),
        (r'root ::= "\uDFFF"', "U+DFFF is not a character."),
        (r'root ::= "\U00110000"', "U+110000 is not a character."),
        ('root ::= "a"{2,1}', "Line 1, column 18 of the grammar: a repetition's maximum is below its minimum."),
        ('root ::= "a"{2001}', "at most 2000 repetitions are allowed."),
        ('root ::= "a"{1,2001}', "at most 2000 repetitions are allowed."),
        ('root ::= "a"{2001,}', "at most 2000 repetitions are allowed."),
        ('root ::= "a"{,2}', "'{m}', '{m,}' or '{m,n}' is expected."),
        ("root ::= <think>", "Line 1, column 10 of the grammar: rules of tokens are not supported."),
        ("root ::= !a", "rules of tokens are not supported."),
        ("root ::= " + "(" * (gbnf.MAX_NESTING + 1), f"more than {gbnf.MAX_NESTING} levels of parentheses."),
        ('other ::= "a"', "The grammar has no rule 'root'."),
    ],
)
def test_mistake_is_told_with_its_place(source: str, problem: str) -> None:
    with pytest.raises(GrammarError) as refused:
        gbnf.GbnfReader(source).rules()
    assert refused.value.reason.endswith(problem)


def test_grammar_begun_in_reasoning_has_another_start() -> None:
    grammar = Grammar(kind="lark", source='start: a | b\na: "1"\nb: "2"\n', in_reasoning="THOUGHT a")
    assert grammar.begun_in_reasoning() == Grammar(kind="lark", source='start: THOUGHT a\na: "1"\nb: "2"\n')


def test_grammar_that_holds_in_reasoning_too_stays_the_same() -> None:
    grammar = Grammar(kind="regex", source="a+")
    assert grammar.begun_in_reasoning() is grammar


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
