"""What gateways and workers understand beyond the first version of the wire, as their heartbeats say it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

POOLING_OPTIONS, TEXT_PARTS, BACKGROUND = "pooling_options", "text_parts", "background"
LOGPROB_TOKENS, ADAPTERS, IMAGES, WATERMARK = "logprob_token_ids", "adapters", "images", "watermark"
CACHE_HINTS, ADAPTER_STORE, KV_BUDGET, KV_SCORES = "cache_hints", "adapter_store", "kv_budget", "kv_scores"
# What a worker of this version understands beyond the first: queues, orders, and fields of requests. Besides, `IMAGES`
# if its model sees, `KV_BUDGET` if it can evict, `KV_SCORES` if it can by attention too, and `ADAPTER_STORE` if it
# loads adapters by digest.
_OF_REQUESTS = (POOLING_OPTIONS, TEXT_PARTS, LOGPROB_TOKENS, WATERMARK, CACHE_HINTS)
FEATURES = ("resumed", "drain", BACKGROUND, ADAPTERS, "cordon", "role", *_OF_REQUESTS)
BOUND_SEALS, SHORT_PIECES, JOURNAL, READY = "bound_seals", "short_pieces", "journal", "ready"
# The same of a gateway: seals bound to model and kind, short pieces of background responses, journals of streams, the
# queue `ready`.
GATEWAY_FEATURES = (BOUND_SEALS, SHORT_PIECES, JOURNAL, READY)


def own_version() -> str:
    """Return the version of Headrace that is installed; "unknown" where it runs without being installed."""
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"
