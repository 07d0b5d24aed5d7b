"""Paths of other servers' APIs that are not served here, and what stands for them: the 404 says so."""

from __future__ import annotations

from types import MappingProxyType

_JOBS = (
    "Files of the Batch API are computed by `headrace publish`, and responses with 'background' outlive their client."
)
_RESPONSES = "Go on from a response with 'previous_response_id' of /v1/responses, or send the whole conversation."
_TEXT_ONLY = "This server reads and writes text only."
_GENERATE = "Use /v1/chat/completions or /v1/completions."
_STATE = "How the server does is told by the metrics, at the operator's port."
_OLLAMA = (
    "Ollama's own API is not served: choose an OpenAI-compatible server in the client, with a base URL ending in /v1."
)

# By the first part of the path, or the first two, after `/v1` where it begins so.
_INSTEAD = MappingProxyType(
    {
        "": "The API begins at /v1: GET /v1/models lists the models, POST /v1/chat/completions asks one.",
        **dict.fromkeys(("files", "batches", "uploads", "messages/batches"), _JOBS),
        **dict.fromkeys(("conversations", "assistants", "threads"), _RESPONSES),
        **dict.fromkeys(("images", "audio", "videos"), _TEXT_ONLY),
        **dict.fromkeys(("completion", "generate", "generate_stream", "invocations", "engines"), _GENERATE),
        **dict.fromkeys(("v1beta", "openai"), "Use /v1/chat/completions or /v1/responses."),
        **dict.fromkeys(("embed", "embedding", "encode", "pooling", "v2/embed"), "Use /v1/embeddings."),
        **dict.fromkeys(("metrics", "slots", "load", "server_info", "get_server_info", "get_model_info"), _STATE),
        "api": _OLLAMA,
        "classify": "Use /v1/score.",
        "complete": "Use /v1/messages.",
        "fine_tuning": "Models are trained elsewhere, and served from their files.",
        "moderations": "Ask a model, with a schema of the verdict, at /v1/chat/completions.",
        "realtime": "Use 'stream' of /v1/responses or /v1/chat/completions.",
        "reranking": "Use /v1/rerank.",
        "v2/chat": _GENERATE,
        "vector_stores": "Make vectors at /v1/embeddings, and keep them in a store of your own.",
    }
)


def instead_of(path: str) -> str | None:
    """Return what stands for a path that is not served, if it is one that clients of other servers know."""
    parts = path.strip("/").split("/", 3)
    if parts[0] == "v1":
        parts = parts[1:] or [""]
    return _INSTEAD.get("/".join(parts[:2])) or _INSTEAD.get(parts[0])
