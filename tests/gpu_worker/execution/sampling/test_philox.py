from __future__ import annotations

import numpy as np
import pytest

from gpu_worker.execution.sampling.philox import UniformStream, philox4x32, uniforms

# Known answers of the authors' Random123 library: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    words = philox4x32(tuple(np.array([word, 0], dtype=np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == expected


def test_stream_equals_direct_numbers_in_any_order() -> None:
    direct = uniforms(-5, 0, 300)
    stream = UniformStream(-5)
    for position in (0, 299, 64, 63, 65, 128, 1):
        assert stream.at(position) == direct[position]


def test_numbers_are_uniform_and_seeds_and_positions_independent() -> None:
    numbers = np.stack([uniforms(seed, 0, 1000) for seed in range(20)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 86  # chi-square, 49 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(numbers)[np.triu_indices(20, 1)]).max() < 0.15
    assert len(np.unique(numbers)) == numbers.size


def test_all_64_bits_of_seed_and_position_matter() -> None:
    assert uniforms(1, 0, 1) != uniforms(1 + 2**32, 0, 1)
    assert uniforms(1, 0, 1) != uniforms(1 - 2**63, 0, 1)
    assert uniforms(1, 0, 1) != uniforms(1, 2**32, 1)
