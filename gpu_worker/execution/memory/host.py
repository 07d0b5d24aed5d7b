"""What a CPU's memory has left for keys and values: a share of what is free, since others live there too; its pages."""

from __future__ import annotations

import os

from gpu_worker.execution.memory.budget import CacheDemand, shown_bytes
from shared.errors import ConfigError

SHARE_OF_FREE = 0.25


def ask_for_huge_pages() -> None:
    """Let torch ask the kernel for pages of 2 MiB for large tensors. Call it before the process makes its first tensor.

    Weights are read once a step, from end to end. With pages of 4 KiB the processor looks up an address for every 64
    cache lines, and its prefetcher starts anew. A value that is set already stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def host_num_blocks(demand: CacheDemand, max_num_seqs: int, free_bytes: int) -> int:
    """Return how many blocks a share of the free memory holds, but no more than the batch can use.

    Raises:
        ConfigError: They do not hold the longest sequence.
    """
    pool_bytes = int(free_bytes * SHARE_OF_FREE)
    num_blocks = min(demand.num_blocks(pool_bytes), demand.blocks_per_sequence * max_num_seqs)
    if num_blocks >= demand.blocks_per_sequence:
        return num_blocks
    remedies = [f"HEADRACE_KV_CACHE_BYTES={demand.least_bytes}"] if demand.least_bytes <= free_bytes else []
    if (length := demand.len_within(num_blocks)) is not None:
        remedies.append(f"HEADRACE_MAX_MODEL_LEN={length}")
    raise ConfigError(
        "HEADRACE_MAX_MODEL_LEN",
        f"a sequence of {demand.max_model_len} tokens needs {shown_bytes(demand.least_bytes)} of KV cache, but a share "
        f"of {SHARE_OF_FREE:g} of the {shown_bytes(free_bytes)} that are free is {shown_bytes(pool_bytes)}. "
        + (f"Set {' or '.join(remedies)}" if remedies else "Free some memory, or serve a smaller model"),
    )


def check_host_cache_fits(variable: str, num_blocks: int, demand: CacheDemand, free_bytes: int) -> None:
    """Check that a cache of a set size fits, though its memory is taken only as blocks are first used.

    Raises:
        ConfigError: It does not; names `variable`, which sets the size.
    """
    num_bytes = demand.num_bytes(num_blocks)
    if num_bytes <= free_bytes:
        return
    fitting = demand.num_blocks(free_bytes)
    most = f"{fitting} blocks ({demand.num_bytes(fitting)} bytes)"
    raise ConfigError(
        variable,
        f"a KV cache of {num_blocks} blocks needs {shown_bytes(num_bytes)}, but {shown_bytes(free_bytes)} of memory "
        f"are free beside the weights; allow {most} at most, or leave it out for a quarter of what is free",
    )


def check_host_weights_fit(num_bytes: int, dtype: str, free_bytes: int) -> None:
    """Check, before they are loaded, that a model's weights fit; `ConfigError` if they do not."""
    if num_bytes > free_bytes:
        halve = "set HEADRACE_DTYPE to bfloat16, " if dtype == "float32" else ""
        raise ConfigError(
            "HEADRACE_MODEL",
            f"the weights need {shown_bytes(num_bytes)} in {dtype}, but {shown_bytes(free_bytes)} of memory are free; "
            f"{halve}free some memory, or serve a quantized or a smaller model",
        )


def check_host_states_fit(num_bytes: int, max_num_seqs: int, free_bytes: int) -> None:
    """Check that the states of a batch's sequences fit beside the weights; `ConfigError` if they do not."""
    if num_bytes <= free_bytes:
        return
    fitting = max(0, free_bytes) * (max_num_seqs + 1) // num_bytes - 1
    remedy = f"lower it to {fitting}" if fitting > 0 else "free some memory, or serve a smaller model"
    raise ConfigError(
        "HEADRACE_MAX_NUM_SEQS",
        f"the states of {max_num_seqs} sequences in the model's recurrent layers need {shown_bytes(num_bytes)}, but "
        f"{shown_bytes(max(0, free_bytes))} of memory are free beside the weights; {remedy}",
    )
