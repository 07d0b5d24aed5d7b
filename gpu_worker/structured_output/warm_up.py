"""Works out masks before anybody waits for them.

The first mask of a state of the grammar takes up to hundreds of times as long as the next, because llguidance finds the
states of its lexer as it meets them. All copies of a matcher share what was found. Walks through the grammar find most.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NUM_WALKS = 3
_MAX_WALK_TOKENS = 64
_MAX_WARM_UP_S = 0.02
_CLOSING = '"}],'
"""What ends a part of a JSON document. Without a preference for it a walk would stay in the first string."""


def warm_up(matcher: LLMatcher, tokenizer: LLTokenizer) -> LLMatcher:
    """Walk through the grammar of a matcher for some milliseconds. The matcher itself takes no token.

    The walks are always the same, so that what one worker can follow, all can.

    Returns:
        The matcher that walked last, or the first that had an error.
    """
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.uint32)
    closing = {tokens[0] for character in _CLOSING if len(tokens := tokenizer.tokenize_str(character)) == 1}
    deadline = time.monotonic() + _MAX_WARM_UP_S
    for number in range(_NUM_WALKS):
        walker = matcher.deep_copy()
        _walk(walker, mask, closing, random.Random(number), deadline)
        if walker.is_error():
            break
    return walker


def _walk(
    walker: LLMatcher, mask: npt.NDArray[np.uint32], closing: set[int], generator: random.Random, deadline: float
) -> None:
    for count in range(_MAX_WALK_TOKENS):
        if walker.is_stopped() or (count and time.monotonic() > deadline):
            return
        walker.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if walker.is_error():
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ends = [token_id for token_id in sorted(closing) if mask[token_id // 32] >> token_id % 32 & 1]
        if not len(allowed):
            return
        takes_end = ends and generator.random() < 0.5
        token_id = generator.choice(ends) if takes_end else int(allowed[generator.randrange(len(allowed))])
        walker.try_consume_tokens([token_id])
