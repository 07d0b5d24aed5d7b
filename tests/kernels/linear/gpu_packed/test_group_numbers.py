from __future__ import annotations

import pytest
import torch

from kernels.linear.gpu_packed.group_numbers import GroupKind, GroupLayout, GroupNumbers

ROWS, PADDED_ROWS = 5, 8
# 4-bit codes in groups of 32, 128, whole rows and a size that no block is made of; 8-bit codes in groups of 16.
LAYOUTS = (
    GroupLayout(32, 32, 4, 3),
    GroupLayout(128, 64, 4, 3),
    GroupLayout(1024, 64, 4, 7),
    GroupLayout(384, 64, 4, 3),
    GroupLayout(16, 16, 2, 5),
)
EXAMPLES = {
    GroupKind.E8M0: 2.0**-9, GroupKind.FP16: 1.25, GroupKind.BF16: 1.25 * 2.0**100, GroupKind.FP32: 1 + 2.0**-20,
}  # fmt: skip


def decode(numbers: GroupNumbers, layout: GroupLayout, block: int, part: int) -> torch.Tensor:
    per_word = 32 // numbers.kind.bits
    words = numbers.words[block // numbers.step, part // per_word].to(torch.int64) & 0xFFFF_FFFF
    bits = (words >> (numbers.kind.bits * (part % per_word))) & ((1 << numbers.kind.bits) - 1)
    if numbers.kind is GroupKind.FP16:
        return bits.to(torch.int16).view(torch.float16).float()
    shift = {GroupKind.E8M0: 23, GroupKind.BF16: 16, GroupKind.FP32: 0}[numbers.kind]
    return (bits << shift).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=[kind.name for kind in EXAMPLES])
def test_words_hold_the_number_of_every_part(layout: GroupLayout, example: float) -> None:
    block = layout.num_planes * layout.plane
    num_groups = -(-layout.num_blocks * block // layout.group_size)
    powers = torch.arange(ROWS * num_groups).view(ROWS, num_groups) % 5
    matrix = example * 2.0**powers
    [numbers] = layout.pack([matrix], PADDED_ROWS)
    for of_block in range(layout.num_blocks):
        for part in range(layout.num_parts):
            group = (of_block * block + part * layout.planes_per_part * layout.plane) // layout.group_size
            found = decode(numbers, layout, of_block, part)
            assert torch.equal(found[:ROWS], matrix[:, group])
            assert not found[ROWS:].any()


def test_scales_of_a_row_and_block_are_in_the_fewest_words() -> None:
    four_parts, two_parts, one_part = LAYOUTS[0], LAYOUTS[1], LAYOUTS[2]
    for layout, expected in ((four_parts, (1, 2, 2, 4)), (two_parts, (1, 1, 1, 2)), (one_part, (1, 1, 1, 1))):
        num_words = [layout.pack([torch.full((1, 1), example)], 1)[0].num_words for example in EXAMPLES.values()]
        assert tuple(num_words) == expected


def test_matrices_that_are_packed_together_have_one_kind() -> None:
    narrow, wide = torch.full((ROWS, 12), 0.5), torch.full((ROWS, 12), EXAMPLES[GroupKind.FP32])
    assert [numbers.kind for numbers in LAYOUTS[0].pack([narrow, wide], PADDED_ROWS)] == [GroupKind.FP32] * 2


def test_blocks_of_one_group_share_their_words() -> None:
    [numbers] = LAYOUTS[2].pack([torch.ones(ROWS, 2)], PADDED_ROWS)
    assert numbers.words.shape == (2, 1, PADDED_ROWS)
