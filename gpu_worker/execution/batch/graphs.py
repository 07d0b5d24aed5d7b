"""CUDA graphs of whole steps, at a few sizes, to which smaller steps are padded.

A graph reads its step from fixed places in one buffer. It runs from the gathering of inputs up to the logits, or up to
the hidden vectors where only some tokens are sampled behind. On a device without graphs, the same function is called on
the same padded buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.execution.batch.graph_shapes import GraphShape
from gpu_worker.execution.batch.step_table import DeviceStep, HostStep, StagedStep, no_step, padded
from gpu_worker.execution.batch.transfers import Upload


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """What a step makes of its tokens.

    Attributes:
        hidden: `[num_tokens, hidden_size]`.
        logits: `[num_tokens, vocab_size]` float32; None where the step's shape is without.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None


Body = Callable[[DeviceStep, GraphShape], ComputedRows]


class StepGraphs:
    """Runs steps that fit into one of a few shapes."""

    def __init__(
        self,
        body: Body,
        shapes: list[GraphShape],
        spare_row: int,
        device: torch.device,
        num_windows: int = 0,
        spare_slot: int | None = None,
    ) -> None:
        self._spare_row, self._spare_slot = spare_row, spare_slot
        self._body = body
        self._device = device
        self._shapes = sorted(shapes, key=_size)
        self._sizes = [shape.num_tokens for shape in self._shapes]
        self._no_step = no_step(num_windows)
        self._buffer = torch.zeros(max(map(self._num_bytes, self._shapes)), dtype=torch.uint8, device=device)
        self._steps: dict[GraphShape, DeviceStep] = {}
        self._launches: dict[GraphShape, Callable[[], ComputedRows]] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all shapes, the largest first: the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for num_captured, shape in enumerate(reversed(self._shapes), start=1):
            upload = Upload(self._device, is_copied=True)
            step = self._staged(shape, upload)
            upload.bind(self._buffer)
            upload.send_into(self._buffer)
            self._steps[shape] = step.tensors
            self._launches[shape] = self._capture(step.tensors, shape, pool)
            if progress is not None:
                progress(num_captured, len(self._shapes))

    def shape_for(self, layout: HostStep, *, is_decode: bool, num_expanded_blocks: int = 0) -> GraphShape | None:
        """Return the smallest shape that a step fits into, None where there is none.

        With `num_expanded_blocks`, it makes keys and values of these.
        """
        first = bisect_left(self._sizes, len(layout.token_ids))
        size = (len(layout.token_ids), len(layout.rows), layout.max_query_len, num_expanded_blocks)
        fitting = (shape for shape in self._shapes[first:] if shape.holds(*size))
        return next((shape for shape in fitting if is_decode or not shape.has_logits), None)

    def run(self, shape: GraphShape, layout: HostStep) -> ComputedRows:
        """Launch a step; return what it makes of the layout's tokens, valid until the next step is launched."""
        num_tokens = len(layout.token_ids)
        upload = Upload(self._device, is_copied=True)
        StagedStep(self._padded(layout, shape), upload)
        upload.send_into(self._buffer)
        computed = self._launches[shape]()
        return ComputedRows(
            computed.hidden[:num_tokens], None if computed.logits is None else computed.logits[:num_tokens]
        )

    def _staged(self, shape: GraphShape, upload: Upload) -> StagedStep:
        return StagedStep(self._padded(self._no_step, shape), upload)

    def _padded(self, step: HostStep, shape: GraphShape) -> HostStep:
        return padded(step, shape, self._spare_row, self._spare_slot)

    def _num_bytes(self, shape: GraphShape) -> int:
        upload = Upload(self._device, is_copied=True)
        self._staged(shape, upload)
        return upload.num_bytes

    def _capture(self, step: DeviceStep, shape: GraphShape, pool: Any) -> Callable[[], ComputedRows]:
        if pool is None:
            return lambda: self._body(step, shape)
        # The first call compiles and allocates, which must not happen while capturing.
        self._body(step, shape)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            computed = self._body(step, shape)
        aliases = ComputedRows(_alias(computed.hidden), None if computed.logits is None else _alias(computed.logits))

        def replay() -> ComputedRows:
            graph.replay()
            return aliases

        return replay


def _size(shape: GraphShape) -> tuple[int, int, int, int]:
    return shape.num_tokens, shape.query_len, shape.num_seqs, shape.num_expanded_blocks


class _Bytes:
    """The bytes of a tensor, which torch can read here without owning the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of a graph's result, which does not own it.

    While a tensor owns that memory, no other graph of the pool can use it. It need not be owned: the pool lives as long
    as the graphs, and a result is read before the next graph runs.
    """
    alias = torch.as_tensor(_Bytes(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    assert alias.data_ptr() == tensor.data_ptr(), "a copy would show the results of the capture for ever"
    return alias
