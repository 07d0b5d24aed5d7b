"""Whether a tokenizer and its model mean the same tokens, asked once at load.

Tokenizers to which a few more tokens were added than their model has embeddings are common (a padding token), and do no
harm as long as no prompt needs them. A prompt that does is refused when it comes, alone. A tokenizer whose vocabulary
itself is larger is another model's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError, ConfigError

_MAX_NAMED = 8

_log = logging.getLogger(__name__)


def check_vocabulary(tokenizer: ModelTokenizer, directory: ModelDirectory) -> None:
    """Warn about tokens that the model does not have.

    Raises:
        ConfigError: The tokenizer is another model's, or such a token is part of every prompt.
    """
    size, conversation = directory.vocab_size, _conversation(tokenizer)
    if tokenizer.num_own_ids > size:
        raise ConfigError(
            "HEADRACE_MODEL",
            f"{directory.path}: the tokenizer's vocabulary has {tokenizer.num_own_ids} ids and the model {size}; "
            "its weights and its tokenizer are not of the same model",
        )
    of_text, of_chat = _first_from(size, tokenizer.encode_text("a")), _first_from(size, conversation)
    found = [
        f"the token {token_id}, which {what}"
        for token_id, what in (
            (of_text, "the tokenizer adds to every text"),
            (of_chat, "the chat template adds to every conversation"),
        )
        if token_id is not None
    ]
    problem = f"{directory.path} has the ids 0 to {size - 1} only, and so lacks {' and '.join(found)}"
    if of_text is not None and (of_chat is not None or not conversation):
        raise ConfigError("HEADRACE_MODEL", f"{problem}; its weights and its tokenizer are not of the same model")
    if found:
        _log.warning("%s; such prompts are refused", problem)
    extra = tokenizer.tokens_from(size)
    if extra:
        named = ", ".join(f"{token!r} ({token_id})" for token, token_id in extra[:_MAX_NAMED])
        _log.warning(
            "the tokenizer has %d tokens that the model does not have, which knows the ids 0 to %d: %s; prompts with "
            "one of them are refused",
            len(extra),
            size - 1,
            named if len(extra) <= _MAX_NAMED else f"{named}, ...",
        )


def _first_from(size: int, token_ids: Iterable[int]) -> int | None:
    return min((token_id for token_id in token_ids if token_id >= size), default=None)


def _conversation(tokenizer: ModelTokenizer) -> set[int]:
    """Return the tokens of the shortest conversation; none when the template cannot do with it, or there is none."""
    try:
        return set(tokenizer.encode_chat([ChatMessage(role="user", content="a")]).token_ids)
    except BadRequestError:
        return set()
