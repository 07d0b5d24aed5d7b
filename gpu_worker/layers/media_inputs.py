"""What a step's images give the model: embeddings in place of tokens, positions of several axes, what layers add."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from msgspec import Struct

from kernels.layer_cache import LayerCache
from kernels.paged_attention import AttentionOptions
from kernels.paged_attention.reference import bidirectional_span_attention


class BidirectionalSpan(Struct, frozen=True):
    """An image whose tokens attend to one another in both directions.

    Attributes:
        sequence: Its number in the step.
        first, end: Its tokens in the step, all of which are there.
        num_before: Tokens of the sequence before it.
    """

    sequence: int
    first: int
    end: int
    num_before: int


class MediaInputs(Struct, frozen=True):
    """The images of a step.

    Attributes:
        places: `[num_rows]` int64, tokens of the step whose embeddings are replaced.
        rows: `[num_rows, hidden_size]`, what replaces them.
        deep: Likewise, added to the stream behind the first layers, one a layer.
        positions: `[3, num_tokens]` int64, of all tokens, where positions have several axes; else None.
        rotary_axes: `[num_pairs]` int64, the axis that each pair of dimensions of a head turns by; likewise.
        bidirectional: Images with attention in both directions.
        rotary_rows: By the address of a rotary table, the rows of the step's tokens; filled when layers first ask.
    """

    places: torch.Tensor
    rows: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    positions: torch.Tensor | None = None
    rotary_axes: torch.Tensor | None = None
    bidirectional: Sequence[BidirectionalSpan] = ()
    rotary_rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = msgspec.field(default_factory=dict)


def rotations_of(
    media: MediaInputs | None, table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rotary table of the step's tokens alone, and the row in it of each token.

    Where positions have one axis, or the step has no images, these are `table` and `positions`.

    Shapes:
        table: `[max_positions, head_dim]`, the cosines, then the sines
        positions: `[num_tokens]`
        result: `[num_tokens, head_dim]`, `[num_tokens]`
    """
    if media is None or media.positions is None or media.rotary_axes is None:
        return table, positions
    key = table.data_ptr()
    if key not in media.rotary_rows:
        half = table.shape[1] // 2
        # Pairs that do not turn have an angle of zero at all positions.
        axes = torch.nn.functional.pad(media.rotary_axes, (0, half - len(media.rotary_axes)))
        index = media.positions[axes].T.repeat(1, 2)
        media.rotary_rows[key] = table.gather(0, index), torch.arange(len(positions), device=positions.device)
    return media.rotary_rows[key]


def attend_bidirectional(
    media: MediaInputs | None,
    attended: torch.Tensor,
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Replace what tokens of images attended to, where an image's tokens attend to one another in both directions.

    Shapes:
        query, attended, result: `[num_tokens, num_heads, head_dim]`
    """
    for span in () if media is None else media.bidirectional:
        part, table = slice(span.first, span.end), block_tables[span.sequence]
        attended[part] = bidirectional_span_attention(query[part], cache, table, span.num_before, options)
    return attended
