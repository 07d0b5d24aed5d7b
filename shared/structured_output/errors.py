"""Why a grammar of the output cannot be obeyed."""

from __future__ import annotations

from shared.errors import BadRequestError, HeadraceError

GRAMMAR_PARAM = "grammar"
"""What a worker calls the field that holds the grammar: only the gateway knows in which one the client sent it."""


class GrammarError(BadRequestError):
    """A grammar is wrong, too large, or asks for what is not supported.

    Attributes:
        path: Where in a JSON schema, as `.properties.name`; empty for the whole.
        reason: What is wrong, without the place.
    """

    def __init__(self, reason: str, path: str = "", param: str | None = None) -> None:
        """Say what is wrong and where; `param` is the field of the request that holds the grammar."""
        where = f"{param or ''}{path}".lstrip(".")
        super().__init__(f"{where}: {reason}" if where else reason, param, "invalid_grammar")
        self.path = path
        self.reason = reason


class LlguidanceMissingError(HeadraceError):
    """The package that reads grammars is not installed."""

    def __init__(self) -> None:
        """Say what to install."""
        super().__init__(
            "This server cannot constrain its output: the Python package 'llguidance' is not installed. "
            "Its operator can install it with 'pip install llguidance'."
        )
