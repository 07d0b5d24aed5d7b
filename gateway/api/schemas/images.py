"""Images in bodies: where each comes from, and where it stands among the texts of its message.

An image in the body itself is decoded from base64 and its header is read, so that a wrong one is refused with its
place before anything else happens. Nothing is fetched here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.api.schemas.checks import invalid_value
from gateway.api.schemas.names import described
from gateway.errors import ApiError
from gateway.generation import ImageSource
from shared.bounds import MAX_IMAGES
from shared.image_header import ImageProblemError, read_header
from shared.media import ContentImage, Detail

MAX_URL_CHARACTERS = 8192
# Of an image whose size is not known yet; and how many pixels a token stands for in models of late.
_UNKNOWN_TOKENS = 1024
_PIXELS_PER_TOKEN = 784
_MOST_TOKENS = 4096
_DATA_URL = re.compile(r"data:[\w.+/-]{0,100}(?:;[\w=.+-]{1,100}){0,8};base64,", re.IGNORECASE)
_SHOWN_CHARACTERS = 64
_SPACES = " \n\r\t\v\f"
_NO_SPACES = str.maketrans("", "", _SPACES)
# Some 3 ms; whole groups of four.
_BASE64_PIECE = 256 << 10

AskedDetail = Literal["auto", "low", "high", "original"]
"""As clients ask for it. `original` is `high`: images are made no smaller than the model's processor makes them."""
DetailField = Annotated[
    AskedDetail | None, described("How finely to look: `auto`, `low`, `high` or `original`.", "low")
]


class ImageUrlBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Where an image is, and how finely to look at it."""

    url: Annotated[
        str | None,
        described("A data URL (`data:image/png;base64,...`), or an https URL of a host that the operator allows."),
    ] = None
    file_id: Annotated[
        Annotated[str, Meta(max_length=256)] | None, described("An uploaded file of `/v1/files`, instead of `url`.")
    ] = None
    detail: DetailField = None


ImageUrl = str | ImageUrlBody


@dataclass(slots=True)
class Images:
    """The images of one conversation, in the order in which they were read, and how many it may have."""

    sources: list[ImageSource] = field(default_factory=list)
    limit: int = MAX_IMAGES

    def add(self, source: ImageSource) -> int:
        """Take an image, and return its index."""
        if len(self.sources) >= self.limit:
            raise invalid_value(source.where, f"'{source.where}' is one image too many: at most {self.limit} are read.")
        self.sources.append(source)
        return len(self.sources) - 1

    @property
    def estimated_tokens(self) -> int:
        """Prompt tokens of all of them, about: the model's processor knows."""
        return sum(map(_estimate, self.sources))


@dataclass(slots=True)
class MixedContent:
    """Texts and images of one content, in their order."""

    images: Images | None
    separator: str = ""
    texts: list[str] = field(default_factory=list)
    shown: list[ContentImage] = field(default_factory=list)

    def show(self, source: ImageSource) -> None:
        """Add an image."""
        if self.images is None:
            raise invalid_value(source.where, f"'{source.where}' is an image; only text may stand there.")
        self.shown.append(ContentImage(len(self.texts), self.images.add(source)))

    @property
    def text(self) -> str:
        """All texts."""
        return self.separator.join(self.texts)

    @property
    def part_lengths(self) -> tuple[int, ...]:
        """The lengths of the texts, each with the separator behind it."""
        return tuple(len(text) + len(self.separator) for text in self.texts)

    @property
    def fields(self) -> dict[str, Any]:
        """Of the message, beside its text; none for one that shows no image."""
        return {"part_lengths": self.part_lengths, "images": tuple(self.shown)} if self.shown else {}


def image_named(asked: ImageUrl, where: str) -> ImageSource:
    """Return the image of a part `image_url`."""
    if isinstance(asked, str):
        return image_at(asked, None, where)
    if (asked.url is None) == (asked.file_id is None):
        raise invalid_value(where, f"'{where}' needs either 'url' or 'file_id'.")
    if asked.url is not None:
        return image_at(asked.url, asked.detail, where)
    return ImageSource(f"{where}.file_id", served_detail(asked.detail), file_id=asked.file_id)


def image_at(url: str, detail: AskedDetail | None, where: str) -> ImageSource:
    """Return the image that a URL names or is."""
    if url[:5].lower() != "data:":
        if url[:8].lower() != "https://" or len(url) > MAX_URL_CHARACTERS:
            shown = url[:_SHOWN_CHARACTERS]
            message = f"'{where}' must be a data URL or an https URL of at most {MAX_URL_CHARACTERS} characters"
            upload = " An uploaded file is named as 'file_id'." if url.startswith("file-") else ""
            raise invalid_value(where, f"{message}; it is '{shown}'.{upload}")
        return ImageSource(where, served_detail(detail), url=url)
    head = _DATA_URL.match(url)
    if head is None:
        raise invalid_value(where, f"'{where}' must be a data URL in base64: data:image/png;base64,...")
    return image_of(url[head.end() :], detail, where)


def image_of(text: str, detail: AskedDetail | None, where: str) -> ImageSource:
    """Return the image that a text in base64 holds."""
    try:
        data = _from_base64(_without_spaces(text) if any(space in text for space in _SPACES) else text)
    except (binascii.Error, ValueError):
        raise invalid_value(where, f"'{where}' is not valid base64.") from None
    try:
        header = read_header(data)
    except ImageProblemError as error:
        raise bad_image(where, str(error)) from None
    return ImageSource(where, served_detail(detail), data=data, num_pixels=header.width * header.height)


def _without_spaces(text: str) -> str:
    return "".join([piece.translate(_NO_SPACES) for piece in _pieces(text)])


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + _BASE64_PIECE] for at in range(0, len(text), _BASE64_PIECE))


def _from_base64(text: str) -> bytes:
    """Decode in pieces: `binascii` holds the interpreter's lock, and streams of others wait for it meanwhile."""
    if "=" in text[:-2]:
        raise ValueError("padding amid the text")
    return b"".join(base64.b64decode(piece, validate=True) for piece in _pieces(text))


def served_detail(detail: AskedDetail | None) -> Detail:
    """Return the detail that workers know."""
    return "high" if detail == "original" else detail or "auto"


def bad_image(where: str, problem: str) -> ApiError:
    """Answer for an image that is not read; `problem` completes the sentence 'The image ...'."""
    return ApiError(400, f"The image at '{where}' {problem}", param=where, code="invalid_image")


def _estimate(source: ImageSource) -> int:
    if source.detail == "low":
        return _UNKNOWN_TOKENS // 4
    if not source.num_pixels:
        return _UNKNOWN_TOKENS
    return min(_MOST_TOKENS, max(16, source.num_pixels // _PIXELS_PER_TOKEN))
