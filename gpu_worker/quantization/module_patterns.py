"""Patterns of layer names in configurations: untrusted regular expressions, so only those that cannot take forever."""

from __future__ import annotations

import re

from gpu_worker.quantization.config_fields import QuantizationError

_MAX_LENGTH = 1000
_MAX_PATHS = 1 << 20
# What a name of some forty characters allows each of several repeats, on average.
_PATHS_OF_A_REPEAT = 16
# A repeated group, whose matching can take exponential time; and kinds of group that have no use here.
_REFUSED = re.compile(r"\)[*+{]|\(\?(?![:=!])")
# Whatever decides how many ways of matching there are; of what is escaped, or a class of characters, none is left.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\??|[)|?*+{]", re.DOTALL)


def compile_pattern(field: str, text: str) -> re.Pattern[str]:
    """Compile a regular expression, matched from a name's beginning; `QuantizationError` if wrong or too slow."""
    shown = repr(text[:80])
    if len(text) > _MAX_LENGTH or _REFUSED.search(text) or _num_paths(text) > _MAX_PATHS:
        limits = f"at most {_MAX_LENGTH} characters, 5 repeats (fewer beside alternatives), and no repeated group"
        raise QuantizationError(field, f"has the pattern {shown}; a pattern may have {limits}")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise QuantizationError(
            field, f"has the pattern {shown}, which is not a regular expression ({error})"
        ) from None


def _num_paths(text: str) -> int:
    """Return about how many ways of matching are tried at worst: the product of all choices that the pattern has."""
    paths = 1
    alternatives = [1]
    for token in _TOKEN.findall(text):
        if token.startswith("("):
            alternatives.append(1)
        elif token == ")" and len(alternatives) > 1:
            paths *= alternatives.pop()
        elif token == "|":
            alternatives[-1] += 1
        elif token == "?":
            paths *= 2
        elif token in "*+{":
            paths *= _PATHS_OF_A_REPEAT
    for count in alternatives:
        paths *= count
    return paths
