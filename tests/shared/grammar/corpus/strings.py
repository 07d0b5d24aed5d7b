"""Lengths, patterns and formats of strings."""

from __future__ import annotations

from tests.shared.grammar.corpus.case import Case

_LENGTHS = [
    Case({"type": "string", "minLength": 1}, ["a", "é", "ab" * 20], ["", 1]),
    Case({"type": "string", "maxLength": 3}, ["", "a", "abc", "é😀b"], ["abcd", "éééé"]),
    Case({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd", "😀😀"], ["a", "abcde", "😀"]),
    Case({"type": "string", "minLength": 5, "maxLength": 5}, ["12345"], ["1234", "123456"]),
    Case({"type": "string", "maxLength": 0}, [""], ["a"]),
    Case({"type": "string", "minLength": 10}, ["0123456789"], ["012345678"]),
    Case({"type": "string", "maxLength": 2000}, ["x" * 2000], ["x" * 2001]),
    Case({"maxLength": 1}, ["a", 100, None], ["ab"]),
    Case({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "^a*$"}, ["a", "aa"], ["", "aaa", "b"]),
    Case({"type": "string", "maxLength": 2}, ['"\\', "\n\t"], ['"\\"']),
]

_PATTERNS = [
    ("^[a-z]+$", ["abc", "z"], ["", "A", "ab1"]),
    ("^[A-Z]{2}[0-9]{4}$", ["AB1234"], ["A1234", "AB123", "ab1234"]),
    (r"^\d{3}-\d{4}$", ["555-1234"], ["5551234", "555-123"]),
    (r"^\w+$", ["a_1", "Word"], ["a b", ""]),
    (r"^\S+$", ["a-b"], ["a b", ""]),
    (r"^\s*$", ["", "  "], ["a"]),
    ("^(yes|no)$", ["yes", "no"], ["maybe", "yesno"]),
    ("^#[0-9a-fA-F]{6}$", ["#00FFaa"], ["#00FFa", "00FFaa"]),
    ("^#(?:[0-9a-f]{3}){1,2}$", ["#abc", "#abcdef"], ["#abcd", "#"]),
    ("a", ["a", "xay", "banana"], ["", "xyz"]),
    ("^a", ["a", "abc"], ["ba", ""]),
    ("a$", ["a", "cba"], ["ab", ""]),
    ("^$", [""], ["a", " "]),
    ("^a|b$", ["abc", "xb"], ["xbx", "ba "]),
    ("^(a|b)*c$", ["c", "abbac"], ["ab", "d"]),
    (r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$", ["me@example.org"], ["me@", "a@b"]),
    (r"^v\d+\.\d+\.\d+$", ["v1.20.3"], ["1.2.3", "v1.2"]),
    (r"^\+?[1-9]\d{1,14}$", ["+4912345", "123"], ["0123", "+"]),
    (r"^[a-z0-9]+(?:-[a-z0-9]+)*$", ["a-slug-2"], ["-a", "a--b", "A"]),
    (r"^(\d+)(px|em|%)$", ["10px", "5%"], ["px", "10"]),
    ("^.{3}$", ["abc", "é-😀"], ["ab", "abcd"]),
    ("^[ -~]*$", ["Plain ASCII!"], ["é", "\nx"]),
    ('^[^"]*$', ["no quotes"], ['a "b"']),
    (r"^\\d$", ["\\d"], ["1"]),
    (r"^/(?:[^/]+/)*$", ["/", "/a/b/"], ["/a", "a/"]),
    (r"^\{\}$", ["{}"], ["{", "()"]),
    (r"^[\[\]]+$", ["[]", "]["], ["a"]),
    (r"^a{2,}$", ["aa", "aaaa"], ["a", "b"]),
    (r"^a{0,2}$", ["", "aa"], ["aaa"]),
    (r"^(?:0|[1-9][0-9]*)$", ["0", "10"], ["01", ""]),
    (r"^[A-Za-z_][A-Za-z0-9_]*$", ["_name1"], ["1a", "a-b"]),
    ("^(a+)+$", ["a", "aaaa"], ["", "aab"]),
    ("^[éèê]+$", ["éê"], ["e"]),
    (r"^\u0041+$", ["AA"], ["B"]),
    (r"^[0-9]{4}-(0[1-9]|1[0-2])$", ["2024-02", "1999-12"], ["2024-13", "2024-00"]),
    (r"^([01]\d|2[0-3]):[0-5]\d$", ["00:00", "23:59"], ["24:00", "12:60"]),
    (r"^[A-HJ-NPR-Z0-9]{17}$", ["1HGCM82633A004352"], ["1HGCM82633A00435", "IHGCM82633A004352"]),
    (r"^\d{1,3}(,\d{3})*$", ["1", "1,234", "12,345,678"], ["1234,5", ","]),
    (r"^[^\\]*$", ['no "backslash"'], ["a\\b"]),
    (r"^[^\"\n]*$", ["a\\b"], ['"', "a\nb"]),
    ("^[^ -~]*$", ["é\n"], ['"', "\\", "a"]),
    ("^[^!-/]*$", ["a\\b"], ['"', "!"]),
    (r"^[\W]$", ['"', "\\", "-"], ["a"]),
    (r"^[[&~a]+$", ["[&&~~a"], ["b", "]"]),
    (r"^[^[&]$", ["a", '"'], ["[", "&"]),
    (r"^[^]$", ["a", "\n", '"'], ["", "ab"]),
    (r"^[\]^-]+$", ["]^-"], ["a", "\\"]),
    (r"^\[[a-z]\]$", ["[a]"], ["a", "[1]"]),
]

_FORMATS = [
    ("date", ["2024-02-29", "1999-12-31"], ["2024-13-01", "2024-1-1", "today"]),
    ("time", ["12:30:00Z", "23:59:59+01:00"], ["25:00:00Z", "12:30"]),
    ("date-time", ["2024-02-29T12:30:00Z", "2024-01-01T00:00:00.5+02:00"], ["2024-02-29", "2024-02-29 noon"]),
    ("duration", ["P1D", "PT2H30M", "P3Y6M4DT12H30M5S"], ["1 day", "P", "PT"]),
    ("email", ["me@example.org", "first.last+tag@sub.example.com"], ["me", "@example.org", "a b@c.de"]),
    ("hostname", ["example.org", "a-b.c"], ["-a.b", "a_b", ""]),
    ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "a.b.c.d"]),
    ("ipv6", ["::1", "2001:db8::8a2e:370:7334"], ["12345::", "1:2:3", "g::1"]),
    ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "123e4567-e89b-12d3-a456-42661417400g"]),
    ("uri", ["https://example.org/a?b=c#d", "mailto:me@example.org"], ["example", "", "//a"]),
]

# JSON Schema defines them, and llguidance cannot hold a text to them.
_REFUSED_FORMATS = ["idn-email", "iri", "json-pointer", "regex", "uri-reference", "ip-address"]

# JSON Schema does not define them, so no text is invalid by them.
_NOTES = ["semver", "int32", "double", "binary", "byte", "password", "cuid2", "emoji", "jwt", "x-own"]

_REFUSED_PATTERNS = [
    (r"^[\x00-z]$", "NUL"),
    ("^[]$", "matches nothing"),
    ("^[+--]$", "'--'"),
    ("^[a-z$", "closing bracket"),
    (r"^(?=.*\d).+$", "look-around"),
    (r"\bword\b", "edge of a word"),
    (r"^(.)\1$", "backreference"),
]

STRINGS = [
    *_LENGTHS,
    *(Case({"type": "string", "pattern": pattern}, valid, [*invalid, 5]) for pattern, valid, invalid in _PATTERNS),
    *(Case({"type": "string", "format": name}, valid, [*invalid, 5]) for name, valid, invalid in _FORMATS),
    *(Case({"type": "string", "format": name}, [], [5], f"'{name}'") for name in _REFUSED_FORMATS),
    *(Case({"type": "string", "format": name}, ["", "any text"], [5, None]) for name in _NOTES),
    Case({"type": "integer", "format": "int64"}, [5], ["5", 1.5]),
    Case({"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"}, ["a1"], ["A", ""]),
    *(Case({"type": "string", "pattern": pattern}, [], [5], word) for pattern, word in _REFUSED_PATTERNS),
    Case({"type": "string", "format": "date", "pattern": "^2024"}, ["2024-05-06"], ["2023-05-06", "2024"]),
    Case({"type": "string", "pattern": "^[a-z]*$", "minLength": 2}, ["ab"], ["a", "A1"]),
    Case({"type": ["string", "null"], "pattern": "^x+$"}, ["xx", None], ["y", ""]),
    Case({"pattern": "^x$"}, ["x", 5, None], ["y"]),
    Case({"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}, ["aGk="], [1]),
]
