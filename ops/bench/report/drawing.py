"""Writes small SVG files: lines, bars and words, in colours for bright and for dark pages.

The page's colour scheme is asked by the file itself, which paints its own background, so it can be read anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Tell apart under every common colour blindness; the same hue is darker on white and lighter on black.
_BRIGHT = ("#0969da", "#c4432b", "#1a7f4e", "#8250df", "#9a6700", "#57606a")
_DARK = ("#58a6ff", "#ff8b72", "#4ac28a", "#c297ff", "#e3b341", "#a8b3bf")
NUM_COLOURS = len(_BRIGHT)
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(slots=True)
class Drawing:
    """An SVG file in the making. Sizes and places are in pixels, y down from the top."""

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, turn: int = 0, kind: str = "ink"
    ) -> None:
        """Write words whose anchor (`start`, `middle`, `end`) is at a place; `kind` is `ink` or `faint`."""
        turned = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{turned}>'
            f"{escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        """Draw a line of the grid, or an axis where `kind` is `axis`."""
        self._parts.append(f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def bar(self, x1: float, x2: float, y: float, height: float, colour: int) -> None:
        """Draw a horizontal bar between two places."""
        left, width = min(x1, x2), abs(x2 - x1)
        self._parts.append(
            f'<rect class="c{colour}" x="{left:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
        )

    def curve(self, points: list[tuple[float, float]], colour: int, *, is_bold: bool = False, dash: int = 0) -> None:
        """Draw a line through points, each marked with a dot; `dash` chooses a pattern, 0 being none."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width = 3 if is_bold else 1.6
        dashes = f' stroke-dasharray="{_DASHES[dash % len(_DASHES)]}"' if dash % len(_DASHES) else ""
        self._parts.append(f'<polyline class="s{colour}" points="{path}" stroke-width="{width:g}"{dashes}/>')
        radius = 4 if is_bold else 3
        self._parts += [f'<circle class="c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in points]

    def svg(self) -> str:
        """Return the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{_FONT}">'
        )
        parts = [head, f"<title>{escape(self.title)}</title>", f"<style>{_style()}</style>"]
        parts.append(f'<rect class="page" width="{self.width}" height="{self.height}"/>')
        return "\n".join([*parts, *self._parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True)
class LogScale:
    """Places values between two pixels by their logarithm."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return the pixel of a value; values off the scale are at its ends."""
        bounded = min(max(value, self.low), self.high)
        share = math.log(bounded / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return the round numbers on the scale: 1, 2 and 5 times powers of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        numbers = (float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5))
        return [number for number in numbers if self.low <= number <= self.high]


def round_down(value: float) -> float:
    """Return the largest of 1, 2, 5, 10, … that is not above a positive value."""
    power = math.floor(math.log10(value))
    return max(candidate for digit in (1, 2, 5) if (candidate := float(f"{digit}e{power}")) <= value * (1 + 1e-9))


def round_up(value: float) -> float:
    """Return the smallest of 1, 2, 5, 10, … that is not below a positive value."""
    power = math.floor(math.log10(value))
    return min(candidate for digit in (1, 2, 5, 10) if (candidate := digit * 10.0**power) >= value * (1 - 1e-9))


def _style() -> str:
    def scheme(page: str, ink: str, faint: str, grid: str, colours: tuple[str, ...]) -> str:
        rules = f".page{{fill:{page}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}"
        rules += f".grid{{stroke:{grid}}}.axis{{stroke:{faint}}}"
        return rules + "".join(
            f".c{index}{{fill:{colour}}}.s{index}{{stroke:{colour};fill:none}}" for index, colour in enumerate(colours)
        )

    bright = scheme("#ffffff", "#1f2328", "#59636e", "#d9dee3", _BRIGHT)
    dark = scheme("#0d1117", "#e6edf3", "#9da7b1", "#2d333b", _DARK)
    return f"{bright}@media(prefers-color-scheme:dark){{{dark}}}"
