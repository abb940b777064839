"""The figure of compression error: its perpendicular and its parallel part by layer, local beside propagated."""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, add_line, interval, layer_axis, log_ticks, number, panels, require, style
from lens_geometry.compression_gate import COLUMNS, LOSS, PERPENDICULAR, layer_rows, measured, whole_row

PARTS = {  # metric: dash, width, marker size, what the legend says
    PERPENDICULAR: ("solid", 2.2, 6, "perpendicular"),
    "parallel_error": ("dash", 1.6, 4, "parallel"),
}
MANY, TICKS = 16, 6  # layers from which markers are small; labels of a panel that may be narrow
LOWEST = 1e-3  # of the largest value: an axis reaches no lower, what is below ends at its edge


def compression_figure(table: pd.DataFrame) -> go.Figure:
    """A row of panels for each site, a column for each mode: |e_perp|/|u| and |e_par|/|u| by layer, bands of 95 %.

    Axes are logarithmic, and the same for both modes of a site. An error of zero ends at the panel's edge with an open
    marker, as does one that leaves tokens out; a cross marks one that is not finite. Above, the whole model's numbers.
    `ResultError` where columns or rows are missing.
    """
    require(table, COLUMNS, "compression")
    pairs = measured(table)
    require(pd.DataFrame(pairs), "", "compression, by layer,")
    modes, sites = (list(dict.fromkeys(found)) for found in zip(*pairs, strict=True))
    titles = [f"{html.escape(site)}, {mode}" for site in sites for mode in modes]
    drawn = panels(titles, len(modes), height=250)
    for row, site in enumerate(sites, 1):
        for col, mode in enumerate(modes, 1):
            if (mode, site) in pairs:
                place = {"row": row, "col": col}
                add_errors(drawn, table, mode, site, place, legend=False)
                drawn.update_yaxes(title_text="error / |u|" if col == 1 else None, showticklabels=col == 1, **place)
                drawn.update_xaxes(title_text="layer" if row == len(sites) else None, **place)
    _add_key(drawn)
    words = whole_words(table)
    lines = 1 + words.count("<br>") if words else 0
    drawn.update_layout(title={"subtitle": {"text": words, "font": {"size": 12, "color": INK}}})
    drawn.update_layout(margin={"t": 84 + 16 * lines}, height=drawn.layout.height + 16 * lines)
    return drawn.update_layout(title={"x": 0.02, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 14}})


def whole_words(table: pd.DataFrame) -> str:
    """The whole model's numbers in short lines; empty where they were not measured."""
    change = whole_row(table, LOSS)
    if change is None:
        return ""
    ends = [whole_row(table, name) for name in ("loss_base", "loss_compressed")]
    losses = " → ".join("?" if row is None else number(row["mean"]) for row in ends)
    lines = [f"loss {losses}: {interval(*_values(change), signed=True)} nats"]
    kl, agreement = whole_row(table, "kl"), whole_row(table, "agreement")
    more = [] if kl is None else [f"KL {number(kl['mean'])}"]
    more += [] if agreement is None else [f"same first choice {100 * agreement['mean']:.1f} %"]
    return "<br>".join([*lines, *filter(None, [", ".join(more)])])


def _values(row: pd.Series) -> tuple[float, float, float]:
    return float(row["mean"]), float(row["ci_low"]), float(row["ci_high"])


def add_errors(
    drawn: go.Figure, table: pd.DataFrame, mode: str, site: str, place: dict[str, int], *, legend: bool = True
) -> None:
    """Both parts of the error of one site by layer, on the axis that both modes of the site share."""
    low, high = _limits(table, site)
    layers = layer_rows(table, mode, PERPENDICULAR, site)["layer"]
    for metric, (dash, width, size, name) in PARTS.items():
        rows = layer_rows(table, mode, metric, site).sort_values("layer")
        points = _points(rows, low)
        drawn.add_trace(_band(points, site, metric), **place)
        small = 3 if dash == "solid" else 1  # larger ones would make a dashed line one of dashes and dots
        look = {
            "dash": dash,
            "width": width,
            "size": size if len(layers) <= MANY else small,
            "showlegend": legend,
            "legendgroup": metric,
        }
        line = points.assign(low=np.nan, high=np.nan)  # the band shows the interval
        add_line(drawn, line, site=site, role="edit", name=name, top=high, place=place, look=look)
    ticks, labels = log_ticks(low, high)
    edges = [math.log10(low) - 0.06, math.log10(high) + 0.06]
    drawn.update_yaxes(type="log", tickvals=ticks, ticktext=labels, range=edges, **place)
    layer_axis(drawn, layers, place)
    step = math.ceil(len(layers) / TICKS)
    drawn.update_xaxes(tickvals=sorted(map(int, layers))[::step], **place)


def _limits(table: pd.DataFrame, site: str) -> tuple[float, float]:
    """The ends of a site's axis, over both modes and both parts."""
    shown = table[(table["site"] == site) & table["metric"].isin(PARTS) & table["head"].isna() & table["layer"].notna()]
    values = shown[["mean", "ci_low", "ci_high"]].to_numpy(dtype=float)
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return 0.1, 1.0
    high = float(values.max())
    low = max(float(values.min()), LOWEST * high)
    return min(low, high / 2), high


def _points(rows: pd.DataFrame, low: float) -> pd.DataFrame:
    points = rows.assign(x=rows["layer"].astype(int), real=rows["mean"], hover=_hover(rows))
    points["y"] = rows["mean"].astype(float).clip(lower=low)
    points["lost"] = (rows["n_infinite"] > 0) | ~np.isfinite(rows["mean"].astype(float))
    points["open"] = (rows["n_undefined"] > 0) | (rows["mean"].astype(float) < low)
    return points.assign(low=rows["ci_low"].astype(float).clip(lower=low), high=rows["ci_high"].clip(lower=low))


def _hover(rows: pd.DataFrame) -> list[str]:
    names = {PERPENDICULAR: "|e⊥| / |u|", "parallel_error": "|e∥| / |u|"}
    return [
        f"<b>{html.escape(row['site'])}</b>, layer {row['layer']}, {row['mode']}"
        f"<br>{names[row['metric']]} {interval(row['mean'], row['ci_low'], row['ci_high'])}"
        f"<br>mean of {row['n_tokens']:,} tokens"
        + (f", infinite for {row['n_infinite']:,}" if row["n_infinite"] else "")
        + (f", undefined for {row['n_undefined']:,}" if row["n_undefined"] else "")
        for row in rows.to_dict("records")
    ]


def _band(points: pd.DataFrame, site: str, metric: str) -> go.Scatter:
    rows = points[np.isfinite(points["low"].astype(float)) & np.isfinite(points["high"].astype(float))]
    layers, low, high = (rows[name].tolist() for name in ("x", "low", "high"))
    band = go.Scatter(x=layers + layers[::-1], y=high + low[::-1], fill="toself", fillcolor=style(site)[0])
    band.update(opacity=0.22, mode="lines", line_width=0, hoverinfo="skip", showlegend=False)
    return band.update(legendgroup=metric, name=html.escape(site), meta={"site": site, "role": "band"})


def _add_key(drawn: go.Figure) -> None:
    """A legend in ink: dashes mean the same at every site."""
    for metric, (dash, width, _, name) in PARTS.items():
        symbol: dict[str, Any] = {"color": INK, "width": width, "dash": dash}
        key = go.Scatter(x=[None], y=[None], mode="lines", line=symbol, name=name, legendgroup=metric, showlegend=True)
        drawn.add_trace(key.update(meta={"site": "", "role": "key"}), row=1, col=1)
