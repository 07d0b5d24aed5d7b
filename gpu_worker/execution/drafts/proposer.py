"""What a proposer is: it drafts the next tokens of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Values
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from gpu_worker.core.batch_sequences import BatchSequence
from gpu_worker.core.draft import Draft

if TYPE_CHECKING:
    # A simulated worker has no torch; nothing decodes these structs, so their annotations are never looked up.
    import torch  # noqa: TC004


class DraftRequest(Struct, frozen=True, gc=False):
    """Ask for a draft of at most `num_tokens` tokens behind `sequence.token_ids`, all of which are known.

    The sequence's block table covers as many tokens more.
    """

    sequence: BatchSequence
    num_tokens: int


class ComputedTokens(Struct, frozen=True, gc=False):
    """What a step, or several that followed one another, left behind for one sequence.

    Attributes:
        sequence: Its tokens up to `start` are what they were before the step; more may be known by now.
        start: Position of the first of the tokens.
        token_ids: Tokens whose KV is in the blocks now, accepted draft tokens included, and the one that follows them,
            which has none yet: sampled, or the prompt's next.
        hidden: `[len(token_ids) - 1, hidden_size]`, what the model made of them, normalised as for its head. Valid as
            long as it is kept.
    """

    sequence: BatchSequence
    start: int
    token_ids: tuple[int, ...]
    hidden: torch.Tensor


class Proposer(Protocol):
    """Drafts tokens. Called by the thread that executes steps; reads sequences, and writes nothing to them.

    Drafts are verified, so they may be anything: tokens that are too many are cut off, and so is everything from one on
    that is not in the vocabulary.
    """

    @property
    def wants_hidden(self) -> bool:
        """Return whether `observe` is to be called."""

    def propose(self, requests: Values[DraftRequest]) -> list[Draft]:
        """Return a draft for each request; an empty one if nothing can be predicted."""

    def observe(self, computed: Iterable[ComputedTokens]) -> None:
        """Receive the computed tokens of each sequence; a proposer may keep them until it is next asked for drafts.

        Called in the order of the steps, before `propose`, and now and then while nothing is drafted.
        """

    def forget(self, sequence: BatchSequence) -> None:
        """Drop the state of a sequence that has left the batch; it may come back later."""
