"""The figure of minimal pairs: accuracy and margin of every set, by scoring."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, bars, interval, panels, require

PAIRS = (
    "set feature value scoring n_pairs accuracy accuracy_low accuracy_high margin margin_low margin_high "
    "n_ties n_nonfinite status"
)
SCORINGS = {  # colour, marker, and the name in words
    "sentence": ("#0072B2", "circle", "whole sentence"),
    "word": ("#D55E00", "square", "critical word"),
    "normalised": ("#009E73", "diamond", "sentence, per token"),
}
ACCURACY = "accuracy"
PANELS = {  # the quantity, its title, and which scorings have it: sums of nats and nats per token share no axis
    "accuracy": (ACCURACY, "accuracy: share of pairs right", ("sentence", "word", "normalised")),
    "margin": ("margin", "margin, nats", ("sentence", "word")),
    "margin-per-token": ("margin", "margin, nats per token", ("normalised",)),
}
CHANCE = 0.5


def pairs_figure(table: pd.DataFrame) -> go.Figure:
    """Accuracy and mean margin, log p(good) - log p(bad), of each set, a marker per scoring; see `add_pairs`.

    `ResultError` where columns or rows are missing.
    """
    require(table, PAIRS, "minimal pairs")
    whole = table[table["feature"] == "all"]
    require(whole, "", "minimal pairs, whole sets,")
    names = list(whole["set"].unique())
    shown = {panel: PANELS[panel] for panel in pair_panels(whole)}
    drawn = panels([title for _, title, _ in shown.values()], len(shown), height=max(240, 46 * len(names) + 90))
    for place, panel in enumerate(shown, 1):
        add_pairs(drawn, whole.assign(label=whole["set"]), panel, {"row": 1, "col": place}, labels=place == 1)
    return drawn


def pair_panels(table: pd.DataFrame) -> list[str]:
    """The panels for which a table has a scoring."""
    return [panel for panel, (_, _, scorings) in PANELS.items() if set(scorings) & set(table["scoring"])]


def add_pairs(drawn: go.Figure, rows: pd.DataFrame, panel: str, place: dict[str, int], *, labels: bool = True) -> None:
    """Draw one panel, a line of `label` for each group of pairs and a marker with 95 % interval for each scoring.

    The dotted line is chance (accuracy 0.5) or a margin of 0. A cross marks a group with margins that are not finite,
    which are left out.
    """
    quantity, _, wanted = PANELS[panel]
    names = list(dict.fromkeys(rows["label"]))
    scorings = [name for name in wanted if name in set(rows["scoring"])]
    step = 0.22
    for number, scoring in enumerate(scorings):
        part = rows[rows["scoring"] == scoring]
        colour, symbol, words = SCORINGS[scoring]
        offset = step * (number - (len(scorings) - 1) / 2)
        ends = {quantity: "y", f"{quantity}_low": "low", f"{quantity}_high": "high"}
        points = part[list(ends)].rename(columns=ends)
        symbols = ["x-thin" if status == "nonfinite" else symbol for status in part["status"]]
        dots = go.Scatter(x=points["y"], y=[names.index(name) + offset for name in part["label"]], mode="markers")
        dots.update(name=words, legendgroup=scoring, showlegend=labels, meta={"site": "", "role": scoring})
        dots.update(text=[_hover(row) for row in part.to_dict("records")], hovertemplate="%{text}<extra></extra>")
        dots.update(customdata=part[quantity])
        dots.update(marker={"color": colour, "symbol": symbols, "size": 9, "line": {"color": colour, "width": 1.6}})
        drawn.add_trace(dots.update(error_x={**bars(points, 1.6), "color": colour}), **place)
    chance = CHANCE if quantity == ACCURACY else 0.0
    drawn.add_vline(x=chance, line={"color": INK, "width": 1.5, "dash": "dot"}, **place)
    for line in np.arange(len(names) - 1) + 0.5:
        drawn.add_hline(y=line, line={"color": RULE, "width": 1}, **place)
    if quantity == ACCURACY:
        low = float(rows[["accuracy", "accuracy_low"]].min(axis=None, skipna=True))
        drawn.update_xaxes(range=[min(0.45, np.floor(10 * low) / 10 - 0.02), 1.02], tickformat=".0%", **place)
    drawn.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[html.escape(str(name)) for name in names],
        showticklabels=labels,
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        **place,
    )


def _hover(row: dict[Any, Any]) -> str:
    group = "" if row["feature"] == "all" else f", {row['feature']}: {row['value']}"
    lost = f"{row['n_nonfinite']:,} pairs without a finite margin, left out" if row["n_nonfinite"] else ""
    lines = [
        f"<b>{html.escape(str(row['set']))}</b>{html.escape(group)}",
        f"by {SCORINGS.get(row['scoring'], ('', '', row['scoring']))[2]}",
        f"accuracy {interval(row['accuracy'], row['accuracy_low'], row['accuracy_high'])}",
        f"margin {interval(row['margin'], row['margin_low'], row['margin_high'], signed=True)}",
        f"{row['n_pairs']:,} pairs" + (f", {row['n_ties']:,} ties" if row["n_ties"] else ""),
        lost,
    ]
    return "<br>".join(line for line in lines if line)
