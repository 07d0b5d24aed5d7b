"""Paged attention of decodes, of chunks, and of both, beside attention over keys and values that lie in one piece."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.gpu_config import gpu_of
from kernels.paged_attention import flash_attention, paged_attention
from kernels.paged_attention.reference import paged_attention_reference
from kernels.paged_attention.triton_config import ChunkConfig, SplitConfig
from kernels.quantized_kv import is_quantized, quantize_heads
from ops.bench.gpu.case import OURS, Candidate, Case, CaseSpec, Check, Entry, OpSuite, relative_error, sets_for
from ops.bench.gpu.shapes import LLAMA3_8B, QWEN3_06B, QWEN3_32B, ModelShape

BLOCK_SIZE = 16
_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences by (query tokens, cached tokens), their blocks scattered over a cache with NaN where nothing lies."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    max_query_len: int
    max_context_len: int
    scale: float
    kv_scales: torch.Tensor | None = None

    def attend(
        self, sliding_window: int | None = None, soft_cap: float | None = None, entry: Entry | None = None
    ) -> torch.Tensor:
        """Run our op; on a GPU launched by an entry where one is given."""
        if entry is None or self.query.device.type != "cuda":
            return self._run(paged_attention, sliding_window, soft_cap)
        from kernels.paged_attention.triton_attention import PagedAttentionBatch, paged_attention_triton

        tensors = PagedAttentionBatch(
            *(self.query, self.key_cache, self.value_cache, self.block_tables, self.query_starts, self.context_lens),
            self.kv_scales,
        )
        # Only the kernel for many query tokens divides them into blocks.
        split, chunk = (None, ChunkConfig(**entry)) if "block_m" in entry else (SplitConfig(**entry), None)
        return paged_attention_triton(
            tensors, self.max_query_len, self.scale, sliding_window, soft_cap, gpu_of(self.query.device),
            split=split, chunk=chunk,
        )  # fmt: skip

    def attend_by_reference(self, sliding_window: int | None, soft_cap: float | None) -> torch.Tensor:
        """Run the oracle, in float32."""
        return replace(self, query=self.query.float())._run(paged_attention_reference, sliding_window, soft_cap)

    def _run(
        self, attend: Callable[..., torch.Tensor], sliding_window: int | None, soft_cap: float | None
    ) -> torch.Tensor:
        tensors_and_sizes = (getattr(self, name) for name in Batch.__slots__[:-1])
        return attend(*tensors_and_sizes, sliding_window, soft_cap, self.kv_scales)

    def with_cache_in(self, dtype: torch.dtype) -> Batch:
        """Return the same batch on a KV cache of another type: quantized where that has eight bits."""
        if not is_quantized(dtype):
            return replace(self, key_cache=self.key_cache.to(dtype), value_cache=self.value_cache.to(dtype))
        (keys, key_scales), (values, value_scales) = (
            quantize_heads(cache, dtype) for cache in (self.key_cache, self.value_cache)
        )
        scales = torch.stack((key_scales, value_scales), dim=-1).transpose(1, 2).contiguous()
        return replace(self, key_cache=keys, value_cache=values, kv_scales=scales)


def make_batch(
    device: torch.device, model: ModelShape, lengths: list[tuple[int, int]], block_size: int = BLOCK_SIZE
) -> Batch:
    """Make a batch of (query tokens, cached tokens)."""
    blocks = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(blocks) + 1, device=device).int()
    caches = torch.randn(
        2, len(order), block_size, model.num_kv_heads, model.head_dim, device=device, dtype=torch.bfloat16
    )
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=device)
    first = 0
    for row, (count, (_, context)) in enumerate(zip(blocks, lengths, strict=True)):
        tables[row, :count] = order[first : first + count]
        if context % block_size:
            caches[:, order[first + count - 1], context % block_size :] = float("nan")
        first += count
    caches[:, order[-1]] = float("nan")
    starts = torch.tensor([0, *(query for query, _ in lengths)], dtype=torch.int32).cumsum(0)
    return Batch(
        torch.randn(int(starts[-1]), model.num_heads, model.head_dim, device=device, dtype=torch.bfloat16),
        caches[0],
        caches[1],
        tables,
        starts.int().to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        max(query for query, _ in lengths),
        max(context for _, context in lengths),
        model.head_dim**-0.5,
    )


def attention_error(
    device: torch.device,
    model: ModelShape,
    lengths: list[tuple[int, int]],
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    cache_dtype: torch.dtype = torch.bfloat16,
    entry: Entry | None = None,
) -> float:
    """Compare with the reference, which computes in float32 what it reads."""
    batch = make_batch(device, model, lengths).with_cache_in(cache_dtype)
    actual = batch.attend(sliding_window, soft_cap, entry)
    return relative_error(actual, batch.attend_by_reference(sliding_window, soft_cap))


def attention_case(device: torch.device, model: ModelShape, lengths: list[tuple[int, int]]) -> Case:
    """Read each sequence's keys and values once; two products over the pairs that causality leaves."""
    contexts = sum(context for _, context in lengths)
    queries = sum(query for query, _ in lengths)
    pairs = sum(query * (context - query) + query * (query + 1) // 2 for query, context in lengths)
    cache_bytes = 2 * contexts * model.num_kv_heads * model.head_dim * 2
    num_sets = sets_for(cache_bytes)
    batches = [make_batch(device, model, lengths) for _ in range(num_sets)]
    candidates: dict[str, Candidate] = {OURS: partial(_attend_one, batches)}
    query_len, context_len = lengths[0]
    if len(set(lengths)) == 1 and query_len in (1, context_len):
        candidates |= _contiguous(device, model, lengths, num_sets)
    peers, unavailable = _paged_peers(device, model, lengths, num_sets)
    candidates |= peers
    num_bytes = cache_bytes + 2 * queries * model.num_heads * model.head_dim * 2
    return Case(num_bytes, 4 * pairs * model.num_heads * model.head_dim, num_sets, candidates, unavailable)


def eight_bit_case(device: torch.device, model: ModelShape, lengths: list[tuple[int, int]]) -> Case:
    """Read the same batch from caches in fp8, int8 and bf16; the bytes and so the bandwidth are those of eight bits."""
    contexts, queries = sum(context for _, context in lengths), sum(query for query, _ in lengths)
    cache_bytes = 2 * contexts * model.num_kv_heads * (model.head_dim + 2)
    num_sets = sets_for(cache_bytes)
    plain = [make_batch(device, model, lengths) for _ in range(num_sets)]
    batches = {f"{OURS}/bf16": plain}
    for name, dtype in ((OURS, torch.float8_e4m3fn), (f"{OURS}/int8", torch.int8)):
        batches[name] = [batch.with_cache_in(dtype) for batch in plain]
    candidates = {name: partial(_attend_one, sets) for name, sets in batches.items()}
    num_bytes = cache_bytes + 2 * queries * model.num_heads * model.head_dim * 2
    return Case(num_bytes, 4 * contexts * model.num_heads * model.head_dim, num_sets, candidates)


def _attend_one(batches: list[Batch], index: int, entry: Entry | None = None) -> torch.Tensor:
    return batches[index].attend(entry=entry)


def _contiguous(
    device: torch.device, model: ModelShape, lengths: list[tuple[int, int]], num_sets: int
) -> dict[str, Callable[[int], object]]:
    """Return torch's own attention over keys and values without blocks: an easier problem of the same size."""
    query_len, context_len = lengths[0]
    cached_shape = (2, num_sets, len(lengths), model.num_kv_heads, context_len, model.head_dim)
    cached = torch.randn(cached_shape, device=device, dtype=torch.bfloat16)
    query_shape = (len(lengths), model.num_heads, query_len, model.head_dim)
    query = torch.randn(query_shape, device=device, dtype=torch.bfloat16)

    def attend(backend: SDPBackend, index: int) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, cached[0, index], cached[1, index], is_causal=query_len > 1, enable_gqa=True
            )

    return {name: partial(attend, backend) for name, backend in _BACKENDS.items()}


def _paged_peers(
    device: torch.device, model: ModelShape, lengths: list[tuple[int, int]], num_sets: int
) -> tuple[dict[str, Callable[[int], object]], dict[str, str]]:
    """Return others' attention over paged caches, with the blocks that suit them, and why others are missing."""
    found: dict[str, Callable[[int], object]] = {}
    missing: dict[str, str] = {}
    if device.type != "cuda":
        return found, {"FlashAttention": "needs a GPU"}

    def add(name: str, block_size: int, load: Callable[[], Callable[[Batch], object]]) -> None:
        try:
            attend = load()
        except (ImportError, AttributeError) as error:
            missing[name] = str(error)
            return
        batches: list[Batch] = []

        def call(index: int) -> object:
            # Made when they are first needed: most machines have no such peer.
            while len(batches) < num_sets:
                batches.append(make_batch(device, model, lengths, block_size))
            return attend(batches[index])

        found[name] = call

    for block_size in (BLOCK_SIZE, 128):
        add(f"FlashAttention-3/{block_size}", block_size, _load_flash_attention)
    # torch's own kernel takes no smaller blocks.
    add("torch varlen_attn/256", 256, _load_varlen_attention)
    return found, missing


def _load_flash_attention() -> Callable[[Batch], object]:
    attend = importlib.import_module(flash_attention.MODULE).flash_attn_with_kvcache

    def call(batch: Batch) -> object:
        caches = (batch.key_cache, batch.value_cache, batch.block_tables)
        lengths = (batch.query_starts, batch.context_lens, batch.max_query_len)
        return flash_attention.paged_attention_flash(attend, batch.query, *caches, *lengths, batch.scale)

    return call


def _load_varlen_attention() -> Callable[[Batch], object]:
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return lambda batch: varlen_attn(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.query_starts,
        None,
        batch.max_query_len,
        batch.max_context_len,
        scale=batch.scale,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=batch.context_lens,
        block_table=batch.block_tables,
    )


def _checks(device: torch.device, batches: dict[str, list[tuple[int, int]]]) -> list[Check]:
    checks = []
    for name, lengths in batches.items():
        checks += [
            Check(f"{model.name} {name}", partial(attention_error, device, model, lengths), 1e-2)
            for model in (LLAMA3_8B, QWEN3_06B)
        ]
        options = partial(attention_error, device, QWEN3_32B, lengths, 100, 30.0)
        checks.append(Check(f"{QWEN3_32B.name} {name} window, soft-cap", options, 1e-2))
        for dtype in (torch.float8_e4m3fn, torch.int8):
            error = partial(attention_error, device, LLAMA3_8B, lengths, cache_dtype=dtype)
            checks.append(Check(f"{LLAMA3_8B.name} {name} {str(dtype).removeprefix('torch.')} KV", error, 1e-2))
    return checks


def _decodes(model: ModelShape, num_seqs: int, context: int) -> CaseSpec:
    build = partial(attention_case, model=model, lengths=[(1, context)] * num_seqs)
    return CaseSpec(f"{model.name} {num_seqs} x {context}", build)


def _decodes_of_eight_bits(model: ModelShape, num_seqs: int, context: int) -> CaseSpec:
    build = partial(eight_bit_case, model=model, lengths=[(1, context)] * num_seqs)
    return CaseSpec(f"{model.name} {num_seqs} x {context}, fp8 KV", build)


def _chunk(model: ModelShape, query: int, context: int, num_decodes: int = 0) -> CaseSpec:
    lengths = [(query, context)] + [(1, context)] * num_decodes
    label = f"{model.name} {query} at {context}" + (f" + {num_decodes} decodes" if num_decodes else "")
    return CaseSpec(label, partial(attention_case, model=model, lengths=lengths))


DECODE_ATTENTION = OpSuite(
    "decode_attention",
    lambda device: _checks(
        device,
        {
            "one long": [(1, 9001)],
            "ragged": [(1, 1), (1, 15), (1, 16), (1, 777), (1, 4096)],
            "many": [(1, 100 + 7 * row) for row in range(70)],
            "verified drafts": [(5, 5), (5, 300), (5, 1029)],
        },
    ),
    (
        _decodes(LLAMA3_8B, 64, 8192),
        _decodes(LLAMA3_8B, 1, 32_768),
        _decodes(LLAMA3_8B, 1, 1024),
        _decodes(LLAMA3_8B, 8, 1024),
        _decodes(LLAMA3_8B, 256, 1024),
        _decodes(QWEN3_06B, 64, 2048),
        _decodes(QWEN3_32B, 16, 8192),
        _decodes_of_eight_bits(LLAMA3_8B, 64, 8192),
        _decodes_of_eight_bits(LLAMA3_8B, 256, 1024),
    ),
)
CHUNK_ATTENTION = OpSuite(
    "chunk_attention",
    lambda device: _checks(
        device,
        {
            "whole prompt": [(1000, 1000)],
            "chunk": [(333, 2000)],
            "mixed": [(1, 700), (200, 200), (1, 33), (65, 1000), (1, 1)],
            "cache hits": [(17, 9001), (128, 5000), (1, 3000)],
        },
    ),
    (
        _chunk(LLAMA3_8B, 8192, 8192),
        _chunk(LLAMA3_8B, 2048, 8192),
        _chunk(LLAMA3_8B, 512, 2048, 63),
        # What a hit in the prefix cache leaves to compute.
        _chunk(LLAMA3_8B, 17, 32_768),
        _chunk(LLAMA3_8B, 128, 32_768),
        _chunk(QWEN3_06B, 8192, 8192),
        _chunk(QWEN3_32B, 8192, 8192),
    ),
)
