"""Paged attention in all its forms, beside attention over keys and values that lie in one piece and others' paged one.

Decodes, chunks, and both; with sinks, windows and soft caps; over a latent row a token; over caches in eight bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.layer_cache import LayerCache, is_quantized, quantize_heads
from kernels.paged_attention import AttentionOptions, ExpandedBlocks, expanded_attention
from kernels.paged_attention.reference import paged_attention_reference
from ops.bench.gpu.case import OURS, Candidate, Case, Check, Entry, Op, OpSuite, Shapes, relative_error, sets_for
from ops.bench.gpu.cases.attention_batch import BLOCK_SIZE, AttentionShape, Batch, Lengths, make_batch
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_06B, QWEN3_32B

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
LLAMA_ATTENTION, SMALL_ATTENTION, LARGE_ATTENTION = map(AttentionShape.of, (LLAMA3_8B, QWEN3_06B, QWEN3_32B))
GPT_OSS = AttentionShape("gpt-oss-20b", 64, 8, 64, has_sinks=True)
GPT_OSS_WINDOW = replace(GPT_OSS, name="gpt-oss-20b window", sliding_window=128)
GEMMA2_9B = AttentionShape("Gemma-2-9B", 16, 8, 256, soft_cap=50.0)
DEEPSEEK_V2_LITE = AttentionShape("DeepSeek-V2-Lite", 16, 1, 576, latent_dim=512, scale_dim=192)
DEEPSEEK_V3 = replace(DEEPSEEK_V2_LITE, name="DeepSeek-V3", num_heads=128)


def attention_error(
    device: torch.device,
    shape: AttentionShape,
    lengths: Lengths,
    cache_dtype: torch.dtype = torch.bfloat16,
    entry: Entry | None = None,
) -> float:
    """Compare with the reference, which computes in float32."""
    batch = make_batch(device, shape, lengths).with_cache_in(cache_dtype)
    expected = replace(batch, query=batch.query.float()).attend(paged_attention_reference)
    return relative_error(batch.attend(entry=entry), expected)


def expanded_error(
    device: torch.device, shape: AttentionShape, lengths: Lengths, cache_dtype: torch.dtype = torch.bfloat16
) -> float:
    """Compare keys and values made for the step with the reference over latent vectors, which computes in float32."""
    batch, query, key_up, value_up = _expandable(device, shape, lengths)
    latent_dim = key_up.shape[2]
    if is_quantized(cache_dtype):
        rows, scales = quantize_heads(batch.key_cache, cache_dtype)
        # One row is key and value, and so is its scale.
        scales = torch.stack((scales, scales), dim=-1).transpose(1, 2).contiguous()
        batch = replace(batch, key_cache=rows, value_cache=rows[..., :latent_dim], kv_scales=scales)
    plain, turning = query.float().split_with_sizes((key_up.shape[1], query.shape[2] - key_up.shape[1]), dim=2)
    latent = torch.cat((torch.einsum("nhp,hpl->nhl", plain, key_up.float()), turning), dim=2)
    attended = replace(batch, query=latent).attend(paged_attention_reference)
    expected = torch.einsum("nhl,hlv->nhv", attended, value_up.float())
    return relative_error(_attend_expanded(batch, query, key_up, value_up, lengths), expected)


def attention_case(device: torch.device, shape: AttentionShape, lengths: Lengths) -> Case:
    """Time plain attention beside peers; `_case_of` counts bytes read and multiplications."""
    case = _case_of(device, shape, lengths, {OURS: lambda batch: batch})
    query_len, context_len = lengths[0]
    candidates = dict(case.candidates)
    if len(set(lengths)) == 1 and query_len in (1, context_len):
        candidates |= _contiguous(device, shape, lengths, case.num_sets)
    peers, unavailable = _paged_peers(device, shape, lengths, case.num_sets)
    return replace(case, candidates=candidates | peers, unavailable=unavailable)


def variant_case(device: torch.device, shape: AttentionShape, lengths: Lengths) -> Case:
    """Time a variant of attention beside ours without its special feature."""
    if shape.latent_dim:
        case = _case_of(device, shape, lengths, {OURS: lambda batch: batch})
        if lengths[0][0] == 1:
            return case
        return replace(case, candidates={**case.candidates, f"{OURS}/expanded": _expanded(device, shape, lengths)})
    return _case_of(device, shape, lengths, {OURS: lambda batch: batch, f"{OURS}/plain": Batch.plain})


def eight_bit_case(device: torch.device, shape: AttentionShape, lengths: Lengths) -> Case:
    """Read the same batch from caches in fp8, int8 and bf16; the bytes and so the bandwidth are those of eight bits."""
    dtypes = {f"{OURS}/bf16": torch.bfloat16, OURS: torch.float8_e4m3fn, f"{OURS}/int8": torch.int8}
    forms = {name: partial(Batch.with_cache_in, dtype=dtype) for name, dtype in dtypes.items()}
    # A scale of 16 bits for each head's key, and for its value.
    return _case_of(device, shape, lengths, forms, shape.numbers_per_token + 4 * shape.num_kv_heads)


def _case_of(
    device: torch.device,
    shape: AttentionShape,
    lengths: Lengths,
    forms: Mapping[str, Callable[[Batch], Batch]],
    bytes_per_token: int | None = None,
) -> Case:
    """Read each sequence's visible tokens once; two products per pair of a query and a visible token."""
    tokens, pairs = (sum(counts) for counts in zip(*(shape.seen(*one) for one in lengths), strict=True))
    cache_bytes = tokens * (bytes_per_token or 2 * shape.numbers_per_token)
    num_sets = sets_for(cache_bytes)
    made = [make_batch(device, shape, lengths) for _ in range(num_sets)]
    batches = {name: [form(batch) for batch in made] for name, form in forms.items()}
    candidates: dict[str, Candidate] = {
        name: lambda index, entry=None, sets=sets: sets[index].attend(entry=entry) for name, sets in batches.items()
    }
    # The products that a query takes with one token, in all heads.
    per_pair = shape.num_heads * (shape.head_dim + (shape.latent_dim or shape.head_dim))
    num_bytes = cache_bytes + 2 * sum(query for query, _ in lengths) * per_pair
    return Case(num_bytes, 2 * pairs * per_pair, num_sets, candidates)


def _expanded(device: torch.device, shape: AttentionShape, lengths: Lengths) -> Candidate:
    made = _expandable(device, shape, lengths)
    return lambda index: _attend_expanded(*made, lengths)


def _expandable(
    device: torch.device, shape: AttentionShape, lengths: Lengths
) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a batch, its queries in plain heads, and what makes keys and values, about as large as the latents."""
    batch, latent_dim = make_batch(device, shape, lengths), shape.latent_dim or 0
    made, kept = min(128, latent_dim), shape.head_dim - latent_dim
    ups = torch.randn(2, shape.num_heads, made, latent_dim, device=device) * latent_dim**-0.5
    key_up, value_up = ups.bfloat16()
    return batch, batch.query[..., : made + kept].contiguous(), key_up, value_up.transpose(1, 2)


def _attend_expanded(
    batch: Batch, query: torch.Tensor, key_up: torch.Tensor, value_up: torch.Tensor, lengths: Lengths
) -> torch.Tensor:
    cache = LayerCache(batch.key_cache, batch.value_cache, batch.kv_scales)
    block_size = cache.keys.shape[1]
    num_blocks = sum(-(-context // block_size) for _, context in lengths)
    expanded = ExpandedBlocks.of(batch.block_tables, batch.context_lens, block_size, num_blocks)
    where = (batch.query_starts, batch.context_lens, batch.max_query_len, batch.max_context_len)
    return expanded_attention(query, cache, key_up, value_up, expanded, *where, AttentionOptions(batch.scale))


def _contiguous(
    device: torch.device, shape: AttentionShape, lengths: Lengths, num_sets: int
) -> dict[str, Callable[[int], object]]:
    query_len, context_len = lengths[0]
    cached_shape = (2, num_sets, len(lengths), shape.num_kv_heads, context_len, shape.head_dim)
    cached = torch.randn(cached_shape, device=device, dtype=torch.bfloat16)
    query_shape = (len(lengths), shape.num_heads, query_len, shape.head_dim)
    query = torch.randn(query_shape, device=device, dtype=torch.bfloat16)

    def attend(backend: SDPBackend, index: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, cached[0, index], cached[1, index], is_causal=query_len > 1, enable_gqa=True
            )

    return {name: partial(attend, backend) for name, backend in _BACKENDS.items()}


def _paged_peers(
    device: torch.device, shape: AttentionShape, lengths: Lengths, num_sets: int
) -> tuple[dict[str, Callable[[int], object]], dict[str, str]]:
    if device.type != "cuda":
        return {}, {"FlashAttention": "needs a GPU"}
    # Made when they are first needed: most machines have no such peer.
    batches = cache(lambda size: [make_batch(device, shape, lengths, size) for _ in range(num_sets)])
    found: dict[str, Callable[[int], object]] = {}
    missing: dict[str, str] = {}

    def call(attend: Callable[[Batch], object], size: int, index: int) -> object:
        return attend(batches(size)[index])

    for size in (BLOCK_SIZE, 128):
        name = f"FlashAttention-3/{size}"
        try:
            attend = _load_flash_attention()
        except (ImportError, AttributeError) as error:
            missing[name] = str(error)
        else:
            found[name] = partial(call, attend, size)
    return found, missing


def _load_flash_attention() -> Callable[[Batch], object]:
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(batch: Batch) -> object:
        return attend(
            *(batch.query, batch.key_cache, batch.value_cache),
            cache_seqlens=batch.context_lens,
            page_table=batch.block_tables,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=batch.scale,
            causal=True,
        )

    return call


ATTENTION_OP = Op(attention_error, attention_case, 1e-2)
EIGHT_BIT_OP = replace(ATTENTION_OP, case=eight_bit_case)
VARIANT_OP = replace(ATTENTION_OP, case=variant_case)
EXPANDED_OP = replace(ATTENTION_OP, error=expanded_error, case=variant_case)


def _checked(batches: Mapping[str, Lengths]) -> Shapes:
    capped = replace(LARGE_ATTENTION, sliding_window=100, soft_cap=30.0)
    found: dict[str, tuple[Any, ...]] = {}
    for name, lengths in batches.items():
        found |= {f"{shape.name} {name}": (shape, lengths) for shape in (LLAMA_ATTENTION, SMALL_ATTENTION)}
        found[f"{capped.name} {name} window, soft-cap"] = (capped, lengths)
        for dtype in EIGHT_BITS:
            label = f"{LLAMA_ATTENTION.name} {name} {str(dtype).removeprefix('torch.')} KV"
            found[label] = (LLAMA_ATTENTION, lengths, dtype)
    return found


def _decodes(*loads: tuple[AttentionShape, int, int], suffix: str = "") -> Shapes:
    return {
        f"{shape.name} {num_seqs} x {context}{suffix}": (shape, [(1, context)] * num_seqs)
        for shape, num_seqs, context in loads
    }


def _chunks(*loads: tuple[AttentionShape, int, int]) -> Shapes:
    return {f"{shape.name} {query} at {context}": (shape, [(query, context)]) for shape, query, context in loads}


DECODES_CHECKED: dict[str, Lengths] = {
    "one long": [(1, 9001)],
    "ragged": [(1, 1), (1, 15), (1, 16), (1, 777), (1, 4096)],
    "many": [(1, 100 + 7 * row) for row in range(70)],
    "verified drafts": [(5, 5), (5, 300), (5, 1029)],
}
CHUNKS_CHECKED: dict[str, Lengths] = {
    "whole prompt": [(1000, 1000)],
    "chunk": [(333, 2000)],
    "mixed": [(1, 700), (200, 200), (1, 33), (65, 1000), (1, 1)],
    "cache hits": [(17, 9001), (128, 5000), (1, 3000)],
}
_FORMS_CHECKED: dict[str, Lengths] = {
    "decodes": [(1, 1), (1, 777), (1, 4096)],
    "mixed": [(1, 700), (200, 200), (65, 1000)],
    "verified drafts": [(5, 300), (5, 1029)],
}
# One long context holds up the others, if it is not divided by its own length.
_SKEWED: Shapes = {f"{LLAMA_ATTENTION.name} 1 x 65536 + 63 x 1024": (LLAMA_ATTENTION, [(1, 65_536)] + [(1, 1024)] * 63)}
DECODE_ATTENTION = OpSuite(
    "decode_attention",
    partial(ATTENTION_OP.checks, shapes=_checked(DECODES_CHECKED)),
    ATTENTION_OP.cases(
        {
            **_decodes(
                *((LLAMA_ATTENTION, *load) for load in ((64, 8192), (1, 32_768), (1, 1024), (8, 1024), (256, 1024))),
                (SMALL_ATTENTION, 64, 2048),
                (LARGE_ATTENTION, 16, 8192),
            ),
            **_SKEWED,
        }
    )
    + EIGHT_BIT_OP.cases(_decodes((LLAMA_ATTENTION, 64, 8192), (LLAMA_ATTENTION, 256, 1024), suffix=", fp8 KV")),
)
CHUNK_ATTENTION = ATTENTION_OP.suite(
    "chunk_attention",
    _checked(CHUNKS_CHECKED),
    {
        **_chunks((LLAMA_ATTENTION, 8192, 8192), (LLAMA_ATTENTION, 2048, 8192)),
        f"{LLAMA_ATTENTION.name} 512 at 2048 + 63 decodes": (LLAMA_ATTENTION, [(512, 2048)] + [(1, 2048)] * 63),
        # The rest of a prompt after a prefix-cache hit.
        **_chunks((LLAMA_ATTENTION, 17, 32_768), (LLAMA_ATTENTION, 128, 32_768)),
        **_chunks((SMALL_ATTENTION, 8192, 8192), (LARGE_ATTENTION, 8192, 8192)),
    },
)
# Long enough that a step makes keys and values: of all heads at once, and of one after the other.
_EXPANSIONS_CHECKED: dict[str, Lengths] = {"1100 new": [(1100, 1100)], "512 new at 8701": [(512, 8701)]}
EXPANDED_CHECKED: Shapes = {
    f"{DEEPSEEK_V2_LITE.name} expanded {name} {str(dtype).removeprefix('torch.')} KV": (
        DEEPSEEK_V2_LITE,
        lengths,
        dtype,
    )
    for name, lengths in _EXPANSIONS_CHECKED.items()
    for dtype in (torch.bfloat16, *EIGHT_BITS)
}


def _form_checks(device: torch.device) -> list[Check]:
    forms: Shapes = {
        f"{shape.name} {name}": (shape, lengths)
        for shape in (GPT_OSS, GPT_OSS_WINDOW, GEMMA2_9B, DEEPSEEK_V2_LITE, DEEPSEEK_V3)
        for name, lengths in _FORMS_CHECKED.items()
    }
    return VARIANT_OP.checks(device, forms) + EXPANDED_OP.checks(device, EXPANDED_CHECKED)


ATTENTION_FORMS = OpSuite(
    "attention_forms",
    _form_checks,
    VARIANT_OP.cases(
        {
            **_decodes((DEEPSEEK_V2_LITE, 64, 8192), (DEEPSEEK_V2_LITE, 1, 32_768), (DEEPSEEK_V3, 64, 4096)),
            f"{DEEPSEEK_V2_LITE.name} 1 x 8192, 512 new": (DEEPSEEK_V2_LITE, [(512, 8192)]),
            # Where the latent form and that of keys and values meet, and whole prompts.
            **_chunks(*((DEEPSEEK_V2_LITE, size, size) for size in (256, 512, 1024, 8192)), (DEEPSEEK_V3, 4096, 4096)),
            **_decodes((GPT_OSS, 64, 8192), (GPT_OSS_WINDOW, 64, 8192), (GEMMA2_9B, 64, 8192)),
        }
    ),
)
