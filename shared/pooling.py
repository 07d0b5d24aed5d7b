"""Parameters of requests answered by numbers: a vector of the prompt, or a score of a text for a query.

Such a request is computed as a prompt, without a generated token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_DIMENSIONS, MAX_INSTRUCTION_CHARACTERS

Task = Literal["generate", "embed", "score"]


class Pooling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the hidden vectors of a prompt are pooled.

    Attributes:
        task: `embed` gives one vector, `score` the score of the request's text for `query`.
        dimensions: Keep this many numbers of the vector, the first ones; None keeps all.
        normalize: Scale the vector to length 1; None follows the model's files.
        query: The query that the request's text is scored against; only with `score`.
        instruction: Definition of a relevant text, for a generative reranker; None for the model's own.
        raw: A score is the model's own number, without the function that its files end it with.
        input_type: Purpose of the text of an embedding: the model's own prefix for it is prepended.
    """

    task: Literal["embed", "score"] = "embed"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    normalize: bool | None = None
    query: str | None = None
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARACTERS)] | None = None
    raw: bool = False
    input_type: Annotated[str, Meta(max_length=64)] | None = None
