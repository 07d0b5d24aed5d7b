"""The bodies of embeddings, reranking and scores: served parameters, and those that are ignored or refused."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.bodies import OPENAI_NAMES, TokenIds
from gateway.api.schemas.checks import ModelName
from gateway.api.schemas.names import Kind, ParameterTable, described, ignored, refused
from gateway.api.schemas.parameters import EndUser
from gateway.api.schemas.shared_fields import AskedPriority, AskedTimeout
from shared.bounds import (
    MAX_DIMENSIONS,
    MAX_INPUTS,
    MAX_INSTRUCTION_CHARACTERS,
    MAX_PROMPT_TOKENS,
    NumTruncatedTokens,
    TokenId,
)

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
AskedInstruction = Annotated[
    Annotated[str, Meta(min_length=1, max_length=MAX_INSTRUCTION_CHARACTERS)] | None,
    described("What makes a text relevant, for a model that takes one.", "Find code."),
]
InputType = Annotated[str, Meta(min_length=1, max_length=64)]


class PooledBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of all three bodies. None always means: left out."""

    model: Annotated[ModelName, described("The model to use.")]
    user: Annotated[
        EndUser | None, described("The end user, a name or an object; checked and without influence.", "someone")
    ] = None
    priority: AskedPriority = None
    timeout: AskedTimeout = None
    truncate_prompt_tokens: Annotated[
        NumTruncatedTokens | None,
        described(
            "Use only this many of a text's first tokens; -1 for as many as the model reads. Of a pair the longer is "
            "cut.",
            5,
        ),
    ] = None
    truncate: Annotated[
        bool | Literal["NONE", "END"] | None,
        described("`true` or `END` is -1 of `truncate_prompt_tokens`, `false` or `NONE` cuts nothing.", True),
    ] = None


class EmbeddingsBody(PooledBody, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    input: Annotated[
        str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)],
        described("A text, a list of texts, a list of token ids, or a list of such lists."),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        described("`float` for lists of numbers, `base64` for their 32-bit form.", "base64"),
    ] = None
    dimensions: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DIMENSIONS)] | None,
        described("Keep this many numbers of each vector, the first ones.", 8),
    ] = None
    normalize: Annotated[
        bool | None, described("Scale vectors to length 1 or not, whatever the model's files say.", False)
    ] = None
    input_type: Annotated[
        InputType | None, described("What the texts are for: the model's own words for that come before them.", "query")
    ] = None


class Document(Struct, forbid_unknown_fields=True):
    """A document that is an object."""

    text: Annotated[str, described("The document's text.")]


class RerankBody(PooledBody, kw_only=True):
    """The body of `POST /v1/rerank`: with `documents` as Jina and Cohere write it, with `texts` as TEI does."""

    query: Annotated[str, described("What the documents are ranked for.")]
    documents: Annotated[
        Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)] | None,
        described("Texts, or objects with a `text`."),
    ] = None
    top_n: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_INPUTS)] | None,
        described("Answer with this many of the best documents; 0 means all.", 1),
    ] = None
    return_documents: Annotated[
        bool | None, described("Repeat the texts in the answer, which is so when left out.", False)
    ] = None
    instruction: AskedInstruction = None
    texts: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] | None,
        described("TEI's form: texts to rank. The answer is a list of `index` and `score`."),
    ] = None
    raw_scores: Annotated[bool | None, described("With `texts`: the model's own numbers, without the sigmoid.")] = None
    return_text: Annotated[bool | None, described("With `texts`: repeat them in the answer.")] = None


class ScoreBody(PooledBody, kw_only=True):
    """The body of `POST /v1/score`."""

    text_1: Annotated[Texts, described("A text, or a list of texts: the queries.")]
    text_2: Annotated[Texts, described("A text, or a list of texts, each of which is scored for its query.")]
    instruction: AskedInstruction = None


class Pooled(Kind):
    """An object in a body of this API."""

    EMBEDDINGS = "POST /v1/embeddings"
    RERANK = "POST /v1/rerank"
    SCORE = "POST /v1/score"
    DOCUMENT = "A document of /v1/rerank"


_PAIRS = (Pooled.RERANK, Pooled.SCORE)
_ALL = (Pooled.EMBEDDINGS, *_PAIRS)
_SHORTEN = "Shorten the texts."
_ROWS = (
    ignored("request_id", "Send the header `x-request-id`: it names the request everywhere.", "mine", *_ALL),
    ignored("mm_processor_kwargs", "For images and sounds, which are not read.", {"fps": 1}, *_ALL),
    refused("stream", "Leave it out: the answer is sent whole.", True, (False,), *_ALL),
    refused("truncation_direction", "Texts are cut at their end.", "Left", ("Right",), Pooled.RERANK),
    refused("truncation_side", "Texts are cut at their end.", "left", ("right",), *_ALL),
    refused("add_special_tokens", "Send token ids to choose the tokens yourself.", False, (True,), *_ALL),
    refused("messages", "Send the text as 'input'.", [{"role": "user", "content": "a"}], (), Pooled.EMBEDDINGS),
    refused("embed_dtype", "Numbers have 32 bits.", "float16", ("float32",), Pooled.EMBEDDINGS),
    refused("endianness", "Numbers begin with their little end.", "big", ("little", "native"), Pooled.EMBEDDINGS),
    refused("use_activation", "Scores end as the model's files say.", False, (True,), *_PAIRS),
    refused("max_tokens_per_doc", _SHORTEN, 5, (), Pooled.RERANK),
    refused("max_chunks_per_doc", _SHORTEN, 5, (), Pooled.RERANK),
    refused("rank_fields", "Join the fields into one text.", ["title"], (), Pooled.RERANK),
    refused("queries", "Use 'text_1'.", ["a"], (), Pooled.SCORE),
    refused("documents", "Use 'text_2'.", ["a"], (), Pooled.SCORE),
)

POOLED_NAMES = ParameterTable(
    {
        Pooled.EMBEDDINGS: EmbeddingsBody,
        Pooled.RERANK: RerankBody,
        Pooled.SCORE: ScoreBody,
        Pooled.DOCUMENT: Document,
    },
    _ROWS,
    beside=OPENAI_NAMES,
)
