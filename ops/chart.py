"""Plots as SVG inside a page of HTML that needs nothing from elsewhere; light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 240, 64, 34, 14
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; font-size: 13px; }
svg { width: 100%; max-width: 44rem; height: auto; }
svg text { fill: currentColor; font-size: 11px; }
svg .axis { stroke: currentColor; opacity: .35; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; both lists have as many numbers."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(title: str, x_name: str, lines: Sequence[Line], bottom: float = 0.0, top: float | None = None) -> str:
    """Return a plot of lines, from 0 on; the vertical axis goes from `bottom` to `top`, or to the largest value."""
    right = max((x for line in lines for x in line.x), default=1.0) or 1.0
    if top is None:
        top = _round_up(max((y for line in lines for y in line.y), default=1.0) or 1.0)
    parts = [_frame(top, bottom)]
    for place in range(5):
        x = right * place / 4
        anchor = "end" if place == 4 else "middle"
        parts.append(f'<text x="{_x(x / right):.1f}" y="{_HEIGHT - 18}" text-anchor="{anchor}">{_shown(x)}</text>')
    parts.append(f'<text x="{_x(0.5):.1f}" y="{_HEIGHT - 4}" text-anchor="middle">{html.escape(x_name)}</text>')
    for number, line in enumerate(lines):
        color = _COLORS[number % len(_COLORS)]
        pairs = [(_x(x / right), _y((y - bottom) / (top - bottom))) for x, y in zip(line.x, line.y, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>')
        parts.append(_legend(number, line.name, color))
    return _svg(title, parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return a plot of bars, from 0 on."""
    top = _round_up(max((value for _, value in bars), default=1.0) or 1.0)
    parts, width = [_frame(top)], 1 / max(1, len(bars))
    for number, (name, value) in enumerate(bars):
        left, right, y = _x((number + 0.15) * width), _x((number + 0.85) * width), _y(value / top)
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="{_y(0) - y:.1f}" '
            f'fill="{_COLORS[0]}"/><text x="{(left + right) / 2:.1f}" y="{y - 3:.1f}" text-anchor="middle">'
            f'{_shown(value)}</text><text x="{(left + right) / 2:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">'
            f"{html.escape(name)}</text>"
        )
    return _svg(title, parts)


def page(title: str, lines: Sequence[str], charts: Sequence[str]) -> str:
    """Return a page with a text in columns, and plots."""
    name, text = html.escape(title), html.escape("\n".join(lines))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n<pre>{text}</pre>\n" + "\n".join(charts) + "\n</body></html>\n"
    )


def picture(chart: str) -> str:
    """Return a plot as a file of its own, which pages of documentation show."""
    svg = chart.partition("\n")[2]
    style = "<style>svg{color:#333;color-scheme:light dark}svg text{fill:currentColor;font:11px system-ui,sans-serif}"
    style += ".axis{stroke:currentColor;opacity:.35}@media (prefers-color-scheme: dark){svg{color:#ddd}}</style>"
    return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace("</title>", f"</title>{style}", 1)


def _frame(top: float, bottom: float = 0.0) -> str:
    axes = [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">{_shown(value)}</text>'
        for share, value in ((0.0, bottom), (0.5, (bottom + top) / 2), (1.0, top))
    ]
    return "".join(axes)


def _svg(title: str, parts: Sequence[str]) -> str:
    name = html.escape(title)
    body = "".join(parts)
    return (
        f"<h2>{name}</h2>\n"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}"><title>{name}</title>{body}</svg>'
    )


def _legend(number: int, name: str, color: str) -> str:
    x = _LEFT + 10 + 150 * number
    return f'<text x="{x}" y="11" style="fill: {color}">{html.escape(name)}</text>'


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - 8)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _round_up(value: float) -> float:
    """Return the next number of one digit that is not 3, 6, 7 or 9."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 5, 8, 10) if step * unit >= value * (1 - 1e-9))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
