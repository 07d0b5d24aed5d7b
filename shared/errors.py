"""The typed errors that more than one part raises or reports.

HeadraceError
├── ConfigError            a setting is wrong: names the variable and what is allowed
├── InvalidNameError       a model, tenant or request name cannot be used
├── BadRequestError        the client's input is wrong: names the field and the limit
│   └── PromptTooLongError the prompt does not fit the model
└── DependencyError        a server we need is missing, too old or refuses us
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(HeadraceError):
    """A setting cannot be used."""

    def __init__(self, variable: str, problem: str) -> None:
        """Say which variable is wrong, and what is allowed."""
        super().__init__(f"{variable}: {problem}")
        self.variable = variable
        self.problem = problem


class InvalidNameError(HeadraceError):
    """A name chosen by a user cannot be used."""

    def __init__(self, name: str, problem: str) -> None:
        """Say which name, shortened, and why."""
        super().__init__(f"name {name[:40]!r} {problem}")
        self.name = name
        self.problem = problem


class BadRequestError(HeadraceError):
    """The client's input is wrong in a way that it can mend."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        """Say what is wrong and allowed; `param` names the field, `code` is the reason for machines."""
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(BadRequestError):
    """Prompt and requested output do not fit into the model's context."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, param: str = "prompt") -> None:
        """Say both lengths in tokens."""
        super().__init__(
            f"The prompt has {num_prompt_tokens} tokens, but this model's context holds {max_model_len} "
            "including at least one generated token. Shorten the prompt.",
            param,
            "context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class DependencyError(HeadraceError):
    """A server we depend on is missing, too old, or refuses us; the message says what to do."""
