"""Whether a tokenizer and its model mean the same tokens, asked once at load.

Tokenizers with a few more entries than their model has embeddings are common (a padding token added later), and do no
harm as long as no prompt needs them. A prompt that does is refused when it comes, alone.
"""

from __future__ import annotations

import logging

from gpu_worker.text.model_directory import ModelDirectory
from gpu_worker.text.tokenizer import ModelTokenizer
from shared.conversation import ChatMessage
from shared.errors import BadRequestError, ConfigError

_MAX_NAMED = 8

_log = logging.getLogger(__name__)


def check_vocabulary(tokenizer: ModelTokenizer, directory: ModelDirectory) -> None:
    """Warn about tokens that the model does not have.

    Raises:
        ConfigError: One of them ends every answer or is part of every prompt, so no request could be served.
    """
    size = directory.vocab_size
    needed = {"the end-of-sequence token": set(directory.eos_token_ids)}
    if directory.bos_token_id is not None:
        needed["the begin-of-sequence token"] = {directory.bos_token_id}
    needed["a token that the tokenizer adds to every prompt"] = set(tokenizer.encode_text("a"))
    needed["a token that the chat template adds to every conversation"] = _conversation(tokenizer)
    for what, token_ids in needed.items():
        beyond = sorted(token_id for token_id in token_ids if not 0 <= token_id < size)
        if beyond:
            problem = f"{directory.path}: {what} has the id {beyond[0]}, but the model has the ids 0 to {size - 1} only"
            raise ConfigError("HEADRACE_MODEL", problem)
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


def _conversation(tokenizer: ModelTokenizer) -> set[int]:
    """Return the tokens of the shortest conversation; none when the template cannot do with it, or there is none."""
    try:
        return set(tokenizer.encode_chat([ChatMessage(role="user", content="a")]).token_ids)
    except BadRequestError:
        return set()
