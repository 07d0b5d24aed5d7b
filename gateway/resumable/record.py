"""Records of a resumable generation: its head, the requests of its sequences, and the entries of its log.

An answer follows from its head and its entries alone, so every gateway writes it with the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from gateway.api.answer import AnswerStamp
from gateway.api.output_reading import NO_TOOLS, reading_of
from gateway.api.sequences import numbered_requests
from gateway.errors import ApiError
from gateway.generation import Details, Generation, Kind, Prompt, Ranking, ToolUse
from shared.messages import Delta, Request
from shared.sampling import Sampling


class Failure(Struct, frozen=True, array_like=True):
    """How a generation failed: the fields of an `ApiError`."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: ApiError) -> Failure:
        """Return an error as it is kept."""
        return cls(error.status, error.message, error.param, error.code, error.retry_after_s)

    def error(self) -> ApiError:
        """Return the error."""
        return ApiError(self.status, self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s)


# The number of a sequence and a piece of it, or how all of them failed.
Entry = tuple[int, Delta | None, Failure | None]


class StreamForm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters of a generation that its answer needs.

    Attributes:
        endpoint: Name of the endpoint that answers.
        prompt_tokens: Estimated tokens of each prompt.
        num_at_once: As in `Generation`.
        has_ids: Events have ids, so that the stream can be resumed.
        chat_format: Format of the text; None where all of it is content.
        grammar_field: Request field that errors of the grammar name.
        served: The model that answers, if the client asked for an alias.
    """

    endpoint: str
    kind: Kind
    n: int
    prompt_tokens: tuple[int, ...]
    num_at_once: int
    stream: bool = False
    has_ids: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    details: Details | None = None
    ranking: Ranking | None = None
    chat_format: str | None = None
    tools: ToolUse | None = None
    includes_reasoning: bool = True
    grammar_field: str = "tools"
    served: str | None = None

    @classmethod
    def of(cls, generation: Generation, endpoint: str) -> StreamForm:
        """Return the form of a generation that `endpoint` answers."""
        asked, reading = generation.structured_output, generation.reading
        return cls(
            endpoint=endpoint,
            kind=generation.kind,
            n=generation.n,
            prompt_tokens=tuple(prompt.estimated_tokens for prompt in generation.prompts),
            num_at_once=generation.num_at_once,
            stream=generation.stream,
            has_ids=generation.is_resumable,
            include_usage=generation.include_usage,
            max_tokens=generation.sampling.max_tokens,
            details=generation.details,
            ranking=generation.ranking,
            chat_format=None if reading is None else reading.format_name,
            tools=None if reading is None else generation.tools,
            includes_reasoning=generation.includes_reasoning,
            grammar_field="tools" if asked is None else asked.field,
            served=None if generation.alias is None else generation.model,
        )

    def generation(self, model: str) -> Generation:
        """Return a generation that is answered in the same way; its prompts are empty."""
        reading = None
        if self.chat_format is not None:
            reading = reading_of(self.chat_format, self.tools or NO_TOOLS, self.includes_reasoning)
        return Generation(
            kind=self.kind,
            model=self.served or model,
            alias=None if self.served is None else model,
            prompts=tuple(Prompt(tokens) for tokens in self.prompt_tokens),
            n=self.n,
            sampling=Sampling(max_tokens=self.max_tokens),
            deterministic=False,
            stream=self.stream,
            include_usage=self.include_usage,
            details=self.details,
            ranking=self.ranking,
            tools=self.tools,
            includes_reasoning=self.includes_reasoning,
            reading=reading,
            is_resumable=self.has_ids,
        )


class StreamHead(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stream_1"):
    """State of a stream known before its first token, its owner, and how it ended.

    Attributes:
        id: The `x-request-id` of its first answer.
        key_id: Name of the key that asked for it.
        owner: Name of the writer of its log.
        term: Number of takeovers.
        num_request_pieces: Number of pieces that hold its requests.
        created: Unix seconds by the clock of NATS.
        ended: Time of its end, likewise; None while it is generated.
        is_cut: Its log became too large, and was dropped.
        requests_digest: Digest of its requests, to detect another stream's; None from an earlier version.
        key_digest: Digest of the idempotency key that stands for it.
        body_digest: Digest of the body that came with the key; None from an earlier version.
        key_seq: Number of the message by which the key stands for it; 0 from an earlier version.
    """

    id: str
    tenant: str
    key_id: str
    model: str
    form: StreamForm
    stamp: AnswerStamp
    fingerprint: str | None
    owner: str
    num_request_pieces: int
    created: float
    term: int = 0
    ended: float | None = None
    is_cut: bool = False
    requests_digest: str | None = None
    key_digest: str | None = None
    body_digest: str | None = None
    key_seq: int = 0


class KeyRecord(Struct, frozen=True, array_like=True, tag="stream_key_1"):
    """Which stream an idempotency key stands for, and the digest of the request that it came with."""

    stream_id: str
    request_digest: str
    created: float


encode = msgspec.msgpack.Encoder().encode
decode_head = msgspec.msgpack.Decoder(StreamHead).decode
decode_key = msgspec.msgpack.Decoder(KeyRecord).decode
decode_piece = msgspec.msgpack.Decoder(tuple[int, list[Entry]]).decode
decode_entries = msgspec.msgpack.Decoder(list[Entry]).decode
_decode_requests = msgspec.msgpack.Decoder(list[Request]).decode

# A piece is one message of NATS, which is written anew while it grows. Reading a stream takes a round trip for each.
PIECE_BYTES = 4 << 10
# Entries that are encoded at once.
_ENCODED_AT_ONCE = 15
# An entry that is larger than a piece lies in several messages, each behind one of these: no msgpack begins so.
FIRST_PART, MIDDLE_PART, LAST_PART = b"\xc1\x00", b"\xc1\x01", b"\xc1\x02"


def encode_requests(requests: Sequence[Request], n: int) -> list[bytes]:
    """Return the requests of a generation in pieces: of each prompt that of the first of `n` choices."""
    payload = encode(requests[::n])
    return [payload[start : start + PIECE_BYTES] for start in range(0, len(payload), PIECE_BYTES)]


def digest_of(requests: Sequence[bytes]) -> str:
    """Return the digest of a generation's requests, given in pieces."""
    return hashlib.blake2b(b"".join(requests), digest_size=12).hexdigest()


def decode_requests(pieces: Iterable[bytes], n: int) -> list[Request]:
    """Return the requests of all choices; raise `msgspec.MsgspecError` if pieces are missing."""
    return numbered_requests(_decode_requests(b"".join(pieces)), n)


class PieceWriter:
    """Puts entries into pieces. Every gateway that owns a stream writes all of its pieces under its own name.

    Each entry is encoded once, for the journal and the pieces.

    Attributes:
        has_begun: Pieces were written, at least an empty one.
        num_logged: Entries that the journal or the pieces have.
        num_entries: Entries that the pieces have.
        num_bytes: Size of the encoded entries.
        num_messages: In which the entries of pieces lie.
    """

    __slots__ = (
        "_content",
        "_encoded",
        "_first",
        "_num_in_piece",
        "_number",
        "has_begun",
        "num_bytes",
        "num_entries",
        "num_logged",
        "num_messages",
    )

    def __init__(self) -> None:
        self._number = self._first = 0
        self._content = bytearray()
        self._num_in_piece = 0
        # Of entries that no piece has yet.
        self._encoded: list[bytes] = []
        self.has_begun = False
        self.num_logged = self.num_entries = 0
        self.num_bytes = 0
        self.num_messages = 0

    def encode(self, entries: Sequence[Entry]) -> bytes:
        """Encode the entries that follow the logged ones, for the journal and the pieces; return their array."""
        array = encode(entries)
        self.num_logged += len(entries)
        self._encoded.append(array)
        return array

    def put(self, entries: Sequence[Entry]) -> list[tuple[int, bytes]]:
        """Put the entries into pieces that no piece has yet; return the messages that changed, with their numbers.

        `entries` are those behind the logged ones.
        """
        changed: list[tuple[int, bytes]] = []
        self.has_begun = True
        for start in range(0, len(entries), _ENCODED_AT_ONCE):
            self.encode(entries[start : start + _ENCODED_AT_ONCE])
        for array in self._encoded:
            num_entries, content = _without_header(array)
            self.num_bytes += len(content)
            if len(self._content) + len(content) <= PIECE_BYTES:
                self._content += content
                self._num_in_piece += num_entries
            else:
                for each in map(encode, decode_entries(array)):
                    self._put_one(each, changed)
        self._encoded.clear()
        self.num_entries = self.num_logged
        if self._num_in_piece or not changed:
            changed.append((self._number, self._piece()))
        self.num_messages = changed[-1][0] + 1
        return changed

    def _put_one(self, entry: bytes, changed: list[tuple[int, bytes]]) -> None:
        """Add an entry to the piece, to a new one if it is full; a larger entry has a piece of several messages."""
        if self._num_in_piece and len(self._content) + len(entry) > PIECE_BYTES:
            self._close([self._piece()], changed)
        self._content += entry
        self._num_in_piece += 1
        if len(self._content) > PIECE_BYTES:
            self._close(_parts(self._piece()), changed)

    def _close(self, messages: list[bytes], changed: list[tuple[int, bytes]]) -> None:
        changed += enumerate(messages, self._number)
        self._number += len(messages)
        self._first, self._num_in_piece = self._first + self._num_in_piece, 0
        self._content.clear()

    def _piece(self) -> bytes:
        # In msgpack: a pair of the number of the first entry, 32 bits, and an array with a length of 16 bits.
        head = b"\x92\xce" + self._first.to_bytes(4, "big") + b"\xdc" + self._num_in_piece.to_bytes(2, "big")
        return head + self._content


def _without_header(array: bytes) -> tuple[int, bytes]:
    """Return the length of an array in msgpack, and its elements: the header of an array has 1, 3 or 5 bytes."""
    first = array[0]
    if first < 0xA0:
        return first - 0x90, array[1:]
    size = 3 if first == 0xDC else 5
    return int.from_bytes(array[1:size], "big"), array[size:]


def _parts(piece: bytes) -> list[bytes]:
    size = PIECE_BYTES - len(FIRST_PART)
    parts = [piece[start : start + size] for start in range(0, len(piece), size)]
    middle = [MIDDLE_PART + part for part in parts[1:-1]]
    return [FIRST_PART + parts[0], *middle, LAST_PART + parts[-1]]
