"""Draws the report's plots: how much of each goal is reached, and decode rates by batch size."""

from __future__ import annotations

from ops.bench.plot import NUM_COLOURS, Drawing, LogScale, round_down, round_up
from ops.bench.report_figures import OURS, engine_name
from ops.bench.report_records import Run, latest
from ops.bench.report_tables import Standing

_BLUE, _RED = 0, 1
_WIDTH = 860

Rates = dict[str, dict[int, float]]


def goals_plot(standings: list[Standing]) -> str:
    """Draw a bar a measured goal, from 1 to the fraction that is reached, on a logarithmic scale."""
    bars = [(one.goal.what, reached) for one in standings if (reached := one.reached) is not None]
    row, top, left = 20, 44, 400
    drawing = Drawing(_WIDTH, top + row * len(bars) + 46, "Fraction of each goal that is reached")
    known = [max(reached, 0.01) for _, reached in bars]
    low, high = round_down(min([0.5, *known])), min(10.0, round_up(max([2.0, *known])))
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
        drawing.text(x, y + 13, f"{reached:.2f}", anchor=anchor, size=11)
    drawing.text(
        (left + _WIDTH - 60) / 2, bottom + 34, "fraction of the goal (log scale)", anchor="middle", kind="faint"
    )
    return drawing.svg()


def decode_plot(runs: list[Run], models: tuple[str, ...]) -> str:
    """Draw a panel a model: decode tokens/s by batch size, a line an engine, both axes logarithmic."""
    panels = {model: rates for model in models if (rates := decode_rates(runs, model))}
    engines = list(dict.fromkeys(name for rates in panels.values() for name in sorted(rates, key=_ours_first)))
    drawing = Drawing(_WIDTH, 380, "Decode tokens per second by batch size")
    drawing.text(12, 22, "Decode, tokens per second of all sequences together", size=14)
    x = 14.0
    for index, name in enumerate(engines):
        drawing.curve([(x, 42), (x + 22, 42)], index % NUM_COLOURS, is_bold=name == OURS)
        drawing.text(x + 30, 46, name)
        x += 50 + 7.2 * len(name)
    for index, (model, rates) in enumerate(panels.items()):
        _panel(drawing, 64 + index * 420, model, rates, engines)
    return drawing.svg()


def decode_rates(runs: list[Run], model: str) -> Rates:
    """Return the rates by batch size of each engine in the latest run that compares ours with another."""

    def compared(run: Run) -> Rates | None:
        rates: Rates = {}
        for row in run.rows:
            if row.get("model") == model and row.get("decode_tokens_per_s"):
                rates.setdefault(engine_name(row), {})[int(row["batch"])] = float(row["decode_tokens_per_s"])
        return rates if OURS in rates and len(rates) > 1 else None

    found = latest(runs, compared)
    return {} if found is None else found[1]


def _panel(drawing: Drawing, left: float, model: str, rates: Rates, engines: list[str]) -> None:
    top, bottom, right = 92, 326, left + 340
    batches = sorted({batch for by_batch in rates.values() for batch in by_batch})
    values = [rate for by_batch in rates.values() for rate in by_batch.values()]
    horizontal = LogScale(batches[0], max(batches[-1], batches[0] + 1), left + 16, right - 16)
    vertical = LogScale(round_down(min(values)), round_up(max(values)), bottom, top)
    drawing.text((left + right) / 2, top - 14, f"{model.upper()} parameters, bf16", anchor="middle", size=13)
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
    for name in sorted(rates, key=_ours_first, reverse=True):
        points = [(horizontal.place(b), vertical.place(rate)) for b, rate in sorted(rates[name].items())]
        drawing.curve(points, engines.index(name) % NUM_COLOURS, is_bold=name == OURS)


def _ours_first(name: str) -> tuple[bool, str]:
    return not name.startswith(OURS), name
