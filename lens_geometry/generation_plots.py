"""Figures of generation: metrics step by step, layer by step, and continuations side by side."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, add_line, interval, log_ticks, number, panels, require

METRICS = {  # the panel's title, and whether its axis is logarithmic
    "parallel_ratio": ("parallel_ratio: parallel size / perpendicular size", True),
    "alpha": ("alpha: signed length along the reference", False),
    "parallel_fraction": ("parallel_fraction: parallel size / update size", False),
    "update_over_reference": ("update_over_reference: update size / reference size", True),
}
PROFILE = "site layer step metric mean ci_low ci_high n n_infinite n_undefined"
CONTINUATIONS = (
    "prompt prompt_text site parallel when text agreed_characters n_new n_agree logprob repetition eos_step status"
)
WHEN = {"always": "all tokens", "prompt": "the prompt's tokens", "new": "new tokens"}
MAPPED = "parallel_fraction"


def generation_figure(
    table: pd.DataFrame, metrics: Sequence[str] = tuple(METRICS), *, sites: Sequence[str] | None = None
) -> go.Figure:
    """A panel per metric (a line per site, the mean over layers, by step), then a map of layer by step per site.

    `sites` chooses the maps, all by default. Bars are 95 % intervals over prompts. `ResultError` where columns or
    rows are missing.
    """
    require(table, PROFILE, "generation_profile")
    mapped = [str(site) for site in (table["site"].unique() if sites is None else sites)]
    titles = [METRICS.get(metric, (metric,))[0] for metric in metrics] + [
        f"{html.escape(site)}: {MAPPED} by layer" for site in mapped
    ]
    columns = min(2, len(titles))
    drawn = panels(titles, columns)
    pooled = table[table["layer"].isna()].sort_values("step", kind="stable")
    for index, metric in enumerate(metrics):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        _lines(drawn, pooled, metric, METRICS.get(metric, ("", False))[1], place, legend=index == 0)
        drawn.update_xaxes(title_text="step", **place)
    maps = table[table["layer"].notna() & (table["metric"] == MAPPED)]
    for index, site in enumerate(mapped, len(metrics)):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        drawn.add_trace(_map(maps[maps["site"] == site], site), **place)
        drawn.update_xaxes(title_text="step", showgrid=False, **place)
        drawn.update_yaxes(title_text="layer", showgrid=False, zeroline=False, **place)
    if mapped:
        finite = maps["mean"].astype(float)
        top = float(finite[np.isfinite(finite)].max()) if np.isfinite(finite).any() else 1.0
        bar = {"thickness": 12, "outlinewidth": 0, "title": {"text": MAPPED, "side": "right"}}
        drawn.update_layout(coloraxis={"colorscale": "Viridis", "cmin": 0.0, "cmax": top, "colorbar": bar})
    return drawn


def _lines(drawn: go.Figure, pooled: pd.DataFrame, metric: str, log: bool, place: dict[str, int], legend: bool) -> None:
    panel = pooled[pooled["metric"] == metric]
    require(panel, "", f"generation_profile of {metric}, all layers together,")
    values = panel[["mean", "ci_low", "ci_high"]].to_numpy(dtype=float)
    seen = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.1, 1.0)
    for site, rows in panel.groupby("site", sort=False):
        points = rows.assign(x=rows["step"], y=rows["mean"], real=rows["mean"], hover=_hover(rows))
        points = points.assign(low=rows["ci_low"], high=rows["ci_high"])
        points["open"] = rows["n_infinite"] + rows["n_undefined"] > 0
        if log:
            points[["y", "low"]] = points[["y", "low"]].clip(lower=low)
        look = {"dash": "solid", "width": 2.2, "size": 5, "showlegend": legend}
        add_line(drawn, points, site=str(site), role="edit", name=str(site), top=high, place=place, look=look)
    if log:
        ticks, labels = log_ticks(low, high)
        drawn.update_yaxes(type="log", tickvals=ticks, ticktext=labels, **place)


def _map(rows: pd.DataFrame, site: str) -> go.Heatmap:
    rows = rows.assign(layer=rows["layer"].astype(int), hover=_hover(rows))
    rows["mark"] = np.where(np.isfinite(rows["mean"].astype(float)), "", "×")
    grid = {name: rows.pivot(index="layer", columns="step", values=name) for name in ("mean", "hover", "mark")}
    means = grid["mean"].astype(float).replace([np.inf, -np.inf], np.nan)
    cells = go.Heatmap(z=means, x=means.columns, y=means.index, coloraxis="coloraxis", xgap=1, ygap=1)
    cells.update(text=grid["mark"], texttemplate="%{text}", hovertext=grid["hover"])
    return cells.update(hovertemplate="%{hovertext}<extra></extra>", meta={"site": site, "role": "map"})


def _hover(rows: pd.DataFrame) -> list[str]:
    return [
        f"<b>{html.escape(str(row.site))}</b>, step {row.step}, "
        + ("mean over layers" if pd.isna(row.layer) else f"layer {row.layer}")
        + f"<br>{row.metric} {interval(row.mean, row.ci_low, row.ci_high)}<br>mean of {row.n:,} prompts"
        + (f", {left:,} numbers left out (infinite, undefined)" if (left := row.n_infinite + row.n_undefined) else "")
        for row in rows.itertuples()
    ]


def edit_label(row: Any) -> str:
    """A condition of `continuations` in words, such as "attn, s_par = 0, new tokens"."""
    if row.site == "none":
        return "unedited"
    return f"{row.site}, s_par = {row.parallel:g}, {WHEN.get(row.when, row.when)}"


def edit_numbers(row: Any) -> str:
    """What was measured of one continuation, in words."""
    if row.status == "nonfinite":
        return "not finite: these tokens mean nothing"
    agreement = "" if row.site == "none" else f"agrees for {row.n_agree} of {row.n_new} tokens; "
    ended = "" if pd.isna(row.eos_step) else f"; end of text at step {row.eos_step}"
    idle = "; the edit changed nothing" if row.status == "no_effect" else ""
    repeated = "" if not math.isfinite(row.repetition) else f"; {100 * row.repetition:.0f} % of 3-grams repeated"
    return f"{agreement}log-probability {number(row.logprob)}{repeated}{ended}{idle}"


def parted(row: Any) -> tuple[str, str]:
    """A continuation's text up to where it parts from the unedited one, and from there on; no control characters."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in row.text)
    return shown[: row.agreed_characters], shown[row.agreed_characters :]


def continuations_figure(table: pd.DataFrame) -> go.Figure:
    """A table: each prompt, its unedited continuation and the edited ones, bold and underlined where they differ."""
    require(table, CONTINUATIONS, "continuations")
    first: list[str] = []
    second: list[str] = []
    fills: list[str] = []
    for _, rows in table.groupby("prompt", sort=False):
        first.append("<b>prompt</b>")
        second.append(f"<b>{_line(rows['prompt_text'].iloc[0])}</b>")
        fills.append(RULE)
        for row in rows.itertuples():
            same, other = parted(row)
            first.append(f"{html.escape(edit_label(row))}<br>{_facts(row)}")
            second.append(_line(same) + (f"<b><u>{_line(other)}</u></b>" if other else ""))
            fills.append("rgba(0,0,0,0)")
    height = 80 + sum(20 * max(5, math.ceil(len(text) / 80)) for text in second)
    cells = {"align": "left", "fill_color": [fills], "line_color": RULE, "font": {"size": 12, "color": INK}}
    drawn = go.Figure(
        go.Table(
            columnwidth=[1, 2],
            header={"values": ["edit", "continuation"], "align": "left", "fill_color": RULE, "line_color": RULE},
            cells={"values": [first, second], "height": 24, **cells},
        )
    )
    margin = {"l": 8, "r": 8, "t": 48, "b": 8}
    return drawn.update_layout(height=height, margin=margin, template="none", paper_bgcolor="rgba(0,0,0,0)")


def _facts(row: Any) -> str:
    """The numbers of one continuation, each on a line of its own: such a cell wraps nothing by itself."""
    return "<br>".join(f"<i>{html.escape(fact)}</i>" for fact in edit_numbers(row).split("; "))


def _line(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
