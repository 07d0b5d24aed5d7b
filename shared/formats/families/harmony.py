"""gpt-oss: messages in channels. Analysis is reasoning, commentary to a function is a call, the rest is content."""

from __future__ import annotations

from shared.formats.chat_format import ChatFormat
from shared.formats.description import CallForm, ThinkTags
from shared.formats.parts.fixed import Name, Skipped
from shared.formats.parts.json_arguments import JsonArguments

_FINAL = "<|channel|>final<|message|>"
_TURN = "<|start|>assistant"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")

_PARTS = (Name(), Skipped(" <|constrain|>json", "<|message|>"), JsonArguments())
_RECIPIENTS = ("<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to=")


def _calls(namespace: str) -> CallForm:
    """Return how functions of a namespace are called."""
    return CallForm(
        opens=tuple(f"{each}{namespace}" for each in _RECIPIENTS),
        # The prompt ends with the beginning of the turn, and the recipient may stand before the channel.
        bare_opens=(f"to={namespace}",),
        parts=_PARTS,
        closes=("<|call|>", "<|end|>"),
        is_closed_by_end=True,
    )


HARMONY = ChatFormat(
    name="harmony",
    marks=(("<|channel|>", "<|message|>"),),
    reasoning=ThinkTags(
        opens=("<|channel|>analysis<|message|>",),
        closes=("<|end|>", "<|return|>", _FINAL, "<|channel|>commentary<|message|>"),
        behind=_TURN,
        is_anywhere=True,
    ),
    # The tools that the client offers are functions. Others are those that the model was trained with, as its browser.
    calls=(_calls("functions."), _calls("")),
    content_open=_FINAL,
    dropped=(
        _FINAL,
        "<|channel|>commentary<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        _TURN,
        *_ENDS,
    ),
    tokens=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
    keeps_special_tokens=True,
)
