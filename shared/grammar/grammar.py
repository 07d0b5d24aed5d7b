"""A grammar of the output, and why one cannot be obeyed."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_GRAMMAR_CHARACTERS
from shared.errors import BadRequestError, HeadraceError

GRAMMAR_PARAM = "grammar"
"""What a worker calls the field that holds the grammar: only the gateway knows in which one the client sent it."""


class Grammar(Struct, frozen=True, kw_only=True):
    """What the output must look like.

    `source` is a JSON schema, a regular expression, a grammar in Lark's syntax as llguidance reads it, or one in GBNF,
    the notation of llama.cpp.

    Only the worker, which has rendered the prompt, knows whether the prompt has opened the model's reasoning.
    `in_reasoning` is the body of the rule `start` for that case. It takes the place of the first line of `source`,
    which then is the rule `start` of a Lark grammar. Empty: the same grammar holds in both cases.

    `strict`: of a schema's `oneOf`, no two alternatives may be able to match at once; where that cannot be shown, the
    schema is refused. Without `strict` such a `oneOf` is read as `anyOf`.
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    source: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
    strict: bool = True
    in_reasoning: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""

    def begun_in_reasoning(self) -> Grammar:
        """Return the grammar of an answer to a prompt that has opened the reasoning."""
        if not self.in_reasoning:
            return self
        rest = self.source.partition("\n")[2]
        return Grammar(kind=self.kind, source=f"start: {self.in_reasoning}\n{rest}", strict=self.strict)


class GrammarError(BadRequestError):
    """A grammar is wrong, too large or not supported: the `reason`, and the `path` in a schema, as `.items`."""

    def __init__(self, reason: str, path: str = "", param: str | None = None) -> None:
        where = f"{param or ''}{path}".lstrip(".")
        super().__init__(f"{where}: {reason}" if where else reason, param, "invalid_grammar")
        self.path = path
        self.reason = reason


class LlguidanceMissingError(HeadraceError):
    """The package that reads grammars is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "This server cannot constrain its output: the Python package 'llguidance' is not installed. "
            "Its operator can install it with 'pip install llguidance'."
        )
