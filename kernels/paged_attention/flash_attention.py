"""FlashAttention-3 over the same paged cache, where its package is installed on a Hopper GPU.

It takes what it can: queries and caches in 16 bits, without trees of drafts, sinks or chunks. The Triton kernels serve
all else, and are what it is compared with. Nothing of it has been measured by this project yet.
Source: Shah et al., arXiv 2407.08608; `flash_attn_with_kvcache` in `hopper/` of github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable

import torch

MODULE = "flash_attn_interface"
MAX_HEAD_DIM = 256
_CAPABILITY = 9
_DTYPES = (torch.bfloat16, torch.float16)
AttendWithCache = Callable[..., torch.Tensor]


@functools.cache
def find_flash_attention(device: torch.device) -> AttendWithCache | None:
    """Return the function of the package, looked for once a process, or None where it is absent or of no use."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _CAPABILITY:
        return None
    if importlib.util.find_spec(MODULE) is None:
        return None
    try:
        attend: AttendWithCache = importlib.import_module(MODULE).flash_attn_with_kvcache
    except (ImportError, AttributeError) as error:
        message = f"{MODULE} is installed but cannot be used ({error}); attention uses our own kernels"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return attend


def can_run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_scales: torch.Tensor | None,
    tree_masks: torch.Tensor | None,
) -> bool:
    """Return True for tensors that FlashAttention-3 takes; what it makes of other caches is not known here."""
    head_dim = query.shape[2]
    is_supported = query.dtype in _DTYPES and key_cache.dtype == query.dtype
    is_supported = is_supported and key_cache.shape == value_cache.shape
    is_supported = is_supported and key_cache.is_contiguous() and value_cache.is_contiguous()
    return is_supported and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0 and kv_scales is None and tree_masks is None


def paged_attention_flash(
    attend: AttendWithCache,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Compute what `kernels.paged_attention.paged_attention` promises, by what `find_flash_attention` returned."""
    return attend(
        query,
        key_cache,
        value_cache,
        cache_seqlens=context_lens,
        page_table=block_tables,
        cu_seqlens_q=query_starts,
        max_seqlen_q=max_query_len,
        softmax_scale=scale,
        causal=True,
        # FlashAttention's window counts the tokens before a query's own.
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        softcap=soft_cap or 0.0,
    )
