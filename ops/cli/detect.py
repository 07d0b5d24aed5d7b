"""`headrace detect`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.options import settings_command
from ops.cli.parts import require
from shared.config import REQUIRED, setting
from shared.errors import ConfigError
from shared.model_hub import existing_model

if TYPE_CHECKING:
    from ops.watermark import Detection

_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DetectConfig:
    """What to look for."""

    model: Path = setting(REQUIRED, "Directory of the model, for its tokenizer. Required.")
    key_file: Path = setting(
        REQUIRED, "File with the keys that `headrace keys watermark TENANT --model NAME` prints. Required."
    )
    json: bool = setting(False, "Print JSON: tokens, scored, score, p_value, log10_p, key, keys_tried.")


def run(config: DetectConfig, file: str) -> int:
    """Test a text for a watermark.

    FILE is a text in UTF-8; - or nothing reads it from standard input. The p-value says how likely it is that a text
    without the watermark looks as this one does. A small p-value speaks for the watermark: at most 1e-5 is a proof,
    since one unmarked text in 100,000 looks so. Some 25 scored tokens of a marked text are enough as a rule. Of several
    keys, the one that fits best is named, and the p-value is multiplied by their number.
    """
    keys, text = _keys(config.key_file), _text(file)
    require("worker", "torch", "numpy", "tokenizers")
    from gpu_worker.text.model_directory import read_model_directory
    from gpu_worker.text.tokenizer import ModelTokenizer
    from ops.watermark import detect_best

    tokenizer = ModelTokenizer(read_model_directory(existing_model(config.model, "HEADRACE_MODEL")))
    place, found = detect_best(tokenizer.encode_text(text, add_special_tokens=False), list(keys))
    owner = list(keys.values())[place]
    click.echo(_json(found, owner, len(keys)) if config.json else _sentence(found, owner, len(keys)))
    return 0


def _keys(path: Path) -> dict[bytes, str]:
    """Return the different keys of a file, and of each what stands behind it: whose it is."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError as error:
        raise ConfigError("HEADRACE_KEY_FILE", f"{path} cannot be read: {error.strerror}") from None
    made = "`headrace keys watermark TENANT --model NAME` prints them"
    keys: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        digits, _, owner = line.strip().partition(" ")
        if digits and not _KEY.fullmatch(digits):
            problem = f"{path}, line {number}: not a key of 64 hexadecimal digits"
            raise ConfigError("HEADRACE_KEY_FILE", f"{problem}; {made}")
        if digits:
            keys.setdefault(bytes.fromhex(digits), owner.strip() or f"line {number}")
    if not keys:
        raise ConfigError("HEADRACE_KEY_FILE", f"{path} holds no key; {made}")
    return keys


def _text(file: str) -> str:
    try:
        if file == "-":
            content = sys.stdin.buffer.read(_MAX_TEXT_BYTES + 1)
        else:
            with open(file, "rb") as opened:
                content = opened.read(_MAX_TEXT_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} is not a text in UTF-8: byte {error.start} is not") from None
    if len(content) > _MAX_TEXT_BYTES:
        raise click.UsageError(f"{file} is longer than {_MAX_TEXT_BYTES >> 20} MiB; give a part of it")
    return text


def _json(found: Detection, owner: str, num_keys: int) -> str:
    fields = {"tokens": found.num_tokens, "scored": found.num_scored, "score": found.score}
    told = {"p_value": found.p_value, "log10_p": found.log10_p, "key": owner, "keys_tried": num_keys}
    return json.dumps(fields | told)


def _sentence(found: Detection, owner: str, num_keys: int) -> str:
    if not found.num_scored:
        return f"p-value 1: the text has {found.num_tokens} tokens, and none can be scored before the fifth"
    # Too small for a float, it is known by its logarithm.
    value = f"{found.p_value:.3g}" if found.log10_p > -300 else f"1e{found.log10_p:.0f}"
    mean = found.score / found.num_scored
    scored = f"{found.num_scored} of {found.num_tokens} tokens scored, {mean:.3f} each; unmarked 1.000"
    best = f"; key: {owner}" if num_keys == 1 else f"; best of {num_keys} keys, and multiplied by as many: {owner}"
    return f"p-value {value} ({scored}){best}"


command = settings_command(DetectConfig, "detect", run, [click.Argument(["file"], default="-")])
