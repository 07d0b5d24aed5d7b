"""From the bodies of embeddings, reranking and scores to their sequences. Each function may raise an `ApiError` 400."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.api.schemas.checks import checked_model, estimate_tokens, invalid_value, missing_parameter, require_text
from gateway.api.schemas.decoding import BodyReader
from gateway.api.schemas.names import STRICT, BodyRules
from gateway.api.schemas.parameters import counted
from gateway.api.schemas.parsing import prompts_of
from gateway.generation import Generation, Prompt
from gateway.pooling.bodies import POOLED_NAMES, EmbeddingsBody, Pooled, PooledBody, RerankBody, ScoreBody, Texts
from shared.bounds import MAX_INPUTS
from shared.pooling import Pooling
from shared.sampling import Sampling

_NOTHING = Sampling(max_tokens=0)

_embeddings_reader = BodyReader(POOLED_NAMES, Pooled.EMBEDDINGS, EmbeddingsBody)
_rerank_reader = BodyReader(POOLED_NAMES, Pooled.RERANK, RerankBody)
_score_reader = BodyReader(POOLED_NAMES, Pooled.SCORE, ScoreBody)


class EmbeddingsRequest(Generation, frozen=True):
    """What a body of embeddings asks for; vectors are written in base64 or as lists of numbers."""

    is_base64: bool = False


class RerankRequest(Generation, frozen=True):
    """What a body of reranking asks for.

    Attributes:
        top_n: Documents in the answer at most; None for all.
        returns_documents: The answer repeats their texts.
        is_plain_list: The answer is a list of ranks alone, as TEI's is.
    """

    top_n: int | None = None
    returns_documents: bool = True
    is_plain_list: bool = False


def parse_embeddings(body: bytes, rules: BodyRules = STRICT) -> EmbeddingsRequest:
    """Turn the body of embeddings into sequences to compute; `rules` as in `BodyReader.read`."""
    parsed = _embeddings_reader.read(body, rules)
    return EmbeddingsRequest(
        kind="embedding",
        pooling=Pooling(dimensions=parsed.dimensions, normalize=parsed.normalize, input_type=_input_type(parsed)),
        is_base64=parsed.encoding_format == "base64",
        **_common(parsed, _inputs(parsed.input)),
    )


def parse_rerank(body: bytes, rules: BodyRules = STRICT) -> RerankRequest:
    """Turn the body of reranking into sequences to compute; `rules` as in `BodyReader.read`."""
    parsed = _rerank_reader.read(body, rules)
    query = _required_text("query", parsed.query)
    is_teis = parsed.texts is not None
    name, texts = ("texts", parsed.texts or []) if is_teis else ("documents", _documents(parsed))
    _check_form(parsed, is_teis)
    return RerankRequest(
        kind="score",
        pooling=msgspec.structs.replace(_score(parsed.instruction), raw=bool(parsed.raw_scores)),
        top_n=parsed.top_n or None,
        returns_documents=bool(parsed.return_text) if is_teis else parsed.return_documents is not False,
        is_plain_list=is_teis,
        **_common(parsed, tuple(_prompt(text, f"{name}.[{i}]", query) for i, text in enumerate(texts))),
    )


def _documents(body: RerankBody) -> list[str]:
    if body.documents is None:
        raise missing_parameter("documents")
    return [document if isinstance(document, str) else document.text for document in body.documents]


def _check_form(body: RerankBody, is_teis: bool) -> None:
    other = ("documents", "return_documents", "top_n") if is_teis else ("raw_scores", "return_text")
    for name in other:
        if getattr(body, name) not in (None, False):
            own, instead = ("texts", "documents") if is_teis else ("documents", "texts")
            raise invalid_value(name, f"'{name}' goes with '{instead}', and the body has '{own}'. Use one form.")


def _input_type(body: EmbeddingsBody) -> str | None:
    if body.input_type is None:
        return None
    first = body.input if isinstance(body.input, str) else body.input[0]
    if not isinstance(first, str):
        raise invalid_value("input_type", "'input_type' goes with texts: token ids are taken as they are.")
    return require_text("input_type", body.input_type)


def parse_score(body: bytes, rules: BodyRules = STRICT) -> Generation:
    """Turn the body of scores into sequences to compute; `rules` as in `BodyReader.read`."""
    parsed = _score_reader.read(body, rules)
    queries, texts = _as_list(parsed.text_1), _as_list(parsed.text_2)
    if len(queries) not in (1, len(texts)):
        message = f"'text_1' has {len(queries)} texts and 'text_2' {len(texts)}; give one query, or one for each text."
        raise invalid_value("text_1", message)
    for i, query in enumerate(queries):
        _required_text(f"text_1.[{i}]", query)
    pairs = zip(queries * (len(texts) // len(queries)), texts, strict=True)
    return Generation(
        kind="score",
        pooling=_score(parsed.instruction),
        **_common(parsed, tuple(_prompt(text, f"text_2.[{i}]", query) for i, (query, text) in enumerate(pairs))),
    )


def _common(body: PooledBody, prompts: tuple[Prompt, ...]) -> dict[str, Any]:
    """Return what all three ask for alike. The same texts have the same numbers, so that answers can be kept."""
    if isinstance(body.user, str):
        require_text("user", body.user)
    limit = body.truncate_prompt_tokens
    if limit is None and body.truncate in (True, "END"):
        # As many as the model reads.
        limit = -1
    return {
        "prompts": counted(prompts, limit),
        "truncate_prompt_tokens": limit,
        "model": checked_model(body.model),
        "n": 1,
        "sampling": _NOTHING,
        "deterministic": True,
        "priority": body.priority or 0,
        "timeout_s": body.timeout,
    }


def _inputs(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, list) and len(given) > MAX_INPUTS and not isinstance(given[0], int):
        raise invalid_value("input", f"'input' has {len(given)} entries; at most {MAX_INPUTS} are allowed.")
    return prompts_of(given, "input", _prompt)


def _prompt(text: str, where: str, query: str | None = None) -> Prompt:
    tokens = estimate_tokens(text) + (0 if query is None else estimate_tokens(query))
    return Prompt(estimated_tokens=tokens, text=_required_text(where, text), query=query)


def _required_text(where: str, text: str) -> str:
    if not text:
        raise invalid_value(where, f"'{where}' must not be empty.")
    return text


def _score(instruction: str | None) -> Pooling:
    if instruction is not None:
        require_text("instruction", instruction)
    return Pooling(task="score", instruction=instruction)


def _as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
