"""The golden prompts that are recorded where none are given: prose, dialogue, languages, code, data, and long records.

Each is long enough for a mean that hardly varies. The long ones ask again for what they have said hundreds or thousands
of tokens earlier, in another order, so that a model has to attend far back: a wrong rotation base and a block of the
KV cache that is not what it should be show there. The first one is the anchor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigError
from shared.golden import MAX_FILE_BYTES, MAX_PROMPTS

_NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mirko")
_THINGS = ("a lamp", "two ropes", "the blue key", "a map", "six nails", "an old coat", "the ladder", "a red box")


def default_prompts() -> list[str]:
    """Return the texts, the anchor first. They are the same everywhere and always."""
    short = json.loads(Path(__file__).with_name("short_prompts.json").read_text("utf-8"))
    return [_rooms(48, 8), _inventory(110), _rooms(220, 24), _log(90), *short]


def read_prompts(path: Path) -> list[str]:
    """Read texts from a file, one JSON string a line; the first should be long, since it becomes the anchor.

    Raises:
        ConfigError: The file cannot be read, or a line is not text.
    """
    variable = "HEADRACE_PROMPTS"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(variable, f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(variable, f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    texts = [_text(path, number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise ConfigError(variable, f"{path} has {len(texts)} prompts; 1 to {MAX_PROMPTS} are allowed")
    return texts


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        text = json.loads(line)
    except (ValueError, RecursionError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("HEADRACE_PROMPTS", f"line {number} of {path} is no JSON string with a prompt")
    return text


def _numbers(seed: int) -> Iterator[int]:
    """Yield numbers that look random: Lehmer's generator, which is the same in every version of Python."""
    state = seed
    while True:
        state = state * 48271 % 0x7FFFFFFF
        yield state


def _rooms(num_rooms: int, num_asked: int) -> str:
    numbers = _numbers(num_rooms)
    codes = [1000 + next(numbers) % 9000 for _ in range(num_rooms)]
    said = [f"Room {room} opens with {code}." for room, code in enumerate(codes, 1)]
    asked = [1 + next(numbers) % num_rooms for _ in range(num_asked)]
    return " ".join([*said, "Again, in another order:", *(said[room - 1] for room in asked)])


def _inventory(num_lines: int) -> str:
    numbers = _numbers(7)
    owners = {thing: _NAMES[next(numbers) % len(_NAMES)] for thing in _THINGS}
    lines = []
    for number in range(1, num_lines + 1):
        thing, taker = _THINGS[next(numbers) % len(_THINGS)], _NAMES[next(numbers) % len(_NAMES)]
        lines.append(f"{number}. {taker} takes {thing} from {owners[thing]}.")
        owners[thing] = taker
    return "\n".join([*lines, *(f"At the end {owner} has {thing}." for thing, owner in owners.items())])


def _log(num_lines: int) -> str:
    numbers = _numbers(11)
    return "\n".join(
        f"2024-03-{1 + number // 30:02d} {number % 24:02d}:{next(numbers) % 60:02d} INFO worker-{next(numbers) % 5} "
        f"request {1000 + number} took {next(numbers) % 900} ms, status {(200, 200, 200, 404, 503)[next(numbers) % 5]}"
        for number in range(num_lines)
    )
