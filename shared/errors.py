"""The typed errors that more than one part raises or reports.

HeadraceError
├── ConfigError            a setting is wrong: names the variable and the allowed values
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
        super().__init__(f"{variable}: {problem}")
        self.variable = variable
        self.problem = problem


class InvalidNameError(HeadraceError):
    """A name chosen by a user cannot be used."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"name {name[:40]!r} {problem}")
        self.name = name
        self.problem = problem


class BadRequestError(HeadraceError):
    """The client's input is wrong in a way that it can mend."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def prompt_too_long(length: int, limit: int, unit: str, max_model_len: int) -> str:
    """Return the message for a prompt that does not fit, whose length and limit are in `unit` (tokens, characters).

    LiteLLM and LangChain tell this error from others by its words: "this model's maximum context length is", "prompt is
    too long". Without them their fallbacks to a model with a longer context do not begin.
    """
    return (
        f"This model's maximum context length is {max_model_len} tokens. "
        f"However, the prompt is too long: it has {length} {unit}, and at most {limit} can fit. Shorten the prompt."
    )


class PromptTooLongError(BadRequestError):
    """Prompt and requested output do not fit into the model's context."""

    def __init__(
        self, num_prompt_tokens: int, max_model_len: int, param: str = "prompt", *, num_generated: int = 1
    ) -> None:
        message = prompt_too_long(num_prompt_tokens, max_model_len - num_generated, "tokens", max_model_len)
        super().__init__(message, param, "context_length_exceeded")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.num_generated = num_generated

    def naming(self, param: str) -> PromptTooLongError:
        """Return the same error about a field of this name."""
        return PromptTooLongError(self.num_prompt_tokens, self.max_model_len, param, num_generated=self.num_generated)


class DependencyError(HeadraceError):
    """A server we depend on is missing, too old, or refuses us; the message says what to do."""
