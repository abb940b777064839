"""Figures of the scaling sweep: change against scale, and the edit beside its controls."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, SymlogAxis, add_line, bars, interval, number, panels, require, style

CONTROLS = {  # the control in words, dash of its line, its marker beside the edit
    "isotropic": ("isotropic change of the same size", "dash", "diamond-open"),
    "gain": ("gain of the whole branch", "dot", "square-open"),
    "random_reference": ("random reference direction", "dashdot", "triangle-up-open"),
    "shuffled_reference": ("reference of an earlier token", "longdash", "star-open"),
    "matched_random_reference": ("random direction of equal strength", "longdashdot", "pentagon-open"),
    "diagonal_removal": ("no self-attention", "2px,5px", "hexagon-open"),
    "diagonal_removal_renormalised": ("no self-attention, rows renormalised", "9px,3px", "bowtie-open"),
}
UNITS = {"loss": "change of loss (nats per token)", "perplexity": "change of perplexity"}
SCALES = {"parallel": "s_par", "perpendicular": "s_perp"}
SWEEP = "site layers grouping control component scale n_nonfinite status"


def sweep_figure(
    table: pd.DataFrame,
    components: Sequence[str] = ("parallel", "perpendicular"),
    quantities: Sequence[str] = ("loss",),
    controls: bool | str = "legendonly",
) -> go.Figure:
    """Change of `"loss"` or `"perplexity"` against the scale at which one component is retained.

    A row of panels per quantity, a column per component, a line per site with 95 % intervals. Controls are
    thin broken lines in their site's colour; `controls` is their plotly visibility, and one legend entry
    switches each. The axis is symmetric-log with ticks and hover text in real values, and a quantity has one
    scale in all panels. `ResultError` where columns or rows are missing.
    """
    rows = _labelled(table, quantities)
    require(rows[rows["component"].isin(components)], "", f"sweep of {' and '.join(components)}")
    titles = [f"{UNITS[quantity]}, by {SCALES[part]}" for quantity in quantities for part in components]
    drawn = panels(titles, len(components), height=380)
    for row, quantity in enumerate(quantities, 1):
        axis = _axis(rows, quantity)
        points = axis.place(_sweep_points(rows, quantity)).sort_values("x", kind="stable")
        for col, part in enumerate(components, 1):
            place, panel = {"row": row, "col": col}, points[points["component"] == part]
            for (label, name), line in panel.groupby(["label", "control"], sort=False):
                look = {"dash": "solid", "width": 2.4, "size": 7, "showlegend": row == col == 1}
                if name != "none":
                    look = {"dash": control(name)[1], "width": 1.2, "size": 5, "showlegend": False}
                    look |= {"visible": controls, "opacity": 0.85}
                site, role = line["site"].iloc[0], "edit" if name == "none" else name
                add_line(drawn, line, site=site, role=role, name=label, top=axis.top, place=place, look=look)
            drawn.update_xaxes(title_text=f"retained scale {SCALES[part]}", **place)
            drawn.update_yaxes(tickvals=axis.ticks, ticktext=axis.labels, range=axis.range, **place)
            drawn.add_vline(x=1, line={"color": RULE, "width": 1.5, "dash": "dot"}, **place)
    for name in _controls(rows):
        words, dash, _ = control(name)
        line = {"color": INK, "width": 1.5, "dash": dash}
        key = _key(f"control: {words}", name).update(mode="lines", line=line, visible=controls)
        drawn.add_trace(key, row=1, col=1)
    return drawn


def controls_figure(
    table: pd.DataFrame, component: str = "parallel", scale: float = 0.0, quantity: str = "loss"
) -> go.Figure:
    """The edit beside its controls at one scale: a row per site, 95 % intervals, a symmetric-log axis.

    The axis is the same for both components. `ResultError` when nothing was measured at that scale.
    """
    rows = _labelled(table, (quantity,))
    rows = rows[np.isclose(rows["scale"].astype(float), scale)]
    axis, rows = _axis(rows, quantity), rows[rows["component"] == component]
    require(rows, "", f"sweep at {SCALES[component]} = {scale:g}")
    names, labels = ["none", *_controls(rows)], list(rows["label"].unique())
    title = f"{UNITS[quantity]} at {SCALES[component]} = {scale:g}"
    drawn = panels([title], 1, height=max(72, 15 * len(names)) * len(labels) + 40)
    apart = min(0.15, 0.75 / len(names))  # of the room that a site has
    for step, name in enumerate(names):
        words, _, marker = ("the edit", "", "circle") if name == "none" else control(name)
        chosen = rows[rows["control"] == name]
        points = axis.place(_sweep_points(chosen, quantity))
        colours = [style(site)[0] for site in chosen["site"]]
        symbols = np.where(points["lost"] | points["y"].isna(), "x-thin", marker)
        dots = go.Scatter(x=points["y"].fillna(axis.top), mode="markers", customdata=points["real"])
        dots.y = [labels.index(label) + apart * (step - (len(names) - 1) / 2) for label in chosen["label"]]
        dots.update(text=points["hover"], hovertemplate="%{text}<extra></extra>", showlegend=False)
        edges = {"color": colours, "width": 1.6}
        dots.update(marker={"symbol": symbols, "color": colours, "size": 9, "line": edges})
        dots.update(error_x={**bars(points, 1.4), "color": INK}, legendgroup=name)
        drawn.add_trace(dots.update(meta={"site": "", "role": name}))
        key = {"symbol": marker, "color": INK, "size": 9}
        drawn.add_trace(_key(words, name).update(mode="markers", marker=key))
    ticks = {"tickvals": list(range(len(labels))), "ticktext": [html.escape(label) for label in labels]}
    drawn.update_yaxes(**ticks, range=[len(labels) - 0.5, -0.5], showgrid=False, zeroline=False)
    near = 0.09 * (axis.range[1] - axis.range[0])  # across a phone, labels need more room than upwards
    shown = [tick for tick in zip(axis.ticks, axis.labels, strict=True) if tick[0] == 0 or abs(tick[0]) > near]
    drawn.update_xaxes(tickvals=[x for x, _ in shown], ticktext=[words for _, words in shown], tickangle=0)
    return drawn.update_xaxes(range=axis.range, zeroline=True)


def control(name: str) -> tuple[str, str, str]:
    """A control in words, the dash of its line, and its marker."""
    return CONTROLS.get(name, (name, "dot", "cross-open"))


def series_labels(table: pd.DataFrame) -> pd.Series:
    """A line's name for every row of a sweep: the site, with its layers and grouping where those differ."""
    label = table["site"].astype(str)
    for column, before in (("layers", "layers "), ("grouping", "")):
        several = table.groupby("site")[column].transform("nunique") > 1
        label = label.where(~several, label + ", " + before + table[column].astype(str))
    return label


def _controls(rows: pd.DataFrame) -> list[str]:
    """The controls that were measured, those that have a style first and in its order."""
    found = [name for name in rows["control"].unique() if name != "none"]
    return [name for name in CONTROLS if name in found] + [name for name in found if name not in CONTROLS]


def _key(words: str, group: str) -> go.Scatter:
    """A trace that shows nothing but its entry in the legend."""
    key = go.Scatter(x=[None], y=[None], name=html.escape(words), legendgroup=group, showlegend=True)
    return key.update(meta={"site": "", "role": "key"})


def _labelled(table: pd.DataFrame, quantities: Sequence[str]) -> pd.DataFrame:
    ends = ("", "_change", "_change_low", "_change_high")
    needed = " ".join(f"{quantity}{end}" for quantity in quantities for end in ends)
    require(table, f"{SWEEP} {needed}", "scaling_sweep")
    return table.assign(label=series_labels(table))


def _axis(rows: pd.DataFrame, quantity: str) -> SymlogAxis:
    return SymlogAxis(rows[[f"{quantity}_change", f"{quantity}_change_low", f"{quantity}_change_high"]])


def _sweep_points(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """What `add_line` draws of every condition; lost where not all losses were finite."""
    change = f"{quantity}_change"
    names = {"scale": "x", change: "y", f"{change}_low": "low", f"{change}_high": "high"}
    hover = [_sweep_hover(row, quantity) for row in rows.to_dict("records")]
    points = rows[["site", "label", "control", "component", *names]].rename(columns=names)
    return points.assign(lost=rows["status"] == "nonfinite", hover=hover)


def _sweep_hover(row: dict[str, Any], quantity: str) -> str:
    change = interval(*(row[f"{quantity}_change{end}"] for end in ("", "_low", "_high")), signed=True)
    scale = f"{SCALES.get(row['component'], row['component'])} = {row['scale']:g}"
    lines = [
        f"<b>{html.escape(row['label'])}</b>, {html.escape(scale)}",
        "" if row["control"] == "none" else f"control: {html.escape(control(row['control'])[0])}",
        f"change of {quantity} {change}{' nats per token' if quantity == 'loss' else ''}",
        f"{quantity} {number(row[quantity])}",
        f"{row['n_nonfinite']:,} losses not finite, left out" if row["n_nonfinite"] else "",
    ]
    return "<br>".join(line for line in lines if line)
