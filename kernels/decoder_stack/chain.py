"""Chains of likely tokens by the compiled CPU kernel (`chain.h`): steps of a small stack and a head, in one call.

Drafts need not be exact, only quick: dispatch between such small operations would take most of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu_structures import ChainRequestStructure, address_of
from kernels.decoder_stack.cpu import CpuDecoderStack, StackStep, check_fault
from kernels.linear.panels import PanelMatrix, matrix_structure

MAX_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class ChainCandidates:
    """What may follow each sequence.

    Attributes:
        num_places: `[num_seqs]` int32, how many places behind each sequence were computed.
        token_ids: `[max_places, num_seqs, num_candidates]` int32, likely ones first; the next place follows the first.
        scores: The same shape, float32: log probabilities, given the chain before.
    """

    num_places: torch.Tensor
    token_ids: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChainHead:
    """From the vectors that a stack ends with to draft tokens.

    Attributes:
        matrix: `[num_features, hidden_size]`.
        norm: `[hidden_size]` float32, applied before it; None is nothing.
        token_ids: `[num_features]` int32, the tokens that its features stand for; None is their number.
    """

    matrix: PanelMatrix
    norm: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CpuDraftChain:
    """Goes on by itself where the stack ends. Not thread safe, as the stack."""

    stack: CpuDecoderStack
    head: ChainHead

    def __call__(
        self, step: StackStep, limits: Sequence[int], num_candidates: int, least_score: float
    ) -> ChainCandidates:
        """Compute a step, and what follows its first sequences; their block tables cover their chains.

        Args:
            step: Of several tokens a sequence, or one.
            limits: Places to fill behind each of the first sequences, at least 1.
            num_candidates: Of a place, at most `MAX_CANDIDATES`.
            least_score: The log probability that a chain must have to go on.

        Raises:
            IndexError: A token id or position is out of range.
            ValueError: There are more chains than sequences, or nothing to fill them with.
        """
        num_seqs, most = len(limits), max(limits)
        if num_seqs > len(step.context_lens) or min(limits) < 1 or num_candidates < 1:
            problem = f"chains of {list(limits)} places with {num_candidates} candidates each"
            raise ValueError(f"{problem}, for {len(step.context_lens)} sequences")
        num_candidates = min(num_candidates, MAX_CANDIDATES, self.head.matrix.num_outputs)
        places = torch.tensor(limits, dtype=torch.int32)
        head = self.head
        request = ChainRequestStructure(
            matrix_structure(head.matrix),
            address_of(head.norm),
            address_of(head.token_ids),
            places.data_ptr(),
            num_seqs,
            num_candidates,
            least_score,
        )
        found = ChainCandidates(
            torch.empty(num_seqs, dtype=torch.int32),
            torch.empty(most, num_seqs, num_candidates, dtype=torch.int32),
            torch.empty(most, num_seqs, num_candidates),
        )
        stack, structure = self.stack.structures(step)
        library, address = self.stack.library, ctypes.byref(request)
        needed = library.draft_chain_scratch(stack, address, len(step.token_ids), step.block_tables.shape[1])
        results = (found.token_ids.data_ptr(), found.scores.data_ptr(), found.num_places.data_ptr())
        scratch = self.stack.scratch(needed)
        check_fault(library.draft_chain(stack, address, structure, scratch, *results, torch.get_num_threads()))
        return found
