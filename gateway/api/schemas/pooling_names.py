"""What becomes of the parameters of embeddings, reranking and scores, whose structs stand in `gateway/pooling`."""

from __future__ import annotations

from gateway.api.schemas.row import Kind, Row, Use

_EMBEDDINGS = (Kind.EMBEDDINGS,)
_RERANK = (Kind.RERANK,)
_SCORE = (Kind.SCORE,)
_PAIRS = (Kind.RERANK, Kind.SCORE)
_ALL = (*_EMBEDDINGS, *_PAIRS)


def _ignored(name: str, kinds: tuple[Kind, ...], note: str, example: object) -> Row:
    return Row(name, kinds, note, example, use=Use.IGNORED)


def _refused(
    name: str, kinds: tuple[Kind, ...], instead: str, example: object, without_effect: tuple[object, ...] = ()
) -> Row:
    return Row(name, kinds, instead, example, without_effect, use=Use.REFUSED)


_SHORTEN = "Shorten the texts."

POOLING_NAMES = (
    Row("model", _ALL, "The model to use."),
    Row("input", _EMBEDDINGS, "A text, a list of texts, a list of token ids, or a list of such lists."),
    Row("encoding_format", _EMBEDDINGS, "`float` for lists of numbers, `base64` for their 32-bit form.", "base64"),
    Row("dimensions", _EMBEDDINGS, "Keep so many numbers of each vector, the first ones.", 8),
    Row("normalize", _EMBEDDINGS, "Scale vectors to length 1 or not, whatever the model's files say.", False),
    Row("input_type", _EMBEDDINGS, "What the texts are for: the model's own words for that come before them.", "query"),
    Row("query", _RERANK, "What the documents are ranked for."),
    Row("documents", _RERANK, "Texts, or objects with a `text`.", holds=Kind.DOCUMENT),
    Row("texts", _RERANK, "TEI's form: texts to rank. The answer is a list of `index` and `score`."),
    Row("raw_scores", _RERANK, "With `texts`: the model's own numbers, without the sigmoid."),
    Row("return_text", _RERANK, "With `texts`: repeat them in the answer."),
    Row("top_n", _RERANK, "Answer with so many of the best documents; 0 means all.", 1),
    Row("return_documents", _RERANK, "Repeat the texts in the answer, which is so when left out.", False),
    Row("text", (Kind.DOCUMENT,), "The document's text."),
    Row("text_1", _SCORE, "A text, or a list of texts: the queries."),
    Row("text_2", _SCORE, "A text, or a list of texts, each of which is scored for its query."),
    Row("instruction", _PAIRS, "What makes a text relevant, for a model that takes one.", "Find code."),
    Row("user", _ALL, "The end user, a name or an object; checked and without influence.", "someone"),
    Row(
        "priority",
        _ALL,
        "Larger runs earlier among the requests that wait; a key allows at most its `max_priority`, 0 by default.",
        5,
    ),
    Row("timeout", _ALL, "Seconds until the answer must be complete.", 60.0),
    _ignored("request_id", _ALL, "Send the header `x-request-id`: it names the request everywhere.", "mine"),
    Row(
        "truncate_prompt_tokens",
        _ALL,
        "Use only so many of a text's first tokens; -1 for as many as the model reads. Of a pair the longer is cut.",
        5,
    ),
    Row("truncate", _ALL, "`true` or `END` is -1 of `truncate_prompt_tokens`, `false` or `NONE` cuts nothing.", True),
    _ignored("mm_processor_kwargs", _ALL, "For images and sounds, which are not read.", {"fps": 1}),
    _refused("stream", _ALL, "Leave it out: the answer is sent whole.", True, (False,)),
    _refused("truncation_direction", _RERANK, "Texts are cut at their end.", "Left", ("Right",)),
    _refused("truncation_side", _ALL, "Texts are cut at their end.", "left", ("right",)),
    _refused("add_special_tokens", _ALL, "Send token ids to choose the tokens yourself.", False, (True,)),
    _refused("messages", _EMBEDDINGS, "Send the text as 'input'.", [{"role": "user", "content": "a"}]),
    _refused("embed_dtype", _EMBEDDINGS, "Numbers have 32 bits.", "float16", ("float32",)),
    _refused("endianness", _EMBEDDINGS, "Numbers begin with their little end.", "big", ("little", "native")),
    _refused("use_activation", _PAIRS, "Scores end as the model's files say.", False, (True,)),
    _refused("max_tokens_per_doc", _RERANK, _SHORTEN, 5),
    _refused("max_chunks_per_doc", _RERANK, _SHORTEN, 5),
    _refused("rank_fields", _RERANK, "Join the fields into one text.", ["title"]),
    _refused("queries", _SCORE, "Use 'text_1'.", ["a"]),
    _refused("documents", _SCORE, "Use 'text_2'.", ["a"]),
)
