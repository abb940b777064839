"""Figures of what carries a push to the output: mediators by layer, how displacements grow, shares of the damage.

A kind of push has a colour and a marker, a variant a dash (or a hatching). Figures are of one displacement.
"""

from __future__ import annotations

import html
import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, add_line, interval, layer_axis, log_ticks, panels, require, style

COLUMNS = (
    "variant kind displacement unit mediator measure layer pushes seed value low high change change_low change_high"
)
PANELS = {  # mediator: what is drawn of it, the panel's title, the axis
    "relative_displacement": ("value", "displacement of the stream", "|h′ − h| / |h|"),
    "angle": ("value", "angle to the clean stream", "degrees"),
    "attention_entropy": ("change", "change of attention entropy", "nats"),
    "query_key_alignment": ("change", "change of query-key alignment", "mean cosine"),
    "norm_ratio": ("value", "norm over the clean stream's", "|h′| / |h|"),
}
MEDIATORS = {
    "attention_entropy": "attention entropy",
    "query_key_alignment": "query-key alignment",
    "attention_to_first": "attention to position 0",
    "displacement": "stream: |h′ − h|",
    "relative_displacement": "stream: |h′ − h| / |h|",
    "angle": "stream: angle",
    "norm_ratio": "stream: |h′| / |h|",
    "attention_output_displacement": "attention output: moved by",
    "attention_output_relative_displacement": "attention output: relative",
    "mlp_output_displacement": "MLP output: moved by",
    "mlp_output_relative_displacement": "MLP output: relative",
}
GROWTH = {"growth": "the stream", "growth_of_pushes": "the pushes alone"}
SHARES = {
    "explained": "share of the damage that goes with it (R²)",
    "explained_beyond": "R² gained beside |h′ − h| / |h|",
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
HATCHES = ("", "/", "x", ".", "-")
SHADE = "rgba(128,128,128,0.13)"


def mediators_figure(table: pd.DataFrame, displacement: float | None = None) -> go.Figure:
    """Four mediators by layer, growth over pushes, and explained shares, of one displacement (by default the first).

    Perturbed layers are shaded. `ResultError` where columns or rows are missing.
    """
    rows = chosen_rows(table, displacement)
    layers = [name for name in PANELS if name in set(rows["mediator"])]
    grown = bool((rows["mediator"] == "growth").any())
    shares = [name for name in SHARES if rows.loc[rows["measure"] == name, "value"].notna().any()]
    titles = [PANELS[name][1] for name in layers] + ["growth, in units of one push"] * grown
    blank = len(titles) % 2 if shares else 0  # shares stand side by side: the names are left of the first
    titles += [""] * blank + [SHARES[name] for name in shares]
    drawn = panels(titles, 2, height=380)
    places = [{"row": index // 2 + 1, "col": index % 2 + 1} for index in range(len(titles))]
    for index, name in enumerate(layers):
        add_mediator(drawn, rows, name, places[index], legend=index == 0)
    if grown:
        add_growth(drawn, rows, places[len(layers)], legend=not layers)
    if blank:
        drawn.update_xaxes(visible=False, **places[len(layers) + grown])
        drawn.update_yaxes(visible=False, **places[len(layers) + grown])
    for place, name in zip(places[len(titles) - len(shares) :], shares, strict=True):
        add_shares(drawn, rows, name, place, names=place["col"] == 1)
    return drawn


def chosen_rows(table: pd.DataFrame, displacement: float | None = None) -> pd.DataFrame:
    """All seeds together, one displacement."""
    require(table, COLUMNS, "mediators")
    rows = table[table["seed"].isna()]
    require(rows, "", "mediators")
    return rows[rows["displacement"] == (rows["displacement"].iloc[0] if displacement is None else displacement)]


def series(rows: pd.DataFrame) -> dict[tuple[str, str], tuple[str, str]]:
    """(variant, kind) to the variant's dash and hatching."""
    variants = list(rows["variant"].unique())
    pairs = rows[["variant", "kind"]].drop_duplicates().itertuples(index=False)
    number = {name: variants.index(name) % len(DASHES) for name in variants}
    return {(str(v), str(k)): (DASHES[number[v]], HATCHES[number[v]]) for v, k in pairs}


def add_mediator(
    drawn: go.Figure, rows: pd.DataFrame, mediator: str, place: dict[str, int], *, legend: bool = False
) -> None:
    """One mediator by layer, a line for each variant and kind; the last layer is the stream that leaves the model."""
    what, _, unit = PANELS[mediator]
    ends = ("low", "high") if what == "value" else ("change_low", "change_high")
    part = rows[(rows["mediator"] == mediator) & (rows["measure"] == "mean")]
    for (variant, kind), (dash, _) in series(rows).items():
        line = part[(part["variant"] == variant) & (part["kind"] == kind)].sort_values("layer")
        if line.empty:
            continue
        points = pd.DataFrame(
            {"x": line["layer"].astype(int), "y": line[what], "real": line[what], "low": line[ends[0]],
             "high": line[ends[1]], "hover": _hover(line)}
        )  # fmt: skip
        _add(drawn, points, variant, kind, place, dash=dash, legend=legend)
    _shade(drawn, rows, place)
    layer_axis(drawn, part["layer"], place)
    drawn.update_yaxes(
        title_text=unit, rangemode="tozero" if what == "value" and mediator != "norm_ratio" else "normal", **place
    )


def add_growth(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int], *, legend: bool = False) -> None:
    """Displacement after n pushes in units of one, both axes logarithmic: the stream's, and that of the pushes alone.

    Guides are n (pushes that add up) and the square root of n (a random walk).
    """
    part = rows[rows["mediator"].isin(GROWTH) & (rows["measure"] == "mean")]
    last = max(2, int(part["pushes"].max()))
    for power, name in ((1.0, "n: they add up"), (0.5, "√n: a random walk")):
        line = {"color": INK, "width": 1, "dash": "longdash" if power == 1 else "dot"}
        guide = go.Scatter(x=[1, last], y=[1, last**power], mode="lines", name=name, line=line, hoverinfo="skip")
        drawn.add_trace(guide.update(meta={"site": "", "role": "guide"}), **place)
    for (variant, kind), (dash, _) in series(rows).items():
        for mediator in GROWTH:
            line = part[(part["variant"] == variant) & (part["kind"] == kind) & (part["mediator"] == mediator)]
            line = line[line["value"] > 0].sort_values("pushes")
            if line.empty:
                continue
            alone = mediator == "growth_of_pushes"
            points = pd.DataFrame(
                {"x": line["pushes"].astype(int), "y": line["value"], "real": line["value"],
                 "low": line["low"].clip(lower=1e-3), "high": line["high"], "hover": _hover(line), "open": alone}
            )  # fmt: skip
            _add(drawn, points, variant, kind, place, dash=dash, legend=legend and not alone, thin=alone)
    steps = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= last]
    drawn.update_xaxes(title_text="pushes so far, n", type="log", tickvals=steps, ticktext=[*map(str, steps)], **place)
    seen = part.loc[part["value"] > 0, "value"]
    low, high = min(1.0, float(seen.min())), max(float(last), float(seen.max()))
    ticks, words = log_ticks(low, high)
    drawn.update_yaxes(
        title_text="displacement / one push",
        type="log",
        tickvals=ticks,
        ticktext=words,
        range=[math.log10(low) - 0.05, math.log10(high) + 0.05],
        **place,
    )


def add_shares(
    drawn: go.Figure, rows: pd.DataFrame, measure: str, place: dict[str, int], *, names: bool = True
) -> None:
    """Bars of how much of the damage's variance goes with each mediator, with their intervals."""
    part = rows[(rows["measure"] == measure) & rows["value"].notna()]
    known = [name for name in MEDIATORS if name in set(rows.loc[rows["measure"].isin(SHARES), "mediator"])]
    for (variant, kind), (_, hatch) in series(rows).items():
        bars = part[(part["variant"] == variant) & (part["kind"] == kind)].set_index("mediator").reindex(known)
        colour = style(kind)[0]
        up, down = ((bars[end] - bars["value"]).abs() for end in ("high", "low"))
        beyond = bars["value"] > bars["high"], bars["value"] < bars["low"]  # a percentile interval may lie beside it
        error = {
            "type": "data",
            "symmetric": False,
            "array": up.mask(beyond[0], 0),
            "arrayminus": down.mask(beyond[1], 0),
        }
        drawn.add_trace(
            go.Bar(
                x=bars["value"],
                y=[MEDIATORS[name] for name in known],
                orientation="h",
                error_x={**error, "thickness": 1, "width": 0, "color": INK},
                marker={"color": colour, "pattern": {"shape": hatch, "fillmode": "overlay", "fgcolor": "white"}},
                text=_hover(bars.reset_index()),
                textposition="none",
                hovertemplate="%{text}<extra></extra>",
                name=html.escape(f"{kind}, {variant}"),
                showlegend=False,
                meta={"site": kind, "role": variant},
            ),
            **place,
        )
    drawn.update_layout(barmode="group", bargap=0.25, bargroupgap=0.05)
    drawn.update_xaxes(title_text="share of variance", range=[0, 1], **place)
    drawn.update_yaxes(autorange="reversed", showticklabels=names, showgrid=False, **place)


def _add(
    drawn: go.Figure,
    points: pd.DataFrame,
    variant: str,
    kind: str,
    place: dict[str, int],
    *,
    dash: str,
    legend: bool,
    thin: bool = False,
) -> None:
    look = {"dash": dash, "width": 1.0 if thin else 1.9, "size": 5, "showlegend": legend}
    look |= {"legendgroup": f"{kind}, {variant}"}
    top = float(points["y"].max()) if np.isfinite(points["y"]).any() else 1.0
    add_line(drawn, points, site=kind, role=variant, name=f"{kind}, {variant}", top=top, place=place, look=look)


def _shade(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> None:
    """The layers that were perturbed, behind the lines."""
    layers = sorted({int(layer) for layer in rows.loc[rows["mediator"] == "growth", "layer"].dropna()})
    for layer in layers:
        drawn.add_vrect(x0=layer - 0.5, x1=layer + 0.5, fillcolor=SHADE, line_width=0, layer="below", **place)


def _hover(rows: pd.DataFrame) -> list[str]:
    return [_words(row) for row in rows.to_dict("records")]


def _words(row: dict[str, Any]) -> str:
    if pd.isna(row["value"]):
        return ""
    where = "" if pd.isna(row["layer"]) else f", layer {row['layer']}"
    where += "" if pd.isna(row["pushes"]) else f" after {row['pushes']} push{'' if row['pushes'] == 1 else 'es'}"
    name = {**MEDIATORS, **{key: f"growth of {words}" for key, words in GROWTH.items()}}[row["mediator"]]
    change = ""
    if not pd.isna(row["change"]) and row["change"] != row["value"]:
        change = f"<br>change {interval(row['change'], row['change_low'], row['change_high'], signed=True)}"
    return (
        f"<b>{html.escape(str(row['kind']))}</b>, {html.escape(str(row['variant']))}{where}<br>{name} "
        f"{interval(row['value'], row['low'], row['high'])}{change}"
    )
