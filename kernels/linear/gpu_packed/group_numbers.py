"""Scales and offsets as a product reads them: those of a row and block of columns side by side, in few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import gcd

import torch
import torch.nn.functional as F

_WORD_BITS = 32


class GroupKind(Enum):
    """How the number of a group is stored, and in how many bits; those in eight bits are exponents of two (e8m0)."""

    E8M0 = 8
    FP16 = 16
    BF16 = -16
    FP32 = 32

    @property
    def bits(self) -> int:
        """Return the bits of a number."""
        return abs(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumbers:
    """A number for each row and group of columns.

    Attributes:
        words: `[..., num_steps, num_words, padded_rows]` int32: of each block of columns, or of `step` blocks that have
            the same, the numbers of its parts, the first in the lowest bits of the first word.
        kind: Of each number.
        step: Blocks that share their words.
    """

    words: torch.Tensor
    kind: GroupKind
    step: int

    @property
    def num_words(self) -> int:
        """Words of a row and block."""
        return self.words.shape[-2]

    @property
    def constants(self) -> tuple[str, int, int]:
        """Return what kernels are compiled for."""
        return self.kind.name, self.num_words, self.step


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How groups of columns lie in a matrix of `num_blocks` blocks, of `num_planes` planes of `plane` columns each."""

    group_size: int
    plane: int
    num_planes: int
    num_blocks: int

    @property
    def planes_per_part(self) -> int:
        """Planes of a block that have the same group, wherever the block begins."""
        return gcd(self.group_size // self.plane, self.num_planes)

    @property
    def num_parts(self) -> int:
        """Parts of a block, which may have different groups."""
        return self.num_planes // self.planes_per_part

    @property
    def step(self) -> int:
        """Blocks that have the same groups."""
        block = self.num_planes * self.plane
        return self.group_size // block if self.group_size % block == 0 else 1

    def pack(self, matrices: Sequence[torch.Tensor], padded_rows: int) -> list[GroupNumbers]:
        """Store the numbers of some matrices in the fewest words that hold those of all.

        Shapes:
            matrices: `[num_rows, num_groups]` float32 each
        """
        kinds = [kind for kind in GroupKind if all(_fits(numbers, kind) for numbers in matrices)]
        fewest = min(self._num_words(kind) for kind in kinds)
        # Of kinds with as many words the widest is the least to decode.
        kind = max((kind for kind in kinds if self._num_words(kind) == fewest), key=lambda kind: kind.bits)
        return [GroupNumbers(self._words(numbers, kind, padded_rows), kind, self.step) for numbers in matrices]

    def _words(self, numbers: torch.Tensor, kind: GroupKind, padded_rows: int) -> torch.Tensor:
        device, block = numbers.device, self.num_planes * self.plane
        firsts = torch.arange(0, self.num_blocks, self.step, device=device) * block
        parts = torch.arange(self.num_parts, device=device) * (self.planes_per_part * self.plane)
        groups = (firsts[:, None] + parts) // self.group_size
        num_rows, num_groups = numbers.shape
        numbers = F.pad(numbers, (0, max(0, int(groups.max()) + 1 - num_groups), 0, padded_rows - num_rows))
        per_word = _WORD_BITS // kind.bits
        codes = _codes(numbers[:, groups], kind)
        codes = F.pad(codes, (0, -self.num_parts % per_word)).view(*codes.shape[:2], -1, per_word)
        words = codes[..., 0].clone()
        for place in range(1, per_word):
            words |= codes[..., place] << (kind.bits * place)
        return words.permute(1, 2, 0).contiguous()

    def _num_words(self, kind: GroupKind) -> int:
        return -(-self.num_parts * kind.bits // _WORD_BITS)


def _fits(numbers: torch.Tensor, kind: GroupKind) -> bool:
    if kind is GroupKind.E8M0:
        return not bool((numbers.view(torch.int32) & 0x807F_FFFF).any())
    dtype = {GroupKind.FP16: torch.float16, GroupKind.BF16: torch.bfloat16}.get(kind, torch.float32)
    return torch.equal(numbers.to(dtype).float(), numbers)


def _codes(numbers: torch.Tensor, kind: GroupKind) -> torch.Tensor:
    if kind is GroupKind.FP16:
        return numbers.half().view(torch.int16).int() & 0xFFFF
    bits = numbers.contiguous().view(torch.int32)
    return {GroupKind.E8M0: bits >> 23, GroupKind.BF16: (bits >> 16) & 0xFFFF, GroupKind.FP32: bits}[kind]
