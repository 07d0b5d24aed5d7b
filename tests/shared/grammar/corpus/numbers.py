"""Bounds and multiples of numbers."""

from __future__ import annotations

from tests.shared.grammar.corpus.case import Case

_RANGES = [(0, 10), (1, 100), (-5, 5), (-100, -10), (0, 255), (1000, 9999), (18, 120), (-1, 1), (7, 7), (99, 1001)]


def _closed(low: int, high: int) -> list[Case]:
    bounds = {"minimum": low, "maximum": high}
    middle = (low + high) // 2
    outside = [low - 1, high + 1, low - 1000, high * 10 + 100_000]
    return [
        Case({"type": "integer", **bounds}, [low, middle, high], [*outside, "1", None]),
        Case({"type": "number", **bounds}, [low, middle, high], [*outside, low - 0.5, high + 0.001]),
    ]


def _open(low: int, high: int) -> list[Case]:
    bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
    middle = (low + high) // 2
    return [
        Case({"type": "integer", **bounds}, [low + 1, middle, high - 1], [low, high, low - 1, high + 1]),
        Case({"type": "number", **bounds}, [low + 0.5, middle, high - 0.25], [low, high, low - 0.5, high + 0.5]),
    ]


def _one_sided(bound: int) -> list[Case]:
    return [
        Case({"type": "integer", "minimum": bound}, [bound, bound + 1, bound + 10_000], [bound - 1, bound - 999]),
        Case({"type": "integer", "maximum": bound}, [bound, bound - 1, bound - 10_000], [bound + 1, bound + 999]),
        Case({"type": "number", "exclusiveMinimum": bound}, [bound + 0.5, bound + 100], [bound, bound - 0.5]),
    ]


def _multiples(step: int) -> list[Case]:
    wrong = [1, step + 1] if step > 1 else [0.5]
    return [
        Case({"type": "integer", "multipleOf": step}, [0, step, 7 * step, -step], wrong),
        Case(
            {"type": "integer", "multipleOf": step, "minimum": 1, "maximum": 10 * step},
            [step, 2 * step, 10 * step],
            [0, 11 * step, -step],
        ),
    ]


NUMBERS = [
    *(case for low, high in _RANGES for case in _closed(low, high)),
    *(case for low, high in _RANGES if high - low > 1 for case in _open(low, high)),
    *(case for bound in (0, 1, -1, 42, -273) for case in _one_sided(bound)),
    *(case for step in (2, 3, 5, 7, 10, 12, 60) for case in _multiples(step)),
    Case({"type": "number", "multipleOf": 0.5}, [0, 0.5, 2.5, 3], [0.25, 0.1]),
    Case({"type": "number", "multipleOf": 0.01}, [0.01, 1.25, 3], [0.001, 1.255]),
    Case({"type": "number", "multipleOf": 0.25}, [0.25, 1.75, 2], [0.2, 0.3]),
    Case({"type": "number", "minimum": 0.5, "maximum": 0.75}, [0.5, 0.625, 0.75], [0.49, 0.76, 1, 0]),
    Case({"type": "number", "minimum": -0.1, "maximum": 0.1}, [-0.1, 0, 0.05, 0.1], [-0.11, 0.2, 1]),
    Case({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [-0.1, 1.1, 2]),
    Case({"type": "number", "minimum": -90, "maximum": 90}, [-90, 45.5, 90], [-90.5, 91, 180]),
    Case({"type": "integer", "minimum": 1, "maximum": 12}, [1, 9, 10, 12], [0, 13, 100]),
    Case(
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}, [-(2**31), 0, 2**31 - 1], [2**31, -(2**31) - 1]
    ),
    Case({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [0, 10**18], [-1, 2**64]),
    Case({"type": ["integer", "null"], "minimum": 3}, [3, 50, None], [2, -3, "3"]),
    Case({"minimum": 5}, [5, 6.5, "text", None, [1]], [4, 4.5]),
    Case({"type": "integer", "minimum": 2, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
    Case({"type": "integer", "minimum": 3, "exclusiveMinimum": 5}, [6, 7], [5, 4, 3]),
    Case({"type": "integer", "format": "int32", "minimum": 0}, [0, 5], [-1]),
    Case({"type": "number", "exclusiveMinimum": 0}, [0.001, 1, 1e2], [0, -1]),
]
