"""Requests to simulate: drawn by a seed, or read from a trace.

A trace is a file of lines, JSON objects with `at` (seconds), `prompt` and `output` (tokens) and optionally `tenant` and
`prefix`, a name: requests with the same one begin with the same `prefix_tokens` tokens. Mooncake's traces
(`timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of 512 tokens each) and the CSV of Azure's
(`TIMESTAMP,ContextTokens,GeneratedTokens`) are read too.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import repeat
from pathlib import Path
from zlib import crc32

from ops.simulation.engine import TOKEN_ID
from shared.cache_hints import CacheHints
from shared.errors import HeadraceError

MAX_TOKENS = 1 << 22
_FIELDS = ("at", "prompt", "output", "tenant", "prefix", "prefix_tokens")
_MAX_LINE = 1 << 20
_MOONCAKE_BLOCK = 512
# Ids of tokens are below 2^31. Texts are ranges of them that begin at different ids: as digests of blocks are chained,
# it does not matter that ranges overlap.
_STRIDE = 17
_FIRST_OF_ITS_OWN = 1 << 30
ANSWER = -1
"""Number of the text that an earlier answer was."""
_NUM_OF_THEIR_OWN = (1 << 30) - MAX_TOKENS


class TraceError(HeadraceError):
    """A line of a trace cannot be used."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes.

    Attributes:
        at: Seconds since the beginning.
        beginnings: What its prompt begins with: the number of a text that other prompts may have too, and its tokens.
        hints: Of how long its blocks are of use.
    """

    at: float
    prompt: int
    output: int
    tenant: str = "default"
    beginnings: tuple[tuple[int, int], ...] = ()
    hints: CacheHints | None = None

    def token_ids(self, number: int) -> list[int]:
        """Return the tokens of the prompt. Blocks of two prompts are equal in their common beginnings alone."""
        ids: list[int] = []
        for text, length in self.beginnings:
            start, length = text * _STRIDE % _FIRST_OF_ITS_OWN, min(length, self.prompt - len(ids))
            ids += repeat(TOKEN_ID, length) if text == ANSWER else range(start, start + length)
        start = _FIRST_OF_ITS_OWN + number * _STRIDE % _NUM_OF_THEIR_OWN
        ids += range(start, start + self.prompt - len(ids))
        return ids


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Requests drawn at random.

    Attributes:
        rate: Requests a second, in the mean; infinite for all at once.
        prompt: Tokens of a prompt, in the mean; `output` of an answer.
        spread: Standard deviation of the lengths' logarithms; 0 for equal lengths.
        burstiness: Shape of the gamma distribution of the times between requests, as in vLLM's `bench serve`: 1 for a
            Poisson process, less for bursts, more for even times.
        tenants: Among which requests are drawn, all alike.
        shared_prefix: Tokens that a prompt begins with, and others too; there are `num_prefixes` of these beginnings.
    """

    requests: int
    rate: float
    prompt: int
    output: int
    spread: float = 0.0
    burstiness: float = 1.0
    tenants: int = 1
    shared_prefix: int = 0
    num_prefixes: int = 1

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Draw the requests, in order."""
        draw = random.Random(f"workload/{seed}")
        at = 0.0
        for _ in range(self.requests):
            tenant = f"t{draw.randrange(self.tenants)}" if self.tenants > 1 else "default"
            beginnings = ((draw.randrange(self.num_prefixes), self.shared_prefix),) if self.shared_prefix else ()
            prompt = self.shared_prefix + self._length(draw, self.prompt - self.shared_prefix)
            yield Arrival(at, prompt, self._length(draw, self.output), tenant, beginnings)
            at += self._gap_s(draw)

    def _length(self, draw: random.Random, mean: int) -> int:
        if not self.spread:
            return max(1, mean)
        return max(1, round(draw.lognormvariate(math.log(max(1, mean)) - self.spread**2 / 2, self.spread)))

    def _gap_s(self, draw: random.Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        if self.burstiness == 1:
            return draw.expovariate(self.rate)
        return draw.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


def read_trace(path: Path, count: int | None = None) -> list[Arrival]:
    """Read a trace, its first `count` requests if given; the first one comes at 0.

    Raises:
        TraceError: A line is invalid, or the file is empty or shorter.
    """
    arrivals: list[Arrival] = []
    parse = _of_json
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), ""), start=1):
            if number == 1 and line.startswith("TIMESTAMP"):
                parse = _of_csv
            elif line.strip():
                try:
                    arrivals.append(_checked(parse(line)))
                except KeyError as error:
                    raise TraceError(f"{path}: line {number}: {error.args[0]!r} is missing") from None
                except (ValueError, TypeError, AttributeError, OverflowError) as error:
                    raise TraceError(f"{path}: line {number}: {error}") from None
            if len(arrivals) == count:
                break
    if not arrivals:
        raise TraceError(f"{path}: has no requests")
    if count is not None and len(arrivals) < count:
        raise TraceError(f"{path}: has {len(arrivals):,} requests; --requests is {count:,}")
    arrivals.sort(key=lambda arrival: arrival.at)
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]


def _checked(arrival: Arrival) -> Arrival:
    if not (1 <= arrival.prompt <= MAX_TOKENS and 1 <= arrival.output <= MAX_TOKENS):
        raise ValueError(f"prompt and output must have 1 to {MAX_TOKENS} tokens")
    if not math.isfinite(arrival.at):
        raise ValueError("its time is not a number")
    return arrival


def _of_csv(line: str) -> Arrival:
    at, prompt, output = line.strip().split(",")[:3]
    # Seven digits behind the second's point, of which Python reads six.
    moment = datetime.fromisoformat(at.split("+")[0][:26])
    return Arrival((moment - datetime(1970, 1, 1)).total_seconds(), int(prompt), int(output))


def _of_json(line: str) -> Arrival:
    try:
        fields = json.loads(line)
    except ValueError:
        raise ValueError("is no JSON object") from None
    if not isinstance(fields, dict):
        raise ValueError("is no JSON object")
    if "input_length" in fields:
        texts = tuple((int(text), _MOONCAKE_BLOCK) for text in fields.get("hash_ids", ()))
        at = float(fields["timestamp"]) / 1000
        return Arrival(at, int(fields["input_length"]), int(fields["output_length"]), beginnings=texts)
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ValueError(f"{unknown[0][:40]!r} is unknown; there are {', '.join(_FIELDS)}")
    beginnings: tuple[tuple[int, int], ...] = ()
    if "prefix" in fields or "prefix_tokens" in fields:
        if not 0 <= int(fields["prefix_tokens"]) <= int(fields["prompt"]):
            raise ValueError(f"prefix_tokens is {int(fields['prefix_tokens'])}; it must be from 0 to prompt")
        beginnings = ((crc32(str(fields["prefix"]).encode()), int(fields["prefix_tokens"])),)
    tenant = str(fields.get("tenant", "default"))
    return Arrival(float(fields["at"]), int(fields["prompt"]), int(fields["output"]), tenant, beginnings)
