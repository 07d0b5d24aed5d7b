"""`best_of`: more answers to a prompt are generated than are returned."""

from __future__ import annotations

import msgspec

from gateway.api.schemas.refusals import invalid_value
from gateway.generation import Generation, Ranking
from shared.bounds import MAX_SEQUENCES


def with_best_of(generation: Generation, best_of: int | None) -> Generation:
    """Return a generation that makes `best_of` sequences of each prompt, of which the `n` likeliest are returned.

    With temperature 0 all sequences of a prompt are equal: any `n` are the best, and no more are generated.

    Raises:
        ApiError: 400; there are fewer than are to be returned, they are too many, or the answer is to be streamed.
    """
    n = generation.n
    if best_of is None or best_of == n:
        return generation
    if best_of < n:
        message = f"'best_of' is {best_of} and 'n' is {n}: 'best_of' must be at least 'n'. Raise it, or lower 'n'."
        raise invalid_value("best_of", message)
    if generation.stream:
        reason = "Which answers are the best is known when all are complete. Leave 'stream' or 'best_of' out."
        raise invalid_value("best_of", f"Results cannot be streamed when 'best_of' is greater than 'n'. {reason}")
    num_sequences = len(generation.prompts) * best_of
    if num_sequences > MAX_SEQUENCES:
        message = f"'best_of' times the number of prompts is {num_sequences}; at most {MAX_SEQUENCES} are allowed."
        raise invalid_value("best_of", message)
    sampling = generation.sampling
    if sampling.temperature == 0:
        return generation
    ranking = Ranking(num_returned=n, shows_logprobs=sampling.logprobs is not None)
    sampling = msgspec.structs.replace(sampling, logprobs=sampling.logprobs or 0)
    return msgspec.structs.replace(generation, n=best_of, sampling=sampling, ranking=ranking)


def without_ranking(generation: Generation) -> Generation:
    """Return a generation that makes only the sequences that are returned: all of a prompt are equal.

    For a temperature of 0 that its model advises, and that is not known yet when its body is read.
    """
    ranking = generation.ranking
    if ranking is None:
        return generation
    sampling = generation.sampling
    if not ranking.shows_logprobs:
        sampling = msgspec.structs.replace(sampling, logprobs=None)
    return msgspec.structs.replace(generation, n=ranking.num_returned, sampling=sampling, ranking=None)
