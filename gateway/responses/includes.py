"""What `include` may name: more output than a response has by itself."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.api.schemas.refusals import invalid_value

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# The others are about tools that there are not, so there is nothing that they could include.
_INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED_REASONING,
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)


def check_includes(values: Iterable[str]) -> None:
    """Refuse what nothing is known of.

    Raises:
        ApiError: 400; it names the value.
    """
    for value in values:
        if value not in _INCLUDABLE:
            raise invalid_value("include", f"'include' has '{value[:64]}'; allowed are {', '.join(_INCLUDABLE)}.")
