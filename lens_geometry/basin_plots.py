"""Figures of the tolerance basin, an interval around 1 for each target, and of the schedule by layer."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, bars, interval, number, panels, require, style

SCALES = {"parallel": "s_par", "perpendicular": "s_perp"}
BASIN = (
    "kind site layers head component bound low high low_estimate high_estimate low_open high_open low_estimate_open "
    "high_estimate_open low_loss_change high_loss_change reentrant scale inside status"
)
SCHEDULE = (
    "kind site variant half layer scale strength budget loss_change loss_change_low loss_change_high difference status"
)
PARTS = {  # panels of the schedule: title and axis
    "scale": ("retained scale s_par, by layer", "s_par"),
    "strength": ("applied strength, by layer", "change over size of the branch's output"),
    "comparison": ("joint change of loss at equal strength", "change of loss (nats per token)"),
}
VARIANTS = {  # in words, and the dash of its line; "random 1", ... share theirs
    "greedy": ("the greedy schedule", "solid"),
    "uniform": ("one scale for all layers", "dash"),
    "random": ("random orders of the layers", "dot"),
}


def basin_figure(table: pd.DataFrame) -> go.Figure:
    """A row for each target: its basin as a thick line around 1, the one by the change itself as a thin line.

    An arrow is an end where the search's limit was reached without leaving, a hollow dot a scale further out that
    is inside again. `ResultError` where columns or rows are missing.
    """
    rows = basins(table)
    tried = table[table["kind"] == "evaluation"]
    words = SCALES.get(rows["component"].iloc[0], rows["component"].iloc[0])
    title = f"scales {words} with a change of loss under {rows['bound'].iloc[0]:g} nats per token"
    drawn = panels([title], 1, height=24 * len(rows) + 110)
    for place, (_, row) in enumerate(rows.iterrows()):
        colour = style(row["site"])[0]
        base = {"meta": {"site": row["site"], "role": "edit"}, "showlegend": False}
        base |= {"text": _basin_hover(row), "hovertemplate": "%{text}<extra></extra>"}
        for kind, width, size in (("_estimate", 1.4, 7), ("", 6, 10)):
            ends = [row[f"low{kind}"], row[f"high{kind}"]]
            symbols = [
                arrow if row[f"{end}{kind}_open"] else "line-ns"
                for end, arrow in (("low", "triangle-left"), ("high", "triangle-right"))
            ]
            line = go.Scatter(base, x=ends, y=[place, place], mode="lines+markers")
            marker = {"symbol": symbols, "size": size, "color": colour, "opacity": 1}
            marker["line"] = {"color": colour, "width": 2 if "line-ns" in symbols else 0}
            drawn.add_trace(line.update(line={"color": colour, "width": width}, marker=marker))
        again = _inside_again(tried, row)
        if len(again):
            dots = go.Scatter(base, x=again["scale"], y=[place] * len(again), mode="markers")
            marker = {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 1.5}}
            drawn.add_trace(dots.update(marker=marker, text=[f"{row['label']}: inside again"] * len(again)))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [html.escape(label) for label in rows["label"]]}
    drawn.update_yaxes(**ticks, range=[len(rows) - 0.5, -0.5], showgrid=False, zeroline=False)
    drawn.update_xaxes(title_text=f"retained scale {words}")
    return drawn.add_vline(x=1, line={"color": RULE, "width": 1.5, "dash": "dot"})


def basins(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that are basins, site by site, each with a `label` of what tells it apart: site, layers, head."""
    require(table, BASIN, "basin")
    rows = table[table["kind"] == "basin"]
    require(rows, "", "basin")
    order = {site: place for place, site in enumerate(rows["site"].unique())}
    rows = rows.sort_values("site", kind="stable", key=lambda sites: sites.map(order))
    heads = rows["head"].map(lambda head: "" if pd.isna(head) else f"head {head}")
    layers = rows["layers"].map(lambda text: f"layer {text}" if str(text).isdecimal() else f"layers {text}")
    none = [""] * len(rows)
    several = rows["layers"].nunique() > 1 or rows["head"].notna().any()
    sites = rows["site"] if len(order) > 1 or not several else none
    parts = zip(sites, layers if several else none, heads, strict=True)
    return rows.assign(label=[", ".join(part for part in found if part) for found in parts])


def basin_range(row: Any, kind: str = "") -> str:
    """`0.53 to 1.72`, or `≤ −1.00 to 1.72` where the lower limit was reached; `kind` "_estimate" for the other one."""
    low, high = (f"{row[f'{end}{kind}']:.2f}".replace("-", "−") for end in ("low", "high"))
    return f"{'≤ ' * bool(row[f'low{kind}_open'])}{low} to {'≥ ' * bool(row[f'high{kind}_open'])}{high}"


def _inside_again(tried: pd.DataFrame, row: pd.Series) -> pd.DataFrame:
    """The scales of one target that are inside, further out than its basin."""
    own = (tried["site"] == row["site"]) & (tried["layers"] == row["layers"])
    own &= tried["head"].isna() if pd.isna(row["head"]) else tried["head"] == row["head"]
    beyond = (tried["scale"] < row["low"]) | (tried["scale"] > row["high"])
    return tried[own & beyond & tried["inside"].astype(bool)] if row["reentrant"] else tried.iloc[:0]


def _basin_hover(row: pd.Series) -> str:
    changes = [f"{number(row[f'{end}_loss_change'], signed=True)}" for end in ("low", "high")]
    remarks = {"nonfinite": "some scale gave losses that are not finite", "no_effect": "no scale changed any loss"}
    lines = [
        f"<b>{html.escape(row['label'])}</b>",
        f"basin {basin_range(row)}",
        f"by the change itself {basin_range(row, '_estimate')}",
        f"change of loss at the edges {' and '.join(changes)} nats per token",
        "inside again further out" if row["reentrant"] else "",
        remarks.get(row["status"], ""),
    ]
    return "<br>".join(line for line in lines if line)


def schedule_figure(table: pd.DataFrame, parts: Sequence[str] = tuple(PARTS)) -> go.Figure:
    """Panels of the schedule: each layer's `"scale"`, its `"strength"`, and the joint `"comparison"`.

    A site has its colour, a variant its dash. In the comparison a filled marker is the held-out half, an open one
    the half that was searched, with 95 % intervals; the dotted line is the budget. `ResultError` where columns or
    rows are missing.
    """
    require(table, SCHEDULE, "schedule")
    layers, compared = table[table["kind"] == "layer"], table[table["kind"] == "comparison"]
    require(layers, "", "schedule")
    height = max(330, 26 * len(compared) // 2 + 110)
    drawn = panels([PARTS[part][0] for part in parts], 1, height=height)
    for row, part in enumerate(parts, 1):
        place = {"row": row, "col": 1}
        if part == "comparison":
            _comparison(drawn, compared, place)
            continue
        for (site, variant), line in layers.groupby(["site", "variant"], sort=False):
            trace = _steps(line.sort_values("layer"), site, variant, part)
            drawn.add_trace(trace.update(showlegend=row == 1 and not variant.startswith("random")), **place)
        drawn.update_xaxes(title_text="layer", dtick=max(1, layers["layer"].nunique() // 8), **place)
        drawn.update_yaxes(title_text=PARTS[part][1], rangemode="tozero", **place)
        if part == "scale":  # 1 is always seen: there nothing is edited
            drawn.update_yaxes(range=[min(0.0, float(layers["scale"].min())) - 0.05, 1.05], **place)
    return drawn


def variant_words(variant: str) -> tuple[str, str]:
    """A variant in words, and the dash of its line."""
    return VARIANTS.get(variant.split()[0], (variant, "dashdot"))


def _steps(line: pd.DataFrame, site: str, variant: str, part: str) -> go.Scatter:
    colour, symbol = style(site)
    random, words = variant.startswith("random"), variant_words(variant)
    hover = [
        f"<b>{html.escape(site)}</b>, {html.escape(variant)}, layer {row.layer}<br>s_par = {row.scale:.3g}"
        f"<br>applied strength {number(row.strength)}"
        + (f"<br>alone {interval(*_changes(row), signed=True)} nats per token" if row.status == "ok" else "")
        for row in line.itertuples()
    ]
    trace = go.Scatter(x=line["layer"].astype(int), y=line[part], text=hover, hovertemplate="%{text}<extra></extra>")
    trace.update(mode="lines" if random else "lines+markers", name=html.escape(f"{site}, {words[0]}"))
    trace.update(line={"color": colour, "dash": words[1], "width": 1 if random else 2.2, "shape": "hvh"})
    trace.update(marker={"color": colour, "symbol": symbol, "size": 5}, opacity=0.6 if random else 1)
    return trace.update(meta={"site": site, "role": _role(variant)}, legendgroup=f"{site} {_role(variant)}")


def _comparison(drawn: go.Figure, compared: pd.DataFrame, place: dict[str, int]) -> None:
    several = compared["site"].nunique() > 1
    names = compared["site"] + ", " + compared["variant"] if several else compared["variant"]
    labels = list(dict.fromkeys(names))
    for (site, half, variant), rows in compared.assign(label=names).groupby(["site", "half", "variant"], sort=False):
        colour, symbol = style(site)
        step = 0.15 if half == "held_out" else -0.15
        ends = {"loss_change": "y", "loss_change_low": "low", "loss_change_high": "high"}
        points = rows.rename(columns=ends)
        hover = [
            f"<b>{html.escape(row.label)}</b>, {'held out' if half == 'held_out' else 'searched'}"
            f"<br>change of loss {interval(*_changes(row), signed=True)} nats per token"
            f"<br>against greedy {interval(row.difference, row.difference_low, row.difference_high, signed=True)}"
            f"<br>applied strength, all layers {number(row.strength)}"
            for row in rows.itertuples()
        ]
        dots = go.Scatter(x=points["y"], y=[labels.index(label) + step for label in points["label"]], mode="markers")
        dots.update(text=hover, hovertemplate="%{text}<extra></extra>", showlegend=False)
        marker = {"symbol": symbol if half == "held_out" else f"{symbol}-open", "size": 9, "color": colour}
        dots.update(marker=marker, error_x={**bars(points, 1.4), "color": INK})
        drawn.add_trace(dots.update(meta={"site": site, "role": _role(variant)}), **place)
    ticks = {"tickvals": list(range(len(labels))), "ticktext": [html.escape(label) for label in labels]}
    drawn.update_yaxes(**ticks, range=[len(labels) - 0.5, -0.5], showgrid=False, zeroline=False, **place)
    drawn.update_xaxes(title_text=PARTS["comparison"][1], zeroline=True, **place)
    line = {"color": INK, "width": 1.5, "dash": "dot"}
    drawn.add_vline(x=float(compared["budget"].iloc[0]), line=line, **place)


def _role(variant: str) -> str:
    return "edit" if variant == "greedy" else variant.split()[0]


def _changes(row: Any) -> tuple[float, float, float]:
    return row.loss_change, row.loss_change_low, row.loss_change_high
