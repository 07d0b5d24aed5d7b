"""Blocks of images have digests that no other content has: whoever chooses texts, images and places finds none."""

from __future__ import annotations

import gc
import random
from hashlib import sha256

from msgspec import structs

from gpu_worker.core.block_pool import BlockPool
from gpu_worker.core.media import MediaSpan, PreparedImage, SharedImages
from gpu_worker.core.prefix_cache import PrefixCache
from gpu_worker.core.sequence import Sequence
from shared.sampling import Sampling

BLOCK, IMAGE_TOKEN = 4, 9


def seeing_sequence(parts: list[int | tuple[str, int]], salt: bytes = b"") -> Sequence:
    """Return a sequence of tokens, and of images by name and length."""
    token_ids: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        name, length = part
        spans.append(MediaSpan(len(token_ids), length, sha256(name.encode()).digest(), length))
        token_ids += [IMAGE_TOKEN] * length
    sequence = Sequence("s", token_ids, len(token_ids), Sampling(), max_tokens=1, salt=salt)
    sequence.media = tuple(spans)
    return sequence


def digests_of(sequence: Sequence) -> list[bytes]:
    PrefixCache(BlockPool(1), BLOCK).chain(sequence, len(sequence.token_ids) // BLOCK)
    return sequence.block_digests


def contents_of(sequence: Sequence) -> list[tuple[object, ...]]:
    """Return what each token is: itself, or a part of an image."""
    contents: list[tuple[object, ...]] = [(token_id,) for token_id in sequence.token_ids]
    for span in sequence.media:
        for place in range(span.start, span.end):
            contents[place] = (sequence.token_ids[place], span.digest, place - span.start)
    return contents


def adversarial_pair(rng: random.Random) -> tuple[Sequence, Sequence]:
    """Return a prompt, and one that differs in an image, in where it stands, in how it is cut, or in its detail."""
    images = [f"{rng.choice('abc')} {rng.choice(['low', 'high'])}" for _ in range(rng.randint(1, 3))]
    lengths = [rng.choice([1, 3, 4, 7, 8, 12]) for _ in images]
    texts = [[rng.randrange(3) for _ in range(rng.randint(0, 6))] for _ in range(len(images) + 1)]

    def parts(names: list[str], counts: list[int], words: list[list[int]]) -> list[int | tuple[str, int]]:
        found: list[int | tuple[str, int]] = list(words[0])
        for name, count, text in zip(names, counts, words[1:], strict=True):
            found += [(name, count), *text]
        return found

    first = seeing_sequence(parts(images, lengths, texts))
    which, place = rng.randrange(5), rng.randrange(len(images))
    if which == 0:
        images = [*images[:place], f"{rng.choice('abc')} high", *images[place + 1 :]]
    elif which == 1:
        images = [*images[:place], images[place].replace("low", "high"), *images[place + 1 :]]
    elif which == 2:
        rng.shuffle(images)
    elif which == 3:
        # A token of text that is an image's, before the image: the same tokens, shifted.
        texts = [*texts[:place], [*texts[place], IMAGE_TOKEN], *texts[place + 1 :]]
        lengths = [*lengths[:place], max(1, lengths[place] - 1), *lengths[place + 1 :]]
    else:
        # One image where there were two.
        lengths = [*lengths[:place], lengths[place] + 4, *lengths[place + 1 :]]
    return first, seeing_sequence(parts(images, lengths, texts))


def test_no_pair_shares_a_block_that_differs() -> None:
    rng, num_different = random.Random(32), 0
    for _ in range(10_000):
        pair = adversarial_pair(rng)
        contents, digests = [contents_of(sequence) for sequence in pair], [digests_of(sequence) for sequence in pair]
        for number, (one, other) in enumerate(zip(*digests, strict=False), start=1):
            is_same = contents[0][: number * BLOCK] == contents[1][: number * BLOCK]
            assert (one == other) is is_same
            num_different += not is_same
    assert num_different > 10_000


def test_the_same_image_in_another_grid_shares_no_block() -> None:
    digests = []
    for grid in ((2, 4), (4, 2)):
        sequence = seeing_sequence([("a", 8), 1])
        sequence.media = tuple(structs.replace(span, token_grid=grid) for span in sequence.media)
        digests.append(digests_of(sequence))
    assert set(digests[0]).isdisjoint(digests[1])


def test_text_alone_has_the_digests_that_it_had() -> None:
    sequence = seeing_sequence([1, 2, 3, 4, 5, 6, 7, 8], salt=b"tenant")
    words = [int(token).to_bytes(8, "little") for token in sequence.token_ids]
    parent = sha256(sha256(b"tenant").digest() + b"".join(words[:4])).digest()
    assert digests_of(sequence) == [parent, sha256(parent + b"".join(words[4:])).digest()]


def test_pixels_live_as_long_as_a_sequence_that_has_them() -> None:
    """Also where two show the same image, and either one ends."""
    for ended in range(2):
        images, digest = SharedImages(), b"d" * 32
        owned = [images.share([PreparedImage(digest, object(), (1, 1), 1)]) for _ in range(2)]
        kept = owned[0][0].values
        del owned[ended]
        gc.collect()
        found = images.get(digest)
        assert found is not None
        assert found.values is kept
        del owned, found
        gc.collect()
        assert images.get(digest) is None
