"""Where memory goes, and what remains for keys and values: arithmetic on measured numbers, and messages.

On a device the cache takes all remaining memory; on a CPU a share of the free memory, since others use it too.

Nothing here touches a device; `probe` measures. An error about a shortage names settings that would fix it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import ConfigError

# Left alone on the device: the driver, libraries and the allocator's rounding take some memory after we have measured.
RESERVE_BYTES = 256 << 20

# Suggested token budgets are multiples of this.
_TOKENS_STEP = 64


@dataclass(frozen=True, slots=True)
class CacheDemand:
    """What a KV cache is asked for.

    Attributes:
        block_bytes: Of one block, over all layers.
        max_model_len: Tokens of the longest sequence, which must fit.
        fixed_bytes: However many blocks there are.
    """

    block_bytes: int
    block_size: int
    max_model_len: int
    fixed_bytes: int = 0

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def least_bytes(self) -> int:
        """Memory of the longest sequence."""
        return self.num_bytes(self.blocks_per_sequence)

    def num_bytes(self, num_blocks: int) -> int:
        """Return the memory of a number of blocks."""
        return num_blocks * self.block_bytes + self.fixed_bytes

    def num_blocks(self, num_bytes: int) -> int:
        """Return how many blocks so much memory holds."""
        return max(0, num_bytes - self.fixed_bytes) // self.block_bytes

    def len_within(self, num_blocks: int) -> int | None:
        """Return the longest sequence that a number of blocks holds, None when that is too short to be of use."""
        num_tokens = num_blocks * self.block_size
        return num_tokens if num_tokens >= 2 else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Measured memory, in bytes.

    Attributes:
        weights: Of the model, as the allocator holds them.
        rows: State of the sequences of the batch besides their KV.
        activations: Of the largest step, beyond the rows.
        other: Libraries, compiled kernels and whatever else grew while we measured.
        proposer: Kept free for the proposer of drafts, which comes later, besides its share of every block.
    """

    weights: int = 0
    rows: int = 0
    activations: int = 0
    graphs: int = 0
    other: int = 0
    proposer: int = 0

    @property
    def total(self) -> int:
        """Everything but the KV cache."""
        return sum(self.named.values())

    @property
    def named(self) -> dict[str, int]:
        """All of it, by what it is called; of the proposer only where there is one."""
        sizes = {"weights": self.weights, "activations": self.activations, "rows of the batch": self.rows}
        sizes |= {"graphs": self.graphs, "other": self.other}
        return sizes | {"proposer": self.proposer} if self.proposer else sizes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Divides a device.

    Attributes:
        used_before: Of that, in use when this process began, its own driver context included.
        utilization: Share of `device_bytes` that this process may use.
    """

    device_bytes: int
    used_before: int
    utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    use: MemoryUse

    @property
    def room(self) -> int:
        """What this process can have, however much it may have; below zero on a device that is full already."""
        return self.device_bytes - self.used_before - RESERVE_BYTES

    @property
    def limit(self) -> int:
        """What this process uses in all: its share, but no more than there is."""
        return min(int(self.device_bytes * self.utilization), self.room)

    @property
    def kv_bytes(self) -> int:
        """What remains for keys and values."""
        return max(0, self.limit - self.use.total)

    def num_blocks(self, demand: CacheDemand) -> int:
        """Return how many blocks fit; `ConfigError`, which says what would, if not even one sequence does."""
        num_blocks = demand.num_blocks(self.kv_bytes)
        if num_blocks < demand.blocks_per_sequence:
            raise ConfigError("HEADRACE_GPU_MEMORY_UTILIZATION", self._shortage(demand))
        return num_blocks

    def check_fixed(self, variable: str, num_blocks: int, demand: CacheDemand) -> None:
        """Check that a cache of a set size fits the device, whatever the share; `ConfigError` if it does not."""
        left = max(0, self.room - self.use.total)
        if demand.num_bytes(num_blocks) > left:
            fitting = demand.num_blocks(left)
            value = fitting if variable == "HEADRACE_NUM_BLOCKS" else demand.num_bytes(fitting)
            raise ConfigError(
                variable,
                f"asks for a KV cache of {shown_bytes(demand.num_bytes(num_blocks))}, but {shown_bytes(left)} of "
                f"{shown_bytes(self.device_bytes)} are left beside {self._parts()}. Lower it to {value}",
            )

    def fitting_max_model_len(self, demand: CacheDemand) -> int | None:
        """Return the longest sequence that would fit as things are."""
        return demand.len_within(demand.num_blocks(self.kv_bytes))

    def fitting_batched_tokens(self, demand: CacheDemand) -> int | None:
        """Return a token budget whose activations would leave enough: they grow with it, at most in proportion."""
        spare = self.limit - (self.use.total - self.use.activations) - demand.least_bytes
        if spare <= 0 or self.use.activations == 0:
            return None
        tokens = min(spare, self.use.activations) * self.max_num_batched_tokens // self.use.activations
        tokens = tokens // _TOKENS_STEP * _TOKENS_STEP
        return tokens if tokens >= max(self.max_num_seqs, _TOKENS_STEP) else None

    def fitting_utilization(self, demand: CacheDemand) -> float | None:
        """Return the least share, in hundredths, with which it would fit."""
        needed = self.use.total + demand.least_bytes
        percent = math.ceil(needed * 100 / self.device_bytes)
        # A hundredth of the device, times a hundred, may round to one byte less.
        while int(self.device_bytes * (percent / 100)) < needed:
            percent += 1
        return percent / 100 if percent <= 100 and needed <= self.room else None

    def lines(self, demand: CacheDemand, num_blocks: int) -> list[str]:
        """Return a table of where the memory goes, one line an item, the sum first."""
        kv, (weights, *others) = demand.num_bytes(num_blocks), self.use.named.items()
        left = self.device_bytes - self.used_before - self.use.total - kv
        rows = [("this process", self.use.total + kv), weights, ("KV cache", kv), *others]
        rows += [("used before", self.used_before), ("left free", left)]
        return [f"{name:<18} {shown_bytes(size):>9} {size / self.device_bytes:>6.1%}" for name, size in rows]

    def summary(self, demand: CacheDemand, num_blocks: int) -> str:
        """Return the same as one sentence."""
        num_tokens = num_blocks * demand.block_size
        kv = demand.num_bytes(num_blocks)
        return (
            f"memory: {shown_bytes(self.use.total + kv)} of {shown_bytes(self.device_bytes)}: {self._parts()}, "
            f"KV cache {shown_bytes(kv)} = {num_blocks} blocks of {demand.block_size} = {num_tokens} tokens, "
            f"{num_tokens / demand.max_model_len:.1f} sequences of {demand.max_model_len}"
        )

    def _parts(self) -> str:
        return ", ".join(f"{name} {shown_bytes(size)}" for name, size in self.use.named.items())

    def _shortage(self, demand: CacheDemand) -> str:
        remedies = []
        if (length := self.fitting_max_model_len(demand)) is not None:
            remedies.append(f"lower HEADRACE_MAX_MODEL_LEN to {length}")
        if (tokens := self.fitting_batched_tokens(demand)) is not None:
            remedies.append(f"lower HEADRACE_MAX_NUM_BATCHED_TOKENS to {tokens}")
        if (utilization := self.fitting_utilization(demand)) is not None:
            remedies.append(f"raise HEADRACE_GPU_MEMORY_UTILIZATION to {utilization:.2f}")
        if self.limit == self.room:
            remedies.append(f"free some of the {shown_bytes(self.used_before)} that others use")
        if not remedies:
            remedies.append("serve a smaller or a quantized model")
        return (
            f"{self.utilization:g} of {shown_bytes(self.device_bytes)} leaves {shown_bytes(self.kv_bytes)} for the KV "
            f"cache beside {self._parts()}, but a sequence of HEADRACE_MAX_MODEL_LEN ({demand.max_model_len} tokens) "
            f"needs {shown_bytes(demand.least_bytes)}. To make it fit, {', or '.join(remedies)}"
        )


def check_weights_fit(num_bytes: int, dtype: str, budget: MemoryBudget) -> None:
    """Check, before they are loaded, that a model's weights fit; `ConfigError` if they do not."""
    if num_bytes <= budget.limit:
        return
    needs = f"the weights need {shown_bytes(num_bytes)} in {dtype}"
    if num_bytes <= budget.room:
        percent = min(100, math.ceil(num_bytes * 100 / budget.device_bytes) + 1)
        problem = f"{budget.utilization:g} allows {shown_bytes(budget.limit)} of {shown_bytes(budget.device_bytes)}"
        remedy = f"raise it to more than {percent / 100:.2f}, so that the KV cache fits too"
        raise ConfigError("HEADRACE_GPU_MEMORY_UTILIZATION", f"{needs}, but {problem}; {remedy}")
    there = f"the device has {shown_bytes(budget.device_bytes)}, of which {shown_bytes(budget.used_before)} are in use"
    halve = "set HEADRACE_DTYPE to bfloat16, " if dtype == "float32" else ""
    raise ConfigError("HEADRACE_MODEL", f"{needs}, but {there}; {halve}serve a quantized or a smaller model")


def shown_bytes(size: int) -> str:
    """Write a size for people: 16.1 GB, 412 MB."""
    if abs(size) >= 10**9:
        return f"{size / 1e9:.1f} GB"
    if abs(size) >= 10**6:
        return f"{size / 1e6:.0f} MB"
    return f"{size / 1e3:.0f} KB" if abs(size) >= 10**4 else f"{size} bytes"


SHARE_OF_FREE = 0.25


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
        f"are free beside the weights; allow {most} at most, or leave it out for a quarter of the free memory",
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
