"""What a tokenizer may make of a text, and where texts that are embedded or scored are cut.

Its files are untrusted: of thirty steps that each double an `a`, one letter of a prompt would fill the memory of a
machine. Steps are checked before the library reads them. Growth is counted in characters, of each step's worst text.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer

from shared.errors import HeadraceError
from shared.messages import UNDECODABLE

MAX_TOKENS = 1 << 22
"""Of a vocabulary; the largest ones have a quarter of a million."""
MAX_TOKEN_CHARACTERS = 1 << 16
_MAX_GROWTH = 1024
# Of all tokens that are found in a text before anything else: the library makes one large automaton of them.
_MAX_MATCHED_CHARACTERS = 1 << 20
_MAX_ADDED_TOKENS = 4096
_MAX_SEQUENCES = 4
# A compatibility form of U+FDFA has 18 characters, a decomposition has up to 4, a small letter up to 3.
_GROWTHS: Mapping[str, int] = {
    "NFKC": 18,
    "NFKD": 18,
    "NFC": 4,
    "NFD": 4,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
    "Metaspace": 2,
}
# Those that put a space beside a token.
_DECODER_GROWTHS: Mapping[str, int] = {"WordPiece": 2, "BPEDecoder": 2, "CTC": 2}

_Step = dict[str, Any]


class TokenizerBoundsError(HeadraceError):
    """A tokenizer could make too much of a text."""


class _MatchedToken(msgspec.Struct):
    content: str


class _File(msgspec.Struct):
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    post_processor: _Step | None = None
    decoder: _Step | None = None
    added_tokens: list[_MatchedToken] = []


def check_steps(tokenizer_json: bytes) -> None:
    """Check what the steps of a `tokenizer.json` could make of a text; may raise `TokenizerBoundsError`."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_File)
        before = [*_flat(file.normalizer, "normalizers"), *_flat(file.pre_tokenizer, "pretokenizers")]
        _check_growth(math.prod(map(_growth, before)))
        _check_growth(math.prod(map(_decoder_growth, _flat(file.decoder, "decoders"))))
        for step in _flat(file.post_processor, "processors"):
            if step["type"] == "TemplateProcessing":
                _check_template(step)
        check_matched(token.content for token in file.added_tokens)
    except (*UNDECODABLE, KeyError, TypeError, AttributeError) as error:
        raise TokenizerBoundsError(f"it is not a tokenizer.json ({error!r})") from None


def check_matched(contents: Iterable[str]) -> None:
    """Check the tokens that are found in a text before anything else; may raise `TokenizerBoundsError`."""
    size = sum(map(len, contents))
    if size > _MAX_MATCHED_CHARACTERS:
        problem = f"its added_tokens have {size} characters; at most {_MAX_MATCHED_CHARACTERS} are read"
        raise TokenizerBoundsError(problem)


def check_vocabulary_sizes(vocabulary: Mapping[str, int], vocab_size: int) -> None:
    """Check the vocabulary's sizes: tokens' lengths, ids, and the model's number; may raise `TokenizerBoundsError`."""
    if vocab_size > MAX_TOKENS:
        raise TokenizerBoundsError(f"its model has {vocab_size} tokens; at most {MAX_TOKENS} are read")
    for token, token_id in vocabulary.items():
        if len(token) > MAX_TOKEN_CHARACTERS:
            problem = f"has {len(token)} characters; at most {MAX_TOKEN_CHARACTERS} are read"
            raise TokenizerBoundsError(f"its token {token_id} {problem}")
        if token_id >= MAX_TOKENS:
            problem = f"has the id {token_id}; only ids below {MAX_TOKENS} are read"
            raise TokenizerBoundsError(f"its token {token[:40]!r} {problem}")


def _flat(step: _Step | None, name: str) -> list[_Step]:
    """Return a step, or the steps of a sequence, which has them in the field `name`."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [each for part in step[name] for each in _flat(part, name)]


def _growth(step: _Step) -> int:
    match step["type"]:
        case "Replace":
            return _replacement_growth(step)
        case "Prepend":
            return 1 + len(step["prepend"])
        case "Precompiled":
            return _charsmap_growth(step["precompiled_charsmap"])
    return _GROWTHS.get(step["type"], 1)


def _decoder_growth(step: _Step) -> int:
    return _replacement_growth(step) if step["type"] == "Replace" else _DECODER_GROWTHS.get(step["type"], 1)


def _replacement_growth(step: _Step) -> int:
    content, text = step["content"], step["pattern"].get("String")
    if text:
        return max(1, math.ceil(len(content) / len(text)))
    # A regular expression may match nothing, before each character.
    return 1 + len(content)


def _charsmap_growth(charsmap: str | None) -> int:
    """Return the characters of the longest text that stands for one; texts end with a NUL, behind a table."""
    if charsmap is None:
        return 1
    data = base64.b64decode(charsmap, validate=True)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _check_growth(growth: int) -> None:
    if growth > _MAX_GROWTH:
        problem = f"its steps could make more than {_MAX_GROWTH} characters of one"
        raise TokenizerBoundsError(problem)


def _check_template(template: _Step) -> None:
    sizes = {name: len(token["ids"]) for name, token in template["special_tokens"].items()}
    for name in ("single", "pair"):
        pieces = template[name]
        num_added = sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in pieces if "SpecialToken" in piece)
        num_sequences = sum("Sequence" in piece for piece in pieces)
        if num_added > _MAX_ADDED_TOKENS or num_sequences > _MAX_SEQUENCES:
            problem = f"adds {num_added} tokens to a text, or repeats it {num_sequences} times"
            limit = f"at most {_MAX_ADDED_TOKENS} tokens and {_MAX_SEQUENCES} texts are read"
            raise TokenizerBoundsError(f"its post_processor {problem}; {limit}")


class TextCutter:
    """Cuts token ids of texts that one tokenizer has made. The caller turns the library's errors into its own."""

    def __init__(self, tokenizer: Tokenizer, encode: Callable[[str, bool], list[int]]) -> None:
        """Return a step, or the steps of a sequence, which has them in the field `name`."""
        self._tokenizer = tokenizer
        whole, bare = encode("a", True), encode("a", False)
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        start = next(starts, 0) if bare else 0
        # What the tokenizer puts before a text, and behind it.
        self._begin, self._end = whole[:start], whole[start + len(bare) :]

    def shortened(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return the first tokens of a text, between those that the tokenizer adds to every text."""
        begin, end = self._begin, self._end
        if len(token_ids) <= max_tokens:
            return token_ids
        if token_ids[: len(begin)] != begin or (end and token_ids[-len(end) :] != end):
            return token_ids[:max_tokens]
        room = max(1, max_tokens - len(begin) - len(end))
        return [*token_ids[: len(begin) + room], *end]

    def joined(self, first: str, second: str, max_tokens: int) -> list[int]:
        """Return a pair of texts as one prompt; the longer text is cut, or both where both are long."""
        one, other = self._tokenizer.encode_batch_fast([first, second], add_special_tokens=False)
        room = max(2, max_tokens - self._tokenizer.num_special_tokens_to_add(True))
        num_first, num_second = _longest_first(len(one), len(other), room)
        one.truncate(num_first)
        other.truncate(num_second)
        ids: list[int] = self._tokenizer.post_process(one, other).ids
        return ids

    def without_last_tokens(self, text: str, num_tokens: int) -> str:
        """Return a text without its last `num_tokens` tokens."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[-num_tokens][0]] if num_tokens < len(offsets) else ""


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, as the tokenizers' strategy of this name has it."""
    shorter, longer = min(first, second), max(first, second)
    if shorter + longer > room:
        if shorter < room - shorter:
            longer = room - shorter
        else:
            shorter, longer = room // 2, room // 2 + room % 2
    return (shorter, longer) if first <= second else (longer, shorter)
