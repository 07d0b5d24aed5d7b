"""Whether a sequence failed for what its request asks for: the error then is the client's, and names the field."""

from __future__ import annotations

from gpu_worker.core.model_runner import InvalidLogitsError
from gpu_worker.core.step import SequenceEvent
from shared.errors import BadRequestError
from shared.grammar import GRAMMAR_PARAM, GrammarError
from shared.sampling import Sampling

_NO_TOKEN = str(InvalidLogitsError())


def refused_end(event: SequenceEvent, sampling: Sampling) -> BadRequestError | None:
    """Return why the request of a sequence that failed cannot be obeyed; None for a fault of this worker."""
    error = event.error or ""
    constraint = event.sequence.constraint
    if constraint is not None and constraint.is_at_fault and error == constraint.error:
        return GrammarError(f"{error}.", param=GRAMMAR_PARAM)
    return _contradiction(sampling) if error.endswith(_NO_TOKEN) else None


def _contradiction(sampling: Sampling) -> BadRequestError | None:
    """Return which parameters together leave no token. A single one leaves some wherever it is accepted.

    That logits are no numbers for one prompt alone looks the same, and is far less likely with such parameters.
    """
    forbidding = {
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "bad_words": bool(sampling.bad_words),
        "the grammar of the answer": sampling.grammar is not None,
    }
    names = [name for name, is_given in forbidding.items() if is_given]
    if len(names) < 2:
        return None
    message = f"{names[0]}: together with {' and '.join(names[1:])} it leaves no token here. Loosen one of them."
    return BadRequestError(message, names[0])
