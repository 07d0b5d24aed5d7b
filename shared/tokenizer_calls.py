"""What gateways ask of a model's tokenizer, over NATS request and reply: any worker of the model answers.

Carried like all wire messages (`shared.messages`).
"""

from __future__ import annotations

from msgspec import Struct

from shared.bounds import TenantName, TokenIds, UnixSeconds
from shared.conversation import ChatOptions, Messages
from shared.media import Media


class TokenizeCall(Struct, frozen=True, kw_only=True, tag="tokenize"):
    """Ask any worker of a model for the token ids of a text or a conversation.

    Attributes:
        tenant: Who asks; tenants take turns.
        deadline: Unix seconds after which the caller no longer waits.
        media: With `messages`: the images that they show, by index. Only their sizes are looked at.
    """

    text: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    chat: ChatOptions | None = None
    tenant: TenantName = "default"
    deadline: UnixSeconds | None = None
    media: Media = ()


class DetokenizeCall(Struct, frozen=True, kw_only=True, tag="detokenize"):
    """Ask any worker of a model for the text of token ids. `tenant` and `deadline` are as in `TokenizeCall`."""

    token_ids: TokenIds
    tenant: TenantName = "default"
    deadline: UnixSeconds | None = None


class TokenizerReply(Struct, frozen=True, kw_only=True, tag="tokenizer_reply"):
    """Answer to a tokenizer call.

    Attributes:
        error: Why there are no tokens: the input was bad, or the tokenizer is busy.
        code: The reason in one word, as in `BadRequestError`; workers of earlier versions leave it out.
        param: The field at fault.
        retry_after_s: Of a busy tokenizer: seconds until it can be expected to take more.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    max_model_len: int = 0
    error: str | None = None
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


TokenizerCall = TokenizeCall | DetokenizeCall
