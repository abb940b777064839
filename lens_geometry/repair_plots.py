"""The figure of pathway repair: recovery by pathway, additivity of joint repairs, and a map of single heads."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, bars, interval, layer_axis, number, panels, require

REPAIRS = (
    "kind displacement unit seed pathway layer head clean_loss perturbed_loss repaired_loss damage damage_low "
    "damage_high recovery recovery_low recovery_high sum_of_singles additivity_gap additivity_gap_low "
    "additivity_gap_high n_nonfinite status"
)
KINDS = {"angular": ("#0072B2", "circle"), "magnitude": ("#D55E00", "square")}
CHECKS = ("nothing", "everything")
VIEW = (-1.0, 2.0)  # what the axes show at most
RECOVERY, GAP = "recovery", "additivity_gap"
TITLES = {
    RECOVERY: "recovery: share of the damage that the repair gives back",
    GAP: "additivity: recovery of both together − sum of single recoveries",
}
LOST = {
    "nonfinite": "losses that are not finite",
    "no_damage": "damage cannot be told from 0",
    "impossible": "a displacement that is not possible",
    "no_effect": "changed no loss",
}


def repair_figure(table: pd.DataFrame) -> go.Figure:
    """A row of panels per displacement: recovery by pathway, and how far joint repairs are from adding up.

    Below, where single heads were repaired, a map of layer by head for each kind and displacement. All over seeds.
    `ResultError` where columns or rows are missing.
    """
    require(table, REPAIRS, "pathway repair")
    whole, heads = pooled(table), head_rows(table)
    joint = bool(whole["additivity_gap"].notna().any())
    doses = list(whole["displacement"].unique())
    maps = list(heads.groupby(["kind", "displacement"], sort=False)) if len(heads) else []
    columns = 2 if joint or len(maps) > 1 else 1
    titles: list[str] = []
    for dose in doses:
        titles += [f"{dose_words(whole, dose)}: recovery", "joint repair − sum of single ones"][:columns]
        titles[-1:] = [""] if columns == 2 and not joint else titles[-1:]
    titles += [f"single heads, {kind}, {dose_words(whole, dose)}" for (kind, dose), _ in maps]
    names = whole["pathway"].nunique()
    drawn = panels(titles, columns, height=max(260, 34 * names + 80))
    for row, dose in enumerate(doses, 1):
        part = whole[whole["displacement"] == dose]
        add_repairs(drawn, part, RECOVERY, {"row": row, "col": 1}, legend=row == 1)
        if joint:
            add_repairs(drawn, part, GAP, {"row": row, "col": 2}, names=list(part["pathway"].unique()), legend=False)
            drawn.update_yaxes(showticklabels=False, row=row, col=2)  # the same lines as beside it
        elif columns == 2:
            drawn.update_xaxes(visible=False, row=row, col=2).update_yaxes(visible=False, row=row, col=2)
    for place, (_, rows) in enumerate(maps, len(doses) * columns):
        add_head_map(drawn, heads, rows, {"row": place // columns + 1, "col": place % columns + 1})
    return drawn


def pooled(table: pd.DataFrame) -> pd.DataFrame:
    """The rows over all seeds, single heads left out."""
    found = table[table["seed"].isna() & table["head"].isna()]
    require(found, "", "pathway repair, over seeds,")
    return found


def head_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of single heads."""
    return table[table["head"].notna() & table["seed"].isna()]


def dose_words(rows: pd.DataFrame, dose: float) -> str:
    """A displacement in words."""
    return f"displacement {dose:g} {rows['unit'].iloc[0]}"


def label(pathway: str) -> str:
    """A pathway's name as an axis has it."""
    return html.escape(pathway).replace("+", " +<br>")


def add_repairs(
    drawn: go.Figure,
    rows: pd.DataFrame,
    quantity: str,
    place: dict[str, int],
    *,
    names: Sequence[str] | None = None,
    legend: bool = True,
) -> None:
    """Draw recovery, or the gap of joint repairs, with 95 % intervals: a line per pathway, a marker per kind.

    Dotted lines are no help (0) and the clean loss (1), or a gap of 0. What lies beyond `VIEW` ends at the panel's edge
    with an arrow. A repair without a number has the reason in words instead.
    """
    if quantity == GAP:
        rows = rows[rows["pathway"].str.contains("+", regex=False)]
    names = list(dict.fromkeys(rows["pathway"])) if names is None else names
    kinds = [kind for kind in KINDS if kind in set(rows["kind"])]
    ends = {quantity: "y", f"{quantity}_low": "low", f"{quantity}_high": "high"}
    shown = rows[[*ends, "kind"]].rename(columns=ends)
    values = shown[["y", "low", "high"]].to_numpy(dtype=float)
    seen = [*values[np.isfinite(values)], 0.0, *((1.0,) if quantity == RECOVERY else ())]
    left, right = max(VIEW[0], min(seen)), min(VIEW[1], max(seen))
    for order, kind in enumerate(kinds):
        part, points = rows[rows["kind"] == kind], shown.loc[rows["kind"] == kind, ["y", "low", "high"]].astype(float)
        colour, symbol = KINDS[kind]
        height = [names.index(name) + 0.24 * (order - (len(kinds) - 1) / 2) for name in part["pathway"]]
        symbols = ["triangle-left" if y < left else "triangle-right" if y > right else symbol for y in points["y"]]
        points = points.clip(left, right)
        dots = go.Scatter(x=points["y"], y=height, mode="markers", name=kind, legendgroup=kind)
        dots.update(text=[_hover(row) for row in part.to_dict("records")], hovertemplate="%{text}<extra></extra>")
        dots.update(showlegend=legend, meta={"site": "", "role": kind}, customdata=part[quantity])
        dots.update(marker={"color": colour, "symbol": symbols, "size": 9, "line": {"color": colour, "width": 1.6}})
        drawn.add_trace(dots.update(error_x={**bars(points, 1.6), "color": colour}), **place)
        lost = [number for number, y in enumerate(points["y"]) if not np.isfinite(y)]
        if lost:
            words = [LOST.get(part["status"].iloc[number], "not measured") for number in lost]
            why = go.Scatter(x=[(left + right) / 2] * len(lost), y=[height[number] for number in lost], mode="text")
            why.update(text=[f"{kind}: {word}" for word in words], textfont={"color": colour, "size": 11})
            drawn.add_trace(why.update(hoverinfo="skip", showlegend=False, meta={"site": "", "role": kind}), **place)
    for at in (0.0, 1.0) if quantity == RECOVERY else (0.0,):
        drawn.add_vline(x=at, line={"color": INK, "width": 1.5, "dash": "dot"}, **place)
    for line in np.arange(len(names) - 1) + 0.5:
        drawn.add_hline(y=line, line={"color": RULE, "width": 1}, **place)
    pad = 0.06 * (right - left)
    drawn.update_xaxes(tickformat=".0%", range=[left - pad, right + pad], **place)
    drawn.update_yaxes(
        tickvals=list(range(len(names))), ticktext=[label(str(name)) for name in names],
        range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False, **place,
    )  # fmt: skip


def add_head_map(drawn: go.Figure, heads: pd.DataFrame, rows: pd.DataFrame, place: dict[str, int]) -> None:
    """Layer by head: recovery of one head's output repaired alone; one colour scale around 0 for all maps."""
    rows = rows.assign(hover=[_hover(row) for row in rows.to_dict("records")])
    rows["mark"] = np.where(np.isfinite(rows["recovery"].astype(float)), "", "×")
    grid = {name: rows.pivot(index="head", columns="layer", values=name) for name in ("recovery", "hover", "mark")}
    cells = go.Heatmap(z=grid["recovery"].astype(float), x=[*grid["mark"].columns], y=[*grid["mark"].index])
    cells.update(coloraxis="coloraxis", xgap=1, ygap=1, text=grid["mark"].fillna(""), texttemplate="%{text}")
    cells.update(hovertext=grid["hover"].fillna(""), hovertemplate="%{hovertext}<extra></extra>")
    drawn.add_trace(cells.update(meta={"site": "", "role": "heads"}), **place)
    drawn.update_yaxes(title_text="head", dtick=max(1, len(grid["mark"]) // 8), showgrid=False, **place)
    layer_axis(drawn, rows["layer"], place, showgrid=False)
    sizes = heads["recovery"].astype(float).abs()
    end = float(sizes[np.isfinite(sizes)].max()) if np.isfinite(sizes).any() else 1.0
    bar = {"thickness": 12, "outlinewidth": 0, "tickformat": ".1%", "len": 0.5, "title": {"text": RECOVERY}}
    drawn.update_layout(coloraxis={"colorscale": "RdBu", "cmin": -end, "cmax": end, "colorbar": bar})


def entry(row: dict[Any, Any], quantity: str = RECOVERY) -> str:
    """Recovery or gap with its interval in per cent, or why there is none."""
    if not np.isfinite(row[quantity]):
        return LOST.get(row["status"], "not measured")
    value, low, high = (100 * float(row[f"{quantity}{end}"]) for end in ("", "_low", "_high"))
    return interval(value, low, high, signed=quantity == GAP).replace(" [", " % [") + " %" * (
        not np.isfinite([low, high]).all()
    )


def _hover(row: dict[Any, Any]) -> str:
    head = "" if pd.isna(row["head"]) else f", layer {row['layer']}, head {row['head']}"
    joint = np.isfinite(row["additivity_gap"])
    lines = [
        f"<b>{html.escape(str(row['pathway']))}</b>{head}, {row['kind']}",
        f"recovery {entry(row)}",
        f"together − sum of single ones {entry(row, GAP)}" if joint else "",
        f"loss: clean {number(row['clean_loss'], digits=4)}, perturbed {number(row['perturbed_loss'], digits=4)}, "
        f"repaired {number(row['repaired_loss'], digits=4)} nats per token",
        f"damage {interval(row['damage'], row['damage_low'], row['damage_high'], signed=True)}",
        f"{row['n_nonfinite']:,} losses are not finite" if row["n_nonfinite"] else "",
    ]
    return "<br>".join(line for line in lines if line)
