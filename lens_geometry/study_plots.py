"""Figures of a compression study: the damage against each error, and how well each error orders the damage."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, SymlogAxis, interval, number, panels, require, style, symlog
from lens_geometry.prediction_verdict import COLUMNS, TARGETS, VERDICTS

STUDY = "variant family status mode site layer predictor value value_low value_high loss_change kl bits_per_weight"
WORDS = {
    "perpendicular_error": "|e_perp| / |u|",
    "error": "|e| / |u|",
    "parallel_error": "|e_par| / |u|",
    "update_cosine_distance": "1 − cos(u, u′)",
    "perpendicular_error_over_reference": "|e_perp| / |x|",
    "error_over_reference": "|e| / |x|",
    "weight_error": "error of the weights",
}
SHOWN = ("perpendicular_error", "error", "parallel_error", "update_cosine_distance", "weight_error")
FAMILIES = {
    "quantisation": ("#0072B2", "circle"),
    "pruning": ("#D55E00", "square"),
    "low rank": ("#009E73", "diamond"),
    "depth": ("#CC79A7", "triangle-up"),
    "gain": ("#B8A800", "star"),
}
MORE = (("#56B4E9", "pentagon"), ("#E69F00", "hexagon"), ("#0F7F8C", "triangle-down"), (INK, "cross"))
KINDS = {"spearman": "", "partial": " given ", "difference": " less "}


def study_figure(
    table: pd.DataFrame,
    predictors: Sequence[str] = SHOWN,
    *,
    mode: str | None = None,
    site: str = "pooled",
    against: str = "loss_change",
) -> go.Figure:
    """A panel for each predictor: the damage of every variant against it, one colour and marker for a kind of method.

    Both axes are symmetric-log: even near zero, so that a predictor of 0 and a loss that falls have their place. A
    cross at the top is a variant whose damage is not finite; variants that failed have no point. `mode` is the first
    that was measured when left out. `ResultError` where columns or rows are missing.
    """
    require(table, STUDY, "compression_study")
    whole = table[table["layer"].isna()]
    modes = [name for name in whole["mode"].unique() if name not in ("", "weights")]
    mode = mode or next(iter(modes), "")
    at = whole[(whole["mode"] == mode) & (whole["site"] == site)]
    rows = pd.concat([at[at["predictor"] != "weight_error"], whole[whole["mode"] == "weights"]])
    predictors = [name for name in predictors if np.isfinite(rows.loc[rows["predictor"] == name, "value"]).any()]
    require(pd.DataFrame({"predictor": predictors}), "", f"compression_study at {site}, {mode},")
    drawn = panels([html.escape(WORDS.get(name, name)) for name in predictors], 2, height=300)
    damage = SymlogAxis(rows[against])
    seen: set[str] = set()
    for number_, name in enumerate(predictors):
        place = {"row": number_ // 2 + 1, "col": number_ % 2 + 1}
        points = rows[rows["predictor"] == name]
        points = points[np.isfinite(points["value"].astype(float))]
        across = SymlogAxis(points["value"])
        for family, part in points.groupby("family", sort=False):
            trace = _points(part, str(family), list(whole["family"].unique()), across, damage, against)
            drawn.add_trace(trace.update(showlegend=family not in seen), **place)
            seen.add(str(family))
        kept = _apart(across.ticks, 0.09 * (across.range[1] - across.range[0]))
        ticks = {
            "tickvals": kept,
            "ticktext": [across.labels[across.ticks.index(tick)] for tick in kept],
            "tickangle": 0,
        }
        drawn.update_xaxes(**ticks, range=across.range, title_text=html.escape(WORDS.get(name, name)), **place)
        title = f"{TARGETS[against]} (nats per token)" if place["col"] == 1 else None
        ticks = {"tickvals": damage.ticks, "ticktext": damage.labels}
        drawn.update_yaxes(**ticks, range=damage.range, title_text=title, **place)
    return drawn


def _apart(ticks: Sequence[float], least: float) -> list[float]:
    """Ticks that are so far apart that the labels of a narrow panel do not run together; zero always stays."""
    kept = [tick for tick in ticks if tick == 0]
    for tick in sorted(ticks, reverse=True):
        if all(abs(tick - other) >= least for other in kept):
            kept.append(tick)
    return sorted(kept)


def family_style(family: str, families: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a kind of method; kinds that are not known take what is left, in the table's order."""
    unknown = [name for name in dict.fromkeys(families) if name not in FAMILIES]
    if family in FAMILIES:
        return FAMILIES[family]
    again, place = divmod(unknown.index(family), len(MORE))
    colour, symbol = MORE[place]
    return colour, f"{symbol}-open" if again % 2 else symbol


def _points(
    part: pd.DataFrame, family: str, families: Sequence[str], across: SymlogAxis, damage: SymlogAxis, against: str
) -> go.Scatter:
    colour, symbol = family_style(family, families)
    values = part[against].astype(float)
    lost = ~np.isfinite(values) | (part["status"] == "nonfinite")
    y = np.where(np.isfinite(values), symlog(values.fillna(0.0), damage.linear), damage.top)
    hover = [
        f"<b>{html.escape(str(row['variant']))}</b><br>{html.escape(WORDS.get(row['predictor'], row['predictor']))} "
        f"{interval(row['value'], row['value_low'], row['value_high'])}<br>change of loss "
        f"{interval(row['loss_change'], row['loss_change_low'], row['loss_change_high'], signed=True)} nats per token"
        f"<br>KL {number(row['kl'])}"
        + (f"<br>{number(row['bits_per_weight'])} bits per weight" if math.isfinite(row["bits_per_weight"]) else "")
        + ("<br>some losses are not finite" if row["status"] == "nonfinite" else "")
        for row in part.to_dict("records")
    ]
    x = symlog(part["value"], across.linear)
    trace = go.Scatter(x=x, y=y, text=hover, hovertemplate="%{text}<extra></extra>", mode="markers")
    trace.update(name=html.escape(family), legendgroup=family, meta={"site": "", "role": family})
    symbols = ["x-thin" if flag else symbol for flag in lost]
    widths = [2 if flag else 0 for flag in lost]
    return trace.update(marker={"color": colour, "symbol": symbols, "size": 9, "opacity": 0.85,
                                "line": {"color": colour, "width": widths}})  # fmt: skip


def prediction_figure(table: pd.DataFrame, against: str = "loss_change") -> go.Figure:
    """How well each error orders the damage: rank correlations with intervals, a panel for each mode and question.

    Rows are the predictors, then partial correlations and the difference that the verdict is about; a dot for every
    site, the mean over sites filled and thick. Thick lines are 95 % intervals over variants, the thin grey one of the
    mean over sites is the range when each family is left out. What cannot be told has no dot. `ResultError` where
    columns or rows are missing.
    """
    require(table, COLUMNS, "error_prediction")
    rows = table[table["against"] == against]
    require(rows, "", f"error_prediction of {against}")
    asked = list(dict.fromkeys(zip(rows["kind"], rows["predictor"], rows["given"], strict=True)))
    groups = list(rows.groupby(["question", "mode"], sort=False))
    titles = [
        f"{mode}, whole variants" if question == "variants" else "single layers" for (question, mode), _ in groups
    ]
    drawn = panels(titles, len(titles), height=46 * len(asked) + 60)
    sites = [site for site in rows["site"].unique() if site != "pooled"]
    order = [*(["pooled"] if "pooled" in set(rows["site"]) else []), *sites]
    for column, (_, part) in enumerate(groups, 1):
        place = {"row": 1, "col": column}
        for step, site in enumerate(order):
            trace, band = _dots(part[part["site"] == site], site, asked, 0.13 * (step - (len(order) - 1) / 2))
            for one in filter(None, (band, trace.update(showlegend=column == 1))):
                drawn.add_trace(one, **place)
        ticks = {"tickvals": list(range(len(asked))), "ticktext": [html.escape(question_words(*one)) for one in asked]}
        drawn.update_yaxes(**ticks, showticklabels=column == 1, range=[len(asked) - 0.4, -0.6], showgrid=False, **place)
        drawn.update_xaxes(range=[-1.08, 1.08], dtick=0.5, title_text="rank correlation", **place)
        drawn.add_vline(x=0, line={"color": RULE, "width": 1.5}, **place)
    return drawn.update_yaxes(zeroline=False)


def question_words(kind: str, predictor: str, given: str) -> str:
    """`|e_perp| / |u| given |e| / |u|`."""
    return WORDS.get(predictor, predictor) + (f"{KINDS[kind]}{WORDS.get(given, given)}" if given else "")


def _dots(
    rows: pd.DataFrame, site: str, asked: list[tuple[str, str, str]], step: float
) -> tuple[go.Scatter, go.Scatter | None]:
    colour, symbol = (INK, "circle") if site == "pooled" else style(site)
    rows = rows[np.isfinite(rows["value"].astype(float))]
    keys = list(zip(rows["kind"], rows["predictor"], rows["given"], strict=True))
    y = [asked.index(key) + step for key in keys]
    hover = [
        f"<b>{html.escape(question_words(*key))}</b>, {'mean over sites' if site == 'pooled' else html.escape(site)}"
        f"<br>{interval(row['value'], row['low'], row['high'], signed=True)}"
        f"<br>without one family {interval(row['value'], row['family_low'], row['family_high'], signed=True)}"
        f"<br>{row['n']} variants, {row['n_families']} families"
        + (f"<br>{VERDICTS[row['verdict']]}" if row["verdict"] else "")
        for key, row in zip(keys, rows.to_dict("records"), strict=True)
    ]
    up, down = (rows["high"] - rows["value"]).clip(lower=0), (rows["value"] - rows["low"]).clip(lower=0)
    pooled = site == "pooled"
    bar = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "width": 0,
           "thickness": 2.6 if pooled else 1.2, "color": colour}  # fmt: skip
    trace = go.Scatter(x=rows["value"], y=y, error_x=bar, text=hover, hovertemplate="%{text}<extra></extra>")
    trace.update(mode="markers", name="mean over sites" if pooled else html.escape(site), legendgroup=site)
    trace.update(marker={"color": colour, "symbol": symbol if pooled else f"{symbol}-open", "size": 9 if pooled else 7})
    trace.update(meta={"site": site, "role": "edit"})
    ranged = [(row, at) for row, at in zip(rows.to_dict("records"), y, strict=True) if math.isfinite(row["family_low"])]
    if not pooled or not ranged:
        return trace, None
    ends = [(x, at - 0.07) for row, at in ranged for x in (row["family_low"], row["family_high"], None)]
    band = go.Scatter(x=[x for x, _ in ends], y=[at for _, at in ends], mode="lines", showlegend=False)
    band.update(line={"color": RULE, "width": 5}, hoverinfo="skip", meta={"site": site, "role": "band"})
    return trace, band
