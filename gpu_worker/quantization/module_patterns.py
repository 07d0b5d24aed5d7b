"""Patterns of layer names in configurations: untrusted regular expressions, so only those that cannot take forever."""

from __future__ import annotations

import re

from gpu_worker.quantization.errors import QuantizationError

_MAX_LENGTH = 1000
_MAX_REPEATS = 8
# A repeated group, whose matching can take exponential time; and what repeats a single character or class.
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_REPEAT = re.compile(r"(?<!\\)(?:[*+]|\{\d*,)")


def compile_pattern(field: str, text: str) -> re.Pattern[str]:
    """Compile a regular expression that is matched from a name's beginning.

    Names are shorter than a hundred characters, so that a few repeats, none within another, end soon.

    Raises:
        QuantizationError: It is not one, or may take too long.
    """
    shown = repr(text[:80])
    if len(text) > _MAX_LENGTH or _REPEATED_GROUP.search(text) or len(_REPEAT.findall(text)) > _MAX_REPEATS:
        limits = f"at most {_MAX_LENGTH} characters and {_MAX_REPEATS} repeats, and no repeated group"
        raise QuantizationError(field, f"has the pattern {shown}; a pattern may have {limits}")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise QuantizationError(
            field, f"has the pattern {shown}, which is not a regular expression ({error})"
        ) from None
