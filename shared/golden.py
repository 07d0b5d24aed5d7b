"""Golden prompts: what a model that is known to be right made of them, in a file that its recorder has signed.

A baseline names the model as clients do, and never its files: a worker that serves other weights under the name, or the
same ones rounded, is to be found and not excused. Tokens are fixed, so a probe compares the same places whatever a
model would rather say: every token of a prompt is scored given those before it. Behind the first prompt, the *anchor*,
the most likely next tokens are compared, and its own tokens behind beginnings of it that the prefix cache has.

The first line of a file has the HMAC-SHA256 of the rest. It is verified before anything of the rest is read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.bounds import Counter, Seconds, TokenId, UnixSeconds
from shared.errors import ConfigError
from shared.files import AtomicFile

MAX_FILE_BYTES = 16 << 20
MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 8192
NUM_ANSWER_TOKENS = 8
"""Tokens generated behind the anchor, and how many likely ones are recorded in each place."""
NUM_TOP = 5
LONG_TOKENS = 400
"""A prompt of this length or more counts as long: wrong rotations show between distant tokens."""

_FORMAT = b"headrace-golden-1"
_KEY = re.compile(r"[0-9a-f]{64}")

Logprob = Annotated[float, Meta(ge=-10_000.0, le=0.001)]
Deviation = Annotated[float, Meta(ge=0.0, le=1e6)]
Likely = tuple[TokenId, Logprob]


class GoldenPrompt(Struct, frozen=True, array_like=True):
    """A prompt, and the log probability of each token but the first, given those before it."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=16, max_length=MAX_PROMPT_TOKENS)]
    logprobs: Annotated[tuple[Logprob, ...], Meta(min_length=15, max_length=MAX_PROMPT_TOKENS)]


class Baseline(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One recording.

    Attributes:
        model: The name that clients ask for.
        label: The recorder's name for the model's revision, for people.
        recorded: When.
        noise: The largest deviation between two passes of the recording: other batches, the prefix cache.
        place_noise: The largest deviation of a single token of the anchor between them.
        prompts: The first one is the anchor.
        answer: Behind the anchor: the most likely tokens in each place, best first; each place follows the best of the
            one before.
    """

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    label: Annotated[str, Meta(max_length=256)] = ""
    recorded: UnixSeconds
    noise: Deviation
    place_noise: Deviation = 0.0
    prompts: Annotated[tuple[GoldenPrompt, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]
    answer: Annotated[
        tuple[Annotated[tuple[Likely, ...], Meta(min_length=1, max_length=8)], ...], Meta(min_length=1, max_length=16)
    ]


class GoldenReading(Struct, frozen=True, array_like=True):
    """Results of a worker's probes, as its heartbeats carry them.

    Attributes:
        probes, failed: Since its start; those given up are in neither.
        in_a_row: Failures since the last probe that passed.
        deviation: Of the last probe.
        limit: Largest deviation that passes.
        device_s: Device time of all probes.
        given_up: Probes that did not end in time.
        has_withdrawn: The worker takes no more requests because of them.
        problem: Why it has withdrawn, or would have if it were not the last one; empty while nothing is wrong.
        age_s: Seconds since the last probe ended with a deviation, or since the start; None from earlier versions.
    """

    probes: Counter = 0
    failed: Counter = 0
    in_a_row: Counter = 0
    deviation: Deviation = 0.0
    limit: Deviation = 0.0
    device_s: Seconds = 0.0
    given_up: Counter = 0
    has_withdrawn: bool = False
    problem: Annotated[str, Meta(max_length=512)] = ""
    age_s: Seconds | None = None


def sign(baseline: Baseline, key: bytes) -> bytes:
    """Return the content of a file."""
    content = msgspec.json.encode(baseline)
    return b"%s %s\n%s" % (_FORMAT, _mac(content, key), content)


def read_baseline(path: Path, key: bytes, variable: str) -> Baseline:
    """Read a baseline; `ConfigError`, which names `variable`, if it cannot be or was not signed by this key."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(variable, f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(variable, f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, so it is not a baseline")
    head, _, content = data.partition(b"\n")
    name, _, mac = head.partition(b" ")
    if name != _FORMAT:
        raise ConfigError(variable, f"{path} is not a signed baseline; `headrace golden record` makes one")
    if not hmac.compare_digest(mac, _mac(content, key)):
        problem = "was not signed by this key, or was changed since"
        raise ConfigError(variable, f"{path} {problem}; record it again, or give the key that it was recorded with")
    try:
        baseline = msgspec.json.decode(content, type=Baseline)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(variable, f"{path} cannot be used: {str(error)[:200]}; record it again") from None
    if any(len(prompt.logprobs) != len(prompt.token_ids) - 1 for prompt in baseline.prompts):
        raise ConfigError(variable, f"{path} has a prompt without one log probability a token; record it again")
    return baseline


def read_key(path: Path, variable: str) -> bytes:
    """Read the key of baselines, 64 hexadecimal digits; `ConfigError`, which names `variable`, if there is none."""
    try:
        content = path.read_text("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(variable, f"{path} cannot be read: {error.strerror}") from None
    if not _KEY.fullmatch(content):
        raise ConfigError(variable, f"{path} holds no key of 64 hexadecimal digits; `headrace golden record` makes one")
    return bytes.fromhex(content)


def make_key(path: Path) -> bytes:
    """Write a new key, readable by its owner alone; `OSError` if it cannot be written."""
    key = secrets.token_bytes(32)
    file = AtomicFile(path)
    file.write(key.hex().encode() + b"\n")
    file.commit()
    return key


def _mac(content: bytes, key: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).hexdigest().encode()
