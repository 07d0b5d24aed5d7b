"""CUDA graphs of whole decode steps, at a few batch sizes, to which smaller batches are padded.

A graph reads its step from one buffer at fixed places and runs from the gathering of inputs to the logits. On a device
without graphs the same body is called on the same padded buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_worker.execution.step_layout import Int64s, StepLayout
from gpu_worker.execution.step_tensors import StagedStep, StepTensors
from gpu_worker.execution.transfers import Upload

Body = Callable[[StepTensors], torch.Tensor]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: close together where padding costs most in proportion."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Runs decode steps of up to `max_num_seqs` sequences."""

    def __init__(self, body: Body, max_num_seqs: int, spare_row: int, device: torch.device) -> None:
        """Use `body` to compute logits; nothing is captured yet.

        Args:
            body: Launches a step, from `StepTensors` to `[num_seqs, vocab_size]` float32.
            max_num_seqs: The largest batch.
            spare_row: The row of sequences that are only padding.
            device: Where it runs.
        """
        self._body = body
        self._device = device
        self._sizes = bucket_sizes(max_num_seqs)
        self._padding = _padding(max_num_seqs, spare_row)
        upload = Upload(device)
        StagedStep(self._padding, self._padding.positions, upload)
        self._buffer = torch.zeros(upload.num_bytes, dtype=torch.uint8, device=device)
        self._steps: dict[int, StepTensors] = {}
        self._launches: dict[int, Callable[[], torch.Tensor]] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture all sizes, the largest first: the others fit into its memory.

        Args:
            progress: Called with the number of sizes captured and in all.
        """
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for num_captured, size in enumerate(reversed(self._sizes), start=1):
            upload = Upload(self._device)
            step = StagedStep(_first(self._padding, size), self._padding.positions[:size], upload)
            upload.bind(self._buffer)
            upload.send_into(self._buffer)
            self._steps[size] = step.tensors
            self._launches[size] = self._capture(step.tensors, pool)
            if progress is not None:
                progress(num_captured, len(self._sizes))

    def run(self, layout: StepLayout, output_positions: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a step of one token a sequence.

        Returns:
            The logits, `[num_seqs, vocab_size]`, valid until the next step is launched; and the rows, `[num_seqs]`.
        """
        count = len(layout.rows)
        size = self._sizes[bisect_left(self._sizes, count)]
        padding = self._padding
        positions = np.concatenate((output_positions, padding.positions[count:size]))
        upload = Upload(self._device)
        StagedStep(_joined(layout, padding, size), positions, upload)
        upload.send_into(self._buffer)
        return self._launches[size]()[:count], self._steps[size].rows[:count]

    def _capture(self, step: StepTensors, pool: Any) -> Callable[[], torch.Tensor]:
        if pool is None:
            return lambda: self._body(step)
        # What is compiled or allocated at a first call must not be while capturing.
        self._body(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self._body(step)
        alias = torch.as_tensor(_Alias(logits), device=self._device)
        assert alias.data_ptr() == logits.data_ptr(), "a copy would show the logits of the capture for ever"

        def replay() -> torch.Tensor:
            graph.replay()
            return alias

        return replay


class _Alias:
    """The memory of a graph's result, without keeping the other graphs of its pool from using it.

    The pool lives as long as the graphs, and a result is read before the next graph runs.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _padding(size: int, spare_row: int) -> StepLayout:
    """Return a step of sequences that write no KV and attend to nothing."""
    zeros, spare = np.zeros(size, dtype=np.int64), np.full(size, spare_row, dtype=np.int64)
    starts, lengths = np.arange(size + 1, dtype=np.int32), np.zeros(size, dtype=np.int32)
    return StepLayout(zeros, spare, zeros, np.full(size, -1, dtype=np.int64), spare, starts, lengths, max_query_len=1)


def _first(padding: StepLayout, size: int) -> StepLayout:
    return StepLayout(
        padding.token_ids[:size],
        padding.token_rows[:size],
        padding.positions[:size],
        padding.slots[:size],
        padding.rows[:size],
        padding.query_starts[: size + 1],
        padding.context_lens[:size],
        max_query_len=1,
    )


def _joined(layout: StepLayout, padding: StepLayout, size: int) -> StepLayout:
    """Pad a step of one token a sequence to `size` sequences."""
    rest = slice(len(layout.rows), size)
    return StepLayout(
        np.concatenate((layout.token_ids, padding.token_ids[rest])),
        np.concatenate((layout.token_rows, padding.token_rows[rest])),
        np.concatenate((layout.positions, padding.positions[rest])),
        np.concatenate((layout.slots, padding.slots[rest])),
        np.concatenate((layout.rows, padding.rows[rest])),
        padding.query_starts[: size + 1],
        np.concatenate((layout.context_lens, padding.context_lens[rest])),
        max_query_len=1,
    )
