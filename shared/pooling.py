"""What a request asks for whose answer is numbers: a vector of its prompt, or how well a text answers a query.

Such a request is computed as a prompt, without a generated token.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.bounds import MAX_DIMENSIONS, MAX_INSTRUCTION_CHARACTERS

Task = Literal["generate", "embed", "score"]


class Pooling(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of the hidden vectors of a prompt.

    Attributes:
        task: `embed` gives one vector, `score` the score of the request's text for `query`.
        dimensions: Keep this many numbers of the vector, the first ones; None keeps all.
        normalize: Scale the vector to length 1; None does what the model's files say.
        query: What the request's text is scored against; given with `score` and nothing else.
        instruction: What a relevant text is, for a generative reranker; None for its own words.
        raw: A score is the model's own number, without the function that its files end it with.
        input_type: What the text of an embedding is for: the model's own words for that stand before it.
    """

    task: Literal["embed", "score"] = "embed"
    dimensions: Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None = None
    normalize: bool | None = None
    query: str | None = None
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARACTERS)] | None = None
    raw: bool = False
    input_type: Annotated[str, Meta(max_length=64)] | None = None
