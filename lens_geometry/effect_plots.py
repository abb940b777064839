"""Figures of single heads (a map, the layers' totals, the two methods) and of applied strength against loss."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, SymlogAxis, add_line, interval, layer_axis, number, panels, require, style

HEADS = "site grouping layer head kind method loss_change loss_change_low loss_change_high status"
STRENGTH = (
    "site grouping component scale layer change_over_branch change_energy norm_ratio "
    "loss_change loss_change_low loss_change_high status"
)
STRENGTHS = ("change_over_branch", "change_energy", "norm_ratio")
METHODS = {"exact": "exactly", "first_order": "to first order"}
KINDS = {  # of a layer's lines: in words, dash, width
    "all": ("all heads at once", "solid", 2.4),
    "sum_of_singles": ("sum of single heads", "dash", 1.6),
    "largest": ("the head that costs most", "dot", 1.6),
    "smallest": ("the head that costs least", "dashdot", 1.2),
}
CHANGE = "change of loss (nats per token)"


def heads_figure(table: pd.DataFrame) -> go.Figure:
    """For each site, grouping and method a map of layer by head; below, the layers' totals and the two methods.

    `ResultError` where columns or rows are missing.
    """
    require(table, HEADS, "head_sweep")
    maps = head_maps(table)
    series = list(dict.fromkeys(zip(table["site"], table["grouping"], strict=True)))
    titles = [map_title(*key) for key in maps] + [f"{html.escape(site)}, {by}: {CHANGE}" for site, by in series]
    both = table["method"].nunique() > 1 and bool(maps)
    drawn = panels([*titles, *(["single heads: exact against first order"] if both else [])], 1, height=300)
    for row, key in enumerate(maps, 1):
        add_head_map(drawn, table, maps[key], {"row": row, "col": 1})
    for row, (site, by) in enumerate(series, len(maps) + 1):
        chosen = table[(table["site"] == site) & (table["grouping"] == by)]
        add_layers(drawn, chosen, {"row": row, "col": 1}, legend=row == len(maps) + 1)
    if both:
        add_agreement(drawn, table, {"row": len(titles) + 1, "col": 1})
    return drawn


def head_maps(table: pd.DataFrame) -> dict[tuple[str, str, str], pd.DataFrame]:
    """The rows of single heads for each (site, grouping, method) that has any."""
    singles = table[table["kind"] == "single"]
    groups = singles.groupby(["site", "grouping", "method"], sort=False)
    return {(str(site), str(by), str(method)): rows for (site, by, method), rows in groups}


def map_title(site: str, grouping: str, method: str) -> str:
    """A map's title in words."""
    unit = {"each": "head by head", "kv_group": "KV head by KV head"}.get(grouping, grouping)
    return f"{html.escape(site)}, {unit}, {METHODS.get(method, method)}"


def add_head_map(drawn: go.Figure, table: pd.DataFrame, rows: pd.DataFrame, place: dict[str, int]) -> None:
    """Layer by head, on one symmetric-log colour scale around zero for the whole table; a cross where not finite."""
    axis = SymlogAxis(table.loc[table["kind"] == "single", "loss_change"])
    rows = rows.assign(head=rows["head"].astype(int), hover=_head_hover(rows))
    rows["mark"] = np.where(rows["status"] == "nonfinite", "×", "")
    rows["colour"] = axis.place(rows.assign(y=rows["loss_change"], low=np.nan, high=np.nan))["y"]
    grid = {name: rows.pivot(index="head", columns="layer", values=name) for name in ("colour", "hover", "mark")}
    cells = go.Heatmap(z=grid["colour"], x=grid["colour"].columns, y=grid["colour"].index, coloraxis="coloraxis")
    cells.update(
        text=grid["mark"].fillna(""), texttemplate="%{text}", hovertext=grid["hover"].fillna(""), xgap=1, ygap=1
    )
    cells.update(hovertemplate="%{hovertext}<extra></extra>", meta={"site": rows["site"].iloc[0], "role": "heads"})
    drawn.add_trace(cells, **place)
    drawn.update_yaxes(title_text="head", dtick=max(1, len(grid["mark"]) // 8), showgrid=False, **place)
    layer_axis(drawn, rows["layer"], place, showgrid=False)
    end = max(abs(position) for position in axis.range)
    bar = {"thickness": 12, "outlinewidth": 0, "tickvals": axis.ticks, "ticktext": axis.labels, "len": 0.6}
    bar |= {"title": {"text": "nats per token", "side": "right"}}
    drawn.update_layout(
        coloraxis={"colorscale": "RdBu", "reversescale": True, "cmin": -end, "cmax": end, "colorbar": bar}
    )


def add_layers(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int], *, legend: bool = True) -> None:
    """By layer: all heads at once, the sum of singles, and the single heads that cost most and least."""
    method = "exact" if "exact" in set(rows["method"]) else "first_order"
    rows = rows[rows["method"] == method]
    singles = rows[rows["kind"] == "single"].dropna(subset="loss_change")
    extremes = []
    if len(singles):
        changes = singles.groupby("layer")["loss_change"]
        found = {"largest": changes.idxmax(), "smallest": changes.idxmin()}
        extremes = [singles.loc[where].assign(kind=kind) for kind, where in found.items()]
    lines = pd.concat([rows[rows["kind"] != "single"], *extremes])
    names = {"layer": "x", "loss_change": "y", "loss_change_low": "low", "loss_change_high": "high"}
    points = lines.rename(columns=names).assign(hover=_head_hover(lines), lost=lines["status"] == "nonfinite")
    axis = SymlogAxis(points[["y", "low", "high"]])
    points = axis.place(points).sort_values("x", kind="stable")
    for kind, (words, dash, width) in KINDS.items():
        line = points[points["kind"] == kind]
        if len(line):
            look = {"dash": dash, "width": width, "size": 5, "showlegend": legend}
            site = line["site"].iloc[0]
            add_line(drawn, line, site=site, role="edit", name=words, top=axis.top, place=place, look=look)
    drawn.update_yaxes(tickvals=axis.ticks, ticktext=axis.labels, range=axis.range, **place)
    layer_axis(drawn, rows["layer"], place)


def add_agreement(drawn: go.Figure, table: pd.DataFrame, place: dict[str, int]) -> None:
    """Each single head's effect: exact across, first order upwards; on the diagonal they are equal."""
    singles = table[table["kind"] == "single"]
    wide = singles.pivot(index=["site", "grouping", "layer", "head"], columns="method", values="loss_change").dropna()
    axis = SymlogAxis(wide)
    drawn.add_trace(_diagonal(axis), **place)
    for site, rows in wide.groupby("site", sort=False):
        exact, first = (
            axis.place(pd.DataFrame({"y": rows[m], "low": np.nan, "high": np.nan}))["y"]
            for m in ("exact", "first_order")
        )
        hover = [
            f"<b>{html.escape(str(site))}</b>, layer {layer}, head {head} ({by})<br>"
            f"exact {number(row['exact'], signed=True)}, first order {number(row['first_order'], signed=True)}"
            for (_, by, layer, head), row in rows.iterrows()
        ]
        colour, symbol = style(str(site))
        dots = go.Scatter(x=exact, y=first, mode="markers", text=hover, name=html.escape(str(site)), showlegend=False)
        dots.update(hovertemplate="%{text}<extra></extra>", marker={"color": colour, "symbol": symbol, "size": 6})
        drawn.add_trace(dots.update(meta={"site": str(site), "role": "edit"}), **place)
    ticks = {"tickvals": axis.ticks, "ticktext": axis.labels, "range": axis.range}
    drawn.update_xaxes(title_text="exact", tickangle=0, **ticks, **place)
    drawn.update_yaxes(title_text="first order", **ticks, **place)


def _diagonal(axis: SymlogAxis) -> go.Scatter:
    line = go.Scatter(x=axis.range, y=axis.range, mode="lines", line={"color": INK, "width": 1, "dash": "dot"})
    return line.update(hoverinfo="skip", showlegend=False, meta={"site": "", "role": "diagonal"})


def _head_hover(rows: pd.DataFrame) -> list[str]:
    kinds = {kind: words for kind, (words, _, _) in KINDS.items()}
    return [
        f"<b>{html.escape(str(row.site))}</b>, layer {row.layer}, "
        + (kinds.get(row.kind, row.kind) if pd.isna(row.head) else f"head {row.head}")
        + ("" if pd.isna(row.head) or row.kind == "single" else f": {kinds.get(row.kind, row.kind)}")
        + f"<br>change of loss {interval(row.loss_change, row.loss_change_low, row.loss_change_high, signed=True)}"
        + f"<br>{METHODS.get(row.method, row.method)}, heads: {html.escape(str(row.grouping))}, {row.status}"
        for row in rows.itertuples()
    ]


def strength_figure(table: pd.DataFrame) -> go.Figure:
    """Strength across, change of loss upwards (one point per layer, a ring for all layers at once), and both by layer.

    A row of panels for each component. `ResultError` where columns or rows are missing.
    """
    require(table, STRENGTH, "applied_strength")
    components = list(table["component"].unique())
    titles = [title for part in components for title in (f"{part} part: cost against strength", "by layer")]
    drawn = panels([html.escape(title) for title in titles], 2, height=360)
    for row, part in enumerate(components, 1):
        add_strength(drawn, table, part, {"row": row, "col": 1}, legend=row == 1)
        add_strength_by_layer(drawn, table[table["component"] == part], {"row": row, "col": 2})
    return drawn


def add_strength(
    drawn: go.Figure, table: pd.DataFrame, component: str, place: dict[str, int], *, legend: bool = True
) -> None:
    """change_over_branch across, change of loss upwards on a symmetric-log axis that all components share."""
    axis = SymlogAxis(table["loss_change"])
    rows = table[table["component"] == component]
    points = axis.place(rows.assign(y=rows["loss_change"], low=np.nan, high=np.nan, hover=_strength_hover(rows)))
    for (site, scale), part in points.groupby(["site", "scale"], sort=False):
        colour, symbol = style(str(site))
        whole = part["layer"].isna()
        symbols = np.where(whole, f"{symbol}-open", symbol)
        sizes = np.where(whole, 14, 7)
        several = rows["scale"].nunique() > 1
        name = html.escape(f"{site}, scale {scale:g}" if several else str(site))
        dots = go.Scatter(x=part["change_over_branch"], y=part["y"].fillna(axis.top), mode="markers", name=name)
        dots.update(text=part["hover"], hovertemplate="%{text}<extra></extra>", legendgroup=name, showlegend=legend)
        dots.update(marker={"color": colour, "symbol": symbols, "size": sizes, "line": {"color": colour, "width": 1.5}})
        drawn.add_trace(dots.update(meta={"site": str(site), "role": "edit"}), **place)
    drawn.update_xaxes(title_text="|y′ − y| / |y|, after W_O", rangemode="tozero", **place)
    drawn.update_yaxes(title_text=CHANGE, tickvals=axis.ticks, ticktext=axis.labels, range=axis.range, **place)


def add_strength_by_layer(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> None:
    """change_over_branch of each layer edited alone, with its interval."""
    alone = rows[rows["layer"].notna()]
    names = {
        "layer": "x",
        "change_over_branch": "y",
        "change_over_branch_low": "low",
        "change_over_branch_high": "high",
    }
    points = alone.rename(columns=names).assign(hover=_strength_hover(alone))
    points["real"] = points["y"]
    for (site, _), line in points.groupby(["site", "scale"], sort=False):
        look = {"dash": "solid", "width": 1.8, "size": 5, "showlegend": False}
        top = float(points["y"].max())
        add_line(drawn, line, site=str(site), role="edit", name=str(site), top=top, place=place, look=look)
    layer_axis(drawn, alone["layer"], place)
    drawn.update_yaxes(title_text="|y′ − y| / |y|", rangemode="tozero", **place)


def _strength_hover(rows: pd.DataFrame) -> list[str]:
    return [
        f"<b>{html.escape(str(row['site']))}</b>, "
        + ("all layers at once" if pd.isna(row["layer"]) else f"layer {row['layer']}")
        + f", {html.escape(str(row['component']))} scale {row['scale']:g}"
        + f"<br>|y′ − y| / |y| {_with(row, 'change_over_branch')}"
        + f"<br>its square {number(row['change_energy'])}, |y′| / |y| {number(row['norm_ratio'])}"
        + f"<br>change of loss {_with(row, 'loss_change', signed=True)}, {row['status']}"
        for row in rows.to_dict("records")
    ]


def _with(row: dict[str, Any], name: str, *, signed: bool = False) -> str:
    ends = (row.get(f"{name}{end}", np.nan) for end in ("", "_low", "_high"))
    return interval(*ends, signed=signed)
