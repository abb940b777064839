"""What the figures are built from: a site's colour, numbers in words, the symmetric-log axis, panels, lines.

plotly has no symmetric-log axis, so values are drawn at `symlog` of themselves and the ticks are labelled
with the values they stand for. Everything here knows tables and plotly only.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray
from plotly.subplots import make_subplots

from lens_geometry.errors import ResultError

INK, RULE = "#767676", "rgba(128,128,128,0.3)"  # the ink has a contrast of 4.5 on white and on black
STYLE = {  # the colours of Okabe and Ito, and a marker that tells sites apart without colour
    "attn": ("#0072B2", "circle"),
    "mlp": ("#D55E00", "square"),
    "block": ("#E69F00", "diamond"),
    "value": ("#009E73", "triangle-up"),
    "value_excl_self": ("#CC79A7", "triangle-down"),
    "mlp_carrier": ("#56B4E9", "pentagon"),
    "mlp_contribution": ("#B8A800", "hexagon"),
    "mlp_carrier_stream": ("#0F7F8C", "star"),
    "angular": ("#0072B2", "circle"),
    "magnitude": ("#D55E00", "square"),
}
SLICED = ("mlp_carrier", "mlp_carrier_stream", "mlp_contribution")


def style(site: str) -> tuple[str, str]:
    """Colour and plotly marker symbol of a site, the same in every figure; grey for one that is not known."""
    return STYLE.get(site, (INK, "cross"))


def part_of(site: str) -> str:
    """What a site's vectors are numbered by in a table's column `head`: the heads, or the slices of the carrier."""
    return "slice" if site in SLICED else "head"


def require(table: pd.DataFrame, columns: str, what: str) -> None:
    """Raise `ResultError` when a table lacks one of the columns (names split by blanks) or has no rows."""
    lacking = [name for name in columns.split() if name not in table.columns]
    if lacking:
        raise ResultError(f"the {what} table lacks the column {', '.join(lacking)}", cure="pass the whole table")
    if table.empty:
        raise ResultError(f"the {what} table has no rows", cure="check which sites and conditions were measured")


def number(value: float, *, signed: bool = False, digits: int = 3) -> str:
    """A number for reading: `digits` significant ones, a real minus sign, a power of ten from 10^6 on.

    >>> number(0.41234), number(-1234.5), number(3.3e6, signed=True), number(float("nan"))
    ('0.412', '−1,230', '+3.3 × 10⁶', 'not finite')
    """
    if not math.isfinite(value):
        return "not finite"
    size = abs(float(f"{value:.{digits - 1}e}"))
    sign = "−" if value < 0 and size else "+" if signed and size else ""
    if size and not 1e-4 <= size < 1e6:
        front, power = f"{size:.{digits - 1}e}".split("e")
        return f"{sign}{float(front):g} × 10{_superscript(int(power))}"
    places = 0 if size == 0 else max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{sign}{size:,.{places}f}"


def interval(value: float, low: float, high: float, *, signed: bool = False) -> str:
    """A number with its interval in brackets, or alone where there is none."""
    bounds = f" [{number(low, signed=signed)}, {number(high, signed=signed)}]"
    return number(value, signed=signed) + (bounds if math.isfinite(low) and math.isfinite(high) else "")


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def symlog(values: ArrayLike, linear: float) -> NDArray[np.float64]:
    """Position on a symmetric-log axis: linear well inside ±`linear`, decades of equal length outside."""
    return np.arcsinh(np.asarray(values, dtype=float) / (2 * linear)) / math.log(10)


def symlog_inverse(positions: ArrayLike, linear: float) -> NDArray[np.float64]:
    """The value that `symlog` put at a position."""
    return 2 * linear * np.sinh(np.asarray(positions, dtype=float) * math.log(10))


def symlog_ticks(low: float, high: float, linear: float, most: int = 9) -> list[float]:
    """Zero and powers of ten from `linear` on between two values: about `most`, and 3s where they are few."""
    reach = sum(math.log10(max(end, linear) / linear) for end in (-low, high))
    step, factors = max(1, math.ceil(reach / most)), (1, 3) if reach < 3.5 else (1,)
    powers = range(round(math.log10(linear)), 309, step)
    sizes = [factor * 10.0**power for power in powers for factor in factors]
    below = [-size for size in reversed(sizes) if -size >= low]
    return [*below, 0.0, *(size for size in sizes if size <= high)]


class SymlogAxis:
    """One symmetric-log scale for every panel that shows the same quantity.

    Attributes:
        linear: where the scale turns from linear to logarithmic, a power of ten taken from the data.
        ticks, labels: positions on the drawn axis, and the real values written there.
        range: ends of the drawn axis; `top` is the position kept for what is not finite.
    """

    def __init__(self, values: ArrayLike) -> None:
        values = np.asarray(values, dtype=float).ravel()
        data = values[np.isfinite(values)]
        sizes = np.abs(data[data != 0])
        typical = float(np.quantile(sizes, 0.2)) if sizes.size else 1.0
        self.linear = 10.0 ** min(0, max(-4, math.floor(math.log10(typical))))
        low, high = (float(data.min()), float(data.max())) if data.size else (0.0, 1.0)
        bottom, end = symlog([min(low, 0.0), max(high, self.linear)], self.linear)
        ticks = symlog_ticks(min(low, 0.0), max(high, 0.0), self.linear)
        places = dict(zip(ticks, symlog(ticks, self.linear).tolist(), strict=True))
        room = 0.05 * (end - bottom)  # a label nearer to zero than this would run into zero's
        self.ticks = [place for value, place in places.items() if value == 0 or abs(place) > room]
        self.labels = [_tick(value) for value, place in places.items() if place in self.ticks]
        pad = 0.06 * (end - bottom)
        lost = 1.0 if np.isfinite(values).all() else 2.0  # room for the crosses of what is not finite
        self.range, self.top = [float(bottom - pad), float(end + lost * pad)], float(end + pad)

    def place(self, points: pd.DataFrame) -> pd.DataFrame:
        """`points` with `y`, `low`, `high` moved to where they are drawn; `real` keeps the values."""
        moved = points.assign(real=points["y"])
        for name in ("y", "low", "high"):
            moved[name] = symlog(moved[name].astype(float).replace([np.inf, -np.inf], np.nan), self.linear)
        return moved


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of an ordinary logarithmic axis: powers of ten, and 2 and 5 between them where there is room."""
    steps = (1, 2, 5) if high < 200 * low else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in decades for step in steps]
    return ticks, [f"{tick:g}" if 1e-4 < tick < 1e5 else _tick(tick) for tick in ticks]


def _tick(value: float) -> str:
    sign, size = "−" if value < 0 else "", abs(value)
    if size == 0 or 1e-3 <= size * 1.001 < 1e4:
        return f"{sign}{size:,g}"
    power = math.floor(math.log10(size * 1.001))
    factor = round(size / 10.0**power)
    return f"{sign}{f'{factor}·' if factor > 1 else ''}10{_superscript(power)}"


def panels(titles: Sequence[str], columns: int, *, height: int = 330) -> go.Figure:
    """An empty figure of titled panels on a transparent ground, its legend below."""
    rows = max(1, math.ceil(len(titles) / columns))
    gap = {"vertical_spacing": 0.3 / rows, "horizontal_spacing": 0.1}
    drawn = make_subplots(rows, columns, subplot_titles=list(titles), **gap)
    drawn.update_annotations(font_size=13)
    drawn.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        margin={"l": 56, "r": 16, "t": 64, "b": 48},
        height=height * rows + 90,
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left", "namelength": -1},
    )
    axis = {"gridcolor": RULE, "zerolinecolor": RULE, "linecolor": RULE, "automargin": True}
    axis |= {"title_standoff": 8, "title_font_size": 12}
    return drawn.update_xaxes(**axis, zeroline=False).update_yaxes(**axis, zerolinewidth=1.5)


def layer_axis(drawn: go.Figure, layers: pd.Series, place: dict[str, int], **more: Any) -> None:
    """An x axis whose ticks are whole layers, about ten of them."""
    found = sorted({int(layer) for layer in layers})
    step = max(1, math.ceil(len(found) / 10))
    drawn.update_xaxes(title_text="layer", tickvals=found[::step], tickangle=0, **more, **place)


def add_line(
    drawn: go.Figure,
    points: pd.DataFrame,
    *,
    site: str,
    role: str,
    name: str,
    top: float,
    place: dict[str, int],
    look: dict[str, Any],
) -> None:
    """Draw one line with its intervals, and a cross for every point that is lost (at `top` without a y).

    `points` has x, y, low, high (drawn positions), real (the values), hover (text), and may have the flags
    lost (a cross though y is finite) and open (an open marker). `look` has dash, width, size, and may have
    any of plotly's own trace settings.
    """
    colour, symbol = style(site)
    dash, width, size = (look[key] for key in ("dash", "width", "size"))
    more = {key: value for key, value in look.items() if key not in ("dash", "width", "size")}
    base = {
        "x": points["x"],
        "text": points["hover"],
        "customdata": points["real"],
        "name": html.escape(name),
    }
    base |= {"meta": {"site": site, "role": role}, "legendgroup": name if role == "edit" else role}
    base |= {"hovertemplate": "%{text}<extra></extra>"}
    no = pd.Series(False, points.index)
    lost = points.get("lost", no) | ~np.isfinite(points["y"].astype(float))
    symbols = [f"{symbol}-open" if flag else symbol for flag in points.get("open", no)]
    line = go.Scatter(base, y=points["y"].mask(lost), mode="lines+markers", error_y=bars(points))
    line.update(line={"color": colour, "width": width, "dash": dash})
    line.update(marker={"color": colour, "size": size, "symbol": symbols})
    drawn.add_trace(line.update(more), **place)
    if lost.any():
        height = points["y"].where(np.isfinite(points["y"].astype(float)), top)
        crosses = go.Scatter(base, y=height.where(lost), mode="markers").update({**more, "showlegend": False})
        cross = {"symbol": "x-thin", "size": 9, "line": {"color": colour, "width": 2}}
        drawn.add_trace(crosses.update(marker=cross), **place)


def bars(points: pd.DataFrame, thickness: float = 1.0) -> dict[str, Any]:
    """plotly's error bars from drawn positions y, low and high; none where the interval is missing."""
    up, down = (points["high"] - points["y"]).clip(lower=0), (points["y"] - points["low"]).clip(lower=0)
    size = {"array": up, "arrayminus": down, "thickness": thickness, "width": 0}
    return {"type": "data", "symmetric": False, **size}
