"""Draws the report's plots: how much of each goal is reached, and decode rates by batch size."""

from __future__ import annotations

from dataclasses import dataclass

from ops.bench.report.drawing import NUM_COLOURS, Drawing, LogScale, round_down, round_up
from ops.bench.report.figures import OURS, engine_name
from ops.bench.report.records import Run, latest
from ops.bench.report.tables import Standing

_BLUE, _RED = 0, 1
_WIDTH = 860


@dataclass(frozen=True, slots=True)
class Line:
    """An engine at one precision; `name` tells both."""

    engine: str
    name: str


Rates = dict[Line, dict[int, float]]


def goals_plot(standings: list[Standing]) -> str:
    """Draw a bar a measured goal, from 1 to the fraction that is reached, on a logarithmic scale."""
    bars = [(one.goal.what, reached) for one in standings if (reached := one.reached) is not None]
    row, top, left = 20, 44, 400
    drawing = Drawing(_WIDTH, top + row * len(bars) + 46, "Fraction of each goal that is reached")
    # A cost that is none, or less, reaches its goal infinitely far.
    known = [min(max(reached, 0.01), 10.0) for _, reached in bars]
    low, high = round_down(min([0.5, *known])), round_up(max([2.0, *known]))
    scale = LogScale(low, high, left, _WIDTH - 60)
    bottom = top + row * len(bars) + 4
    drawing.text(12, 22, "Fraction of each goal that is reached: right of 1 it is met", size=14)
    for tick in scale.ticks():
        x = scale.place(tick)
        drawing.line(x, top - 4, x, bottom, "axis" if tick == 1 else "grid")
        drawing.text(x, bottom + 16, f"{tick:g}", anchor="middle", kind="faint")
    for index, (what, reached) in enumerate(bars):
        y = top + row * index
        drawing.text(left - 50, y + 13, what, anchor="end")
        drawing.bar(scale.place(1), scale.place(reached), y + 3, row - 7, _BLUE if reached >= 1 else _RED)
        x, anchor = (scale.place(reached) + 5, "start") if reached >= 1 else (scale.place(reached) - 5, "end")
        drawing.text(x, y + 13, f"{reached:.2f}".replace("inf", "∞"), anchor=anchor, size=11)
    drawing.text(
        (left + _WIDTH - 60) / 2, bottom + 34, "fraction of the goal (log scale)", anchor="middle", kind="faint"
    )
    return drawing.svg()


def decode_plot(runs: list[Run], models: tuple[str, ...]) -> str:
    """Draw a panel a model: decode tokens/s by batch size, a line an engine, both axes logarithmic.

    An engine has a colour, and each of its precisions a pattern.
    """
    panels = {model: rates for model in models if (rates := decode_rates(runs, model))}
    lines = sorted({line for rates in panels.values() for line in rates}, key=_order)
    places = _legend_places([line.name for line in lines])
    top = 92 + max((y for _, y in places), default=0)
    drawing = Drawing(_WIDTH, round(top) + 288, "Decode tokens per second by batch size")
    words = "Decode, tokens per second of all sequences together; bf16 where nothing else is said"
    drawing.text(12, 22, words, size=14)
    for line, (x, y) in zip(lines, places, strict=True):
        _draw_line(drawing, [(x, 42 + y), (x + 26, 42 + y)], line, lines)
        drawing.text(x + 34, 46 + y, line.name)
    for index, (model, rates) in enumerate(panels.items()):
        _panel(drawing, (64 + index * 420.0, top), model, rates, lines)
    return drawing.svg()


def decode_rates(runs: list[Run], model: str) -> Rates:
    """Return the rates by batch size of each engine in the latest run that compares ours with another."""

    def compared(run: Run) -> Rates | None:
        rates: Rates = {}
        for row in run.rows:
            if row.get("model") == model and row.get("decode_tokens_per_s"):
                line = Line(str(row["engine"]), engine_name(row))
                rates.setdefault(line, {})[int(row["batch"])] = float(row["decode_tokens_per_s"])
        engines = {line.engine for line in rates}
        return rates if OURS in engines and len(engines) > 1 else None

    found = latest(runs, compared)
    return {} if found is None else found[1]


def _legend_places(names: list[str]) -> list[tuple[float, float]]:
    """Place names beside each other, in as many lines as they need."""
    places, x, y = [], 14.0, 0.0
    for name in names:
        width = 54 + 7.2 * len(name)
        if x + width > _WIDTH and x > 14.0:
            x, y = 14.0, y + 20
        places.append((x, y))
        x += width
    return places


def _panel(drawing: Drawing, corner: tuple[float, float], model: str, rates: Rates, lines: list[Line]) -> None:
    left, top = corner
    bottom, right = top + 234, left + 340
    batches = sorted({batch for by_batch in rates.values() for batch in by_batch})
    values = [rate for by_batch in rates.values() for rate in by_batch.values()]
    horizontal = LogScale(batches[0], max(batches[-1], batches[0] + 1), left + 16, right - 16)
    vertical = LogScale(round_down(min(values)), round_up(max(values)), bottom, top)
    drawing.text((left + right) / 2, top - 14, f"{model.upper()} parameters", anchor="middle", size=13)
    for tick in vertical.ticks():
        y = vertical.place(tick)
        drawing.line(left, y, right, y)
        drawing.text(left - 6, y + 4, f"{tick:,g}", anchor="end", kind="faint")
    drawing.line(left, bottom, right, bottom, "axis")
    for batch in batches:
        x = horizontal.place(batch)
        drawing.line(x, bottom, x, bottom + 4, "axis")
        drawing.text(x, bottom + 18, str(batch), anchor="middle", kind="faint")
    drawing.text((left + right) / 2, bottom + 38, "batch size", anchor="middle", kind="faint")
    drawing.text(left - 46, (top + bottom) / 2, "tokens/s", anchor="middle", turn=-90, kind="faint")
    for line in sorted(rates, key=_order, reverse=True):
        points = [(horizontal.place(batch), vertical.place(rate)) for batch, rate in sorted(rates[line].items())]
        _draw_line(drawing, points, line, lines)


def _draw_line(drawing: Drawing, points: list[tuple[float, float]], line: Line, lines: list[Line]) -> None:
    engines = list(dict.fromkeys(other.engine for other in lines))
    precisions = [other for other in lines if other.engine == line.engine]
    colour = engines.index(line.engine) % NUM_COLOURS
    drawing.curve(points, colour, is_bold=line.engine == OURS, dash=precisions.index(line))


def _order(line: Line) -> tuple[bool, str]:
    return line.engine != OURS, line.name
