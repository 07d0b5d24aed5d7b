"""The scheduler's configuration, and the statistics that it reports."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Layers that read only a sequence's last tokens.

    Attributes:
        window: Tokens that one sees, itself included.
    """

    window: int
    num_blocks: int

    def most_blocks(self, block_size: int) -> int:
        """Return the blocks that hold a window wherever it begins: one more than it fills at most."""
        return -(-(self.window - 1) // block_size) + 1


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Layers that keep a fixed number of bytes of a sequence.

    Attributes:
        num_slots: One for each running sequence, the others for checkpoints; all are of the same size.
        interval_blocks: Blocks from one checkpoint along a prompt to the next; a power of two.
    """

    num_slots: int
    interval_blocks: int


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage of a vision tower costs for each embedding, in tokens of the model that have as much to compute.

    Attributes:
        row: Whatever the size of the image.
        pair: On top of that for each patch of the tile: attention.
        fixed_rows: Embeddings that cost as much as any part of the stage costs on top, however small it is.
    """

    row: float
    pair: float = 0.0
    fixed_rows: int = 0


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """A vision tower beside the model.

    Attributes:
        stages: Of the tower: all of an image passes one before a part of it passes the next. Equal ones are taken to
            be as fast as one another.
        max_rows: Embeddings of images that the runner keeps: at least those of two images, since batch work keeps one.
        bidirectional_tokens: Of an image that one step has to compute; 0 where chunks may end inside an image.
    """

    stages: tuple[StageCost, ...]
    max_rows: int
    bidirectional_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes that do not change while the engine runs.

    Attributes:
        max_num_batched_tokens: Token budget of a step; at least `max_num_seqs`, so that every decode fits.
        max_model_len: Prompt and output tokens of a sequence at most.
        headroom_tokens: Output tokens that blocks are counted for, at admission and before a request is pulled. The
            default is long enough that a short answer is never preempted, and short enough that a large `max_tokens`
            does not empty the batch.
        batch_slowdown: How much longer batch work may make a step of interactive sequences, as a share of it.
        retained_share: Of blocks, and of slots for states, that clients may have evicted last for a time.
        windows: Groups of layers that keep the last tokens, besides the group that keeps all: that of `num_blocks`.
        num_groups: Groups into which plans divide the running sequences. Of one group, a plan may compute the token
            that a step in flight samples; of several, sequences wait for that step to land, while the other groups are
            computed.
        num_parts: Of the blocks that keep all tokens, each of as many; a sequence holds blocks of one part alone.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    headroom_tokens: int = 128
    batch_slowdown: float = 0.05
    retained_share: float = 0.5
    windows: tuple[WindowConfig, ...] = ()
    state: StateConfig | None = None
    num_groups: int = 1
    media: MediaConfig | None = None
    num_parts: int = 1

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences could not all go on in one step"
            )
        if self.num_blocks % self.num_parts or (self.num_parts > 1 and (self.windows or self.state)):
            raise ValueError("blocks are divided into equal parts, where all layers keep all tokens and nothing else")
        whole = 0 if self.media is None else self.media.bidirectional_tokens
        if whole and self.max_num_batched_tokens < self.max_num_seqs + whole:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least {self.max_num_seqs + whole}: "
                f"max_num_seqs and the {whole} tokens of an image, which one step computes"
            )
        for group in self.windows:
            most = min(group.most_blocks(self.block_size), self.num_blocks_for(self.max_model_len))
            if group.num_blocks < most:
                raise ValueError(
                    f"the {group.num_blocks} blocks of the layers with a window of {group.window} tokens must be at "
                    f"least {most}, which one sequence needs"
                )
        if self.state is not None and self.state.num_slots < self.max_num_seqs:
            raise ValueError(
                f"{self.state.num_slots} slots for states must be at least max_num_seqs ({self.max_num_seqs})"
            )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def expected_blocks(self, num_tokens: int, max_num_tokens: int) -> int:
        """Return how many blocks to count for a sequence of `num_tokens` that may grow to `max_num_tokens`."""
        return self.num_blocks_for(max(num_tokens, min(num_tokens + self.headroom_tokens, max_num_tokens)))

    @property
    def max_num_tokens(self) -> int:
        """Longest sequence: what the model allows and one part of the blocks can hold."""
        return min(self.max_model_len, self.num_blocks // self.num_parts * self.block_size)


class SchedulerStats(Struct, frozen=True, kw_only=True):
    """A snapshot. `waiting_tokens` counts tokens known and not computed, of waiting and running prompts.

    Attributes:
        max_batch_seqs: Batch sequences that it is worth having in the engine at present.
        free_blocks: Blocks that can be handed out, those with findable content included.
        groups: Each kind of KV memory with its blocks in use, or slots, and how many there are.
        num_prefix_queries: Prompt tokens admitted so far, and of these `num_prefix_hits` found in the prefix cache.
        num_device_hits: Those of them that no tier below the device's memory had to bring.
        num_evicted_blocks: Blocks of the prefix cache that were overwritten so far.
        num_retained_blocks: Blocks that are evicted last at present, because a request asked for it.
        full_step_rate: Prompt tokens per second of a full step, by the model of step times; 0 while unknown.
    """

    running: int
    running_batch: int
    waiting: int
    waiting_batch: int
    max_batch_seqs: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_device_hits: int = 0
    num_evicted_blocks: int = 0
    num_retained_blocks: int = 0
    groups: tuple[tuple[str, int, int], ...] = ()
    full_step_rate: float = 0.0
